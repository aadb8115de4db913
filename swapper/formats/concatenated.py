"""Tensors that lie in stretches of several files, as tensors of one file that does not exist.

A sharded save leaves the rows of a matrix where its ranks put them. One after the other they are the matrix, so whoever reads
a range of its bytes need only ask each stretch for its part. A `ConcatenatedFile` gives such tensors places, side by side, as
though they lay in a file of that layout; what reads from a source resolves them by `Source.extents`, and knows no more of it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ALIGNMENT_BYTES = 4096
"""Of each tensor's place: chunks that begin at sectors, and are whole ones, are then read without a copy."""


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes [offset, offset + nbytes) of a file that exists."""

    path: Path
    offset: int
    nbytes: int


class ConcatenatedFile:
    """The layout of such a file."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._begins: list[int] = []
        self._extents: list[Extent] = []

    def add(self, extents: Sequence[Extent]) -> int:
        """Give the bytes of `extents`, one after the other, a place; returns its offset."""
        offset = cursor = -(-self.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        for extent in extents:
            if extent.nbytes:
                self._begins.append(cursor)
                self._extents.append(extent)
                cursor += extent.nbytes
        self.nbytes = cursor
        return offset

    def extents(self, offset: int, nbytes: int) -> Iterator[tuple[int, Extent]]:
        """Yield where bytes [offset, offset + nbytes) really are, each with its place in that range. What is between tensors
        is nowhere."""
        end = offset + nbytes
        index = max(bisect_right(self._begins, offset) - 1, 0)
        while index < len(self._begins) and self._begins[index] < end:
            begin, extent = self._begins[index], self._extents[index]
            low, high = max(begin, offset), min(begin + extent.nbytes, end)
            if low < high:
                yield low - offset, Extent(extent.path, extent.offset + low - begin, high - low)
            index += 1
