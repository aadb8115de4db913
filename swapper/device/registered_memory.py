"""Page-locked host memory that a device knows: a run's frames, and pieces of any size for saved activations.

A device knows the addresses of an arena (io/registered.py), not those of the windows that its frames are mapped into.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import deque

import torch

from swapper import _C
from swapper.device.device import Device
from swapper.errors import InvariantError
from swapper.io.extents import Extents
from swapper.io.registered import Registration, slabs
from swapper.io.tensor_bytes import SECTOR_BYTES, round_up
from swapper.paging.host_memory import Pool
from swapper.paging.section import Page
from swapper.runtime.interrupts import make_lock

HEAD_BYTES = 32 << 20
"""Populated before the first piece is given; threads populate the rest."""


class HostSide:
    """Owns the registration of a run's memory with a device.

    Args:
        arena: resident sections first, then the frames.
        frames_offset: where the frames begin, in bytes.
    """

    def __init__(self, device: Device, arena: _C.Arena, frames_offset: int, pool: Pool) -> None:
        self._device = device
        self._pool = pool
        self._memory = torch.frombuffer(arena.view(0, arena.nbytes), dtype=torch.uint8)
        self._registrations: list[Registration] = []
        self.add(arena, frames_offset)
        frames = slabs(frames_offset, pool.frame_bytes * pool.frame_count, pool.frame_bytes)
        self._registrations.append(Registration(device, arena, frames))

    def add(self, arena: _C.Arena, nbytes: int) -> None:
        """Register the first `nbytes` bytes of an arena."""
        if nbytes:
            self._registrations.append(Registration(self._device, arena, slabs(0, nbytes, SECTOR_BYTES)))

    def of(self, page: Page) -> torch.Tensor:
        """Return the memory of a leased page, or of a resident section as a whole: uint8 of shape (page.nbytes,)."""
        if page.section.resident:
            return page.section.memory
        if page.frame is None:
            raise InvariantError(f"{page} has no frame to copy from")
        begin = self._pool.offset(page.frame)
        return self._memory[begin : begin + page.nbytes]

    def describe(self) -> str:
        """Return "registered", or why some of it is not."""
        said = [registration.describe() for registration in self._registrations]
        return next((reason for reason in said if reason != "registered"), "registered")

    @property
    def registered_bytes(self) -> int:
        """How much the device knows by now."""
        return sum(registration.registered_bytes for registration in self._registrations)

    def wait(self) -> None:
        """Wait until all of it is registered, or was refused."""
        for registration in self._registrations:
            registration.wait()

    def close(self) -> None:
        """Unregister everything. No copy may be in flight."""
        for registration in self._registrations:
            registration.close()
        self._registrations.clear()
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")


class LockedMemory:
    """Owns an arena of `nbytes` bytes, taken and registered once, and gives pieces of it.

    A piece is a tensor. Its place is free again when the last tensor that shares its memory is gone, wherever that is held: in a
    copy or a transfer in flight, too.
    """

    def __init__(self, device: Device, nbytes: int) -> None:
        self.nbytes = round_up(nbytes, SECTOR_BYTES)
        self._arena = _C.Arena(self.nbytes, head_bytes=min(self.nbytes, HEAD_BYTES), node=device.node)
        self._arena.prefault_rest()
        self._registration = Registration(device, self._arena, slabs(0, self.nbytes, SECTOR_BYTES))
        self._lock = make_lock()
        self._extents = Extents()
        self._given_back: deque[tuple[int, int]] = deque()  # by finalizers, at any moment

    def take(self, nbytes: int) -> torch.Tensor | None:
        """Return memory of any content, uint8 of shape (nbytes,) that begins at a sector.

        Returns:
            None if no range is free, or none is known to be: an exception of another thread has struck in here.

        Raises:
            IoError: the system has no memory.
        """
        with self._lock:
            if self._lock.broken_by:
                return None
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
    """Note a free place. The finalizer keeps `arena` alive until then."""
    given_back.append((offset, nbytes))
