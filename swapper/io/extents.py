"""Allocates ranges of a file for pieces of any size (first fit, neighbors joined), and owns scratch files of such ranges."""

from __future__ import annotations

import bisect
import os
from itertools import count
from pathlib import Path

import torch

from swapper import _C
from swapper.errors import InvariantError
from swapper.io import beneath
from swapper.io.engines import Engine, Transfer
from swapper.io.tensor_bytes import SECTOR_BYTES, round_up


class Extents:
    """Hands out ranges of a file of any length. Pure. All offsets and sizes are multiples of SECTOR_BYTES.

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


_numbers = count()


def transient_name(kind: str) -> str:
    """Return the name of a file until it is unlinked: no other thread's or process's."""
    return f"{kind}-{os.getpid()}-{next(_numbers)}.swap"


class SpillFile:
    """The scratch file of saved activations, unnamed and deleted with the process; made at the first write. Owns its places.

    Args:
        directory: on the drive of the file.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._file: _C.File | None = None
        self._extents = Extents()
        self._pid = os.getpid()
        self.allocated_bytes = 0

    def write(self, engine: Engine, memory: torch.Tensor) -> tuple[int, Transfer]:
        """Begin to write `memory`, uint8, to a place of its own. Returns the place's offset, and the ticket.

        Raises:
            IoError: the drive is full.
        """
        file = self._open()
        offset = self._extents.take(memory.nbytes)
        try:
            if self._extents.end > self.allocated_bytes:
                file.allocate(self._extents.end)
                self.allocated_bytes = self._extents.end
            return offset, engine.write(file, offset, memory.data_ptr(), memory.nbytes, keep=memory)
        except BaseException:
            self._extents.give(offset, memory.nbytes)
            raise

    def read(self, engine: Engine, offset: int, memory: torch.Tensor) -> Transfer:
        """Begin to read into `memory`, uint8, from a written place. Returns the ticket.

        Args:
            engine: submits the read.
            offset: of the place, in bytes.
            memory: uint8, contiguous; kept until the read is over.
        """
        return engine.read(self._open(), offset, memory.data_ptr(), memory.nbytes, keep=memory)

    def give(self, offset: int, nbytes: int) -> None:
        """Free a place. Requires that no transfer of it is in flight."""
        self._extents.give(offset, nbytes)

    def _open(self) -> _C.File:
        if self._file is None:
            path = self._directory / transient_name("activations")
            self._file = beneath.open_for_transfers(path, create=True)
            beneath.unlink(path)
        return self._file

    def __del__(self) -> None:
        if os is not None and os.getpid() == self._pid and self._file is not None:  # else Python ends
            self._file.close()  # transfers in flight keep it open, and their memory
