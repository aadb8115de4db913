"""Quantizes weights to 8 or 4 bits: the arithmetic, the metadata in a safetensors file, and writing such a file.

A matrix of shape (..., columns) becomes one of bytes, (..., row_bytes): each row is its codes, then its scales. Codes
are integers of `bits` bits, one scale in bf16 for each block of columns; a value is its code times its block's scale. A
row is self-contained, so rows can be read, cut and looked up alone, and a matrix is one run of bytes in a file.

8 bits: codes -127 to 127, a byte each. 4 bits: codes -8 to 7; a byte has a column of the row's first half in its low
bits and the column half a row further in its high ones. Their scales are stored divided by 16, because code times 16 is
cheap to extract from a byte. bf16 holds all codes exactly, so that dequantizing rounds once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase

import torch

from swapper import _C
from swapper.checkpoint.writers import ExportTensor, Payloads
from swapper.device.kernels import FLOATS, dequantise_, has_triton, quantise, uses_kernel
from swapper.errors import CheckpointError
from swapper.formats.safetensors import DTYPES
from swapper.formats.stored import Empty, StoredTensor
from swapper.runtime import records

KEY = "swapper.quantized."
"""The prefix of a quantized tensor's entry in a file's metadata, before its name."""
BLOCKS = {8: 128, 4: 64}
"""Columns that share a scale, by the number of bits."""
MIN_BLOCK = 32
CHUNK_ELEMENTS = 1 << 21
"""Elements dequantized at once: intermediate results stay small, and mostly in the cache."""
NOT_FINITE = "it has values that are not finite"
_NATIVE = {torch.float32: "fp32", torch.bfloat16: "bf16"}
"""Of the values that csrc/codecs/ computes."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class QuantizedLayout:
    """The quantization of one tensor.

    Attributes:
        bits: 8 or 4.
        block: columns that share a scale.
        columns: of the tensor, its last dimension; a multiple of `block`, of twice that in 4 bits.
        dtype: of the original tensor, by its name in safetensors.
    """

    bits: int
    block: int
    columns: int
    dtype: str

    @classmethod
    def of(cls, bits: int, columns: int, dtype: torch.dtype) -> QuantizedLayout | None:
        """Return the quantization of a tensor; None if it is not suitable.

        Args:
            bits: of a weight, 8 or 4.
            columns: of the matrix.
            dtype: of the values.
        """
        step = 1 if bits == 8 else 2
        block = BLOCKS[bits]
        while block >= MIN_BLOCK and columns % (step * block):
            block //= 2
        return cls(bits, block, columns, _NAMES[dtype]) if block >= MIN_BLOCK and dtype in FLOATS else None

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = DTYPES[self.dtype]
        return dtype

    @property
    def code_bytes(self) -> int:
        """Bytes of codes in a row."""
        return self.columns * self.bits // 8

    @property
    def row_bytes(self) -> int:
        return self.code_bytes + self.columns // self.block * 2

    def values_shape(self, stored: StoredTensor) -> tuple[int, ...]:
        """Return the shape of the values of `stored`.

        Raises:
            CheckpointError: it does not have the shape of this layout.
        """
        if stored.dtype != torch.uint8 or stored.stride is not None or stored.shape[-1:] != (self.row_bytes,):
            raise CheckpointError(
                f"{stored.path}: {stored.name!r} is a tensor of {stored.dtype} {list(stored.shape)}, and quantized in {self.bits} "
                f"bits it would be of uint8 and have rows of {self.row_bytes}"
            )
        return (*stored.shape[:-1], self.columns)

    def quantise(self, rows: torch.Tensor) -> torch.Tensor:
        """Return `rows`, of shape (n, columns), as bytes of shape (n, row_bytes); by a kernel as `dequantise`."""
        if self._has_kernel(rows):
            stored, overflown = quantise(rows.contiguous(), self.bits, self.block)
            if overflown.item() != 0:
                raise CheckpointError(NOT_FINITE)
            return stored
        return self._quantise(rows)

    def _has_kernel(self, values: torch.Tensor) -> bool:
        is_whole = self.block & (self.block - 1) == 0 and values.dtype in FLOATS
        return is_whole and uses_kernel(values.device) and has_triton()

    def _quantise(self, rows: torch.Tensor) -> torch.Tensor:
        values = rows.float().view(rows.shape[0], -1, self.block)
        if not torch.isfinite(values).all():
            raise CheckpointError(NOT_FINITE)
        if self.bits == 8:
            scales = _not_below(values.abs().amax(-1, keepdim=True) / 127)
            codes = _codes(values, scales, -127, 127)
            stored = codes.view(rows.shape).to(torch.int8).view(torch.uint8)
        else:  # the value farthest from 0 becomes -8
            extreme = values.gather(-1, values.abs().argmax(-1, keepdim=True))
            scales = (extreme / -8).bfloat16().float()
            codes = _codes(values, scales, -8, 7).view(rows.shape).to(torch.int16) & 15
            half = self.columns // 2
            stored = (codes[:, :half] | codes[:, half:] << 4).to(torch.uint8)
            scales = scales / 16
        tail = scales.squeeze(-1).bfloat16().contiguous().view(torch.uint8)
        return torch.cat([stored, tail], dim=1)

    def dequantise(self, stored: torch.Tensor, dtype: torch.dtype, empty: Empty = torch.empty) -> torch.Tensor:
        """Return the values of `stored`, of shape (..., columns).

        `stored` and the result are on one device. On a CPU, and on a GPU with Triton, a kernel does it in one pass, with the
        bits of torch's operations.

        Args:
            stored: bytes of shape (..., row_bytes).
            dtype: of the result.
            empty: makes its memory. Default: torch.empty.
        """
        shape = (*stored.shape[:-1], self.columns)
        values = empty(shape, dtype=dtype, device=stored.device)
        rows, flat = stored.reshape(-1, self.row_bytes), values.view(-1, self.columns)
        if self._has_kernel(flat):
            dequantise_(rows.contiguous(), flat, self.bits, self.block)
        elif flat.device.type == "cpu" and dtype in _NATIVE and self.block % MIN_BLOCK == 0:
            self._dequantise_natively(rows.contiguous(), flat, torch.get_num_threads())
        else:
            self._dequantise_by_torch(rows, flat, empty)
        return values

    def _dequantise_natively(self, rows: torch.Tensor, flat: torch.Tensor, threads: int, isa: str = "") -> None:
        value = flat.data_ptr(), _NATIVE[flat.dtype]
        _C.dequantise(rows.data_ptr(), rows.shape[0], self.columns, self.block, self.bits, value, threads, isa)

    def _dequantise_by_torch(self, rows: torch.Tensor, flat: torch.Tensor, empty: Empty) -> None:
        step = min(max(CHUNK_ELEMENTS // self.columns, 1), rows.shape[0])
        codes = empty((step if self.bits == 4 else 0, self.code_bytes), dtype=torch.int8, device=rows.device)
        for begin in range(0, rows.shape[0], max(step, 1)):
            self._dequantise(rows[begin : begin + step], flat[begin : begin + step], codes)

    def _dequantise(self, rows: torch.Tensor, out: torch.Tensor, memory: torch.Tensor) -> None:
        """Write the values of `rows` to `out`. 4 bits need `memory` for as many rows of codes."""
        codes = rows[:, : self.code_bytes].view(torch.int8)
        scales = rows[:, self.code_bytes :].view(torch.bfloat16).to(out.dtype).unsqueeze(-1)
        if self.bits == 8:
            out.copy_(codes)
        else:
            half, wide = self.columns // 2, memory[: rows.shape[0]]
            out[:, :half].copy_(torch.bitwise_left_shift(codes, 4, out=wide))
            out[:, half:].copy_(torch.bitwise_and(codes, -16, out=wide))
        blocks = out.view(out.shape[0], -1, self.block)
        torch.mul(blocks, scales, out=blocks)


def metadata_of(layouts: Mapping[str, QuantizedLayout]) -> dict[str, str]:
    """Return a file's metadata for its quantized tensors."""
    return {KEY + name: json.dumps(asdict(layout)) for name, layout in layouts.items()}


def layouts_of(metadata: Mapping[str, str], path: object) -> dict[str, QuantizedLayout]:
    """Return the quantization of tensors, by name, from a file's metadata.

    Raises:
        CheckpointError: it is not in the form of `metadata_of`.
    """
    return {key[len(KEY) :]: _parse(text, f"{path}: {key}") for key, text in metadata.items() if key.startswith(KEY)}


def _parse(text: str, where: str) -> QuantizedLayout:
    try:
        layout = QuantizedLayout(**records.parse_json(text.encode()))
        numbers = (layout.bits, layout.block, layout.columns)
        good = all(type(n) is int for n in numbers) and layout.bits in BLOCKS and 2 <= layout.block <= layout.columns
        good = good and layout.columns % (layout.block * (2 if layout.bits == 4 else 1)) == 0
        if not good or DTYPES.get(layout.dtype) not in FLOATS:
            raise ValueError(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{where} does not describe the quantization of a tensor: {text[:200]!r}") from error
    return layout


def _not_below(scales: torch.Tensor) -> torch.Tensor:
    """Convert to bf16, up where rounding would go down: codes must reach every value."""
    rounded = scales.bfloat16()
    up = torch.nextafter(rounded, torch.full_like(rounded, torch.inf))
    return torch.where(rounded.float() < scales, up, rounded).float()


def _codes(values: torch.Tensor, scales: torch.Tensor, least: int, most: int) -> torch.Tensor:
    safe = torch.where(scales == 0, torch.ones_like(scales), scales)
    return (values / safe).round_().clamp_(least, most)


SCHEMES = {"int8": 8, "int4": 4}
MIN_ELEMENTS = 1 << 16
"""Elements. A smaller tensor stays as it is: inference keeps it in memory anyway."""
PIECE_ELEMENTS = 1 << 20


@dataclass
class Loss:
    """The error of a quantized tensor."""

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
        """The root mean square of the error, relative to that of the values."""
        return math.sqrt(self.squared_error / self.squared) if self.squared else 0.0


@dataclass(frozen=True, eq=False)
class QuantisedTensor(ExportTensor):
    """A tensor that becomes codes and scales as it is written, piece by piece, in bounded memory.

    Attributes:
        original: the tensor before.
        loss: filled as it is written.
    """

    layout: QuantizedLayout
    original: ExportTensor
    loss: Loss = field(default_factory=Loss)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape)

    def pieces(self, payloads: Payloads) -> Iterator[torch.Tensor]:
        """Yield the file's bytes in order."""
        columns = self.layout.columns
        rows_a_piece = max(PIECE_ELEMENTS // columns, 1)
        for elements in payloads.elements(self.original, rows_a_piece * columns):
            values = elements.view(-1, columns)
            try:
                stored = self.layout.quantise(values)
            except CheckpointError as error:
                raise CheckpointError(f"{self.name} cannot be quantized: {error}; leave it with --keep") from error
            self.loss.add(values, self.layout.dequantise(stored, values.dtype))
            yield stored.view(-1)


@dataclass(frozen=True, eq=False)
class AlreadyQuantized(ExportTensor):
    """A tensor that the source has quantized: its bytes as they are, for a format that says so."""

    layout: QuantizedLayout

    @classmethod
    def of(cls, stored: StoredTensor, name: str, layout: QuantizedLayout) -> AlreadyQuantized:
        """Return the tensor `stored`. Raises CheckpointError: it does not have the shape of its layout.

        Args:
            stored: bytes of shape (..., row_bytes).
            name: under which it is written.
            layout: of its rows.
        """
        layout.values_shape(stored)
        return cls(name, stored.dtype, stored.shape, (stored,), layout)

    def dequantised(self) -> ExportTensor:
        """Return its values, for any other format."""
        shape = self.layout.values_shape(self.parts[0])
        return DequantisedTensor(self.name, self.layout.torch_dtype, shape, self.parts, self)


@dataclass(frozen=True, eq=False)
class DequantisedTensor(ExportTensor):
    """The values of a quantized tensor, computed as they are written, piece by piece."""

    coded: AlreadyQuantized

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def pieces(self, payloads: Payloads) -> Iterator[torch.Tensor]:
        """Yield its elements in order."""
        layout = self.coded.layout
        rows_a_piece = max(PIECE_ELEMENTS // layout.columns, 1)
        for stored in payloads.elements(self.coded, rows_a_piece * layout.row_bytes):
            yield layout.dequantise(stored.view(-1, layout.row_bytes), self.dtype).view(-1)


def quantised(tensors: Sequence[ExportTensor], scheme: str, keep: Sequence[str]) -> list[ExportTensor]:
    """Return `tensors` with every suitable matrix quantized, except names that match a pattern in `keep`.

    Args:
        tensors: to write.
        scheme: one of SCHEMES.
        keep: patterns of names, with * and ?.
    """
    if scheme not in SCHEMES:
        raise CheckpointError(f"there is no quantization {scheme!r}: use one of {', '.join(SCHEMES)}")
    return [_quantised(tensor, SCHEMES[scheme], keep) for tensor in tensors]


def _quantised(tensor: ExportTensor, bits: int, keep: Sequence[str]) -> ExportTensor:
    if isinstance(tensor, AlreadyQuantized):
        raise CheckpointError(f"{tensor.name} is quantized already: quantize the original, or leave out --quantize")
    is_large = len(tensor.shape) >= 2 and math.prod(tensor.shape) >= MIN_ELEMENTS
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
    """Return the metadata of a safetensors file for the quantized ones of `tensors`."""
    return metadata_of({t.name: t.layout for t in tensors if isinstance(t, QuantisedTensor | AlreadyQuantized)})


def losses(tensors: Sequence[ExportTensor]) -> dict[str, Loss]:
    """Return the error of each quantized tensor, by name, once they are written."""
    return {tensor.name: tensor.loss for tensor in tensors if isinstance(tensor, QuantisedTensor)}
