"""Which parts of a file are in use, where pieces of any size come and go: first fit, neighbours joined. Pure: no I/O."""

from __future__ import annotations

import bisect

from swapper.errors import InvariantError
from swapper.io.alignment import SECTOR_BYTES, round_up


class Extents:
    """Hands out stretches of a file, which is as long as it must be. All offsets and sizes are multiples of SECTOR_BYTES.

    Attributes:
        end: everything that is in use lies before it.
    """

    def __init__(self) -> None:
        self.end = 0
        self._free: list[tuple[int, int]] = []  # (offset, bytes), by offset; no two of them touch

    @property
    def used_bytes(self) -> int:
        return self.end - sum(nbytes for _, nbytes in self._free)

    def take(self, nbytes: int) -> int:
        """Return the offset of at least `nbytes` bytes that nobody else has."""
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
        """Take back what `take(nbytes)` gave."""
        begin, end = offset, offset + round_up(nbytes, SECTOR_BYTES)
        at = bisect.bisect(self._free, (begin, 0))
        if end > self.end or (at < len(self._free) and self._free[at][0] < end):
            raise InvariantError(f"bytes [{begin}, {end}) of a file were given back twice")
        if at and sum(self._free[at - 1]) > begin:
            raise InvariantError(f"bytes [{begin}, {end}) of a file were given back twice")
        if at < len(self._free) and self._free[at][0] == end:
            end += self._free.pop(at)[1]
        if at and sum(self._free[at - 1]) == begin:
            begin = self._free.pop(at - 1)[0]
            at -= 1
        if end == self.end:
            self.end = begin
        else:
            self._free.insert(at, (begin, end - begin))
