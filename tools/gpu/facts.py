"""Says what the other figures depend on: the machine's memory, and how long CUDA takes to register it."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

from gpu.bench import Bench, Row, each
from gpu.hardware import kilobytes
from swapper import _C
from swapper.io.registered import CudaRegistrar, Registration, slabs

MEMORY = "host memory"
SIZES = (1, 4, 16)
REGISTERED = tuple(f"registering {size} GiB of it" for size in SIZES)


def facts(bench: Bench) -> Iterator[Row]:
    yield from each(
        ((MEMORY,), memory),
        *(
            ((figure,), lambda f=figure, s=size: register(bench, f, s))
            for figure, size in zip(REGISTERED, SIZES, strict=True)
        ),
    )


def memory() -> Iterator[Row]:
    yield Row(MEMORY, "", f"{kilobytes('MemAvailable') / 1e6:.0f} of {kilobytes('MemTotal') / 1e6:.0f} GB; {_zones()}")


def register(bench: Bench, figure: str, size: int) -> Iterator[Row]:
    nbytes = bench.size(size << 30, size << 20)
    if nbytes > kilobytes("MemAvailable") * 1024 // 2:
        yield Row(figure, reason=f"{nbytes >> 30} GiB are more than half of the memory that is available", is_open=True)
        return
    arena = _C.Arena(nbytes)
    begin = time.perf_counter()
    arena.wait_populated(nbytes)
    populated_s = time.perf_counter() - begin
    registration = Registration(CudaRegistrar(), arena, slabs(0, nbytes, 4096))
    begin = time.perf_counter()
    registration.wait()
    seconds = time.perf_counter() - begin
    told = registration.describe()
    registration.close()
    arena.close()
    yield Row(
        figure, "", f"{seconds:.2f} s, after {populated_s:.2f} s until it was populated ({nbytes / 1e9:.1f} GB; {told})"
    )


def _zones() -> str:
    """Return the sizes of NUMA nodes, or of the one."""
    found = [path.read_text() for path in sorted(Path("/sys/devices/system/node").glob("node*/meminfo"))]
    sizes = [int(match[1]) for match in (re.search(r"MemTotal:\s+(\d+) kB", text) for text in found) if match]
    return "nodes of " + ", ".join(f"{size / 1e6:.0f}" for size in sizes) + " GB" if sizes else "nodes not known"
