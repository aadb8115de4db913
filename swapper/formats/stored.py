"""Describes a tensor as bytes of a file, the result of every reader; and plans the reads of a group's tensors, pure.

A tensor that was saved in chunks is several of them (`ChunkedTensor`). Chunks along the first dimension alone are
consecutive extents of the tensor's bytes: a `ConcatenatedFile` makes them one tensor of a file that does not exist.
Chunks along several dimensions (a mesh) are assembled: whole (`assembled`), or in boxes of bounded size (`boxes`), each
of which is one extent of the tensor and one of every chunk that it meets.

A *run* is a range of one file that is read as one and lies in memory as it lies in the file: its tensors are views at
the addresses of their offsets. If those addresses suit the kernels, the run begins at a sector, and its reads go from
the drive straight to their target. If not, the whole run is shifted until they do; the engine then stages reads in its
slots if the drive cannot transfer to such addresses.

[Note: alignment] Kernels in fp32 give other bits at addresses that are no multiple of 16 (matrix times vector), so wide
elements lie at multiples of 64, as in torch's own allocations. Elements of two bytes and less gave the same bits at
every address: they only need their own alignment.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import TypeGuard

import torch

from swapper.io.tensor_bytes import SECTOR_BYTES, TENSOR_ALIGNMENT_BYTES, round_up

Empty = Callable[..., torch.Tensor]
"""Gives memory for a result, with the arguments of torch.empty."""
MAX_DIMENSIONS = 64  # torch's limit
MAX_TENSOR_BYTES = 1 << 62  # below the largest file offset


def are_sizes(values: object) -> TypeGuard[Sequence[int]]:
    """Return True for possible sizes, strides or offsets of a tensor: a short sequence of integers, none negative."""
    return (
        isinstance(values, list | tuple)
        and len(values) <= MAX_DIMENSIONS
        and all(type(value) is int and 0 <= value < MAX_TENSOR_BYTES for value in values)
    )


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a checkpoint, as bytes of a file.

    Attributes:
        name: its key. Nested dicts are flattened: {"model": {"a.weight": t}} gives "model.a.weight".
        offset: of the tensor's first element, in bytes. Of no particular alignment.
        nbytes: from the first element to the end of the last, in memory order: numel * itemsize if contiguous.
        stride: in elements, not negative; None if contiguous (the last dimension runs fastest).
    """

    name: str
    path: Path
    offset: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def row(self, index: int) -> StoredTensor | None:
        """Return the location of `tensor[index]`; None if that is not one run of bytes."""
        if self.stride is not None or not self.shape or not 0 <= index < self.shape[0]:
            return None
        found = self.rows(index, index + 1)
        return found and replace(found, shape=self.shape[1:])

    def rows(self, begin: int, end: int) -> StoredTensor | None:
        """Return the location of `tensor[begin:end]`; None if that is not one run of bytes."""
        if self.stride is not None or not self.shape or not 0 <= begin < end <= self.shape[0]:
            return None
        row_bytes = self.nbytes // self.shape[0]
        offset, nbytes = self.offset + begin * row_bytes, (end - begin) * row_bytes
        return replace(self, offset=offset, nbytes=nbytes, shape=(end - begin, *self.shape[1:]))


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes [offset, offset + nbytes) of a file that exists."""

    path: Path
    offset: int
    nbytes: int


class ConcatenatedFile:
    """The layout of a file that does not exist: its whole tensors are extents of files that do.

    Readers of a source resolve them by `Source.extents`.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._begins: list[int] = []
        self._extents: list[Extent] = []

    def add(self, extents: Sequence[Extent]) -> int:
        """Append `extents`, one after the other; return their offset."""
        offset = cursor = round_up(self.nbytes, SECTOR_BYTES)  # chunks of whole sectors are read without a copy
        for extent in extents:
            if extent.nbytes:
                self._begins.append(cursor)
                self._extents.append(extent)
                cursor += extent.nbytes
        self.nbytes = cursor
        return offset

    def extents(self, offset: int, nbytes: int) -> Iterator[tuple[int, Extent]]:
        """Yield the real extents of bytes [offset, offset + nbytes), and their places in it. Gaps have none."""
        end = offset + nbytes
        index = max(bisect_right(self._begins, offset) - 1, 0)
        while index < len(self._begins) and self._begins[index] < end:
            begin, extent = self._begins[index], self._extents[index]
            low, high = max(begin, offset), min(begin + extent.nbytes, end)
            if low < high:
                yield low - offset, Extent(extent.path, extent.offset + low - begin, high - low)
            index += 1


@dataclass(frozen=True)
class Chunk:
    """A part of a tensor: its offset in the tensor, and its location in a file."""

    offsets: tuple[int, ...]
    stored: StoredTensor

    @property
    def ends(self) -> tuple[int, ...]:
        return tuple(offset + size for offset, size in zip(self.offsets, self.stored.shape, strict=True))


@dataclass(frozen=True)
class ChunkedTensor:
    """A tensor in chunks that tile it, in the order of their offsets; none of them is empty unless it is the only one."""

    name: str
    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    def check(self) -> None:
        """Check that the chunks tile the tensor. Raises ValueError: they do not."""
        if any(end > size for chunk in self.chunks for end, size in zip(chunk.ends, self.shape, strict=True)):
            raise ValueError(f"{self.name} has a chunk that is not inside of it")
        if sum(chunk.stored.numel for chunk in self.chunks) != math.prod(self.shape):
            raise ValueError(f"{self.name} of shape {self.shape} is not covered by its chunks")
        under_way: list[Chunk] = []  # chunks that may reach into the next ones
        for chunk in self.chunks:
            under_way = [other for other in under_way if other.ends[0] > chunk.offsets[0]]
            if any(_overlap(chunk, other) for other in under_way):
                raise ValueError(f"two chunks of {self.name} overlap")
            under_way.append(chunk)

    def in_rows(self) -> bool:
        """True if the tensor's bytes are those of the chunks in order."""
        cursor = 0
        for chunk in self.chunks:
            whole = chunk.stored.shape[1:] == self.shape[1:] and not any(chunk.offsets[1:])
            if not whole or (chunk.offsets and chunk.offsets[0] != cursor) or chunk.stored.stride is not None:
                return False
            cursor += chunk.stored.shape[0] if chunk.stored.shape else 0
        return True

    def assembled(self, parts: Sequence[torch.Tensor], dtype: torch.dtype, empty: Empty = torch.empty) -> torch.Tensor:
        """Return the tensor whose chunks are `parts`, in memory of its own and in `dtype`.

        Args:
            parts: one for each of `chunks`, of its shape.
            dtype: of the result.
            empty: makes its memory. Default: torch.empty.
        """
        whole = empty(self.shape, dtype=dtype, device=parts[0].device)
        for chunk, part in zip(self.chunks, parts, strict=True):
            whole[_slices(chunk.offsets, chunk.ends)] = part
        return whole

    def boxes(self, max_bytes: int) -> Iterator[Box]:
        """Yield boxes of at most `max_bytes` that are the tensor's elements in order. No chunk may have strides."""
        cut, row_bytes = len(self.shape) - 1, self.dtype.itemsize  # dimensions behind `cut` are whole
        while cut > 0 and row_bytes * self.shape[cut] <= max_bytes:
            row_bytes *= self.shape[cut]
            cut -= 1
        step = max(max_bytes // row_bytes, 1)
        behind = self.shape[cut + 1 :]
        for prefix in product(*(range(size) for size in self.shape[:cut])):
            for begin in range(0, self.shape[cut], step):
                end = min(begin + step, self.shape[cut])
                yield self._box(
                    (*prefix, begin, *(0 for _ in behind)), (*(index + 1 for index in prefix), end, *behind)
                )

    def _box(self, begins: tuple[int, ...], ends: tuple[int, ...]) -> Box:
        pieces = []
        for chunk in self.chunks:
            lows = tuple(map(max, begins, chunk.offsets))
            highs = tuple(map(min, ends, chunk.ends))
            if all(low < high for low, high in zip(lows, highs, strict=True)):
                at = _slices(_minus(lows, begins), _minus(highs, begins))
                pieces.append(
                    Piece(chunk.stored, _slices(_minus(lows, chunk.offsets), _minus(highs, chunk.offsets)), at)
                )
        return Box(_minus(ends, begins), tuple(pieces))


@dataclass(frozen=True, slots=True)
class Piece:
    """The elements `inside` of a chunk, which go to `at` in a box."""

    stored: StoredTensor
    inside: tuple[slice, ...]
    at: tuple[slice, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(part.stop - part.start for part in self.inside)

    @property
    def first(self) -> int:
        """Index of the first of them among the chunk's elements; they are contiguous there."""
        steps = (math.prod(self.stored.shape[dim + 1 :]) for dim in range(len(self.inside)))
        return sum(part.start * step for part, step in zip(self.inside, steps, strict=True))


@dataclass(frozen=True, slots=True)
class Box:
    """A range of a tensor's elements, and the pieces in it."""

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


def _overlap(one: Chunk, other: Chunk) -> bool:
    lows, highs = map(max, one.offsets, other.offsets), map(min, one.ends, other.ends)
    return all(low < high for low, high in zip(lows, highs, strict=True))


def _slices(begins: Sequence[int], ends: Sequence[int]) -> tuple[slice, ...]:
    return tuple(map(slice, begins, ends))


def _minus(some: Sequence[int], others: Sequence[int]) -> tuple[int, ...]:
    return tuple(one - other for one, other in zip(some, others, strict=True))


LOOSE_ITEM_BYTES = 2  # see [Note: alignment]
MAX_GAP_BYTES = 64 << 10
"""Bytes. Tensors closer than this are read together, with the gap: reading it costs less than another transfer."""


@dataclass(frozen=True, slots=True)
class FileRange:
    """Bytes [file_offset, file_offset + nbytes) of a file, as far as it goes; `nbytes` is a multiple of SECTOR_BYTES.

    `places`: each tensor's offset in the run, by its position in the planned tensors.
    """

    path: Path
    file_offset: int
    nbytes: int
    places: tuple[tuple[int, int], ...]


def plan_runs(tensors: Iterable[StoredTensor]) -> list[FileRange]:
    """Return runs that hold all `tensors`, in the order of files and offsets. Empty tensors are in none."""
    ordered = sorted(
        ((number, tensor) for number, tensor in enumerate(tensors) if tensor.nbytes),
        key=lambda item: (item[1].path, item[1].offset),
    )
    runs = []
    run: _GrowingRange | None = None
    for number, tensor in ordered:
        if run is None or not run.add(number, tensor):
            if run is not None:
                runs.append(run.planned())
            run = _GrowingRange(number, tensor)
    if run is not None:
        runs.append(run.planned())
    return runs


class _GrowingRange:
    """A run that grows by tensors with ascending offsets. It may begin at any offset that is `rest` modulo `alignment`."""

    def __init__(self, number: int, tensor: StoredTensor) -> None:
        self._members = [(number, tensor)]
        self._end = tensor.offset + tensor.nbytes
        self._alignment = _alignment(tensor)
        self._rest = tensor.offset % self._alignment

    def add(self, number: int, tensor: StoredTensor) -> bool:
        """Add a tensor, unless it is far away, or cannot be aligned together with the others."""
        if tensor.path != self._members[0][1].path or tensor.offset - self._end > MAX_GAP_BYTES:
            return False
        alignment = _alignment(tensor)
        least, most = sorted((alignment, self._alignment))
        rest = self._rest if self._alignment == most else tensor.offset % alignment
        if (tensor.offset - rest) % alignment or (self._rest - rest) % least or self._begin(most, rest) < 0:
            return False
        self._members.append((number, tensor))
        self._end = max(self._end, tensor.offset + tensor.nbytes)
        self._alignment, self._rest = most, rest
        return True

    def planned(self) -> FileRange:
        begin = self._begin(self._alignment, self._rest)
        places = tuple((number, tensor.offset - begin) for number, tensor in self._members)
        return FileRange(self._members[0][1].path, begin, round_up(self._end - begin, SECTOR_BYTES), places)

    def _begin(self, alignment: int, rest: int) -> int:
        """Return the file offset at which it begins: that of a sector if it suits, else the last before the first tensor."""
        first = self._members[0][1].offset
        if rest == 0:  # alignments divide sectors
            return first // SECTOR_BYTES * SECTOR_BYTES
        return first - (first - rest) % alignment


def _alignment(tensor: StoredTensor) -> int:
    """Return the alignment that a tensor's memory must have, in bytes. [Note: alignment]"""
    itemsize = tensor.dtype.itemsize
    return itemsize if itemsize <= LOOSE_ITEM_BYTES else TENSOR_ALIGNMENT_BYTES
