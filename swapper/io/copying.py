"""Copies runs of bytes from file to file through the engine, or only reads them, with their checksums.

Thread-safe: it touches only the engine, open files of the caller, and COPY_BYTES of its own memory, freed at the end.
"""

from __future__ import annotations

import contextlib
import mmap
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass

import torch

from swapper import _C
from swapper.errors import CheckpointError, IoError
from swapper.io.engines import Engine, Transfer, drain

PIECE_BYTES = 4 << 20  # a choice
PIECES = 4  # in flight: a choice
COPY_BYTES = PIECES * PIECE_BYTES
"""Memory of a copy, in addition to the budget, while it lasts."""


@dataclass(frozen=True, slots=True)
class CopyRange:
    """Bytes of a file to be copied into another one."""

    source: _C.File
    offset: int  # bytes from the start of the target file
    nbytes: int
    crc32: int | None  # of their write; None: unknown
    name: str  # for a person
    shift: int = 0  # offset in the source minus offset in the target


def copy(engine: Engine, runs: Iterable[CopyRange], target: _C.File | None) -> dict[int, int]:
    """Copy `runs` into `target`, an open file; return the checksum of each by its offset when all is written.

    Args:
        engine: reads and writes.
        runs: ranges of files.
        target: where they are copied; None: they are only read and checked.

    Raises:
        IoError: a transfer failed.
        CheckpointError: the bytes read do not have their checksum.
    """
    checksums = {}
    with contextlib.closing(stream(engine, runs, target)) as outcomes:
        for run, outcome in outcomes:
            if isinstance(outcome, IoError):
                raise outcome
            if run.crc32 not in (None, outcome):
                begin = run.offset + run.shift
                raise CheckpointError(
                    f"{run.name}: bytes {begin} to {begin + run.nbytes} of {run.source.path} do not have the checksum of their "
                    "write: the drive or memory changed them. Do not trust this run; return to an earlier snapshot"
                )
            checksums[run.offset] = outcome
    return checksums


def checksums_of(engine: Engine, runs: Iterable[CopyRange]) -> dict[int, int]:
    """Read `runs` and return the checksum of each by its offset. Raises as `copy` does."""
    return copy(engine, runs, None)


Outcome = tuple[CopyRange, int | IoError]
"""A run with the CRC-32 of its bytes, or with the first error."""


def stream(engine: Engine, runs: Iterable[CopyRange], target: _C.File | None = None) -> Generator[Outcome, None, None]:
    """Yield the outcome of each nonempty run, once it is read, and written to `target` if that is a file.

    Closing it waits for all transfers.

    Args: as of `copy`.
    """
    memory = mmap.mmap(-1, COPY_BYTES)
    memory.madvise(mmap.MADV_DONTFORK)
    view = torch.frombuffer(memory, dtype=torch.uint8)
    in_flight: deque[tuple[CopyRange, bool, int, Transfer, Transfer]] = deque()
    free = [view.data_ptr() + number * PIECE_BYTES for number in range(PIECES)]
    checksum, failure = 0, None

    def end_oldest() -> Iterator[Outcome]:
        nonlocal checksum, failure
        run, is_last, address, read, write = in_flight[0]
        error = read.exception() or write.exception()
        in_flight.popleft()
        free.append(address)
        failure = failure or error
        if error is None:
            checksum = _C.crc32_combine(checksum, read.crc32, read.nbytes)
        if is_last:
            outcome = checksum if failure is None else failure
            checksum, failure = 0, None
            yield run, outcome

    try:
        for run in runs:
            end = run.offset + run.nbytes
            for offset in range(run.offset, end, PIECE_BYTES):
                if not free:
                    yield from end_oldest()
                address, nbytes = free.pop(), min(PIECE_BYTES, end - offset)
                read = engine.read(run.source, offset + run.shift, address, nbytes, keep=view, checksum=True)
                write = read if target is None else engine.write(target, offset, address, nbytes, keep=view, after=read)
                in_flight.append((run, offset + nbytes == end, address, read, write))
        while in_flight:
            yield from end_oldest()
    finally:
        for *_, read, write in in_flight:  # the files are the caller's again
            drain(read)
            drain(write)
