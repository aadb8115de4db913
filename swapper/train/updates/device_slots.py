"""Says what of a slice is in a slot on an accelerator while it is updated there, and fills slots early.

State is copied up and down as it is stored, encoded state encoded.

[Note: who waits for a slot] The copies up into a slot wait, on their stream, for the copies down from it: for state in host memory
Python waits for nothing. It waits for the slot's last results if the slice leases frames, since a frame is given to another page
by Python, or if the slot has too little memory.

[Note: state ahead] The link idles until a step's first gradients are there, and a forward that follows waits for the groups
that it needs first. So in what may be a step's last backward their state goes up already, into memory that nothing else has:
`ahead_bytes` of the plan. It is that of the step before, and stays so until the update: whatever reads or changes state in
between waits for updates first (`Sweep.settle`), which invalidates it. An update that finds its state there only queues kernels,
and copies of what else the slice needs: gradients and parameters in host memory, as shards have.

A slice has the same memory in each step, so the copies of the next step wait on their stream, and the host for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from swapper.device.device_memory import (
    DEVICE_ALIGNMENT_BYTES,
    DeviceStorage,
    HostSide,
    Span,
    merge_spans,
    place_in_storage,
)
from swapper.device.model_device import RING
from swapper.io.tensor_bytes import round_up
from swapper.paging.section import Page
from swapper.train.gradients.cold_grad import ColdGradient, GradientMeta
from swapper.train.groups.train_device import TrainingDevice
from swapper.train.layout.slices import GroupUpdate, Slice, TensorLocation, Trainable


def coded_in(trainable: Trainable, part: Slice) -> int:
    """Return the number of pieces of encoded tensors in a slice."""
    return sum(len(trainable.places[piece.parameter].coded) for piece in part.pieces)


def device_scratch_bytes(trainables: Iterable[Trainable], slice_bytes: int) -> int:
    """Return the maximum bytes of a slice's decoded values."""
    return max((_decoded_bytes(t, part) for t in trainables for part in t.all_slices(slice_bytes)), default=0)


def _decoded_bytes(trainable: Trainable, part: Slice) -> int:
    return sum(
        round_up((piece.end - piece.begin) * torch.float32.itemsize, DEVICE_ALIGNMENT_BYTES)
        * len(trainable.places[piece.parameter].coded)
        for piece in part.pieces
    )


Gradient = Callable[[nn.Parameter], tuple[TensorLocation, GradientMeta]]
"""Returns the location of a parameter's gradient, and its metadata."""


@dataclass(frozen=True, slots=True)
class SlicePart:
    """Elements [begin, end) of a tensor, and their location in a slot.

    Attributes:
        offset: in the slot, in bytes.
        copied_up, copied_down: it is copied to the device, and back.
    """

    place: TensorLocation
    begin: int
    end: int
    offset: int
    copied_up: bool
    copied_down: bool

    @property
    def nbytes(self) -> int:
        return (self.end - self.begin) * self.place.slot.spec.dtype.itemsize

    def view(self, slot: DeviceStorage) -> torch.Tensor:
        return slot.memory[self.offset : self.offset + self.nbytes].view(self.place.slot.spec.dtype)


_Placed = tuple[TensorLocation, int, int, bool, bool]
"""A tensor's elements [begin, end), and whether they are copied up and down."""


def parts_of(
    update: GroupUpdate, part: Slice, gradient_of: Gradient, is_in_place: bool, has_state: bool = False
) -> list[SlicePart]:
    """Return the parts of a slice that are in the slot during its update: state, gradients, parameters unless `is_in_place`.

    Each kind is together, as in its section: neighbors there, if they are of whole DEVICE_ALIGNMENT_BYTES, are neighbors here.
    If the slot `has_state`, that is not copied up.
    """
    gradients: list[_Placed] = []
    params: list[_Placed] = []
    for piece in part.pieces:
        places, elements = update.trainable.places[piece.parameter], (piece.begin, piece.end)
        if type(update.gradients[piece.parameter]) is ColdGradient:
            gradients.append((gradient_of(update.trainable.parameters[piece.parameter])[0], *elements, True, False))
        if not is_in_place:
            params.append((places.param, *elements, places.has_coded_master or not places.has_master, True))
    return _in_slot([*_state_of(update.trainable, part, not has_state), *gradients, *params])


def state_parts(trainable: Trainable, part: Slice) -> list[SlicePart]:
    """Return the parts of a slice that are its state, where `parts_of` has them."""
    return _in_slot(_state_of(trainable, part))


def _state_of(trainable: Trainable, part: Slice, copied_up: bool = True) -> list[_Placed]:
    found: list[_Placed] = []
    for piece in part.pieces:
        places = trainable.places[piece.parameter]
        if not places.state_stays:
            found += [(*stored, copied_up, True) for stored in places.stored(piece.begin, piece.end)]
    return found


def _in_slot(found: Sequence[_Placed]) -> list[SlicePart]:
    offsets, _ = place_in_storage((end - begin) * place.slot.spec.dtype.itemsize for place, begin, end, _, _ in found)
    return [
        SlicePart(place, begin, end, offset, copied_up, copied_down)
        for (place, begin, end, copied_up, copied_down), offset in zip(found, offsets, strict=True)
    ]


def device_slice_bytes(trainable: Trainable, part: Slice) -> int:
    """Return the bytes of a slice on a device: its state, its gradients, and its parameters, which are as large."""
    total = 0
    for piece in part.pieces:
        places = trainable.places[piece.parameter]
        param = places.param, piece.begin, piece.end
        state = () if places.state_stays else places.stored(piece.begin, piece.end)
        for place, begin, end in (*state, param, param):
            total += round_up((end - begin) * place.slot.spec.dtype.itemsize, DEVICE_ALIGNMENT_BYTES)
    return max(total, DEVICE_ALIGNMENT_BYTES)


def slot_bytes(trainables: Iterable[Trainable], slice_bytes: int) -> int:
    """Return the bytes of the largest slice."""
    return max((device_slice_bytes(t, part) for t in trainables for part in t.all_slices(slice_bytes)), default=0)


def state_slice_bytes(trainable: Trainable, part: Slice) -> int:
    """Return the bytes of a slice's state on a device."""
    ends = (one.offset + one.nbytes for one in state_parts(trainable, part))
    return max(round_up(max(ends, default=0), DEVICE_ALIGNMENT_BYTES), DEVICE_ALIGNMENT_BYTES)


def ahead_slice_bytes(trainable: Trainable, part: Slice, only_state: bool) -> int:
    """Return the bytes of a slot for a slice whose state goes up early.

    Args:
        only_state: gradients and parameters are there already; else the slot has room for them.
    """
    return (state_slice_bytes if only_state else device_slice_bytes)(trainable, part)


def group_ahead_bytes(trainable: Trainable, slice_bytes: int, only_state: bool) -> int:
    """Return the bytes of such slots for all slices of a group. Args: as of `ahead_slice_bytes`."""
    return sum(ahead_slice_bytes(trainable, part, only_state) for part in trainable.all_slices(slice_bytes))


def ring_bytes(trainables: Sequence[Trainable], slice_bytes: int) -> int:
    """Return the maximum bytes of the ring, and of the scratch of decoded state."""
    return RING * slot_bytes(trainables, slice_bytes) + device_scratch_bytes(trainables, slice_bytes)


@dataclass(slots=True)
class UpdateSlot:
    """Memory on the device for a slice that is updated there.

    Attributes:
        storage: its memory, allocated at the first use.
        in_flight: slices whose copies to or from it are in flight.
        last_use: the event of the copies down; None before the first.
        has_state: it has the state of the slice: see StateAhead.
    """

    storage: DeviceStorage | None = None
    in_flight: int = 0
    last_use: torch.Event | None = None
    has_state: bool = False


def pieces_on_host(parts: Iterable[SlicePart], host: HostSide) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the offset in the slot and the host memory of what each page has of `parts`; neighbors are one piece."""
    spans: dict[Page, list[Span]] = {}
    for part in parts:
        section, slot = part.place.section, part.place.slot
        begin = slot.offset + part.begin * slot.spec.dtype.itemsize
        end = begin + part.nbytes
        for page in section.pages_of(begin, end) or [section.piece]:
            first, last = max(begin, page.offset), min(end, page.offset + page.nbytes)
            if first < last:
                spans.setdefault(page, []).append(Span(first - page.offset, last - first, part.offset + first - begin))
    for page, found in spans.items():
        memory = host.of(page)
        for span in merge_spans(found):
            yield span.target, memory[span.begin : span.begin + span.nbytes]


class UpdateRing:
    """Owns the slots of the slices of a step, one after the other. All methods are called on the stream of updates."""

    def __init__(self, on_device: TrainingDevice) -> None:
        self._on_device = on_device
        self._slots = [UpdateSlot() for _ in range(RING)]
        self._turn = 0
        self._usual_bytes = 0  # of a slot

    def begin(self, nbytes: Callable[[], int]) -> None:
        """Allocate all slots; `nbytes` returns the bytes of each, once."""
        self._usual_bytes = self._usual_bytes or nbytes()
        for slot in self._slots:
            if slot.storage is None:
                slot.storage = self._on_device.new_storage(self._usual_bytes)

    def next(self, nbytes: int, has_pages: bool) -> UpdateSlot:
        """Return the next slot, with at least this memory. [Note: who waits for a slot]"""
        slot = self._slots[self._turn]
        self._turn = (self._turn + 1) % RING
        is_short = slot.storage is None or slot.storage.nbytes < nbytes
        while slot.in_flight and (has_pages or is_short):
            self._on_device.downloads.wait_for_oldest()
        if slot.storage is None or is_short:
            if slot.storage is not None:
                slot.storage.free()
                slot.storage = slot.last_use = None
            slot.storage = self._on_device.new_storage(max(nbytes, self._usual_bytes))
        return slot

    def free(self) -> None:
        """Give the memory back; no copies are in flight."""
        for slot in self._slots:
            storage, slot.storage, slot.last_use, slot.in_flight = slot.storage, None, None, 0
            if storage is not None:
                storage.free()


class StateAhead:
    """Owns the slots of slices whose state goes up early. All methods are called on the stream of updates.

    Args:
        may_fetch: returns True if the state of a group is in memory that stays where it is.
        needed_bytes: returns the bytes of a slot for a slice.
    """

    def __init__(
        self,
        on_device: TrainingDevice,
        may_fetch: Callable[[Trainable], bool],
        needed_bytes: Callable[[Trainable, Slice], int],
    ) -> None:
        self._on_device = on_device
        self._may_fetch = may_fetch
        self._needed_bytes = needed_bytes
        self._taken_bytes = 0
        self._slots: dict[tuple[int, int], UpdateSlot] = {}  # by group and number of the slice
        self._is_over = False  # nothing more is fetched before the next step

    def fetch(self, slices: Iterable[tuple[Trainable, Sequence[Slice]]], arrived: Mapping[int, torch.Event]) -> None:
        """Queue the copies of as many groups as there is memory for, in order. Once a step; later calls do nothing.

        Args:
            slices: of each group, with all of its parameters.
            arrived: by group: the event after which the last step's results are in host memory.
        """
        if self._is_over:
            return
        self._is_over = True
        for trainable, parts in slices:
            if not self._may_fetch(trainable) or not self._allocate(trainable, parts):
                return
            for number, part in enumerate(parts):
                slot = self._slots[trainable.group, number]
                if slot.storage is not None:
                    up = list(pieces_on_host(state_parts(trainable, part), self._on_device.host))
                    self._on_device.bring_up(slot.storage, up, slot.last_use, arrived.get(trainable.group))
                    slot.has_state = True

    def _allocate(self, trainable: Trainable, parts: Sequence[Slice]) -> bool:
        """Allocate the slots of a group. Return False if there is no memory for them."""
        if (trainable.group, 0) in self._slots:
            return True
        needed = [self._needed_bytes(trainable, part) for part in parts]
        if self._taken_bytes + sum(needed) > self._on_device.memory.ahead_bytes:
            return False
        slots = {}
        for number, nbytes in enumerate(needed):
            storage = self._on_device.spare_storage(nbytes)
            if storage is None:  # something else has taken the memory
                self._on_device.memory.ahead_bytes = self._taken_bytes
                return False
            slots[trainable.group, number] = UpdateSlot(storage)
        self._taken_bytes += sum(needed)
        self._slots |= slots
        return True

    def take(self, group: int, number: int, needed_bytes: int) -> UpdateSlot | None:
        """Return the slot with the state of a slice, if it is there and has this memory; the update changes it."""
        slot = self._slots.get((group, number))
        if slot is None or slot.storage is None or not slot.has_state or slot.storage.nbytes < needed_bytes:
            return None
        slot.has_state = False
        return slot

    def invalidate(self) -> None:
        """Note that state in host memory may change, or that the rest is not needed."""
        for slot in self._slots.values():
            slot.has_state = False

    def begin_step(self) -> None:
        """The next step may fetch again."""
        self.invalidate()
        self._is_over = False

    def free(self) -> int:
        """Give the memory back, and return how much it is; no copies are in flight."""
        self.begin_step()
        while self._slots:
            storage = self._slots.popitem()[1].storage
            if storage is not None:
                storage.free()
        freed_bytes, self._taken_bytes = self._taken_bytes, 0
        return freed_bytes
