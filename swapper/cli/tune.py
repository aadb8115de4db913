"""Implements `swapper tune DIR`: finds the best size and number of kernel calls for a drive, and stores them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from swapper import _C
from swapper.bench.drive import check_directory
from swapper.bench.measure import Pattern, files_for, measure_beside, measure_engine
from swapper.cli.command import ARGUMENT, reported
from swapper.io.tuning import Tuning, keep_tuning
from swapper.runtime.sizes import format_bytes, parse_bytes

SIZES = (1 << 20, 256 << 10, 512 << 10, 2 << 20, 4 << 20)
DEPTHS = (32, 4, 8, 16, 64, 128)
GOOD_ENOUGH = 0.97
"""The smallest setting that reaches this fraction of the best is chosen: less in flight, and the drive's noise is
larger."""


def tune(
    directory: Annotated[Path, typer.Argument(help="A directory on the drive.")],
    file_size: Annotated[str, typer.Option(help="Size of each of the two files.")] = "512MiB",
    seconds: Annotated[float, typer.Option(min=0.05, help="For each measurement; there are some 23.")] = 0.5,
    backend: Annotated[str, typer.Option(help="auto, uring, aio or threads.")] = "auto",
    keep: Annotated[bool, typer.Option(help="Write down the result, for swapper to find.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print only the DeepSpeed configuration.")] = False,
) -> None:
    """Find and store the settings that suit a drive; print them as a DeepSpeed configuration."""
    console = Console(stderr=as_json)
    with reported(console, words=ARGUMENT):
        file_bytes = max(parse_bytes(file_size, "--file-size") >> 20, 32) << 20
        check_directory(directory, 2 * file_bytes)
        with console.status("measuring"):
            tuning = find(directory, file_bytes, seconds, backend)
        where = keep_tuning(directory, tuning) if keep else None
    console.print(
        f"{format_bytes(tuning.piece_bytes)} x {tuning.depth} by {tuning.backend}: "
        f"{tuning.read_bytes_per_s / 1e9:.2f} GB/s read, {tuning.write_bytes_per_s / 1e9:.2f} GB/s written, "
        f"{tuning.busy_bytes_per_s / 1e9:.2f} GB/s both ways beside computing",
        highlight=False,
    )
    if where is not None:
        console.print(f"Kept in {where}.", soft_wrap=True, highlight=False)
    if not as_json:
        console.print("For DeepSpeed:", highlight=False)
    print(json.dumps(tuning.deepspeed_config(), indent=2))


def find(directory: Path, file_bytes: int, seconds: float, backend: str) -> Tuning:
    """Try sizes at a fair depth, then depths at the best size."""
    engine = _C.Engine(backend=backend)
    name = engine.backend
    engine.close()
    with files_for(directory, file_bytes) as paths:

        def speeds(piece_bytes: int, depth: int) -> tuple[float, float]:
            read, write = (
                measure_engine(Pattern(kind, piece_bytes, depth, file_bytes, seconds), paths, name).bytes_per_s
                for kind in ("read", "write")
            )
            return read, write

        found = search(speeds, name)
        beside = measure_beside(Pattern("both", found.piece_bytes, found.depth, file_bytes, seconds), paths, name)
        return replace(found, busy_bytes_per_s=beside.bytes_per_s)


def search(speeds: Callable[[int, int], tuple[float, float]], backend: str) -> Tuning:
    """Search alone. `speeds(piece_bytes, depth)` returns bytes a second of reads and of writes."""
    by_size = {size: speeds(size, DEPTHS[0]) for size in SIZES}
    size = _smallest_good(by_size)
    by_depth = {DEPTHS[0]: by_size[size]} | {depth: speeds(size, depth) for depth in DEPTHS[1:]}
    depth = _smallest_good(by_depth)
    return Tuning(size, depth, backend, *by_depth[depth])


def _smallest_good(found: dict[int, tuple[float, float]]) -> int:
    best = [max(speeds[n] for speeds in found.values()) for n in (0, 1)]
    scores = {
        setting: sum(rate / most for rate, most in zip(speeds, best, strict=True)) for setting, speeds in found.items()
    }
    return min(setting for setting, score in scores.items() if score >= GOOD_ENOUGH * max(scores.values()))
