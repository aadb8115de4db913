"""Measures a drive: reads alone, writes alone, and both at once; direct, by plain threads.

The engine is compared with it, so it does not use the engine. A training step reads and writes at the same time; some
drives do both at full speed and some share one speed between them, so a step's limit needs all three (limit.py). Each
direction keeps `THREADS` transfers of `PIECE_BYTES` in flight.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

THREADS = 8  # transfers in flight each way: a choice
PIECE_BYTES = 1 << 20  # a choice
HUGE_PAGE_BYTES = 2 << 20  # of x86-64
_Lane = tuple[Callable[[int, memoryview, int], int], int]
"""A transfer and its file."""
START_S = 0.2  # not counted: threads start, and a cap lets its first slice through


@dataclass(frozen=True)
class DriveSpeed:
    """Bytes a second: of reads alone, of writes alone, and of both together while both run.

    `direct` is False if the filesystem refuses O_DIRECT.
    """

    read_bytes_per_s: float
    write_bytes_per_s: float
    both_bytes_per_s: float
    direct: bool = True

    def better(self, other: DriveSpeed) -> DriveSpeed:
        """Return the faster of each: a limit is the drive's best, and a shared drive is slower at times."""
        return DriveSpeed(
            max(self.read_bytes_per_s, other.read_bytes_per_s),
            max(self.write_bytes_per_s, other.write_bytes_per_s),
            max(self.both_bytes_per_s, other.both_bytes_per_s),
            self.direct and other.direct,
        )


def measure_drive(directory: Path, *others: Path, file_bytes: int = 256 << 20, duration_s: float = 1.0) -> DriveSpeed:
    """Read one file and write another in `directory`, each of `file_bytes`, then remove both.

    With `others`, on other drives, it does so in all of them at once and returns their joint speed. Takes three times
    `duration_s`, and the time to fill the files. Raises OSError if a directory cannot be written or is full.
    """
    with contextlib.ExitStack() as kept:
        reads: list[_Lane] = []
        writes: list[_Lane] = []
        direct = True
        for each in (directory, *others):
            scratch = Path(kept.enter_context(tempfile.TemporaryDirectory(prefix="swapper-drive-", dir=each)))
            for name, lanes, transfer in (("read", reads, _read), ("write", writes, _write)):
                file, is_direct = _open(scratch / name)
                kept.callback(os.close, file)
                direct = direct and is_direct
                _fill(file, file_bytes)  # blocks that were never written read back without a transfer
                lanes += [(transfer, file)] * THREADS
        return DriveSpeed(
            _transfer(reads, file_bytes, duration_s),
            _transfer(writes, file_bytes, duration_s),
            _transfer(reads + writes, file_bytes, duration_s),
            direct,
        )


def _open(path: Path) -> tuple[int, bool]:
    """Return a new file's descriptor, and True if it is direct."""
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600), True
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return os.open(path, os.O_RDWR | os.O_CREAT, 0o600), False


def _piece() -> memoryview:
    """Return memory for one transfer, with bytes that no drive can omit. It lies in a huge page, if the system has any.

    A drive transfers into contiguous memory up to three times faster than into pages of 4 KiB, and the drive is to be
    measured. Freed with the last reference.
    """
    memory = mmap.mmap(-1, 2 * HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    begin = -address % HUGE_PAGE_BYTES
    piece = memoryview(memory)[begin : begin + PIECE_BYTES]
    piece[:] = os.urandom(1 << 16) * (PIECE_BYTES >> 16)
    return piece


def _fill(file: int, file_bytes: int) -> None:
    os.posix_fallocate(file, 0, file_bytes)
    piece = _piece()
    for offset in range(0, file_bytes, PIECE_BYTES):
        os.pwrite(file, piece, offset)
    os.fsync(file)


def _read(file: int, piece: memoryview, offset: int) -> int:
    return os.preadv(file, [piece], offset)


def _write(file: int, piece: memoryview, offset: int) -> int:
    return os.pwrite(file, piece, offset)


def _transfer(lanes: Sequence[_Lane], file_bytes: int, duration_s: float) -> float:
    """Return bytes a second of all lanes together; each lane is a thread that keeps one transfer in flight."""
    moved_bytes = [0] * len(lanes)
    failures: list[BaseException] = []
    stopped = threading.Event()

    def work(lane: int, transfer: Callable[[int, memoryview, int], int], file: int) -> None:
        pieces = file_bytes // PIECE_BYTES
        number = lane % THREADS
        try:
            piece = _piece()
            while not stopped.is_set():
                moved_bytes[lane] += transfer(file, piece, number % pieces * PIECE_BYTES)
                number += THREADS
        except BaseException as error:  # re-raised by the caller, below
            failures.append(error)
            stopped.set()

    threads = [threading.Thread(target=work, args=(lane, *what)) for lane, what in enumerate(lanes)]
    for thread in threads:
        thread.start()
    try:
        stopped.wait(START_S)
        began_s, at_start_bytes = time.monotonic(), sum(moved_bytes)
        stopped.wait(duration_s)
        elapsed_s, at_end_bytes = time.monotonic() - began_s, sum(moved_bytes)
    finally:
        stopped.set()
        for thread in threads:
            thread.join()
    if failures:
        raise failures[0]
    return (at_end_bytes - at_start_bytes) / elapsed_s


def measure_read(path: Path, *, duration_s: float = 2.0) -> float:
    """Return bytes a second of direct reads of `path`, from its start; buffered if the filesystem refuses."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        file = os.open(path, os.O_RDONLY)
    try:
        return _transfer([(_read, file)] * THREADS, path.stat().st_size, duration_s)
    finally:
        os.close(file)
