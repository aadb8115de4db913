"""Optimizer state that stays on an accelerator, fp32 masters too: updated in place there, copied for nothing but to be kept.

Its place is in host memory or on NVMe, as without a device: from there it comes before its first update, and there it is brought
when somebody looks at the place: a commit, a snapshot, `state_dict`. In between what is on the device is what counts. What is not
of a parameter's shape (step counters) is in host memory beside that, where optimizers want it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from swapper.device.copies import PageCopy
from swapper.device.device_storage import DeviceStorage
from swapper.modules.model_device import page_copies
from swapper.paging.pager import Pager
from swapper.paging.planning.schedule import Access
from swapper.paging.section import Page
from swapper.train.device.train_device import TrainingDevice
from swapper.train.layout.slices import ParameterLocations, TensorLocation
from swapper.train.updates.sweep import Trainable


@dataclass(slots=True)
class _Page:
    """A page of a group's places, or a section as a whole if that stays in memory.

    Attributes:
        copy: how it comes to the device.
        others: where on it there is something else, and memory that has the same.
    """

    copy: PageCopy
    others: list[tuple[int, torch.Tensor]]


@dataclass(slots=True)
class _Group:
    """One group's state.

    Attributes:
        storage: its memory on the device.
        views: of that, flat, by place.
        others: in host memory, by place.
        pages: that all of it has its place on.
        is_filled: it is here; else at its place.
        is_changed: what is at its place is out of date.
    """

    storage: DeviceStorage
    views: dict[TensorLocation, torch.Tensor]
    others: dict[TensorLocation, torch.Tensor]
    pages: list[_Page] = field(default_factory=list)
    is_filled: bool = False
    is_changed: bool = False


class DeviceResidentState:
    """Owns the state of some groups.

    Args:
        trainables: of those groups.
        on_device: where it is; copies it.
        pager: what leases of its pages go to.
    """

    def __init__(self, trainables: Iterable[Trainable], on_device: TrainingDevice, pager: Pager) -> None:
        self._on_device = on_device
        self._pager = pager
        self._groups = {trainable.group: self._lay_out(trainable) for trainable in trainables}

    def _lay_out(self, trainable: Trainable) -> _Group:
        places = [place for of in trainable.places for place in of.state.values()]
        others = [place for of in trainable.places for place in of.others.values()]
        storage, views, spans = self._on_device.lay_out([(place.section, place.slot) for place in places])
        group = _Group(
            storage,
            {place: view.view(-1) for place, view in zip(places, views, strict=True)},
            {place: torch.empty(place.slot.spec.shape, dtype=place.slot.spec.dtype) for place in others},
        )
        for section in dict.fromkeys(place.section for place in (*others, *places)):
            for copy in page_copies(section, spans.get(section, ()), lambda page: Access(None, (page,))):
                group.pages.append(_Page(copy, _on_page(copy.page, group.others)))
        return group

    def __contains__(self, group: int) -> bool:
        return group in self._groups

    def close(self) -> None:
        """Nobody wants it any more. No copy is on its way."""
        for group in self._groups.values():
            group.storage.free()
        self._groups.clear()

    # --- an update --------------------------------------------------------------------------------------------------

    def view(self, group: int, place: TensorLocation) -> torch.Tensor:
        """Return what is on the device of a group that is `ready`, flat."""
        return self._groups[group].views[place]

    def others(self, group: int, places: ParameterLocations) -> dict[str, torch.Tensor]:
        """Return what belongs to a parameter as a whole, in host memory."""
        return {key: self._groups[group].others[place] for key, place in places.others.items()}

    def ready(self, groups: Iterable[int]) -> None:
        """The state of these groups is about to be changed by kernels that are queued next: have it on the device.

        Raises:
            BudgetError: the device has no memory left for it.
            IoError: it could not be read.
        """
        found = [self._groups[index] for index in groups if index in self._groups]
        missing = [group for group in found if not group.is_filled]
        try:
            for group in missing:
                self._fill(group)
        finally:
            if missing:
                self._on_device.finish()  # all frames are free for slices; it is seldom
        for group in found:
            group.storage.wait_on_current_stream()
            group.is_changed = True

    def _fill(self, group: _Group) -> None:
        self._on_device.fill_anew(group.storage, [page.copy for page in group.pages])
        for page in group.pages:
            if page.others:
                access = Access(None, _paged(page.copy.page))
                self._pager.acquire(access)
                memory = self._on_device.host.of(page.copy.page)
                for begin, other in page.others:
                    other.copy_(memory[begin : begin + other.numel()])
                self._pager.release(access)
        group.is_filled = True

    # --- looking at it ----------------------------------------------------------------------------------------------

    def read(self, group: int, place: TensorLocation) -> torch.Tensor | None:
        """Return a copy of what counts, in host memory; None where that is at its place."""
        found = self._groups.get(group)
        if found is None or not found.is_changed:
            return None
        here = found.views.get(place)
        found.storage.wait_for_users()
        return found.others[place].clone() if here is None else here.cpu().clone().view(place.slot.spec.shape)

    def sync_to_host(self) -> None:
        """Somebody looks at places: have them as it is on the device. It stays there.

        Raises:
            IoError: an earlier write failed.
            DeviceError: the device failed.
        """
        for group in self._groups.values():
            if group.is_changed:
                group.storage.wait_for_users()
                for page in group.pages:
                    self._bring_page(group.storage, page)
                group.is_changed = False

    def _bring_page(self, storage: DeviceStorage, page: _Page) -> None:
        copy, only = page.copy, frozenset(_paged(page.copy.page))
        access = Access(None, tuple(only), fresh=only, writes=only)  # nothing else is on these pages
        self._pager.acquire(access)
        try:
            memory = self._on_device.host.of(copy.page)
            pieces = [(memory[s.begin : s.begin + s.nbytes], storage.read(s.target, s.nbytes)) for s in copy.spans]
            self._on_device.downloads.send(pieces)
            for begin, other in page.others:
                memory[begin : begin + other.numel()] = other
            self._on_device.downloads.finish()
        finally:
            self._pager.release(access, only)

    def forget(self) -> None:
        """What is at its place is what counts."""
        for group in self._groups.values():
            group.is_filled = group.is_changed = False


def _on_page(page: Page, others: Mapping[TensorLocation, torch.Tensor]) -> list[tuple[int, torch.Tensor]]:
    """Return where on a page there are bytes of `others`, and those."""
    found = []
    for place, tensor in others.items():
        data, slot = tensor.view(-1).view(torch.uint8), place.slot
        first, last = max(slot.offset, page.offset), min(slot.end, page.offset + page.nbytes)
        if page.section is place.section and first < last:
            found.append((first - page.offset, data[first - slot.offset : last - slot.offset]))
    return found


def _paged(page: Page) -> tuple[int, ...]:
    """Return what is to be leased of a page; nothing where it is all of a section that stays in memory."""
    return () if page.section.resident else (page.index,)
