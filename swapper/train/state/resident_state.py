"""Keeps optimizer state, and fp32 masters, on an accelerator, where it is updated in place.

It also has locations in host memory or on NVMe, as without a device: it is filled from there before its first update,
and copied back there for an access (a commit, a snapshot, `state_dict`). In between the device's copy is the valid one.
State that is not of a parameter's shape (step counters) is in host memory, where optimizers expect it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

import torch

from swapper.device.copies import PageCopy
from swapper.device.device_memory import DeviceStorage
from swapper.device.model_device import page_copies
from swapper.paging.pager import Pager
from swapper.paging.schedule import Access
from swapper.paging.section import Page
from swapper.train.groups.train_device import TrainingDevice
from swapper.train.layout.slices import ParameterLocations, TensorLocation, Trainable


@dataclass(slots=True)
class _Page:
    """A page of a group's state, or a whole section that stays in memory.

    Attributes:
        copy: its copy to the device.
        others: offset on it, and bytes in host memory, of state of other shapes.
    """

    copy: PageCopy
    others: list[tuple[int, torch.Tensor]]


@dataclass(slots=True)
class _GroupState:
    """One group's state.

    Attributes:
        storage: its memory on the device.
        views: of that, flat, by location.
        others: state of other shapes, in host memory, by location.
        pages: all pages of its locations.
        is_filled: the device has it.
        is_changed: its locations are outdated.
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
    """

    def __init__(self, trainables: Iterable[Trainable], on_device: TrainingDevice, pager: Pager) -> None:
        self._on_device = on_device
        self._pager = pager
        self._groups = {trainable.group: self._lay_out(trainable) for trainable in trainables}

    def _lay_out(self, trainable: Trainable) -> _GroupState:
        places = [place for of in trainable.places for place, _, _ in of.stored(0, of.numel)]
        others = [place for of in trainable.places for place in of.others.values()]
        storage, views, spans = self._on_device.lay_out([(place.section, place.slot) for place in places])
        group = _GroupState(
            storage,
            {place: view.view(-1) for place, view in zip(places, views, strict=True)},
            {place: torch.empty(place.slot.spec.shape, dtype=place.slot.spec.dtype, device="cpu") for place in others},
        )
        for section in dict.fromkeys(place.section for place in (*others, *places)):
            for copy in page_copies(section, spans.get(section, ()), _in_frame):
                group.pages.append(_Page(copy, _on_page(copy.page, group.others)))
        return group

    def __contains__(self, group: int) -> bool:
        return group in self._groups

    def close(self) -> None:
        """Release its memory. Requires that no copy is in flight."""
        for group in self._groups.values():
            group.storage.free()
        self._groups.clear()

    # --- an update ----------------------------------------------------------------------------------------------------

    def view(self, group: int, place: TensorLocation) -> torch.Tensor:
        """Return the device's copy of a tensor, flat. Requires that its group is `ready`."""
        return self._groups[group].views[place]

    def others(self, group: int, places: ParameterLocations) -> dict[str, torch.Tensor]:
        """Return the state of a parameter that belongs to it as a whole, in host memory."""
        return {key: self._groups[group].others[place] for key, place in places.others.items()}

    def is_ready(self, group: int) -> bool:
        """Whether `ready` reads no pages."""
        return group not in self._groups or self._groups[group].is_filled

    def ready(self, groups: Iterable[int]) -> None:
        """Copy the state of these groups to the device before kernels, which are queued next, change it.

        Raises:
            BudgetError: the device has too little memory.
            IoError: it could not be read.
        """
        found = [self._groups[index] for index in groups if index in self._groups]
        missing = [group for group in found if not group.is_filled]
        try:
            for group in missing:
                self._fill(group)
        finally:
            if missing:
                self._on_device.finish()  # frees all frames for slices; this is rare
        for group in found:
            group.storage.wait_on_current_stream()
            group.is_changed = True

    def _fill(self, group: _GroupState) -> None:
        self._on_device.fill(group.storage, [page.copy for page in group.pages])
        for page in group.pages:
            if page.others:
                access = Access(None, _paged(page.copy.page), in_frames=frozenset(_paged(page.copy.page)))
                with self._pager.leased(access):
                    memory = self._on_device.host.of(page.copy.page)
                    for begin, other in page.others:
                        other.copy_(memory[begin : begin + other.numel()])
        group.is_filled = True

    # --- access -------------------------------------------------------------------------------------------------------

    def read(self, group: int, place: TensorLocation) -> torch.Tensor | None:
        """Return a copy of the valid content in host memory; None if `place` has it."""
        found = self._groups.get(group)
        if found is None or not found.is_changed:
            return None
        here = found.views.get(place)
        found.storage.wait_for_users()
        return found.others[place].clone() if here is None else here.cpu().clone().view(place.slot.spec.shape)

    def sync_to_host(self) -> None:
        """Copy the state to its locations, for an access there. It also stays on the device.

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
        access = Access(None, tuple(only), only, only, only)  # these pages have nothing else
        with self._pager.leased(access):
            memory = self._on_device.host.of(copy.page)
            pieces = [(memory[s.begin : s.begin + s.nbytes], storage.read(s.target, s.nbytes)) for s in copy.spans]
            self._on_device.downloads.send(pieces)
            for begin, other in page.others:
                memory[begin : begin + other.numel()] = other
            self._on_device.downloads.finish()

    def forget(self, groups: Collection[int] | None = None) -> None:
        """Discard the device's copies of these groups, or all: their locations are valid."""
        for index, group in self._groups.items():
            if groups is None or index in groups:
                group.is_filled = group.is_changed = False


def _in_frame(page: int) -> Access:
    return Access(None, (page,), in_frames=frozenset({page}))


def _on_page(page: Page, others: Mapping[TensorLocation, torch.Tensor]) -> list[tuple[int, torch.Tensor]]:
    """Return the offsets on a page of bytes of `others`, and these bytes."""
    found = []
    for place, tensor in others.items():
        data, slot = tensor.view(-1).view(torch.uint8), place.slot
        first, last = max(slot.offset, page.offset), min(slot.end, page.offset + page.nbytes)
        if page.section is place.section and first < last:
            found.append((first - page.offset, data[first - slot.offset : last - slot.offset]))
    return found


def _paged(page: Page) -> tuple[int, ...]:
    """Return the pages to lease for `page`: none if it is a whole section that stays in memory."""
    return () if page.section.resident else (page.index,)
