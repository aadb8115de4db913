"""Keeps one group's parameters at run time: leased together, materialized while leased, cold otherwise.

On an accelerator a group's parameters are views of its image there. The optimizer updates their content in host memory
or on NVMe, as without a device, and the image is filled from there. Changes on the device itself (by a forward that
writes to its own weights, or inside `manager.gather`) are copied back before the image may be dropped.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Protocol

import torch
from torch import nn

from swapper.device.tier import DeviceCopy
from swapper.errors import DeviceError, InvariantError, StateError, UnsupportedError
from swapper.modules.cold import ASSIGNED_BESIDE_ALIAS, SAME_FORM, materialize, set_cold, unguard
from swapper.modules.groups import Group
from swapper.modules.guarded import FaultHandler, guard
from swapper.modules.leased_group import LeasedGroup, count_uses, storage_of
from swapper.paging.pager import Pager
from swapper.paging.planning.layout import Slot
from swapper.paging.planning.schedule import Access
from swapper.paging.section import Page, Section
from swapper.paging.store.page_files import checksum_of
from swapper.tensors.torch_private import without_torch_functions
from swapper.train.groups.group_state import CURRENT, LEGAL_MOVES, GroupState
from swapper.train.groups.train_device import TrainingDevice
from swapper.train.layout.content import SectionSource, compare, fill


class Hidable(Protocol):
    """Tensors that show a group in addition to its parameters: nobody may read them while a step is open."""

    def hide(self) -> None: ...

    def show(self) -> None: ...


class GroupParameters(LeasedGroup):
    """Owns the placement of one group's parameters.

    Args:
        places: for each parameter, its section and slot.
        expire: called with a reason before changed parameters may be written: expires the tensors that show them.

    Attributes:
        state: in the present step.
    """

    def __init__(
        self,
        group: Group,
        places: Sequence[tuple[Section, Slot]],
        pager: Pager,
        fault_handler: FaultHandler,
        expire: Callable[[str], None],
    ) -> None:
        super().__init__(group.index, group.parameters)
        self.group = group
        self.places = places
        self._pager = pager
        self._fault_handler = fault_handler
        self._expire = expire
        self._sections = list(dict.fromkeys(section for section, _ in places))
        pages = [page.index for section in self._sections for page in section.pages]
        self.access = Access(("param", group.index), tuple(pages))
        self._read_access = Access(None, tuple(pages))
        self._write_access = Access(None, tuple(pages), writes=frozenset(pages))
        self.paged = bool(pages)
        self.state = CURRENT
        self.catch_up: Callable[[Access | None], None] | None = None  # see `defer_update`
        self.open_shards: Hidable | None = None  # of a sharded model
        self.pins: list[Access] = []  # leases outside of the order of a step
        self._external: list[dict[Page, int]] = []  # of each pin to write: checksums of the external pages
        self._addresses: list[int] = []
        self._at_places: list[torch.Tensor] = []  # the parameters' storages, also while `parameter.data` is another's
        self._uses: list[int] = []  # of each, by nobody but the run
        self.own_storages: frozenset[int | None] = frozenset()  # their identities

    @property
    def storages(self) -> set[int]:
        with without_torch_functions():
            return {int(p.untyped_storage()._cdata) for p in self.parameters} if self.paged else set()

    @property
    def kept_accesses(self) -> Sequence[Access]:
        return self.pins

    def adopt(self, content: SectionSource | None) -> None:
        """Move the parameters to their slots and release their previous data. Paged ones are cold afterwards.

        `content` fills the slots; None if they have their content already.
        """
        if content is not None:
            self._fill(content)
        self._at_places = list(self._tensors_at_places())
        for parameter, tensor in zip(self.parameters, self._at_places, strict=True):
            if parameter.is_meta:
                real = nn.Parameter(tensor, requires_grad=parameter.requires_grad)
                torch.utils.swap_tensors(parameter, real)  # keeps the object
            else:
                parameter.data = tensor
            self._addresses.append(parameter.data_ptr())
            guard(parameter, self._fault_handler)
        self.note_uses()
        self.own_storages = frozenset(storage_of(tensor) for tensor in self._at_places if tensor.numel())
        if self.paged:
            self._dematerialize()

    def note_uses(self) -> None:
        """Note that all that refers to the parameters' memory now may see a step that is open."""
        self._uses = [count_uses(tensor) for tensor in self._at_places]

    def aliased(self) -> Iterator[str]:
        """Yield the names of the parameters to whose memory something else refers: a view, `.data`, an array, a graph."""
        for name, tensor, uses in zip(self.names, self._at_places, self._uses, strict=True):
            if tensor.numel() and count_uses(tensor) > uses:
                yield name

    def _tensors_at_places(self) -> Iterable[torch.Tensor]:
        return (section.own_tensor(slot) for section, slot in self.places)

    def _fill(self, content: SectionSource) -> None:
        for section in self._sections:
            if section.plan.external is not None and content.is_external(section.plan):
                compare(section, self._pager, content)
            else:
                fill(section, self._pager, content)

    def move(self, new: GroupState) -> None:
        """Change the state. Raises InvariantError: that is no legal move."""
        if (self.state, new) not in LEGAL_MOVES:
            raise InvariantError(
                f"group {self.index} ({self.names[0]} and others): {self.state.name} -> {new.name} is not a legal move"
            )
        self.state = new

    def defer_update(self, state: GroupState, catch_up: Callable[[Access | None], None]) -> None:
        """Hide the parameters: the group is in the middle of a step.

        Args:
            state: DUE or SEALED.
            catch_up: called at the next access. Updates the group and leases the given access, or refuses (executor.py).
        """
        if self.state is not state:
            self.move(state)
        self.catch_up = catch_up
        if self.open_shards is not None:
            self.open_shards.hide()
        if not self.paged:
            for parameter in self.parameters:
                set_cold(parameter)

    def clear_deferred(self) -> None:
        """Show the parameters: the group is updated."""
        self.forget_update()
        if self.open_shards is not None:
            self.open_shards.show()
        if not self.paged:
            for parameter in self.parameters:
                materialize(parameter)

    def forget_update(self) -> None:
        """Leave the step: the group is of the last one that was taken."""
        self.catch_up = None
        if self.state is not CURRENT:
            self.move(CURRENT)

    def expected_before(self) -> list[int]:
        """Return the groups that the rest of this step is expected to lease before this one."""
        keys = self._pager.expected_before(self.access.key)
        return [group for kind, group, *_ in keys if kind == "param"]

    def check_graph_of_backward(self) -> None:
        """Check that a backward with `create_graph=True` may use the group: its graph will read it without a hook.

        On the CPU such reads are answered from the file (csrc/memory/fault.h).
        """

    def _fault_in(self) -> bool:
        if self.catch_up is not None:
            self.catch_up(self.access if self.paged else None)
        elif self.paged:
            self._pager.acquire(self.access)
        return True

    def _note_change(self, names: list[str]) -> None:
        self._fault_handler.note_change(self, names)

    def _give_back(self, changed: bool) -> None:
        if not self.paged:
            return
        may_write = False
        try:
            if changed:
                self._expire("a forward or backward that changed the parameter")
                self._pager.acquire(self._write_access)  # waits for a write in flight
                may_write = True
        finally:  # also if that was interrupted or failed: the pages are changed
            self._dematerialize()
            self._pager.release(self.access, self._write_access.writes if changed and not may_write else ())
            if may_write:
                self._pager.release(self._write_access, self._write_access.writes)

    def _changed(self) -> list[str]:
        assigned = self.take_in_assigned()
        changed = super()._changed()
        return list(dict.fromkeys([*assigned, *changed, *self.written()]))

    def written(self) -> list[str]:
        """Return the names of the parameters written without torch's version counter, and without a lease to write."""
        if not self.paged:
            return []
        return [page.section.owner_at(at) for page, at in self._pager.written_at(self._read_access)]

    # --- pins: leases outside of the order of a step ------------------------------------------------------------------

    @property
    def pages_to_pin(self) -> Sequence[int]:
        """Pages that are in frames as long as the group is pinned."""
        return self._read_access.pages if self.paged else ()

    @property
    def frame_bytes(self) -> int:
        """The bytes of the frames of its pages."""
        return len(self.pages_to_pin) * self._pager.frame_bytes

    def pin(self, write: bool) -> None:
        """Bring the parameters in, until `unpin`."""
        access = self._write_access if write else self._read_access
        self._acquire_pin(access)
        self.pins.append(access)
        try:
            self._materialize()
            if write:
                self._external.append(self._external_pages())
        except BaseException:
            self._drop_pin(access, frozenset())
            raise

    def unpin(self, write: bool) -> None:
        access = self._write_access if write else self._read_access
        before = self._external.pop() if write else {}
        same: set[int] = set()
        try:
            if write:
                self.take_in_assigned()
                self._expire("the parameter was changed, by gather(..., write=True) or load_state_dict")
                self._copy_back()
                now = self._external_pages()
                same = {page.index for page, checksum in before.items() if now.get(page) == checksum}
        finally:
            self._drop_pin(access, access.writes - same)

    def _external_pages(self) -> dict[Page, int]:
        """Return the checksums of the external pages: unchanged ones need no space in the swap files."""
        found = {}
        for section in self._sections if self.paged else ():
            for page in section.pages:
                checksum = checksum_of(page, section.memory.data_ptr() + page.offset)
                if checksum is not None:
                    found[page] = checksum
        return found

    def _acquire_pin(self, access: Access) -> None:
        if self.paged:
            self._pager.take_in_written()  # earlier writes are not this pin's
            self._pager.acquire(access)

    def write_back(self) -> None:
        """Copy updates to the parameters' locations in host memory; here they are made there."""

    def _copy_back(self) -> None:
        """Copy changes to the parameters' locations in host memory; here they are made there."""

    def _drop_pin(self, access: Access, changed: Collection[int]) -> None:
        self.pins.remove(access)
        if self.paged:
            self._dematerialize()
            self._pager.release(access, changed)

    # ------------------------------------------------------------------------------------------------------------------

    def _materialize(self) -> None:
        if self.paged:
            super()._materialize()
        self.take_in_assigned()
        for number, (parameter, at) in enumerate(zip(self.parameters, self._at_places, strict=True)):
            self._check_form(number, parameter, at)

    @property
    def may_be_assigned(self) -> bool:
        """True if `parameter.data = x` is torch's own now: the parameters are not cold."""
        return not self.paged or self._leases > 0 or bool(self.pins)

    def assigned(self) -> list[int]:
        """Return the numbers of the parameters whose memory is not the run's: `parameter.data = x`, `parameter.set_(x)`."""
        with without_torch_functions():
            return [
                number
                for number, (parameter, at) in enumerate(zip(self.parameters, self._at_places, strict=True))
                if at.numel() and not self._is_at_place(number, parameter)
            ]

    def take_in_assigned(self) -> list[str]:
        """Copy the values of tensors that were assigned (`parameter.data = x`) to the parameters' locations.

        Returns:
            The names of these parameters.

        Raises:
            StateError: one has another shape or dtype, or something still refers to the memory from before.
        """
        numbers = self.assigned()
        for number in numbers:
            self._take_in(number)
        return [self.names[number] for number in numbers]

    def _take_in(self, number: int) -> None:
        parameter, at = self.parameters[number], self._at_places[number]
        self._check_form(number, parameter, at)
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

    def _check_form(self, number: int, parameter: nn.Parameter, at: torch.Tensor) -> None:
        if parameter.shape != at.shape or parameter.dtype != at.dtype:
            raise StateError(
                f"parameter {self.names[number]} was replaced or resized behind the manager's back: expected {at.dtype} "
                f"{list(at.shape)}, found {parameter.dtype} {list(parameter.shape)} on {parameter.device}. {SAME_FORM}"
            )

    def _is_at_place(self, number: int, parameter: nn.Parameter) -> bool:
        return parameter.data_ptr() == self._addresses[number]

    def detach(self) -> None:
        """Leave the parameters without data and not cold, until they are adopted again: the memory is released next."""
        self._leases = 0
        self.pins.clear()
        self._external.clear()
        self._at_places.clear()
        for parameter in self.parameters:
            unguard(parameter)
            parameter.data = torch.zeros((), dtype=parameter.dtype, device="cpu").expand(parameter.shape)

    def _dematerialize(self) -> None:
        if not self._leases and not self.pins:
            super()._dematerialize()


class DeviceGroupParameters(GroupParameters):
    """Leases a group's image on an accelerator; its pages are leased only while they are copied."""

    image: DeviceCopy

    def __init__(
        self,
        group: Group,
        places: Sequence[tuple[Section, Slot]],
        pager: Pager,
        fault_handler: FaultHandler,
        expire: Callable[[str], None],
        on_device: TrainingDevice,
    ) -> None:
        super().__init__(group, places, pager, fault_handler, expire)
        self._on_device = on_device
        self.image, self._views = on_device.image(group, places)
        self._is_in_memory = not self.paged
        self.paged = True  # its image may be dropped between uses, even if its content stays in host memory
        self._read_access = Access(None, ())  # a pin is of the image; these two only tell reading from writing
        self._write_access = Access(None, (), writes=frozenset({-1}))

    @property
    def storages(self) -> set[int]:
        return {self.image.storage.identity}

    def _tensors_at_places(self) -> list[torch.Tensor]:
        return self._views

    def check_graph_of_backward(self) -> None:
        """Check that the group is pinned: reads of a dropped image are not answered.

        Raises:
            UnsupportedError: it is not.
        """
        if not self.pins:
            raise UnsupportedError(
                f"a backward with create_graph=True uses {self.group.name or 'the model'}, and the backward of that would "
                f"find its parameters away from {self._on_device.device}: run forward and backwards inside "
                "`with manager.gather(model):`"
            )

    def expected_before(self) -> list[int]:
        """Return no groups: copies are made ahead of the schedule, so it does not tell which ones were skipped."""
        return []

    def defer_update(self, state: GroupState, catch_up: Callable[[Access | None], None]) -> None:
        super().defer_update(state, catch_up)
        self.image.waits = True

    def clear_deferred(self) -> None:
        super().clear_deferred()
        self.image.waits = False

    def _fault_in(self) -> bool:
        if self.catch_up is not None:
            self.catch_up(None)
        self._on_device.lease(self.image)
        return True

    def _give_back(self, changed: bool) -> None:
        try:
            if changed:
                self._expire("a forward or backward that changed the parameter")
                self._copy_back()
        finally:
            self._dematerialize()
            self._on_device.tier.release(self.image)

    def written(self) -> list[str]:
        """Return no names: writes without torch's version counter cannot be seen on a device."""
        return []

    def _acquire_pin(self, access: Access) -> None:
        self._on_device.tier.lease(self.image)

    def _external_pages(self) -> dict[Page, int]:
        """Return none: they are not in memory, and `copy_back` compares them."""
        return {}

    def write_back(self) -> None:
        self._on_device.write_back(self.image)

    def _copy_back(self) -> None:
        try:
            self._on_device.copy_back(self.image)
        except BaseException:
            self.image.sent = 0  # it has what the host does not: it is copied again for its next use
            raise

    def _drop_pin(self, access: Access, changed: Collection[int]) -> None:
        self.pins.remove(access)
        self._dematerialize()
        self._on_device.tier.release(self.image)

    def forget_leases(self) -> None:
        super().forget_leases()
        self._on_device.tier.forget(self.image, len(self.pins))

    def abandon(self, keep_cold: bool = True) -> None:
        """Make parameters whose content is in host memory usable there; the others stay cold if `keep_cold`."""
        is_usable = keep_cold and self._is_in_memory and self._is_written_back()
        super().abandon(keep_cold and not is_usable)
        if is_usable:
            for parameter, (section, slot) in zip(self.parameters, self.places, strict=True):
                parameter.data = section.tensor(slot)
        self._on_device.tier.drop(self.image)

    def _is_written_back(self) -> bool:
        """Copy updates back. Return False if the device failed, which has them."""
        with contextlib.suppress(DeviceError):
            self.write_back()
        return not self.image.is_dirty

    def _is_at_place(self, number: int, parameter: nn.Parameter) -> bool:
        is_of_image = storage_of(parameter) == self.image.storage.identity
        return is_of_image and parameter.storage_offset() == self._views[number].storage_offset()
