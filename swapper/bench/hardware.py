"""Measures a machine: its drive, and the limit that it sets to a step; a device's link, an update, and a small step as a whole.

Of the drive reads alone, writes alone, and both at once are measured, direct, by plain threads: the engine is
compared with it, so it does not use the engine. Each direction keeps `THREADS` transfers of `PIECE_BYTES` in flight.

A drive reads and writes at the same time as the processor computes, so a step cannot be shorter than the longest of
the three (docs/internals.md). Some drives do both at full speed, and some share one speed between them: then a step
cannot be shorter than all its bytes at that speed either.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import swapper
from swapper.bench.plain import Gpt, GptConfig, make_gpt, make_optimizer
from swapper.errors import DirectoryError
from swapper.io.engines import is_in_memory
from swapper.runtime.sizes import format_bytes

THREADS = 8  # transfers in flight each way: a choice
PIECE_BYTES = 1 << 20  # a choice
HUGE_PAGE_BYTES = 2 << 20  # of x86-64
_Lane = tuple[Callable[[int, memoryview, int], int], int]
"""A transfer and its file."""
START_S = 0.2  # not counted: threads start, and a cap lets its first slice through


def choose_directory() -> Path:
    """Return the first of the current directory and the temporary ones that is on a drive and writable.

    Raises:
        DirectoryError: none is.
    """
    tried = (Path.cwd(), Path(tempfile.gettempdir()), Path("/var/tmp"))
    for directory in tried:
        if directory.is_dir() and os.access(directory, os.W_OK | os.X_OK) and not is_in_memory(directory / "file"):
            return directory
    names = ", ".join(map(str, tried))
    raise DirectoryError(f"none of {names} is a writable directory on a drive; name one with --directory")


def check_directory(directory: Path, needed_bytes: int) -> None:
    """Raise DirectoryError if `directory` is missing, not writable, or short of `needed_bytes`."""
    if not directory.is_dir():
        raise DirectoryError(f"{directory} is not a directory; make it, or name another with --directory")
    if not os.access(directory, os.W_OK | os.X_OK):
        raise DirectoryError(f"{directory} cannot be written; name another with --directory")
    free_bytes = shutil.disk_usage(directory).free
    if free_bytes < needed_bytes:
        raise DirectoryError(
            f"{directory} has {format_bytes(free_bytes)} free and this needs {format_bytes(needed_bytes)}: "
            "free some, name a directory on another drive with --directory, or lower --parameters"
        )


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

    Args:
        directory: on the drive.
        others: directories on other drives.
        file_bytes: of each file.
        duration_s: of each measurement, in seconds.
    """
    with contextlib.ExitStack() as kept:
        reads: list[_Lane] = []
        writes: list[_Lane] = []
        direct = True
        for each in (directory, *others):
            scratch = Path(kept.enter_context(tempfile.TemporaryDirectory(prefix="swapper-drive-", dir=each)))
            for name, lanes, transfer in (("read", reads, _read), ("write", writes, _write)):
                file, is_direct = _open(scratch / name, os.O_RDWR | os.O_CREAT)
                kept.callback(os.close, file)
                direct = direct and is_direct
                _fill(file, file_bytes)  # blocks that were never written read back without a transfer
                lanes += [(transfer, file)] * THREADS
        read, write, both = (_transfer(lanes, file_bytes, duration_s) for lanes in (reads, writes, reads + writes))
        return DriveSpeed(read, write, both, direct)


def _open(path: Path, flags: int) -> tuple[int, bool]:
    """Return a file's descriptor, and True if it is direct."""
    try:
        return os.open(path, flags | os.O_DIRECT, 0o600), True
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return os.open(path, flags, 0o600), False


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
        pieces = max(file_bytes // PIECE_BYTES, 1)
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
    file, _ = _open(path, os.O_RDONLY)
    try:
        return _transfer([(_read, file)] * THREADS, path.stat().st_size, duration_s)
    finally:
        os.close(file)


@dataclass(frozen=True)
class StepLimit:
    """Minimum seconds of a step, by cause. `compute_s` is 0 if it was not measured."""

    read_s: float
    write_s: float
    both_s: float
    compute_s: float

    @classmethod
    def of(cls, speed: DriveSpeed, read_bytes: float, written_bytes: float, compute_s: float) -> StepLimit:
        """Return the limit of a step with these bytes on a drive of this speed.

        Args:
            speed: of the drive.
            read_bytes, written_bytes: of a step.
            compute_s: of its computing, in seconds.
        """
        read_s, write_s = read_bytes / speed.read_bytes_per_s, written_bytes / speed.write_bytes_per_s
        return cls(read_s, write_s, (read_bytes + written_bytes) / speed.both_bytes_per_s, compute_s)

    @property
    def seconds(self) -> float:
        return max(self.by_cause.values())

    @property
    def cause(self) -> str:
        """Return the cause of the limit."""
        return max(self.by_cause, key=lambda cause: self.by_cause[cause])

    @property
    def by_cause(self) -> dict[str, float]:
        return {
            "reads": self.read_s,
            "writes": self.write_s,
            "reads and writes": self.both_s,
            "compute": self.compute_s,
        }


# --- a device, an update, a whole step --------------------------------------------------------------------------------

LINK_BYTES = 256 << 20
LINK_COPIES = 8
"""The fastest of these counts."""
CONFIG = GptConfig(vocabulary=256, context=128, layers=8, width=512)
"""25 million parameters: 400 MB each way in a step, with all of it on NVMe in fp32."""
HOST_MEMORY = "256MiB"
BATCH = 1
STEPS = 5
"""The median of all but the first two counts: they fill pages and learn the order."""


@dataclass(frozen=True)
class Link:
    """Bytes a second between page-locked host memory and a device."""

    up_bytes_per_s: float
    down_bytes_per_s: float


@dataclass(frozen=True)
class WholeStep:
    """A training step with parameters and optimizer state on NVMe, and one of plain torch with all of it in memory.

    Attributes:
        parameters: of the model.
        plain_s: seconds of plain torch.
        wall_s: seconds with swapper.
        read_bytes, written_bytes: of that step.
    """

    parameters: int
    plain_s: float
    wall_s: float
    read_bytes: int
    written_bytes: int


def find_device() -> torch.device | None:
    """Return the accelerator of this process; None if there is none."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return None if found is None else torch.device(found.type, torch.accelerator.current_device_index())


def measure_link(device: torch.device) -> Link:
    here = torch.empty(LINK_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True)
    there = torch.empty(LINK_BYTES, dtype=torch.uint8, device=device)

    def rate(source: torch.Tensor, target: torch.Tensor) -> float:
        return LINK_BYTES / min(_timed(lambda: target.copy_(source), device) for _ in range(LINK_COPIES))

    return Link(rate(here, there), rate(there, here))


def measure_update(device: torch.device) -> float:
    """Return how many fp32 parameters AdamW updates in a second."""
    parameter = torch.nn.Parameter(torch.zeros(16 << 20, device=device))
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    return parameter.numel() / min(_timed(optimizer.step, device) for _ in range(4))


def measure_step(directory: Path, device: torch.device) -> WholeStep:
    """Take some steps of a small GPT, in plain torch and with swapper, whose files are removed afterwards."""
    tokens = torch.arange(BATCH * CONFIG.context, device=device).view(BATCH, -1) % CONFIG.vocabulary
    plain = _step_of(*_model(device), tokens)
    plain_s = statistics.median([_timed(plain, device) for _ in range(STEPS)][2:])
    del plain
    with (
        tempfile.TemporaryDirectory(prefix="swapper-bench-", dir=directory) as scratch,
        swapper.SwapManager(scratch, host_memory=HOST_MEMORY) as manager,
    ):
        model, optimizer = manager.offload(
            *_model(torch.device("cpu")), params="nvme", optimizer_state="nvme", device=device
        )
        step = _step_of(model, optimizer, tokens)
        seconds = [_timed(step, device) for _ in range(STEPS)]
        stats, wall_s = manager.stats(), statistics.median(seconds[2:])
        return WholeStep(CONFIG.parameters, plain_s, wall_s, stats.read_bytes, stats.written_bytes)


def _model(device: torch.device) -> tuple[Gpt, torch.optim.Optimizer]:
    model = make_gpt(CONFIG, torch.float32).to(device)
    return model, make_optimizer(model.parameters(), 1e-3)


def _step_of(model: Gpt, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> Callable[[], None]:
    def step() -> None:
        model(tokens, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _timed(run: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of a call, to the end of what it has queued."""
    began_s = time.perf_counter()
    run()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter() - began_s
