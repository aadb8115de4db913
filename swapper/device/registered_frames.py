"""Host memory as copies to and from a device see it: the frames themselves, not the windows that they are mapped into.

What a device knows (io/registered.py) are the addresses of the arena; a window's are others, for the same memory.
"""

from __future__ import annotations

import torch

from swapper import _C
from swapper.device.device import Device
from swapper.errors import InvariantError
from swapper.io.registered import Registration, slabs
from swapper.paging.pool import Pool
from swapper.paging.section import Page

STAGING_BYTES = 4 << 20
"""Memory beside the frames through which gradients come down that are added to others."""


class HostSide:
    """Owns the registration of a run's memory with a device.

    Args:
        device: which.
        arena: the memory: what stays in it first, then the frames.
        frames_offset: where those begin.
        pool: of the frames.

    """

    def __init__(self, device: Device, arena: _C.Arena, frames_offset: int, pool: Pool) -> None:
        self._device = device
        self._pool = pool
        self._memory = torch.frombuffer(arena.view(0, arena.nbytes), dtype=torch.uint8)
        self._registrations: list[Registration] = []
        self._staging: list[_C.Arena] = []
        self.add(arena, frames_offset)
        frames = slabs(frames_offset, pool.frame_bytes * pool.frame_count, pool.frame_bytes)
        self._registrations.append(Registration(device, arena, frames))

    def new_staging(self) -> torch.Tensor:
        """Return memory beside the arena, registered: uint8 of shape (STAGING_BYTES,)."""
        arena = _C.Arena(STAGING_BYTES)
        self._staging.append(arena)
        self.add(arena, STAGING_BYTES)
        return torch.frombuffer(arena.view(0, STAGING_BYTES), dtype=torch.uint8)

    def add(self, arena: _C.Arena, nbytes: int) -> None:
        """Have the first bytes of an arena registered, as one: copies may go across anything that lies there."""
        if nbytes:
            self._registrations.append(Registration(self._device, arena, [(0, nbytes)]))

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

    def wait(self) -> None:
        """Wait until all of it is registered, or was refused."""
        for registration in self._registrations:
            registration.wait()

    def close(self) -> None:
        """No copy is on its way."""
        for registration in self._registrations:
            registration.close()
        self._registrations.clear()
        self._memory = torch.empty(0, dtype=torch.uint8)
        for arena in self._staging:
            arena.close()
        self._staging.clear()
