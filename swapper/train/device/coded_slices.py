"""Decodes and encodes optimizer state on an accelerator, for the update of a slice there.

The state is copied up and down encoded. Its fp32 values lie in one scratch on the device: updates run one after the other on
their stream, so the slices of the ring share it. Values that a codec cannot hold are counted there, and the counts come down
with the slice: reading them at once would wait for the kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch

from swapper.device.device_storage import DEVICE_ALIGNMENT_BYTES, DeviceStorage
from swapper.errors import StateError
from swapper.io.alignment import round_up
from swapper.train.layout.slices import CodedTensor, ParameterLocations, Slice
from swapper.train.updates.coded_run import CodedRun, PartOf, not_held
from swapper.train.updates.sweep import Trainable

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
                value.reshape(-1),
                self.parts(coded, begin, end),
                param.view(-1),
                self._unheld[number : number + 1],
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
