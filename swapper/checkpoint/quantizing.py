"""Quantising a checkpoint on its way into another file: rows are read, quantised and written piece by piece, in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch

from swapper.checkpoint.quantization import FLOATS, QuantizedLayout, metadata_of
from swapper.checkpoint.writers import ExportTensor, Payloads
from swapper.errors import CheckpointError

SCHEMES = {"int8": 8, "int4": 4}
LEAST_ELEMENTS = 1 << 16
"""A smaller tensor stays as it is: inference keeps it in memory anyway."""
PIECE_ELEMENTS = 1 << 20


@dataclass
class Loss:
    """How far a quantised tensor is from what it was."""

    squared_error: float = 0.0
    squared: float = 0.0
    largest_error: float = 0.0

    def add(self, values: torch.Tensor, found: torch.Tensor) -> None:
        difference = found.float() - values.float()
        self.squared_error += difference.double().square().sum().item()
        self.squared += values.double().square().sum().item()
        self.largest_error = max(self.largest_error, difference.abs().max().item())

    @property
    def relative(self) -> float:
        """The root of the mean square of the error, to that of the values."""
        return math.sqrt(self.squared_error / self.squared) if self.squared else 0.0


@dataclass(frozen=True, eq=False)
class QuantisedTensor(ExportTensor):
    """A tensor that becomes codes and scales as it is written. `dtype` and `shape` are those of the file.

    Attributes:
        layout: how.
        original: the tensor before.
        loss: filled as it is written.
    """

    layout: QuantizedLayout | None = None
    original: ExportTensor | None = None
    loss: Loss = field(default_factory=Loss)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape)

    def pieces(self, payloads: Payloads) -> Iterator[torch.Tensor]:
        """Yield the file's bytes in their order."""
        if self.layout is None or self.original is None:
            raise AssertionError("a quantised tensor without its layout")
        columns = self.layout.columns
        rows_a_piece = max(PIECE_ELEMENTS // columns, 1)
        for elements in payloads.elements(self.original, rows_a_piece * columns):
            values = elements.view(-1, columns)
            try:
                stored = self.layout.quantise(values)
            except CheckpointError as error:
                raise CheckpointError(f"{self.name} cannot be quantised: {error}; leave it with --keep") from error
            self.loss.add(values, self.layout.dequantise(stored, values.dtype))
            yield stored.view(-1)


def quantised(tensors: Sequence[ExportTensor], scheme: str, keep: Sequence[str]) -> list[ExportTensor]:
    """Return `tensors` with every matrix that is worth it quantised, but those whose name fits a pattern in `keep`."""
    if scheme not in SCHEMES:
        raise CheckpointError(f"there is no way to quantise called {scheme!r}: use one of {', '.join(SCHEMES)}")
    return [_quantised(tensor, SCHEMES[scheme], keep) for tensor in tensors]


def _quantised(tensor: ExportTensor, bits: int, keep: Sequence[str]) -> ExportTensor:
    is_large = len(tensor.shape) >= 2 and math.prod(tensor.shape) >= LEAST_ELEMENTS
    is_kept = any(fnmatchcase(tensor.name, pattern) for pattern in keep)
    in_order = all(part.stride is None for part in tensor.parts)
    if is_kept or not is_large or not in_order or tensor.dtype not in FLOATS:
        return tensor
    layout = QuantizedLayout.of(bits, tensor.shape[-1], tensor.dtype)
    if layout is None:
        return tensor
    shape = (*tensor.shape[:-1], layout.row_bytes)
    return QuantisedTensor(tensor.name, torch.uint8, shape, tensor.parts, layout, tensor)


def metadata(tensors: Sequence[ExportTensor]) -> dict[str, str]:
    """What a safetensors file says of those of `tensors` that are quantised."""
    found = {t.name: t.layout for t in tensors if isinstance(t, QuantisedTensor) and t.layout is not None}
    return metadata_of(found)


def losses(tensors: Sequence[ExportTensor]) -> dict[str, Loss]:
    """By name, how far each quantised tensor is from what it was; once they are written."""
    return {tensor.name: tensor.loss for tensor in tensors if isinstance(tensor, QuantisedTensor)}
