"""The optimizer's sweep where slices are updated on an accelerator: up k+1 | update k | down k-1, beside what the drive does.

A slice's state, gradient and parameters go to one of a ring of storages on the device by the copy stream, the optimizer
works on views of it in the order of the compute stream, and what it leaves comes down to the places by another stream. The slice's
pages are leased until that has arrived, and then its storage is free. So three stages of three slices go on at one time, and Python
waits for the oldest only, also from one group to the next; the ring lasts from the first update of a step to the last. State that
stays on the device (resident_state.py) is updated where it is.

The user's optimizer updates them, or swapper's AdamW where the user has said so (adamw_kernel.py).

What an optimizer computes on a device may differ from what it computes on a CPU in the last bits, as in plain torch.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from swapper.device.device_storage import DeviceStorage
from swapper.device.image_layout import DEVICE_ALIGNMENT_BYTES, place_in_storage
from swapper.errors import DeviceError, InvariantError
from swapper.io.alignment import round_up
from swapper.paging.planning.schedule import Access
from swapper.train.device.resident_state import DeviceResidentState
from swapper.train.device.train_device import RING, TrainingDevice
from swapper.train.gradients.cold_grad import ColdGradient, GradientMeta
from swapper.train.layout.slices import ParameterLocations, Slice, SlicePiece, TensorLocation
from swapper.train.optimizer.optimizer_proxy import Work
from swapper.train.updates.sweep import GroupUpdate, Sweep, Trainable, Update

Gradient = Callable[[nn.Parameter], tuple[TensorLocation, GradientMeta]]
"""Returns where a parameter's gradient is, and what it is besides what is there."""


@dataclass(slots=True)
class _Slot:
    """One of the ring.

    Attributes:
        storage: its memory, once it was needed.
        is_free: nothing is on its way to or from it.
    """

    storage: DeviceStorage | None = None
    is_free: bool = True


@dataclass(frozen=True, slots=True)
class _Part:
    """Elements [begin, end) of what is at a place, and where in a slot they are.

    Attributes:
        offset: in bytes.
        goes_up, comes_down: whether it is copied.
    """

    place: TensorLocation
    begin: int
    end: int
    offset: int
    goes_up: bool
    comes_down: bool

    @property
    def nbytes(self) -> int:
        return (self.end - self.begin) * self.place.slot.spec.dtype.itemsize

    def view(self, slot: DeviceStorage) -> torch.Tensor:
        return slot.memory[self.offset : self.offset + self.nbytes].view(self.place.slot.spec.dtype)


class DeviceSweep(Sweep):
    """As any sweep; it updates on the device.

    Args:
        on_device: brings slices up and down.
        gradient_of: where gradients are.
        kept: state that stays there.
        others: as for any sweep.
    """

    def __init__(
        self, on_device: TrainingDevice, gradient_of: Gradient, kept: DeviceResidentState, *others: Any
    ) -> None:
        super().__init__(*others)
        self.on_device = on_device
        self.gradient_of = gradient_of
        self.kept = kept
        self._group_of = {places.name: t.group for t in self.trainables for places in t.places}
        self._over: deque[Access] = deque()  # arrived, and leased still until the next slice is
        self._slots = [_Slot() for _ in range(RING)]
        self._turn = 0
        self._usual_bytes = 0  # of a slot

    def update(self, update: GroupUpdate) -> None:
        """Update a group. What it leaves may be on its way to the places still, its pages leased: see `settle`."""
        self.on_device.order.follow()
        self._make_ready(update)
        self.kept.ready([update.trainable.group])
        with torch.autocast(self.on_device.device.device.type, enabled=False):
            for part in update.trainable.slices(update.active, self._page_bytes):
                self._update_on_device(update, part, self._next_slot(slice_bytes(update.trainable, part)))

    def give_back(self, then: Access | None = None) -> None:
        if then is not None:
            self._pager.lease(then)
        self.on_device.downloads.collect()
        self._release_arrived()
        if then is not None:
            self._pager.wait(then)

    def rejoin(self) -> None:
        with contextlib.suppress(DeviceError):  # a device that failed runs nothing any more; who uses it next is told
            self.on_device.order.follow()

    def settle(self) -> None:
        """Wait until what was updated is at its places.

        Raises:
            DeviceError: the device failed.
        """
        try:
            self.on_device.downloads.finish()
        finally:
            self._release_arrived()

    def end(self) -> None:
        self.settle()
        self._free_slots()
        super().end()

    def abandon(self) -> None:
        super().abandon()
        with contextlib.suppress(DeviceError):  # a device that failed keeps the memory until the process ends
            if not all(slot.is_free for slot in self._slots):
                self.on_device.downloads.finish()
            self._over.clear()
            self._free_slots()

    # --------------------------------------------------------------------------------------------------------------

    def _next_slot(self, nbytes: int) -> _Slot:
        """Return the one whose turn it is, once it is free, with so much memory or more."""
        slot = self._slots[self._turn]
        self._turn = (self._turn + 1) % RING
        while not slot.is_free:
            self.on_device.downloads.wait_for_oldest()
        if slot.storage is None or slot.storage.nbytes < nbytes:
            if slot.storage is not None:
                slot.storage.free()
                slot.storage = None
            self._usual_bytes = self._usual_bytes or ring_bytes(self.trainables, self._page_bytes) // RING
            slot.storage = self.on_device.new_storage(max(nbytes, self._usual_bytes))
        return slot

    def _free_slots(self) -> None:
        for slot in self._slots:
            storage, slot.storage, slot.is_free = slot.storage, None, True
            if storage is not None:
                storage.free()

    def _update_on_device(self, update: GroupUpdate, part: Slice, slot: _Slot) -> None:
        storage = slot.storage
        if storage is None:
            raise InvariantError("a slice was to be updated in a slot without memory")
        self._pager.lease(part.access)
        self._release_arrived()
        self._pager.wait(part.access)
        started = time.monotonic()
        try:
            parts = _parts(update, part, self.gradient_of)
            self.on_device.bring_up(storage, [copied for p in parts if p.goes_up for copied in self._pieces(p)])
            run = list(self._runs(update, part, parts, storage))
            if self.on_device.kernel is None:
                self._proxy.update([one.work for one in run])
            else:
                self.on_device.kernel.update(run, self._proxy.settings)
            for one in run:
                self._store(one)
            found = [copied for p in parts if p.comes_down for copied in self._pieces(p)]
            down = [(memory, storage.read(at, memory.numel())) for at, memory in found]
        except BaseException:
            self.on_device.finish()  # a part of it may be on its way
            self._pager.release(part.access)
            raise
        slot.is_free = False
        self.on_device.downloads.send(
            down,
            lambda: self._arrived(part.access, slot),
            lambda error: self._lost(part.access, slot),
            is_held=False,
        )
        self._counters.updated(started, part.access.key)

    def _arrived(self, access: Access, slot: _Slot) -> None:
        slot.is_free = True
        self._over.append(access)

    def _lost(self, access: Access, slot: _Slot) -> None:
        slot.is_free = True
        self._pager.release(access)

    def _release_arrived(self) -> None:
        while self._over:
            access = self._over.popleft()
            self._pager.release(access, access.writes)

    def _runs(self, update: GroupUpdate, part: Slice, parts: list[_Part], slot: DeviceStorage) -> Iterator[Update]:
        """Yield what the optimizer is to do, on views of the slot."""
        views = {(p.place, p.begin): p.view(slot) for p in parts}
        for piece in part.pieces:
            trainable = update.trainable
            places = trainable.places[piece.parameter]
            shape = (-1,) if places.may_cut else places.param.slot.spec.shape
            homes = {
                key: self._state_of(places, place, piece, views).view(shape) for key, place in places.state.items()
            }
            param = views[places.param, piece.begin].view(shape)
            master = homes.pop("master", None)
            target = param if master is None else master
            gradient = self._gradient_of(update, piece, views).view(shape)
            if self.on_device.kernel is None:
                gradient = gradient.to(target.dtype)
            state = self._state(places, piece.begin, piece.end, homes)
            settings = trainable.settings[piece.parameter]
            there = self._proxy.counts_on_device(settings)
            state = {
                key: value.to(target.device) if isinstance(value, torch.Tensor) and (there or value.dim()) else value
                for key, value in state.items()
            }
            work = Work(settings, target.detach(), gradient, state)
            yield Update(work, places, piece.begin, piece.end, homes, target, None if master is None else param)

    def _state_of(
        self,
        places: ParameterLocations,
        place: TensorLocation,
        piece: SlicePiece,
        views: dict[tuple[TensorLocation, int], torch.Tensor],
    ) -> torch.Tensor:
        """Return a piece of a tensor of state, flat: what came to the slot, or a part of what stays on the device."""
        if not places.state_stays:
            return views[place, piece.begin]
        return self.kept.view(self._group_of[places.name], place)[piece.begin : piece.end]

    def _others(self, places: ParameterLocations) -> dict[str, torch.Tensor]:
        if not places.state_stays:
            return super()._others(places)
        return self.kept.others(self._group_of[places.name], places)

    def refresh_masters(self, trainable: Trainable) -> None:
        if trainable.group not in self.kept:
            super().refresh_masters(trainable)
            return
        self.kept.ready([trainable.group])
        for part in trainable.all_slices(self._page_bytes):
            changed = tuple(page for page in part.access.pages if page in part.access.writes)  # without gradients
            access = Access(None, changed)
            self._pager.acquire(access)
            try:
                self._refresh_kept(trainable, part)
            finally:
                self.on_device.finish()
                self._pager.release(access)

    @torch.no_grad()
    def _refresh_kept(self, trainable: Trainable, part: Slice) -> None:
        slot = self.on_device.new_storage(slice_bytes(trainable, part))
        try:
            for piece in part.pieces:
                places = trainable.places[piece.parameter]
                if places.has_master:
                    param = _Part(places.param, piece.begin, piece.end, 0, True, False)
                    self.on_device.bring_up(slot, list(self._pieces(param)))
                    new = param.view(slot)
                    master = self._state_of(places, places.state["master"], piece, {})
                    master.copy_(torch.where(master.to(new.dtype) == new, master, new.to(master.dtype)))
        finally:
            slot.free()

    def _gradient_of(
        self, update: GroupUpdate, piece: SlicePiece, views: dict[tuple[TensorLocation, int], torch.Tensor]
    ) -> torch.Tensor:
        """Return a piece of a gradient, flat, as clipped: what came to the slot, or a part of what stays on the device."""
        here = update.gradients[piece.parameter]
        if here is not None and type(here) is not ColdGradient:
            return here.detach().reshape(-1)[piece.begin : piece.end]
        grad, content = self.gradient_of(update.trainable.parameters[piece.parameter])
        return content.of(views[grad, piece.begin])

    def _pieces(self, part: _Part) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield where in the slot, and what memory of the host, page by page."""
        section, slot = part.place.section, part.place.slot
        begin = slot.offset + part.begin * slot.spec.dtype.itemsize
        end = begin + part.nbytes
        for page in section.pages_of(begin, end) or [section.piece]:
            first, last = max(begin, page.offset), min(end, page.offset + page.nbytes)
            if first < last:
                memory = self.on_device.host.of(page)
                yield part.offset + first - begin, memory[first - page.offset : last - page.offset]


def _parts(update: GroupUpdate, part: Slice, gradient_of: Gradient) -> list[_Part]:
    """Return what of a slice comes to the device while it is updated, one behind the other."""
    found: list[tuple[TensorLocation, SlicePiece, bool, bool]] = []
    for piece in part.pieces:
        places = update.trainable.places[piece.parameter]
        if not places.state_stays:
            found += [(place, piece, True, True) for place in places.state.values()]
        if type(update.gradients[piece.parameter]) is ColdGradient:
            found.append((gradient_of(update.trainable.parameters[piece.parameter])[0], piece, True, False))
        found.append((places.param, piece, not places.has_master, True))
    sizes = [(piece.end - piece.begin) * place.slot.spec.dtype.itemsize for place, piece, _, _ in found]
    offsets, _ = place_in_storage(sizes)
    return [
        _Part(place, piece.begin, piece.end, offset, goes_up, comes_down)
        for (place, piece, goes_up, comes_down), offset in zip(found, offsets, strict=True)
    ]


def slice_bytes(trainable: Trainable, part: Slice) -> int:
    """Return what a slice takes on a device: its state, its gradients, and its parameters, which are as large."""
    total = 0
    for piece in part.pieces:
        places = trainable.places[piece.parameter]
        state = () if places.state_stays else places.state.values()
        for place in (*state, places.param, places.param):
            total += round_up((piece.end - piece.begin) * place.slot.spec.dtype.itemsize, DEVICE_ALIGNMENT_BYTES)
    return max(total, DEVICE_ALIGNMENT_BYTES)


def ring_bytes(trainables: Iterable[Trainable], page_bytes: int) -> int:
    """Return what the ring takes at most."""
    return RING * max((slice_bytes(t, part) for t in trainables for part in t.all_slices(page_bytes)), default=0)
