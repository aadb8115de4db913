"""Writes a file from bytes of other files, reading and writing at once, through a ring of page-locked blocks.

The new file is tiled by blocks. Reads, and bytes made here, fill a block, which is written when it is complete; half of
the blocks are being filled while the other half is being written. So a copy runs at the speed of the slower side, in
memory that does not depend on its size.

Blocks are written in order, so bytes that depend on earlier ones (a checksum behind a payload) can be appended before
those are read: as a function that is called afterwards.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from swapper import _C
from swapper.io.waiting import drain

BLOCK_BYTES = 2 << 20  # a choice
BLOCKS = 12  # 24 MiB in all: a choice
READING = BLOCKS // 2


class Checksum:
    """The CRC-32 of bytes appended by `Relay.append_read`; known once they are written."""

    def __init__(self) -> None:
        self._tickets: list[Any] = []
        self._value = 0

    def add(self, ticket: Any) -> None:
        """Continue with the bytes of an engine's read ticket."""
        self._tickets.append(ticket)

    def add_bytes(self, data: bytes) -> None:
        self._tickets.append(_Known(_C.crc32(data), len(data)))

    @property
    def value(self) -> int:
        """Return the checksum.

        Raises:
            ValueError: not all is read yet.
        """
        for ticket in self._tickets:
            self._value = _C.crc32_combine(self._value, ticket.crc32, ticket.nbytes)
        self._tickets.clear()
        return self._value


@dataclass(frozen=True)
class _Known:
    crc32: int
    nbytes: int


@dataclass
class _Block:
    address: int
    offset: int = 0  # in the file
    filled: int = 0
    reads: list[Any] = field(default_factory=list)
    later: list[tuple[int, int, Callable[[], bytes]]] = field(default_factory=list)  # (start, bytes, function)
    write: Any = None

    def tickets(self) -> list[Any]:
        return [*self.reads, self.write] if self.write is not None else self.reads


class Relay:
    """Appends to `file`, which is empty. `finish` waits for all; `close` frees the memory, whatever the outcome.

    Args:
        engine: writes. Reads use the engine of `append_read`.
        moved: called with the number of bytes, whenever some are written.
    """

    def __init__(self, engine: _C.Engine, file: _C.File, moved: Callable[[int], None] = lambda nbytes: None) -> None:
        self._engine = engine
        self._file = file
        self._moved = moved
        self._arena = _C.Arena(BLOCKS * BLOCK_BYTES)
        self._free = deque(_Block(self._arena.address + n * BLOCK_BYTES) for n in range(BLOCKS))
        self._reading: deque[_Block] = deque()
        self._writing: deque[_Block] = deque()
        self._block = self._free.popleft()

    @property
    def position(self) -> int:
        """Bytes appended so far."""
        return self._block.offset + self._block.filled

    def append(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            part = view[: self._room(len(view))]
            ctypes.memmove(self._block.address + self._block.filled, bytes(part), len(part))
            self._block.filled += len(part)
            view = view[len(part) :]

    def append_later(self, nbytes: int, make: Callable[[], bytes]) -> None:
        """Append `nbytes` bytes, which `make` returns when everything before them has been read."""
        made: list[bytes] = []
        begin = 0
        while begin < nbytes:
            room = self._room(nbytes - begin)

            def part(begin: int = begin, room: int = room) -> bytes:
                if not made:
                    made.append(make())
                return made[0][begin : begin + room]

            self._block.later.append((self._block.filled, room, part))
            self._block.filled += room
            begin += room

    def append_read(
        self, engine: _C.Engine, file: _C.File, offset: int, nbytes: int, checksum: Checksum | None
    ) -> None:
        """Append [offset, offset + nbytes) of another file, and continue `checksum` with it."""
        done = 0
        while done < nbytes:
            room = self._room(nbytes - done)
            address = self._block.address + self._block.filled
            ticket = engine.read(file, offset + done, address, room, checksum=checksum is not None)
            self._block.reads.append(ticket)
            if checksum is not None:
                checksum.add(ticket)
            self._block.filled += room
            done += room

    def finish(self) -> None:
        """Write the rest, and wait until all is written.

        Raises:
            IoError: a transfer failed.
        """
        end = self.position
        if self._block.filled:
            self._reading.append(self._block)
            self._block = _Block(0, offset=end)
        while self._reading:
            self._begin_write()
        while self._writing:
            self._end_write()

    def close(self) -> None:
        """Wait until nothing is in flight, and free the ring."""
        for block in [self._block, *self._reading, *self._writing]:
            for ticket in block.tickets():
                drain(ticket)
        self._arena.close()

    def _room(self, wanted: int) -> int:
        """Return the free bytes of the block, up to `wanted`; at least one."""
        if self._block.filled == BLOCK_BYTES:
            offset = self.position
            self._reading.append(self._block)
            if len(self._reading) > READING:
                self._begin_write()
            if not self._free:
                self._end_write()
            self._block = self._free.popleft()
            self._block.offset = offset
        return min(wanted, BLOCK_BYTES - self._block.filled)

    def _begin_write(self) -> None:
        block = self._reading[0]
        for ticket in block.reads:
            ticket.wait()
        for start, nbytes, make in block.later:
            data = make()
            ctypes.memmove(block.address + start, data, nbytes)
        block.write = self._engine.write(self._file, block.offset, block.address, block.filled)
        self._writing.append(self._reading.popleft())

    def _end_write(self) -> None:
        block = self._writing[0]
        block.write.wait()
        self._moved(block.filled)
        self._writing.popleft()
        self._free.append(_Block(block.address))
