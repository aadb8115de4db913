"""Copies runs of bytes from file to file through the engine, and checks them against the checksums of their writes.

Runs in a snapshot's own thread and touches only the engine, which any thread may use, files that nobody else has open
in Python, and COPY_BYTES of its own memory, freed after the copy.
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from swapper import _C
from swapper.errors import CheckpointError
from swapper.io.waiting import drain

PIECE_BYTES = 4 << 20
PIECES = 4
COPY_BYTES = PIECES * PIECE_BYTES
"""Memory of a copy, in addition to the budget, while it lasts."""


@dataclass(frozen=True, slots=True)
class CopyRange:
    """Bytes of a file to be copied into another one."""

    source: Any  # swapper._C.File
    offset: int  # bytes from the start of the target file
    nbytes: int
    crc32: int | None  # of their write; None: unknown
    name: str  # for a person
    shift: int = 0  # offset in the source minus offset in the target


def copy(engine: Any, runs: Iterable[CopyRange], target: Any) -> dict[int, int]:
    """Copy `runs` into `target`, an open file; return the checksum of each by its offset when all is written.

    Raises:
        IoError: a transfer failed.
        CheckpointError: the bytes read do not have their checksum.
    """
    return _read(engine, runs, target)


def checksums_of(engine: Any, runs: Iterable[CopyRange]) -> dict[int, int]:
    """Read `runs` and return the checksum of each by its offset. Raises as `copy` does."""
    return _read(engine, runs, None)


def _read(engine: Any, runs: Iterable[CopyRange], target: Any) -> dict[int, int]:
    memory = mmap.mmap(-1, COPY_BYTES)
    memory.madvise(mmap.MADV_DONTFORK)
    view = torch.frombuffer(memory, dtype=torch.uint8)
    in_flight: deque[tuple[CopyRange, int, int, Any, Any]] = deque()
    free = [view.data_ptr() + number * PIECE_BYTES for number in range(PIECES)]
    checksum = 0
    checksums: dict[int, int] = {}

    def finish_one() -> None:
        nonlocal checksum
        run, end, address, read, write = in_flight[0]
        read.wait()
        checksum = _C.crc32_combine(checksum, read.crc32, read.nbytes)
        if end == run.offset + run.nbytes:
            if run.crc32 is not None and checksum != run.crc32:
                raise CheckpointError(
                    f"{run.name}: bytes {run.offset + run.shift} to {end + run.shift} of {run.source.path} do not have the "
                    "checksum of their write: the drive or memory changed them. Do not trust this run; return to "
                    "an earlier snapshot"
                )
            checksums[run.offset], checksum = checksum, 0
        write.wait()
        in_flight.popleft()
        free.append(address)

    try:
        for run, offset, nbytes in _pieces(runs):
            if not free:
                finish_one()
            address = free.pop()
            read = engine.read(run.source, offset + run.shift, address, nbytes, keep=view, checksum=True)
            write = read if target is None else engine.write(target, offset, address, nbytes, keep=view, after=read)
            in_flight.append((run, offset + nbytes, address, read, write))
        while in_flight:
            finish_one()
    finally:
        for *_, read, write in in_flight:  # the files are the caller's again
            drain(read)
            drain(write)
    return checksums


def _pieces(runs: Iterable[CopyRange]) -> Iterator[tuple[CopyRange, int, int]]:
    for run in runs:
        for offset in range(run.offset, run.offset + run.nbytes, PIECE_BYTES):
            yield run, offset, min(PIECE_BYTES, run.offset + run.nbytes - offset)
