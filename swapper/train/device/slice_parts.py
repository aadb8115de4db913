"""Says what of a slice is in a slot on an accelerator while it is updated there: which parts, where, and how many bytes. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from swapper.device.device_storage import DEVICE_ALIGNMENT_BYTES, DeviceStorage, place_in_storage
from swapper.io.alignment import round_up
from swapper.train.device.coded_slices import device_scratch_bytes
from swapper.train.device.train_device import RING
from swapper.train.gradients.cold_grad import ColdGradient, GradientMeta
from swapper.train.layout.slices import Slice, TensorLocation
from swapper.train.updates.sweep import GroupUpdate, Trainable

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


def parts_of(update: GroupUpdate, part: Slice, gradient_of: Gradient) -> list[SlicePart]:
    """Return the parts of a slice that are in the slot during its update: state, gradients, parameters.

    Each kind is together, as in its section: neighbors there, if they are of whole DEVICE_ALIGNMENT_BYTES, are neighbors here.
    """
    state: list[tuple[TensorLocation, int, int, bool, bool]] = []
    gradients, params = state.copy(), state.copy()
    for piece in part.pieces:
        places, elements = update.trainable.places[piece.parameter], (piece.begin, piece.end)
        if not places.state_stays:
            state += [(*stored, True, True) for stored in places.stored(*elements)]
        if type(update.gradients[piece.parameter]) is ColdGradient:
            gradients.append((gradient_of(update.trainable.parameters[piece.parameter])[0], *elements, True, False))
        params.append((places.param, *elements, places.has_coded_master or not places.has_master, True))
    found = [*state, *gradients, *params]
    offsets, _ = place_in_storage((end - begin) * place.slot.spec.dtype.itemsize for place, begin, end, _, _ in found)
    return [
        SlicePart(place, begin, end, offset, copied_up, copied_down)
        for (place, begin, end, copied_up, copied_down), offset in zip(found, offsets, strict=True)
    ]


def slice_bytes(trainable: Trainable, part: Slice) -> int:
    """Return the bytes of a slice on a device: its state, its gradients, and its parameters, which are as large."""
    total = 0
    for piece in part.pieces:
        places = trainable.places[piece.parameter]
        param = places.param, piece.begin, piece.end
        state = () if places.state_stays else places.stored(piece.begin, piece.end)
        for place, begin, end in (*state, param, param):
            total += round_up((end - begin) * place.slot.spec.dtype.itemsize, DEVICE_ALIGNMENT_BYTES)
    return max(total, DEVICE_ALIGNMENT_BYTES)


def slot_bytes(trainables: Iterable[Trainable], page_bytes: int) -> int:
    """Return the bytes of the largest slice."""
    return max((slice_bytes(t, part) for t in trainables for part in t.all_slices(page_bytes)), default=0)


def ring_bytes(trainables: Sequence[Trainable], page_bytes: int) -> int:
    """Return the maximum bytes of the ring, and of the scratch of decoded state."""
    return RING * slot_bytes(trainables, page_bytes) + device_scratch_bytes(trainables, page_bytes)
