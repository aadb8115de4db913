"""Says what of a slice is in a slot on an accelerator while it is updated there: which parts, where, and how many bytes. Pure.

Decodes and encodes optimizer state on an accelerator, for the update of a slice there.

The state is copied up and down encoded. Its fp32 values lie in one scratch on the device: updates run one after the other on
their stream, so the slices of the ring share it. Values that a codec cannot hold are counted there, and the counts come down
with the slice: reading them at once would wait for the kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from swapper.device.device_storage import DEVICE_ALIGNMENT_BYTES, DeviceStorage, place_in_storage
from swapper.device.model_device import RING
from swapper.errors import StateError
from swapper.io.tensor_bytes import round_up
from swapper.train.gradients.cold_grad import ColdGradient, GradientMeta
from swapper.train.layout.slices import CodedTensor, ParameterLocations, Slice, TensorLocation
from swapper.train.layout.trainable import GroupUpdate, Trainable
from swapper.train.state.coded_run import CodedRun, PartOf, not_held

ITEM_BYTES = torch.float32.itemsize
ALIGNMENT_ELEMENTS = DEVICE_ALIGNMENT_BYTES // ITEM_BYTES


class CodedSlices(CodedRun):
    """Owns the scratch of decoded values on a device, as of the first slice with encoded state, until `free`.

    Args:
        nbytes: of the scratch; see `device_scratch_bytes`.
        part: of the slice's memory on the device.
        new_storage: returns memory there.
    """

    def __init__(self, nbytes: int, part: PartOf, new_storage: Callable[[int], DeviceStorage]) -> None:
        super().__init__(nbytes, part)
        self._nbytes = nbytes
        self._new_storage = new_storage
        self._storage: DeviceStorage | None = None
        self._encoded: list[tuple[CodedTensor, str, str]] = []  # of the slice
        self._unheld: torch.Tensor | None = None  # of each

    def begin_slice(self, coded_tensors: int) -> None:
        """Begin a slice with this number of pieces of encoded tensors, on the current stream.

        Raises:
            BudgetError: the device has no memory for the scratch.
        """
        self.begin_run()
        self._encoded.clear()
        self._unheld = None
        if not coded_tensors:
            return
        if self._storage is None:
            self._storage = self._new_storage(self._nbytes)
            self._memory = self._storage.memory.view(torch.float32)
        self._unheld = torch.zeros(coded_tensors, dtype=torch.int32, device=self._storage.memory.device)

    def encode(
        self, places: ParameterLocations, begin: int, end: int, param: torch.Tensor, values: Mapping[str, torch.Tensor]
    ) -> None:
        """Queue what `CodedRun.encode` does. What a codec cannot hold is counted: see `counts`."""
        if self._unheld is None:
            return
        for key, value in values.items():
            coded, number = places.coded[key], len(self._encoded)
            self._encoded.append((coded, places.name, key))
            coded.codec.encode_counting(
                value.reshape(-1), self.parts(coded, begin, end), param.view(-1), self._unheld[number : number + 1]
            )

    def counts(self) -> tuple[torch.Tensor, Callable[[torch.Tensor], StateError | None]] | None:
        """Return the slice's counts on the device, and what finds the error in them once they are in host memory.

        Both as uint8; None if nothing was encoded.
        """
        if self._unheld is None or not self._encoded:
            return None
        encoded = tuple(self._encoded)

        def error_in(counts: torch.Tensor) -> StateError | None:
            found = zip(counts.view(torch.int32).tolist(), encoded, strict=False)
            return next((not_held(lost, *which) for lost, which in found if lost), None)

        return self._unheld.view(torch.uint8), error_in

    def free(self) -> None:
        """Give the scratch back."""
        storage, self._storage, self._memory = self._storage, None, None
        self._unheld = None
        if storage is not None:
            storage.free()

    def _take(self, numel: int) -> torch.Tensor:
        return super()._take(round_up(numel, ALIGNMENT_ELEMENTS))[:numel]


def coded_in(trainable: Trainable, part: Slice) -> int:
    """Return the number of pieces of encoded tensors in a slice."""
    return sum(len(trainable.places[piece.parameter].coded) for piece in part.pieces)


def device_scratch_bytes(trainables: Iterable[Trainable], page_bytes: int) -> int:
    """Return the maximum bytes of a slice's decoded values."""
    return max((_decoded_bytes(t, part) for t in trainables for part in t.all_slices(page_bytes)), default=0)


def _decoded_bytes(trainable: Trainable, part: Slice) -> int:
    return sum(
        round_up((piece.end - piece.begin) * ITEM_BYTES, DEVICE_ALIGNMENT_BYTES)
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


def parts_of(update: GroupUpdate, part: Slice, gradient_of: Gradient, is_in_place: bool) -> list[SlicePart]:
    """Return the parts of a slice that are in the slot during its update: state, gradients, parameters unless `is_in_place`.

    Each kind is together, as in its section: neighbors there, if they are of whole DEVICE_ALIGNMENT_BYTES, are neighbors here.
    """
    gradients: list[_Placed] = []
    params: list[_Placed] = []
    for piece in part.pieces:
        places, elements = update.trainable.places[piece.parameter], (piece.begin, piece.end)
        if type(update.gradients[piece.parameter]) is ColdGradient:
            gradients.append((gradient_of(update.trainable.parameters[piece.parameter])[0], *elements, True, False))
        if not is_in_place:
            params.append((places.param, *elements, places.has_coded_master or not places.has_master, True))
    return _in_slot([*_state_of(update.trainable, part), *gradients, *params])


def state_parts(trainable: Trainable, part: Slice) -> list[SlicePart]:
    """Return the parts of a slice that are its state, where `parts_of` has them."""
    return _in_slot(_state_of(trainable, part))


def _state_of(trainable: Trainable, part: Slice) -> list[_Placed]:
    found: list[_Placed] = []
    for piece in part.pieces:
        places = trainable.places[piece.parameter]
        if not places.state_stays:
            found += [(*stored, True, True) for stored in places.stored(piece.begin, piece.end)]
    return found


def _in_slot(found: Sequence[_Placed]) -> list[SlicePart]:
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


def state_slice_bytes(trainable: Trainable, part: Slice) -> int:
    """Return the bytes of a slice's state on a device."""
    ends = (one.offset + one.nbytes for one in state_parts(trainable, part))
    return max(round_up(max(ends, default=0), DEVICE_ALIGNMENT_BYTES), DEVICE_ALIGNMENT_BYTES)


def group_state_bytes(trainable: Trainable, page_bytes: int) -> int:
    """Return the bytes of the state of all slices of a group."""
    return sum(state_slice_bytes(trainable, part) for part in trainable.all_slices(page_bytes))


def ring_bytes(trainables: Sequence[Trainable], page_bytes: int) -> int:
    """Return the maximum bytes of the ring, and of the scratch of decoded state."""
    return RING * slot_bytes(trainables, page_bytes) + device_scratch_bytes(trainables, page_bytes)
