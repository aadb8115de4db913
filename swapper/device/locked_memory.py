"""Page-locked host memory in pieces of any size, for what comes from a device and goes back to it.

One arena, taken and registered once. A piece is a tensor like any other; its place is free again when the last tensor that shares
its memory is gone, wherever that is held: in a copy that is under way, in a transfer to the drive.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import deque

import torch

from swapper import _C
from swapper.device.device import Device
from swapper.io.alignment import SECTOR_BYTES, round_up
from swapper.io.extents import Extents
from swapper.io.registered import SLAB_BYTES, Registration, slabs
from swapper.runtime.interrupts import SteadyLock

HEAD_BYTES = 32 << 20
"""What is taken from the system before the first piece is given; threads take the rest."""


class LockedMemory:
    """Owns the arena, for as long as a piece of it is used.

    Args:
        device: that shall know it.
        nbytes: of the arena; rounded up to whole sectors.
    """

    def __init__(self, device: Device, nbytes: int) -> None:
        self.nbytes = round_up(nbytes, SECTOR_BYTES)
        self._arena = _C.Arena(self.nbytes, head_bytes=min(self.nbytes, HEAD_BYTES))
        self._arena.prefault_rest()
        self._registration = Registration(device, self._arena, slabs(0, self.nbytes, SECTOR_BYTES))
        self._lock = SteadyLock()
        self._extents = Extents()
        self._given_back: deque[tuple[int, int]] = deque()  # by Python's garbage collector, at any moment

    def take(self, nbytes: int) -> torch.Tensor | None:
        """Return memory of any content, uint8 of shape (nbytes,) that begins at a sector; None where no stretch is free.

        Raises:
            IoError: the system has no memory.
        """
        with self._lock:
            self._collect()
            offset = self._extents.take(nbytes)
            if self._extents.end > self.nbytes:
                self._extents.give(offset, nbytes)
                return None
        try:
            self._arena.wait_populated(offset + nbytes)
        except BaseException:
            self._given_back.append((offset, nbytes))
            raise
        piece = (ctypes.c_uint8 * nbytes).from_address(self._arena.address + offset)
        finalizer = weakref.finalize(piece, _give_back, self._given_back, offset, nbytes, self._arena)
        finalizer.atexit = False
        return torch.frombuffer(piece, dtype=torch.uint8)

    def runs(self, memory: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
        """Return `memory` in runs, each to be copied by one call, and where in it each begins. [Note: slabs]"""
        begin = memory.data_ptr() - self._arena.address
        if not 0 <= begin < self.nbytes:
            return [(0, memory)]
        borders = range(round_up(begin + 1, SLAB_BYTES) - begin, memory.numel(), SLAB_BYTES)
        starts = [0, *borders]
        ends = [*borders, memory.numel()]
        return [(start, memory[start:end]) for start, end in zip(starts, ends, strict=True)]

    @property
    def used_bytes(self) -> int:
        with self._lock:
            self._collect()
            return self._extents.used_bytes

    def wait(self) -> None:
        """Wait until the device knows all of it, or has refused."""
        self._registration.wait()

    def describe(self) -> str:
        """Return "registered", or why some of it is not."""
        return self._registration.describe()

    def _collect(self) -> None:
        while self._given_back:
            self._extents.give(*self._given_back.popleft())


def _give_back(given_back: deque[tuple[int, int]], offset: int, nbytes: int, arena: object) -> None:
    """`arena` is here so that it lives until now."""
    given_back.append((offset, nbytes))
