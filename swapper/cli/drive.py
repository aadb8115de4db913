"""What a drive can do, measured: reads and writes at once, direct, by plain threads.

It is the yardstick that the engine is held against, so it does not use the engine. Both directions run at the
same time because a training step uses them so (docs/architecture.md). Each direction keeps `THREADS`
transfers of `PIECE_BYTES` in flight.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

THREADS = 8
PIECE_BYTES = 1 << 20
START_S = 0.2  # not counted: threads start, and a cap lets its first slice through


@dataclass(frozen=True)
class DriveSpeed:
    """Bytes a second each way, both at once. `direct` is False where the filesystem refuses O_DIRECT."""

    read_bytes_per_s: float
    write_bytes_per_s: float
    direct: bool

    def better(self, other: DriveSpeed) -> DriveSpeed:
        """The faster of each: a limit is what the drive can do, and a shared drive is at times slower."""
        return DriveSpeed(
            max(self.read_bytes_per_s, other.read_bytes_per_s),
            max(self.write_bytes_per_s, other.write_bytes_per_s),
            self.direct and other.direct,
        )


def measure_drive(directory: Path, *, file_bytes: int = 256 << 20, duration_s: float = 1.5) -> DriveSpeed:
    """Reads one file and writes another in `directory` for `duration_s`, each of `file_bytes`; removes both.

    Raises OSError, as the system gives it, where the directory cannot be written or is full.
    """
    with tempfile.TemporaryDirectory(prefix="swapper-drive-", dir=directory) as scratch:
        direct = True
        try:
            files = [_open(Path(scratch) / name, os.O_DIRECT) for name in ("read", "write")]
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            direct = False
            files = [_open(Path(scratch) / name, 0) for name in ("read", "write")]
        try:
            for file in files:  # blocks that were never written read back without a transfer
                _fill(file, file_bytes)
            read, write = _transfer_both(files, file_bytes, duration_s)
        finally:
            for file in files:
                os.close(file)
    return DriveSpeed(read, write, direct)


def _open(path: Path, flags: int) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | flags, 0o600)


def _piece() -> mmap.mmap:
    """Page-aligned memory for one transfer, holding bytes that no drive can leave out."""
    piece = mmap.mmap(-1, PIECE_BYTES)
    piece[:] = os.urandom(1 << 16) * (PIECE_BYTES >> 16)
    return piece


def _fill(file: int, file_bytes: int) -> None:
    os.posix_fallocate(file, 0, file_bytes)
    with contextlib.closing(_piece()) as piece:
        for offset in range(0, file_bytes, PIECE_BYTES):
            os.pwrite(file, piece, offset)
    os.fsync(file)


def _transfer_both(files: list[int], file_bytes: int, duration_s: float) -> tuple[float, float]:
    """Bytes a second of all reads and of all writes, while both run."""
    moved_bytes = [0] * (2 * THREADS)
    failures: list[BaseException] = []
    stopped = threading.Event()

    def work(index: int, transfer: Callable[[int, mmap.mmap, int], int], file: int) -> None:
        pieces = file_bytes // PIECE_BYTES
        number = index % THREADS
        try:
            with contextlib.closing(_piece()) as piece:
                while not stopped.is_set():
                    moved_bytes[index] += transfer(file, piece, number % pieces * PIECE_BYTES)
                    number += THREADS
        except BaseException as error:  # handed to the caller, below
            failures.append(error)
            stopped.set()

    def read(file: int, piece: mmap.mmap, offset: int) -> int:
        return os.preadv(file, [piece], offset)

    work_of = [(read, files[0])] * THREADS + [(os.pwrite, files[1])] * THREADS
    threads = [threading.Thread(target=work, args=(index, *what)) for index, what in enumerate(work_of)]
    for thread in threads:
        thread.start()
    try:
        stopped.wait(START_S)
        began_s, at_start = time.monotonic(), list(moved_bytes)
        stopped.wait(duration_s)
        elapsed_s, at_end = time.monotonic() - began_s, list(moved_bytes)
    finally:
        stopped.set()
        for thread in threads:
            thread.join()
    if failures:
        raise failures[0]
    rates = [(after - before) / elapsed_s for before, after in zip(at_start, at_end, strict=True)]
    return sum(rates[:THREADS]), sum(rates[THREADS:])
