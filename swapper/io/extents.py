"""Allocates ranges of a file for pieces of any size: first fit, neighbors joined. Pure: no I/O."""

from __future__ import annotations

import bisect

from swapper.errors import InvariantError
from swapper.io.alignment import SECTOR_BYTES, round_up


class Extents:
    """Hands out ranges of a file of any length. All offsets and sizes are multiples of SECTOR_BYTES.

    Attributes:
        end: all allocated ranges lie before it.
    """

    def __init__(self) -> None:
        self.end = 0
        self._free: list[tuple[int, int]] = []  # (offset, bytes), by offset; no two adjoin

    @property
    def used_bytes(self) -> int:
        return self.end - sum(nbytes for _, nbytes in self._free)

    def take(self, nbytes: int) -> int:
        """Allocate at least `nbytes` bytes and return their offset."""
        size = round_up(nbytes, SECTOR_BYTES)
        for number, (offset, free_bytes) in enumerate(self._free):
            if free_bytes >= size:
                rest = (offset + size, free_bytes - size)
                self._free[number : number + 1] = [rest] if rest[1] else []
                return offset
        offset = self.end
        self.end = offset + size
        return offset

    def give(self, offset: int, nbytes: int) -> None:
        """Free the range that `take(nbytes)` returned."""
        begin, end = offset, offset + round_up(nbytes, SECTOR_BYTES)
        at = bisect.bisect(self._free, (begin, 0))
        if end > self.end or (at < len(self._free) and self._free[at][0] < end):
            raise InvariantError(f"bytes [{begin}, {end}) of a file were freed twice")
        if at and sum(self._free[at - 1]) > begin:
            raise InvariantError(f"bytes [{begin}, {end}) of a file were freed twice")
        if at < len(self._free) and self._free[at][0] == end:
            end += self._free.pop(at)[1]
        if at and sum(self._free[at - 1]) == begin:
            begin = self._free.pop(at - 1)[0]
            at -= 1
        if end == self.end:
            self.end = begin
        else:
            self._free.insert(at, (begin, end - begin))
