"""Measures this process's memory; and file transfers by swapper's engine, by fio, and by DeepNVMe, each in the same pattern.

RSS would count a frame twice that is mapped twice in one process; PSS counts each page once. Pages of a memory file that nobody has
touched are in no map, and take memory all the same: of such files what they take counts.

The pattern: one direction after the other, or both at once into two files; `depth` pieces of `piece_bytes` in flight,
direct, from page-locked memory. Files are filled before, and removed after.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from swapper import _C
from swapper.io.tensor_bytes import SECTOR_BYTES, round_up
from swapper.runtime.free_memory import anonymous_bytes

_ROLLUP, _STATM = Path("/proc/self/smaps_rollup"), Path("/proc/self/statm")
PAUSES = 100
"""Between samples passes at least this many times the time of a sample."""


def pss_bytes() -> int:
    """Return this process's proportional set size now, in bytes; 0 if the system does not report it.

    Its share of mapped libraries changes by tens of MB as other processes come and go that have them too.
    """
    if not _ROLLUP.exists():
        return 0
    found = re.findall(r"^(Pss\w*):\s+(\d+) kB$", _ROLLUP.read_text(), re.MULTILINE)
    nbytes = Counter({name: int(kilobytes) * 1024 for name, kilobytes in found})
    return nbytes["Pss"] + max(_memory_file_bytes() - nbytes["Pss_Shmem"], 0)


def own_bytes() -> int:
    """Return what this process has in anonymous memory and in memory files now, in bytes; 0 if the system does not report it.

    The kernel counts both all the time, so a sample takes a tenth of a millisecond, whatever the process has.
    """
    return anonymous_bytes() + _memory_file_bytes() if _STATM.exists() else 0


def _memory_file_bytes() -> int:
    """Return what the memory files take that this process has open. By os: pathlib takes three times as long."""
    found = {}
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        with contextlib.suppress(OSError):  # closed meanwhile
            if os.readlink(f"/proc/self/fd/{name}").startswith("/memfd:"):  # noqa: PTH115
                status = os.fstat(int(name))
                found[status.st_ino] = status.st_blocks * 512
    return sum(found.values())


class PeakMemory:
    """Samples the growth of this process's memory since its construction, as a context.

    Args:
        interval_s: seconds between samples; more if one takes long, so that they take a hundredth of a processor at most.
        measure: `pss_bytes`, or `own_bytes`, which is fast enough to see each peak of a step.

    Attributes:
        growth_bytes: the maximum beyond that, so far.
    """

    def __init__(self, interval_s: float = 0.25, measure: Callable[[], int] = pss_bytes) -> None:
        self._measure = measure
        self.baseline_bytes = measure()
        self.growth_bytes = 0
        self._interval_s = interval_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="swapper-memory", daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _sample(self) -> None:
        pause_s = self._interval_s
        while not self._stopped.wait(pause_s):
            began_s = time.perf_counter()
            self.growth_bytes = max(self.growth_bytes, self._measure() - self.baseline_bytes)
            pause_s = max(self._interval_s, PAUSES * (time.perf_counter() - began_s))


KINDS = ("read", "write", "both")
OPERATIONS_AHEAD = 4
START_S = 0.2  # not counted: programs and caps start
POOL_BYTES = 128 << 20
"""Host memory as a run's pool has it: larger than a processor's cache, into which a drive, or what stands for one, is faster."""


@dataclass(frozen=True)
class Pattern:
    """The transfers of a measurement. `memory_bytes` is the least host memory that they pass through in turn."""

    kind: str
    piece_bytes: int
    depth: int
    file_bytes: int
    duration_s: float
    memory_bytes: int = 0

    @property
    def directions(self) -> tuple[str, ...]:
        return ("read", "write") if self.kind == "both" else (self.kind,)


@dataclass(frozen=True)
class Speed:
    """Bytes a second, both directions together, and CPU seconds for each GB."""

    bytes_per_s: float
    cpu_s_per_gb: float | None = None

    @property
    def slowing_byte_s(self) -> float:
        """By how many seconds each byte makes computing longer that goes on meanwhile, if torch's threads need all processors: all
        of them wait for the one that the engine's has displaced."""
        has_spare_processor = torch.get_num_threads() < len(os.sched_getaffinity(0))
        return 0.0 if has_spare_processor else (self.cpu_s_per_gb or 0.0) / 1e9


@contextlib.contextmanager
def files_for(directory: Path, file_bytes: int) -> Iterator[dict[str, Path]]:
    """Make one filled file for each direction. Blocks that were never written would read back without a transfer."""
    with tempfile.TemporaryDirectory(prefix="swapper-bench-", dir=directory) as scratch:
        paths = {kind: Path(scratch) / kind for kind in ("read", "write")}
        arena = _C.Arena(min(file_bytes, 16 << 20))
        torch.frombuffer(arena.view(0, arena.nbytes), dtype=torch.uint8).random_(0, 256)
        engine = _C.Engine(arena=arena)
        for path in paths.values():
            file = _C.File(path, create=True)
            file.allocate(file_bytes)
            for at in range(0, file_bytes, arena.nbytes):
                engine.write(file, at, arena.address, min(arena.nbytes, file_bytes - at)).wait()
            file.sync()
            file.close()
        engine.close()
        arena.close()
        yield paths


def measure_engine(pattern: Pattern, paths: dict[str, Path], backend: str = "auto", ordinary: bool = False) -> Speed:
    """Measure swapper's engine, from its registered arena, or from `ordinary` memory.

    Args:
        pattern: of the transfers.
        paths: of a file for each direction, as `files_for` makes them.
        backend: of the engine. Default: "auto".
        ordinary: transfer memory that the kernel does not know.
    """
    # Twice `depth` pieces are submitted, so that the engine never runs out; they share the memory of `depth` in both
    # directions together, as fio's do: on a filesystem in memory the share of the processor's cache matters.
    lanes = len(pattern.directions)
    pieces = max(2 * pattern.depth // lanes // OPERATIONS_AHEAD, 1)
    span_bytes = min(pieces * pattern.piece_bytes, pattern.file_bytes // OPERATIONS_AHEAD)
    span_bytes = max(span_bytes // pattern.piece_bytes, 1) * pattern.piece_bytes
    slots = max(OPERATIONS_AHEAD // 2, pattern.memory_bytes // lanes // span_bytes)
    nbytes = span_bytes * slots * lanes
    memory = torch.ones(nbytes + SECTOR_BYTES if ordinary else 0, dtype=torch.uint8, device="cpu")
    arena = None if ordinary else _C.Arena(nbytes)
    address = round_up(memory.data_ptr(), SECTOR_BYTES) if arena is None else arena.address
    engine = _C.Engine(backend=backend, depth=pattern.depth, piece_bytes=pattern.piece_bytes, arena=arena)
    files = {kind: _C.File(paths[kind]) for kind in pattern.directions}
    moves = {"read": engine.read, "write": engine.write}
    tickets: dict[str, deque[_C.Ticket]] = {kind: deque() for kind in files}
    at = dict.fromkeys(files, 0)
    news = os.eventfd(0, os.EFD_CLOEXEC)
    try:
        began_s = time.perf_counter()
        start_bytes, start_s, start_cpu_s = 0, 0.0, 0.0
        while True:
            now_s = time.perf_counter()
            if not start_s and now_s - began_s >= START_S:
                start_bytes, start_s, start_cpu_s = _moved(engine), now_s, time.process_time()
            elif start_s and now_s - start_s >= pattern.duration_s and (moved := _moved(engine) - start_bytes):
                return Speed(moved / (now_s - start_s), (time.process_time() - start_cpu_s) / moved * 1e9)
            for lane, (kind, file) in enumerate(files.items()):
                while len(tickets[kind]) < OPERATIONS_AHEAD:
                    offset = at[kind] * span_bytes % (pattern.file_bytes // span_bytes * span_bytes)
                    slot = lane * slots + at[kind] % slots
                    place = address + slot * span_bytes
                    tickets[kind].append(moves[kind](file, offset, place, span_bytes, keep=memory))
                    at[kind] += 1
                    if lanes > 1:
                        tickets[kind][-1].notify(news)
            if lanes > 1:  # the first one counts
                os.eventfd_read(news)
                _take_done(tickets)
            else:
                tickets[pattern.kind].popleft().wait()
    finally:
        engine.close()
        os.close(news)
        for file in files.values():
            file.close()
        if arena is not None:
            arena.close()


def measure_while_computing(pattern: Pattern, paths: dict[str, Path], backend: str = "auto") -> Speed:
    """Measure the bytes a second of swapper's engine while torch computes on all its threads.

    Args: as of `measure_engine`.
    """
    left, right, large = (
        torch.ones(128, 1024, device="cpu"),
        torch.ones(1024, 1024, device="cpu"),
        torch.ones(16 << 20, device="cpu"),
    )
    parts = itertools.cycle(torch.split(large, 1 << 20))  # more than a cache has, as in a step
    with ThreadPoolExecutor(1) as pool:
        measured = pool.submit(measure_engine, pattern, paths, backend)
        while not measured.done():
            torch.mm(left, right)
            part = next(parts)
            torch.add(part, part, alpha=0.5, out=part)
        return Speed(measured.result().bytes_per_s)


def _moved(engine: _C.Engine) -> int:
    return engine.bytes_read + engine.bytes_written


def _take_done(tickets: dict[str, deque[_C.Ticket]]) -> None:
    for queue in tickets.values():
        while queue and queue[0].done:
            queue.popleft().wait()


def has_fio() -> bool:
    return shutil.which("fio") is not None


def measure_fio(pattern: Pattern, paths: dict[str, Path]) -> Speed:
    """Measure fio: io_uring, fixed buffers, registered files, O_DIRECT."""
    command = ["fio", "--output-format=json"]
    for kind in pattern.directions:
        depth = max(pattern.depth // len(pattern.directions), 1)
        command += [
            f"--name={kind}", f"--filename={paths[kind]}", f"--rw={kind}", f"--bs={pattern.piece_bytes}",
            f"--size={pattern.file_bytes}", f"--iodepth={depth}", "--ioengine=io_uring", "--fixedbufs", "--registerfiles",
            "--direct=1", "--time_based", f"--runtime={pattern.duration_s}", f"--ramp_time={START_S}", "--thread",
            "--group_reporting=0", "--overwrite=1",
        ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise OSError(f"fio failed: {(done.stderr or done.stdout).strip()[-300:]}")
    jobs = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
    rate = sum(job[job["jobname"]]["bw_bytes"] for job in jobs)
    cpu_share = sum((job["usr_cpu"] + job["sys_cpu"]) / 100 for job in jobs)
    return Speed(rate, cpu_share / rate * 1e9)


DEEPNVME = """
import json, sys, time, torch
from deepspeed.ops.op_builder import AsyncIOBuilder
kind, path, block, depth, size, duration = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6]), float(sys.argv[6])
handle = AsyncIOBuilder().load().aio_handle(block, depth, False, True, 1)
tensor = handle.new_cpu_locked_tensor(size, torch.empty(0, dtype=torch.uint8))
move = getattr(handle, "sync_p" + kind)
move(tensor, path, 0)
began, cpu, moved = time.perf_counter(), time.process_time(), 0
while time.perf_counter() - began < duration:
    assert move(tensor, path, 0) == 1
    moved += size
took = time.perf_counter() - began
print("RESULT", moved / took, (time.process_time() - cpu) / moved * 1e9)
"""


def measure_deepnvme(pattern: Pattern, paths: dict[str, Path], python: str = sys.executable) -> Speed:
    """Measure DeepNVMe's aio_handle, with overlap_events, in a process of its own. One direction only.

    Args:
        pattern, paths: as of `measure_engine`.
        python: an interpreter that has DeepSpeed.
    """
    path = paths[pattern.kind]
    environment = {key: value for key, value in os.environ.items() if key != "SWAPPER_DEEPSPEED"}
    arguments = [pattern.kind, str(path), pattern.piece_bytes, pattern.depth, pattern.file_bytes, pattern.duration_s]
    command = [python, "-c", textwrap.dedent(DEEPNVME), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    found = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("RESULT")]
    if not found:
        raise OSError(f"DeepNVMe failed: {(done.stderr or done.stdout).strip()[-300:]}")
    return Speed(float(found[0][0]), float(found[0][1]))
