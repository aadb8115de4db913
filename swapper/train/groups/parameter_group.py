"""Keeps one group's parameters at run time: leased together, materialized while leased, cold otherwise.

On an accelerator a group's parameters are views of its image there. The optimizer updates their content in host memory
or on NVMe, as without a device, and the image is filled from there. Changes on the device itself (by a forward that
writes to its own weights, or inside `manager.gather`) are copied back before the image may be dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import nn

from swapper.errors import DeviceError, InvariantError, StateError, UnsupportedError
from swapper.modules.cold import ASSIGNED_BESIDE_ALIAS, SAME_FORM, materialize, set_cold, unguard
from swapper.modules.groups import Group
from swapper.modules.guarded import FaultHandler, guard
from swapper.modules.home import GroupHome, Update
from swapper.modules.leased_group import LeasedGroup
from swapper.paging.layout import Slot
from swapper.paging.pager import Pager
from swapper.paging.section import Section
from swapper.tensors.torch_private import count_uses, replace_data, without_torch_functions
from swapper.train.groups.group_state import CURRENT, LEGAL_MOVES, GroupState
from swapper.train.layout.content import SectionSource, compare, fill


class TrainingFaultHandler(FaultHandler, Protocol):
    """A fault handler that knows what the user was warned of."""

    def warn_of_alias(self, name: str) -> None:
        """Warn once that something of the user's shows a parameter's memory on a device, which is given up next."""


class Hidable(Protocol):
    """Tensors that show a group in addition to its parameters: nobody may read them while a step is open."""

    def hide(self) -> None: ...

    def show(self) -> None: ...


class GroupParameters(LeasedGroup):
    """Owns the placement of one group's parameters.

    Args:
        places: for each parameter, its section and slot.
        home: of the group, in which `tensors` are the parameters' data.
        expire: called with a reason before changed parameters may be written: expires the tensors that show them.

    Attributes:
        state: in the present step.
        may_be_assigned: `parameter.data = x` is torch's own now: the parameters are not cold.
    """

    def __init__(
        self,
        group: Group,
        places: Sequence[tuple[Section, Slot]],
        home: GroupHome,
        tensors: Sequence[torch.Tensor],
        pager: Pager,
        fault_handler: TrainingFaultHandler,
        expire: Callable[[str], None],
    ) -> None:
        super().__init__(group.index, group.parameters, tensors, home, home.is_paged)
        self.group = group
        self.places = places
        self._pager = pager
        self._fault_handler = fault_handler
        self._expire = expire
        self._sections = list(dict.fromkeys(section for section, _ in places))
        self.state = CURRENT
        self.may_be_assigned = True
        self._shown_with: list[Hidable] = []
        self._at_places = list(tensors)  # the parameters' storages, also while `parameter.data` is another's
        self._uses: list[int] = []  # of each, by nobody but the run
        self._set_while_cold: list[str] = []  # names, until the use that found it ends (`parameter.set_(x)`)

    def adopt(self, content: SectionSource | None) -> None:
        """Move the parameters to their slots and release their previous data. Paged ones are cold afterwards.

        `content` fills the slots; None if they have their content already.
        """
        if content is not None:
            self._fill(content)
        for parameter, tensor in zip(self.parameters, self._at_places, strict=True):
            if parameter.is_meta:
                replace_data(parameter, tensor)
            else:
                parameter.data = tensor
            guard(parameter, self._fault_handler)
        self.note_uses()
        self._dematerialize()

    def note_uses(self) -> None:
        """Note that all that refers to the parameters' memory now may see a step that is open."""
        self._uses = [count_uses(tensor) for tensor in self._at_places]

    def aliased(self) -> Iterator[str]:
        """Yield the names of the parameters to whose memory something else refers: a view, `.data`, an array, a graph."""
        for name, tensor, uses in zip(self.names, self._at_places, self._uses, strict=True):
            if tensor.numel() and count_uses(tensor) > uses:
                yield name

    def _fill(self, content: SectionSource) -> None:
        for section in self._sections:
            if section.plan.external is not None and content.is_external(section.plan):
                compare(section, self._pager, content)
            else:
                fill(section, self._pager, content)

    def move(self, new: GroupState) -> None:
        """Change the state. Raises InvariantError: that is no legal move, or not while the group is leased."""
        if (self.state, new) not in LEGAL_MOVES or (self._leases and new is not CURRENT):
            where = f"group {self.index} ({self.names[0]} and others, leased {self._leases} times)"
            raise InvariantError(f"{where}: {self.state.name} -> {new.name} is not a legal move")
        self.state = new

    def show_with(self, shown: Hidable) -> None:
        """From now on hide and show these tensors with the parameters."""
        self._shown_with.append(shown)

    def defer_update(self, state: GroupState, catch_up: Update) -> None:
        """Hide the parameters: the group is in the middle of a step.

        Args:
            state: DUE or SEALED.
            catch_up: called at the next access. Updates the group and leases the given access, or refuses (executor.py).
        """
        if self.state is not state:
            self.move(state)
        self.catch_up = catch_up
        self.home.wait_for_update(True)
        for shown in self._shown_with:
            shown.hide()
        if not self.paged:
            set_cold(*self.parameters)

    def clear_deferred(self) -> None:
        """Show the parameters: the group is updated."""
        self.forget_update()
        for shown in self._shown_with:
            shown.show()
        if not self.paged:
            materialize(*self.parameters)

    def forget_update(self) -> None:
        """Leave the step: the group is of the last one that was taken."""
        self.catch_up = None
        self.home.wait_for_update(False)
        if self.state is not CURRENT:
            self.move(CURRENT)

    def check_graph_of_backward(self) -> None:
        """Check that a backward with `create_graph=True` may use the group: its graph will read it without a hook.

        Raises:
            UnsupportedError: the memory is given up, where nobody answers such reads.
        """
        if not self.home.answers_reads and not self.home.pins:
            raise UnsupportedError(
                f"a backward with create_graph=True uses {self.group.name or 'the model'}, and the backward of that would "
                f"find its parameters away from {self.parameters[0].device}: run forward and backwards inside "
                "`with manager.gather(model):`"
            )

    def _note_change(self, names: list[str]) -> None:
        self._fault_handler.note_change(self, names)

    def _give_back(self, changed: bool) -> None:
        if not self.paged:
            return
        try:
            if changed:
                self._expire("a forward or backward that changed the parameter")
        finally:
            self._dematerialize()
            self.home.give_back(changed)

    def _changed(self) -> list[str]:
        assigned = self.take_in_assigned()
        if self._set_while_cold:
            assigned = [*self._forget_set(), *assigned]
        changed = super()._changed()
        return list(dict.fromkeys([*assigned, *changed, *self.written()]))

    def _forget_set(self) -> list[str]:
        """Return the names of the parameters that had other memory when this use began: only the memory here has its values."""
        names, self._set_while_cold = self._set_while_cold, []
        return names

    def written(self) -> list[str]:
        """Return the names of the parameters written without torch's version counter, and without a lease to write.

        On a device such writes cannot be seen.
        """
        written = self.home.written()
        return [page.section.owner_at(at) for page, at in written] if written else []

    # --- pins: leases outside of the order of a step ------------------------------------------------------------------

    def pin(self, write: bool) -> None:
        """Bring the parameters in, until `unpin`."""
        self.home.pin(write)
        self.home.pins.append(write)
        try:
            self._materialize()
        except BaseException:
            self._unpin(write, changed=False)
            raise

    def unpin(self, write: bool) -> None:
        try:
            if write:
                self.take_in_assigned()
                self._expire("the parameter was changed, by gather(..., write=True) or load_state_dict")
        finally:
            self._unpin(write, changed=write)

    def _unpin(self, write: bool, changed: bool) -> None:
        was_set = self._forget_set() if self._set_while_cold else []
        self.home.pins.remove(write)
        self._dematerialize()
        is_given_up = self.paged and not (self.home.answers_reads or self._leases or self.home.pins)
        if is_given_up and (name := next(self.aliased(), None)) is not None:
            self._fault_handler.warn_of_alias(name)
        self.home.unpin(write, changed or bool(was_set))
        if was_set and not write:
            self._note_change(was_set)

    # ------------------------------------------------------------------------------------------------------------------

    def forget_leases(self) -> None:
        """Forget the leases of abandoned passes. The pager forgets its own by itself."""
        self._leases = 0
        self._versions = []
        if not self.settled:
            self._dematerialize()
        self.home.forget()

    def _materialize(self) -> None:
        if self.state is not CURRENT:
            raise InvariantError(
                f"group {self.index} ({self.names[0]} and others) is used while it is {self.state.name}"
            )
        if self.paged:
            materialize(*self.parameters)
            self.may_be_assigned = True
        self._set_while_cold += self.take_in_assigned()
        for parameter, at in zip(self.parameters, self._at_places, strict=True):
            if parameter.shape != at.shape or parameter.dtype != at.dtype:
                raise self._of_other_form(parameter, at)

    def assigned(self) -> list[int]:
        """Return the numbers of the parameters whose memory is not the run's: `parameter.data = x`, `parameter.set_(x)`."""
        numbers = []
        with without_torch_functions():
            for number, (parameter, at) in enumerate(zip(self.parameters, self._at_places, strict=True)):
                if parameter.data_ptr() != at.data_ptr() and at.numel():
                    numbers.append(number)
        return numbers

    def take_in_assigned(self) -> list[str]:
        """Copy the values of tensors that were assigned (`parameter.data = x`) to the parameters' locations.

        Returns:
            The names of these parameters.

        Raises:
            StateError: one has another shape or dtype, or something still refers to the memory from before.
        """
        names = []
        for number in self.assigned():
            self._take_in(number)
            names.append(self.names[number])
        return names

    def _take_in(self, number: int) -> None:
        parameter, at = self.parameters[number], self._at_places[number]
        if parameter.shape != at.shape or parameter.dtype != at.dtype:
            raise self._of_other_form(parameter, at)
        if count_uses(at) >= self._uses[number]:  # the parameter itself is a use no more
            raise StateError(f"parameter {self.names[number]} {ASSIGNED_BESIDE_ALIAS}")
        if self._fault_handler.owns(parameter):
            raise StateError(
                f"parameter {self.names[number]} was assigned the memory of another parameter of the model (`p.data = q.data`), "
                "which it cannot share: assign a copy, `p.data = q.data.clone()`"
            )
        with without_torch_functions(), torch.no_grad():
            at.copy_(parameter.data)
            parameter.data = at

    def _of_other_form(self, parameter: nn.Parameter, at: torch.Tensor) -> StateError:
        name = next(name for name, one in zip(self.names, self.parameters, strict=True) if one is parameter)
        return StateError(
            f"parameter {name} was replaced or resized behind the manager's back: expected {at.dtype} {list(at.shape)}, "
            f"found {parameter.dtype} {list(parameter.shape)} on {parameter.device}. {SAME_FORM}"
        )

    def abandon(self, keep_cold: bool = True) -> None:
        """Make parameters whose content is in host memory usable there; the others stay cold if `keep_cold`."""
        moves = keep_cold and self.paged and all(section.resident for section in self._sections)  # from a device
        try:
            if moves:
                self.home.sync_to_host()
        except DeviceError:
            moves = False  # which has them
        super().abandon(keep_cold and not moves)
        if moves:
            for parameter, (section, slot) in zip(self.parameters, self.places, strict=True):
                parameter.data = section.tensor(slot)

    def _is_referred_to(self) -> bool:
        is_adopted = 0 < len(self._uses) == len(self._at_places)
        return is_adopted and next(self.aliased(), None) is not None

    def detach(self) -> None:
        """Leave the parameters without data and not cold, until they are adopted again: the memory is released next."""
        self._leases = 0
        self.may_be_assigned = not self.paged
        self._at_places.clear()
        for parameter in self.parameters:
            unguard(parameter)
            parameter.data = torch.zeros((), dtype=parameter.dtype, device="cpu").expand(parameter.shape)

    def _dematerialize(self) -> None:
        if self.paged and not self._leases and not self.home.pins:
            set_cold(*self.parameters)
            self.may_be_assigned = False
