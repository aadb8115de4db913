"""Writes a file from beginning to end, in large aligned transfers, while the next bytes are being made.

Large runs of host memory are written from where they lie. Everything else (headers, small tensors, the ends of large
ones, device tensors) is gathered in a ring of blocks, so that the file is tiled by whole runs of 4096 bytes and all of
it can be direct. The ring is all the memory that this takes, for any size of the file.
"""

from __future__ import annotations

import ctypes
from collections import deque
from typing import Any

import torch

from swapper import _C
from swapper.io.elements import device_errors
from swapper.io.waiting import drain

UNIT = 4096  # bytes; suits direct I/O on every drive
BLOCK_BYTES = 1 << 20
BLOCKS = 16  # 16 MiB in all: a choice
LARGE_BYTES = 256 << 10
"""Bytes from which a run of host memory is written from where it lies."""
STEP_BYTES = 64 << 20
"""Bytes of one operation: they are written while their checksum is computed."""


class StreamWriter:
    """Appends to `file`, which is empty. `finish` waits for all; `close` frees the memory, whatever the outcome.

    Args:
        file: the target. The caller closes it.
        checksums: compute CRC-32s of appended bytes, which `append` returns; 0 otherwise.
        pinned: allocate the ring in memory that a device can copy to directly (torch's `pin_memory`).
        blocks: of BLOCK_BYTES, in the ring.
    """

    def __init__(
        self, engine: _C.Engine, file: _C.File, *, checksums: bool, pinned: bool = False, blocks: int = BLOCKS
    ) -> None:
        self._engine = engine
        self._file = file
        self._checksums = checksums
        nbytes = blocks * BLOCK_BYTES
        self._arena = None if pinned else _C.Arena(nbytes)
        if self._arena is None:
            self._memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        else:
            self._memory = torch.frombuffer(self._arena.view(0, nbytes), dtype=torch.uint8)
        self._address = self._memory.data_ptr()
        self._free = deque(range(blocks))
        self._blocks: deque[tuple[int, Any]] = deque()  # in flight, oldest first
        self._direct: deque[Any] = deque()
        self._block = self._free.popleft()
        self._filled = 0  # bytes of the block
        self._written = 0  # the file offset at which the block begins

    @property
    def position(self) -> int:
        """Bytes appended so far."""
        return self._written + self._filled

    def append(self, data: bytes) -> int:
        """Append bytes; return their CRC-32."""
        checksum = _C.crc32(data) if self._checksums else 0
        view = memoryview(data)
        while view:
            room = self._room(len(view))
            start = self._block * BLOCK_BYTES + self._filled
            ctypes.memmove(self._address + start, bytes(view[:room]), room)
            self._filled += room
            view = view[room:]
        return checksum

    def append_memory(self, address: int, nbytes: int, owner: object) -> int:
        """Append host memory of `owner`, which must not change until `finish`; return its CRC-32."""
        head = -self.position % UNIT
        body = (nbytes - head) // UNIT * UNIT
        if nbytes < LARGE_BYTES or body <= 0:
            return self._gather(address, nbytes, 0)
        checksum = self._gather(address, head, 0)
        self._flush()
        done = head
        while done < head + body:
            step = min(STEP_BYTES, head + body - done)
            self._direct.append(self._engine.write(self._file, self._written, address + done, step, keep=owner))
            if self._checksums:
                checksum = _C.crc32_address(address + done, step, checksum)
            done += step
            self._written += step
        while self._direct and self._direct[0].done:
            self._direct.popleft().wait()
        return self._gather(address + done, nbytes - done, checksum)

    def append_device(self, data: torch.Tensor) -> int:
        """Append a one-dimensional uint8 tensor of any device; return the CRC-32.

        Raises:
            DeviceError: the device failed.
        """
        checksum = done = 0
        while done < data.numel():
            room = self._room(data.numel() - done)
            start = self._block * BLOCK_BYTES + self._filled
            with device_errors(data.device, "copying a tensor for a checkpoint"):
                self._memory.narrow(0, start, room).copy_(data.narrow(0, done, room))
            if self._checksums:
                checksum = _C.crc32_address(self._address + start, room, checksum)
            self._filled += room
            done += room
        return checksum

    def finish(self) -> None:
        """Write the rest, and wait until all is written.

        Raises:
            IoError: a transfer failed.
        """
        self._flush()
        while self._direct:
            self._direct.popleft().wait()
        while self._blocks:
            self._reclaim()

    def close(self) -> None:
        """Wait until nothing is in flight, and free the ring."""
        for ticket in [*self._direct, *(ticket for _, ticket in self._blocks)]:
            drain(ticket)
        if self._arena is not None:
            self._arena.close()

    def _gather(self, address: int, nbytes: int, checksum: int) -> int:
        if self._checksums:
            checksum = _C.crc32_address(address, nbytes, checksum)
        while nbytes:
            room = self._room(nbytes)
            ctypes.memmove(self._address + self._block * BLOCK_BYTES + self._filled, address, room)
            self._filled += room
            address, nbytes = address + room, nbytes - room
        return checksum

    def _room(self, wanted: int) -> int:
        """Return the free bytes of the block, up to `wanted`; at least one."""
        if self._filled == BLOCK_BYTES:
            self._flush()
        return min(wanted, BLOCK_BYTES - self._filled)

    def _flush(self) -> None:
        if not self._filled:
            return
        address = self._address + self._block * BLOCK_BYTES
        ticket = self._engine.write(self._file, self._written, address, self._filled, keep=self._memory)
        self._blocks.append((self._block, ticket))
        self._written += self._filled
        self._filled = 0
        if not self._free:
            self._reclaim()
        self._block = self._free.popleft()

    def _reclaim(self) -> None:
        block, ticket = self._blocks[0]
        ticket.wait()
        self._blocks.popleft()
        self._free.append(block)
