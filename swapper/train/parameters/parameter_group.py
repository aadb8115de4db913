"""A group's parameters at run time: leased together, warm while leased, cold otherwise."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

import torch
from torch import nn

from swapper.errors import StateError
from swapper.modules.cold import materialize, set_cold, unguard
from swapper.modules.groups import Group
from swapper.modules.guarded import FaultHandler, guard
from swapper.modules.leased_group import LeasedGroup
from swapper.paging.pager import Pager
from swapper.paging.planning.layout import Slot
from swapper.paging.planning.schedule import Access
from swapper.paging.section import Page, Section
from swapper.paging.store.page_files import checksum_of
from swapper.train.layout.content import SectionSource, compare, fill


class GroupParameters(LeasedGroup):
    """Owns the placement of one group's parameters.

    Args:
        group: the group; its parameters' data is moved to their slots by `adopt`.
        places: for each parameter, its section and slot.
        pager: None if all sections are resident.
        fault_handler: who is asked when a cold parameter is touched.
        expire: told, with a reason, before changed parameters can be on their way to the drive: what shows them as they were
            there is over.
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
        self.catch_up: Callable[[Access | None], None] | None = None  # see `defer_update`
        self.holds: list[Access] = []  # leases of the pager's that others have, outside of the order of a step
        self._external: list[dict[Page, int]] = []  # of each hold to write: checksums of the pages that are lent
        self._addresses: list[int] = []

    @property
    def storages(self) -> set[int]:
        with torch._C.DisableTorchFunctionSubclass():
            return {int(p.untyped_storage()._cdata) for p in self.parameters} if self.paged else set()

    @property
    def kept_accesses(self) -> Sequence[Access]:
        return self.holds

    def adopt(self, content: SectionSource | None) -> None:
        """Move the parameters to their slots, and let go the data where it was. They are cold afterwards, if paged.

        `content`: fills the slots; None where they have their content already.
        """
        if content is not None:
            self._fill(content)
        for parameter, place in zip(self.parameters, self._tensors_at_places(), strict=True):
            if parameter.is_meta:
                home = nn.Parameter(place, requires_grad=parameter.requires_grad)
                torch.utils.swap_tensors(parameter, home)  # type: ignore[no-untyped-call]  # the same object, elsewhere
            else:
                parameter.data = place
            self._addresses.append(parameter.data_ptr())
            guard(parameter, self._fault_handler)
        if self.paged:
            self._dematerialize()

    def _tensors_at_places(self) -> Iterable[torch.Tensor]:
        return (section.own_tensor(slot) for section, slot in self.places)

    def _fill(self, content: SectionSource) -> None:
        for section in self._sections:
            if section.plan.external is not None and content.is_external(section.plan):
                compare(section, self._pager, content)
            else:
                fill(section, self._pager, content)

    def defer_update(self, catch_up: Callable[[Access | None], None]) -> None:
        """Nobody shall see the group as it is: it is in the middle of a step.

        Args:
            catch_up: asked for by whoever needs it: updates it and leases what it is given (deferred.py), or refuses
                (during_backward.py).
        """
        self.catch_up = catch_up
        if not self.paged:
            for parameter in self.parameters:
                set_cold(parameter)

    def clear_deferred(self) -> None:
        """The group is what the last step has left."""
        self.catch_up = None
        if not self.paged:
            for parameter in self.parameters:
                materialize(parameter)

    def expected_before(self) -> list[int]:
        """Return the groups that are expected to be leased in what is left of this step before this one is."""
        keys = self._pager.expected_before(self.access.key)
        return [group for kind, group, *_ in keys if kind == "param"]

    def check_graph_of_backward(self) -> None:
        """A backward with `create_graph=True` begins to use the group: what autograd makes of it will, unannounced.

        Such reads are answered from the file (csrc/memory/fault.h).
        """

    def _bring_in(self) -> bool:
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
                self._pager.acquire(self._write_access)  # not before a write that is in flight has seen the end of it
                may_write = True
        finally:  # also where that was interrupted or failed: what is changed is changed
            self._dematerialize()
            self._pager.release(self.access, self._write_access.writes if changed and not may_write else ())
            if may_write:
                self._pager.release(self._write_access, self._write_access.writes)

    def _changed(self) -> list[str]:
        changed = super()._changed()
        return changed + [name for name in self.written() if name not in changed]

    def written(self) -> list[str]:
        """Names of the parameters that were written past torch's version counter by someone who had not leased them to write."""
        if not self.paged:
            return []
        return [page.section.owner_at(at) for page, at in self._pager.written_at(self._read_access)]

    @property
    def pages_to_hold(self) -> Sequence[int]:
        """Pages that are in frames all the time that somebody holds the group."""
        return self._read_access.pages if self.paged else ()

    def hold(self, write: bool) -> None:
        """Bring the parameters in for someone outside of the order of a step, until `let_go`."""
        access = self._write_access if write else self._read_access
        self._take_hold(access)
        self.holds.append(access)
        try:
            self._materialize()
            if write:
                self._external.append(self._external_pages())
        except BaseException:
            self._drop_hold(access, frozenset())
            raise

    def let_go(self, write: bool) -> None:
        access = self._write_access if write else self._read_access
        before = self._external.pop() if write else {}
        same: set[int] = set()
        try:
            if write:
                self._expire("the parameter was changed, by gather(..., write=True) or load_state_dict")
                self._copy_back()
                now = self._external_pages()
                same = {page.index for page, checksum in before.items() if now.get(page) == checksum}
        finally:
            self._drop_hold(access, access.writes - same)

    def _external_pages(self) -> dict[Page, int]:
        """Checksums of the pages that are lent, which are in memory: those that stay so need no place in the swap files."""
        found = {}
        for section in self._sections if self.paged else ():
            for page in section.pages:
                checksum = checksum_of(page, section.memory.data_ptr() + page.offset)
                if checksum is not None:
                    found[page] = checksum
        return found

    def _take_hold(self, access: Access) -> None:
        if self.paged:
            self._pager.take_in_written()  # or it would count as changed by who takes hold
            self._pager.acquire(access)

    def _copy_back(self) -> None:
        """What was changed is to be at its place: that is where it was changed."""

    def _drop_hold(self, access: Access, changed: Collection[int]) -> None:
        self.holds.remove(access)
        if self.paged:
            self._dematerialize()
            self._pager.release(access, changed)

    def _materialize(self) -> None:
        if self.paged:
            super()._materialize()
        self._check_places()

    def _check_places(self) -> None:
        """Raise StateError unless the parameters are where they were put."""
        for number, (parameter, (_, slot)) in enumerate(zip(self.parameters, self.places, strict=True)):
            spec = slot.spec
            is_same = spec.numel == 0 or self._is_at_place(number, parameter)
            if not is_same or parameter.shape != spec.shape or parameter.dtype != spec.dtype:
                raise StateError(
                    f"parameter {self.names[number]} was replaced or resized behind the manager's back: expected {spec.dtype} "
                    f"{list(spec.shape)} at its place, found {parameter.dtype} {list(parameter.shape)} on {parameter.device}. "
                    "Change values inside `with manager.gather(..., write=True)`; change shapes, dtypes or devices before "
                    "manager.offload"
                )

    def _is_at_place(self, number: int, parameter: nn.Parameter) -> bool:
        return parameter.data_ptr() == self._addresses[number]

    def part(self) -> None:
        """The memory is about to go: leave the parameters warm and without data, until they are adopted again."""
        self._leases = 0
        self.holds.clear()
        self._external.clear()
        for parameter in self.parameters:
            unguard(parameter)
            parameter.data = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)

    def _dematerialize(self) -> None:
        if not self._leases and not self.holds:
            super()._dematerialize()
