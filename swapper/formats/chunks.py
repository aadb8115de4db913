"""Tensors that were saved in chunks: parts that tile them, each a tensor of its own somewhere in a file.

Chunks along the first dimension alone are stretches of the tensor's bytes, one after the other. Others, as a mesh of several
dimensions leaves them, are put side by side: whole (`assembled`), or in boxes of bounded size (`boxes`), each of which is one
stretch of the tensor and one stretch of every chunk that it meets.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch

from swapper.formats.stored import StoredTensor


@dataclass(frozen=True)
class Chunk:
    """A part of a tensor: where in the tensor it begins, and where in a file it lies."""

    offsets: tuple[int, ...]
    stored: StoredTensor

    @property
    def ends(self) -> tuple[int, ...]:
        return tuple(offset + size for offset, size in zip(self.offsets, self.stored.shape, strict=True))


@dataclass(frozen=True)
class ChunkedTensor:
    """A tensor in chunks that tile it, in the order of their offsets; none of them is empty unless it is the only one.

    Attributes:
        name, dtype, shape: of the tensor.
        path: what the user named.
        chunks: its parts.
    """

    name: str
    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    def check(self) -> None:
        """
        Raises:
            ValueError: the chunks do not tile the tensor.
        """
        if any(end > size for chunk in self.chunks for end, size in zip(chunk.ends, self.shape, strict=True)):
            raise ValueError(f"{self.name} has a chunk that is not inside of it")
        if sum(chunk.stored.numel for chunk in self.chunks) != math.prod(self.shape):
            raise ValueError(f"{self.name} of shape {self.shape} is not covered by its chunks")
        under_way: list[Chunk] = []  # those that may still reach into the next ones
        for chunk in self.chunks:
            under_way = [other for other in under_way if other.ends[0] > chunk.offsets[0]]
            if any(_overlap(chunk, other) for other in under_way):
                raise ValueError(f"two chunks of {self.name} overlap")
            under_way.append(chunk)

    def in_rows(self) -> bool:
        """Whether its bytes are those of the chunks one after the other."""
        cursor = 0
        for chunk in self.chunks:
            whole = chunk.stored.shape[1:] == self.shape[1:] and not any(chunk.offsets[1:])
            if not whole or (chunk.offsets and chunk.offsets[0] != cursor) or chunk.stored.stride is not None:
                return False
            cursor += chunk.stored.shape[0] if chunk.stored.shape else 0
        return True

    def assembled(self, parts: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """Return the tensor whose chunks are `parts`, in memory of its own and in `dtype`."""
        whole = torch.empty(self.shape, dtype=dtype, device=parts[0].device)
        for chunk, part in zip(self.chunks, parts, strict=True):
            whole[_slices(chunk.offsets, chunk.ends)] = part
        return whole

    def boxes(self, most_bytes: int) -> Iterator[Box]:
        """Yield boxes of at most `most_bytes` that are the tensor's elements in their order. No chunk may have strides."""
        cut, row_bytes = len(self.shape) - 1, self.dtype.itemsize  # dimensions behind `cut` are taken whole
        while cut > 0 and row_bytes * self.shape[cut] <= most_bytes:
            row_bytes *= self.shape[cut]
            cut -= 1
        step = max(most_bytes // row_bytes, 1)
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
        """The first of them, counted in the chunk's elements: they follow each other there."""
        steps = (math.prod(self.stored.shape[dim + 1 :]) for dim in range(len(self.inside)))
        return sum(part.start * step for part, step in zip(self.inside, steps, strict=True))


@dataclass(frozen=True, slots=True)
class Box:
    """A range of a tensor's elements, and what it consists of."""

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


def _overlap(one: Chunk, other: Chunk) -> bool:
    return all(
        low < high
        for low, high in zip(map(max, one.offsets, other.offsets), map(min, one.ends, other.ends), strict=True)
    )


def _slices(begins: Sequence[int], ends: Sequence[int]) -> tuple[slice, ...]:
    return tuple(map(slice, begins, ends))


def _minus(some: Sequence[int], others: Sequence[int]) -> tuple[int, ...]:
    return tuple(one - other for one, other in zip(some, others, strict=True))
