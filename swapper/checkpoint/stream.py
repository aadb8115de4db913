"""Writes a file from beginning to end, in large aligned transfers, while the next bytes are being read or made.

Large runs of host memory are written from where they lie. Everything else (headers, small tensors, the ends of large
ones, device tensors, bytes of other files) is gathered in a ring of blocks, so that the file is tiled by whole runs of
4096 bytes and all of it can be direct. Up to half of the blocks are being filled by reads while the others are being
written: a copy runs at the speed of the slower side. The ring is all the memory that this takes, for any file.

Blocks are written in order, so bytes that depend on earlier ones (a checksum behind a payload) can be appended before
those are read: as a function that is called afterwards.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from swapper import _C
from swapper.formats.dcp_format import Item
from swapper.formats.torch_writer import (
    ROOT,
    SERIALIZATION_ID_BYTES,
    Entry,
    descriptor,
    descriptor_nbytes,
    directory,
    local_header,
    serialization_id,
)
from swapper.io.engines import drain, open_for, reserve, shared_engine
from swapper.io.tensor_bytes import SECTOR_BYTES, device_errors

BLOCK_BYTES = 2 << 20  # a choice
BLOCKS = 8  # 16 MiB in all: a choice
LARGE_BYTES = 256 << 10
"""Bytes from which a run of host memory is written from where it lies."""
STEP_BYTES = 64 << 20
"""Bytes of one operation: they are written while their checksum is computed."""


class Known(NamedTuple):
    """The CRC-32 of `nbytes` bytes."""

    crc32: int
    nbytes: int


class Checksum:
    """The CRC-32 of appended bytes; 0 if the writer computes none."""

    def __init__(self, parts: Iterable[_C.Ticket | Known] = ()) -> None:
        self._value = 0
        self._parts = list(parts)  # not in `_value` yet

    def add(self, part: _C.Ticket | Known) -> None:
        """Continue with more bytes; those of a ticket may still be in flight."""
        self._parts.append(part)

    @property
    def value(self) -> int:
        """The checksum of all bytes. Raises ValueError if not all are read yet."""
        for part in self._parts:
            self._value = _C.crc32_combine(self._value, part.crc32, part.nbytes)
        self._parts.clear()
        return self._value


@dataclass
class _Block:
    address: int
    offset: int = 0  # in the file
    filled: int = 0
    reads: list[_C.Ticket] = field(default_factory=list)
    later: list[tuple[int, int, Callable[[], bytes]]] = field(default_factory=list)  # (address, bytes, function)
    write: _C.Ticket | None = None

    @property
    def tickets(self) -> list[_C.Ticket]:
        return self.reads if self.write is None else [*self.reads, self.write]


class StreamWriter:
    """Appends to an empty file. A context: at its end all is written, or after an error nothing is in flight.

    The methods that append continue `checksum` with the appended bytes, if one is passed.

    Args:
        path: the file.
        nbytes: its size in the end, about.
        checksums: compute them.
        pinned: allocate the ring in memory that a device can copy to directly (torch's `pin_memory`).
        blocks: of BLOCK_BYTES, in the ring; at least 2.
        moved: called with the number of bytes, whenever a block is written.

    Raises:
        IoError: the file cannot be opened, or the drive is full.
    """

    def __init__(
        self,
        path: Path,
        nbytes: int,
        *,
        checksums: bool = True,
        pinned: bool = False,
        blocks: int = BLOCKS,
        moved: Callable[[int], None] = lambda nbytes: None,
    ) -> None:
        self._checksums = checksums
        self._moved = moved
        ring_bytes = blocks * BLOCK_BYTES
        self._arena = None if pinned else _C.Arena(ring_bytes)
        if self._arena is None:
            self._memory = torch.empty(ring_bytes, dtype=torch.uint8, pin_memory=True, device="cpu")
        else:
            self._memory = torch.frombuffer(self._arena.view(0, ring_bytes), dtype=torch.uint8)
        begin = self._memory.data_ptr()
        self._free = deque(_Block(begin + number * BLOCK_BYTES) for number in range(blocks))
        self._max_reading = blocks // 2
        self._reading: deque[_Block] = deque()
        self._writing: deque[_Block] = deque()
        self._direct: deque[_C.Ticket] = deque()
        self._block = self._free.popleft()
        self._engine = shared_engine(path)
        self._file = open_for(path, read_only=False)
        try:
            reserve(self._file, nbytes)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> StreamWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        try:
            if kind is None:
                self.finish()
        finally:
            self._close()

    @property
    def position(self) -> int:
        """Bytes appended so far."""
        return self._block.offset + self._block.filled

    def append(self, data: bytes, checksum: Checksum | None = None) -> None:
        if checksum is not None and self._checksums:
            checksum.add(Known(_C.crc32(data), len(data)))
        view = memoryview(data)
        while view:
            address, nbytes = self._take(len(view))
            ctypes.memmove(address, bytes(view[:nbytes]), nbytes)
            view = view[nbytes:]

    def append_later(self, nbytes: int, make: Callable[[], bytes], checksum: Checksum | None = None) -> None:
        """Append bytes that are not known yet.

        Args:
            nbytes: of what `make` returns.
            make: is called when everything before has been read.
            checksum: is extended by these bytes; None: none is.
        """
        made: list[bytes] = []

        def part(begin: int, end: int) -> bytes:
            if not made:
                made.append(make())
                if checksum is not None and self._checksums:
                    checksum.add(Known(_C.crc32(made[0]), nbytes))
            return made[0][begin:end]

        begin = 0
        while begin < nbytes:
            address, count = self._take(nbytes - begin)
            self._block.later.append((address, count, partial(part, begin, begin + count)))
            begin += count

    def append_read(
        self, engine: _C.Engine, file: _C.File, offset: int, nbytes: int, checksum: Checksum | None = None
    ) -> None:
        """Append a range of another file.

        Args:
            engine: reads them.
            file, offset, nbytes: of the range, in bytes.
            checksum: as of `append_later`.
        """
        is_summed = checksum is not None and self._checksums
        end = offset + nbytes
        while offset < end:
            address, count = self._take(end - offset)
            ticket = engine.read(file, offset, address, count, keep=self._memory, checksum=is_summed)
            self._block.reads.append(ticket)
            if checksum is not None and is_summed:
                checksum.add(ticket)
            offset += count

    def append_memory(self, address: int, nbytes: int, owner: object, checksum: Checksum | None = None) -> None:
        """Append host memory of `owner`, which must not change until `finish`.

        Args:
            address, nbytes: of the memory.
            owner: keeps it until it is written.
            checksum: as of `append_later`.
        """
        if nbytes < LARGE_BYTES:
            self._gather(address, nbytes, checksum)
            return
        head = -self.position % SECTOR_BYTES
        body_end = head + (nbytes - head) // SECTOR_BYTES * SECTOR_BYTES
        self._gather(address, head, checksum)
        self._end_block()
        for begin in range(head, body_end, STEP_BYTES):
            step = min(STEP_BYTES, body_end - begin)
            self._direct.append(self._engine.write(self._file, self.position, address + begin, step, keep=owner))
            self._add_memory(checksum, address + begin, step)
            self._block.offset += step
        while self._direct and self._direct[0].done:
            self._direct.popleft().wait()
        self._gather(address + body_end, nbytes - body_end, checksum)

    def append_device(self, data: torch.Tensor, checksum: Checksum | None = None) -> None:
        """Append a one-dimensional uint8 tensor of any device. Raises DeviceError: the device failed."""
        done = 0
        while done < data.numel():
            address, nbytes = self._take(data.numel() - done)
            with device_errors(data.device, "copying a tensor for a checkpoint"):
                start = address - self._memory.data_ptr()
                self._memory.narrow(0, start, nbytes).copy_(data.narrow(0, done, nbytes))
            self._add_memory(checksum, address, nbytes)
            done += nbytes

    def finish(self) -> None:
        """Write the rest, wait until all is written, and cut the file off behind it.

        Raises:
            IoError: a transfer failed.
        """
        self._end_block()
        while self._reading:
            self._begin_write()
        while self._writing:
            self._end_write()
        while self._direct:
            self._direct.popleft().wait()
        self._file.truncate(self.position)

    def _close(self) -> None:
        for block in [self._block, *self._reading, *self._writing]:
            for ticket in block.tickets:
                drain(ticket)
        for ticket in self._direct:
            drain(ticket)
        if self._arena is not None:
            self._arena.close()
        self._file.close()

    def _gather(self, address: int, nbytes: int, checksum: Checksum | None) -> None:
        self._add_memory(checksum, address, nbytes)
        while nbytes:
            target, count = self._take(nbytes)
            ctypes.memmove(target, address, count)
            address, nbytes = address + count, nbytes - count

    def _add_memory(self, checksum: Checksum | None, address: int, nbytes: int) -> None:
        if checksum is not None and self._checksums:
            checksum.add(Known(_C.crc32_address(address, nbytes), nbytes))

    def _take(self, wanted: int) -> tuple[int, int]:
        """Append up to `wanted` bytes of the block, at least one; return their address and number."""
        if self._block.filled == BLOCK_BYTES:
            self._end_block()
        address, nbytes = self._block.address + self._block.filled, min(wanted, BLOCK_BYTES - self._block.filled)
        self._block.filled += nbytes
        return address, nbytes

    def _end_block(self) -> None:
        """Write the block when it is read, and begin the next one."""
        if not self._block.filled:
            return
        end = self.position
        self._reading.append(self._block)
        while self._reading and (
            len(self._reading) > self._max_reading or all(ticket.done for ticket in self._reading[0].reads)
        ):
            self._begin_write()
        if not self._free:
            self._end_write()
        self._block = self._free.popleft()
        self._block.offset = end

    def _begin_write(self) -> None:
        block = self._reading[0]
        for ticket in block.reads:
            ticket.wait()
        for address, nbytes, make in block.later:
            ctypes.memmove(address, make(), nbytes)
        block.write = self._engine.write(self._file, block.offset, block.address, block.filled, keep=self._memory)
        self._writing.append(self._reading.popleft())

    def _end_write(self) -> None:
        block = self._writing[0]
        if block.write is not None:
            block.write.wait()
        self._moved(block.filled)
        self._writing.popleft()
        self._free.append(_Block(block.address))


def append_item(
    stream: StreamWriter, item: Item, append: Callable[[Checksum], object], aligns: bool = True
) -> tuple[int, int]:
    """Append an item of torch.distributed.checkpoint; return its offset and bytes.

    Args:
        stream: of the file.
        item: of one tensor.
        append: appends its payload to the stream, with the checksum that it is given.
        aligns: have the payload begin at a multiple of 4096.
    """
    if aligns:
        stream.append(bytes(item.head_gap(stream.position)))
    offset, checksum = stream.position, Checksum()
    stream.append(item.head)
    append(checksum)
    stream.append_later(item.tail_nbytes, lambda: item.tail(checksum.value))
    return offset, item.total_nbytes


class Archive:
    """A zip as torch.save writes it, appended to a stream: records, then `finish`."""

    def __init__(self, stream: StreamWriter, alignment: int) -> None:
        self._stream = stream
        self._alignment = alignment
        self._records: list[tuple[str, int, int, Checksum]] = []  # name, offset of the header, bytes, checksum

    def add(self, name: str, content: bytes) -> None:
        """Append a record of these bytes."""
        self.add_payload(name, len(content), lambda checksum: self._stream.append(content, checksum))

    def add_payload(self, name: str, nbytes: int, append: Callable[[Checksum], object]) -> None:
        """Append a record.

        Args:
            name: of the record.
            nbytes: of its data.
            append: appends them to the stream, with the checksum that it is given.
        """
        name, cursor, checksum = f"{ROOT}/{name}", self._stream.position, Checksum()
        self._stream.append(local_header(cursor, name, nbytes, self._alignment))
        append(checksum)
        self._stream.append_later(descriptor_nbytes(cursor, nbytes), lambda: descriptor(cursor, nbytes, checksum.value))
        self._records.append((name, cursor, nbytes, checksum))

    def finish(self) -> None:
        """Append the last small records and the directory."""
        self.add("version", b"3\n")
        records = list(self._records)
        self.add_payload(
            ".data/serialization_id",
            SERIALIZATION_ID_BYTES,
            lambda checksum: self._stream.append_later(
                SERIALIZATION_ID_BYTES, lambda: serialization_id(_entries(records)), checksum
            ),
        )
        begin = self._stream.position
        empty = [Entry(name, cursor, nbytes, 0) for name, cursor, nbytes, _ in self._records]
        nbytes = len(directory(empty, begin, self._alignment))
        self._stream.append_later(nbytes, lambda: directory(_entries(self._records), begin, self._alignment))


def _entries(records: list[tuple[str, int, int, Checksum]]) -> list[Entry]:
    return [Entry(name, cursor, nbytes, checksum.value) for name, cursor, nbytes, checksum in records]
