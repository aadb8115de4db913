"""Implements what measures a drive: `swapper bench DIR` and `swapper tune DIR`.

The one compares swapper's engine with fio and DeepNVMe; the other finds the best size and number of kernel calls, and stores them.
"""

from __future__ import annotations

import html
import importlib.util
import json
import logging
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from swapper import _C
from swapper.bench.hardware import (
    Link,
    WholeStep,
    check_directory,
    find_device,
    measure_link,
    measure_step,
    measure_update,
)
from swapper.bench.measure import (
    KINDS,
    POOL_BYTES,
    Pattern,
    Speed,
    files_for,
    has_fio,
    measure_deepnvme,
    measure_engine,
    measure_fio,
    measure_while_computing,
)
from swapper.cli.command import ARGUMENT, check_output, make_console, make_progress, reported
from swapper.errors import ConfigError
from swapper.io.drives import Tuning, keep_tuning
from swapper.runtime.sizes import format_bytes, parse_bytes


@dataclass
class PatternRates:
    """One pattern, and the rates of each program in each round."""

    pattern: Pattern
    speeds: dict[str, list[Speed]] = field(default_factory=dict)

    def rate(self, program: str) -> float | None:
        """Return the median, in bytes a second."""
        found = [speed.bytes_per_s for speed in self.speeds.get(program, [])]
        return statistics.median(found) if found else None

    def cpu(self, program: str) -> float | None:
        found = [speed.cpu_s_per_gb for speed in self.speeds.get(program, []) if speed.cpu_s_per_gb is not None]
        return statistics.median(found) if found else None

    @property
    def ratio(self) -> float | None:
        """Return the median over the rounds of swapper's rate to fio's; the two were measured in direct succession."""
        pairs = zip(self.speeds.get("swapper", []), self.speeds.get("fio", []), strict=False)
        found = [ours.bytes_per_s / theirs.bytes_per_s for ours, theirs in pairs]
        return statistics.median(found) if found else None


def bench(
    directory: Annotated[Path, typer.Argument(help="A directory on the drive.")],
    kinds: Annotated[str, typer.Option(help="Any of read, write, both.")] = "read,write,both",
    sizes: Annotated[str, typer.Option(help="Sizes of one kernel call.")] = "1MiB",
    depths: Annotated[str, typer.Option(help="Kernel calls in flight.")] = "1,8,32",
    file_size: Annotated[str, typer.Option(help="Size of each of the two files.")] = "512MiB",
    seconds: Annotated[float, typer.Option(min=0.05, help="For each measurement.")] = 1.0,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of all measurements; medians are shown.")] = 1,
    backend: Annotated[str, typer.Option(help="auto, uring, aio or threads.")] = "auto",
    peers: Annotated[bool, typer.Option(help="Run fio and DeepNVMe too, where installed.")] = True,
    step: Annotated[bool, typer.Option(help="Also measure a GPU's link, an update, and a small training step.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
    chart: Annotated[Path | None, typer.Option(help="Draw them: FILE.png (needs matplotlib) or FILE.html.")] = None,
) -> None:
    """Measure a drive, a GPU's link, an update and a small training step: half a minute."""
    console = make_console(stderr=as_json)
    with reported(console, words=ARGUMENT):
        if chart is not None and chart.suffix not in (".png", ".html"):
            raise ConfigError(f"--chart {chart}: name a .png or .html file")
        if chart is not None and chart.suffix == ".png" and importlib.util.find_spec("matplotlib") is None:
            raise ConfigError("a .png needs matplotlib (pip install 'torch-swapper[chart]'); a .html does not")
        check_output("--chart", chart)
        file_bytes = max(parse_bytes(file_size, "--file-size") >> 20, 8) << 20
        check_directory(directory, 2 * file_bytes)
        patterns = [
            Pattern(kind, piece, depth, file_bytes, seconds)
            for kind in _choices(kinds)
            for piece in _pieces(sizes, file_bytes)
            for depth in _depths(depths)
        ]
        rows = measure_all(directory, patterns, programs(backend) if peers else programs(backend, ()), rounds, console)
        if step:
            with console.status("taking steps of a small model"):
                more = measure_more(directory)
        else:
            more = None
    if as_json:
        found = {"drive": figures_of(rows), **({} if more is None else asdict(more))}
        print(json.dumps(found, indent=2))
    else:
        console.print(table_of(rows))
        for line in [] if more is None else lines_of(more):
            console.print(line)
    if chart is not None:
        draw(rows, chart)


Measure = Callable[[Pattern, dict[str, Path]], Speed]


def programs(backend: str, wanted: tuple[str, ...] = ("fio", "DeepNVMe")) -> dict[str, Measure]:
    found: dict[str, Measure] = {"swapper": lambda pattern, paths: measure_engine(pattern, paths, backend)}
    if "fio" in wanted and has_fio():
        found["fio"] = measure_fio
    if "DeepNVMe" in wanted and importlib.util.find_spec("deepspeed") is not None:
        found["DeepNVMe"] = measure_deepnvme
    return found


def measure_all(
    directory: Path, patterns: list[Pattern], measures: dict[str, Measure], rounds: int, console: Console
) -> list[PatternRates]:
    """Measure each pattern with each measure, in rounds; what refuses is left out, and said.

    Args:
        directory: on the drive.
        patterns: of transfers.
        measures: by name.
        rounds: how often; medians count.
        console: shows the progress.
    """
    rows = [PatternRates(pattern) for pattern in patterns]
    refused: set[str] = set()
    total = rounds * len(rows) * len(measures)
    with files_for(directory, patterns[0].file_bytes) as paths, _measuring(console, total) as advance:
        for _ in range(rounds):
            for row in rows:
                for program, measure in measures.items():
                    advance()
                    if program in refused or (program == "DeepNVMe" and row.pattern.kind == "both"):
                        continue
                    try:
                        row.speeds.setdefault(program, []).append(measure(row.pattern, paths))
                    except OSError as error:
                        if program == "swapper":
                            raise
                        refused.add(program)
                        console.print(f"without {program}: {error}", markup=False)
    return rows


@contextmanager
def _measuring(console: Console, total: int) -> Iterator[Callable[[], None]]:
    """Show a bar of `total` measurements. Yields what is called before each."""
    columns = SpinnerColumn(), TextColumn("measuring"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with make_progress(console, *columns) as bar:
        task = bar.add_task("measuring", total=total)
        yield lambda: bar.advance(task)


def table_of(rows: list[PatternRates]) -> Table:
    names = list(dict.fromkeys(name for row in rows for name in row.speeds))
    table = Table(title="GB/s (processor seconds for each GB)", title_justify="left")
    for heading in ("", "size", "depth", *names, *(["swapper / fio"] if "fio" in names else [])):
        table.add_column(heading, justify="right" if heading else "left")
    for row in rows:
        cells = [row.pattern.kind, format_bytes(row.pattern.piece_bytes), str(row.pattern.depth)]
        for name in names:
            rate, cpu = row.rate(name), row.cpu(name)
            cells.append(
                "" if rate is None else f"{rate / 1e9:.2f} ({cpu:.3f})" if cpu is not None else f"{rate / 1e9:.2f}"
            )
        if "fio" in names:
            cells.append("" if row.ratio is None else f"{row.ratio:.2f}")
        table.add_row(*cells)
    return table


def figures_of(rows: list[PatternRates]) -> list[dict[str, object]]:
    return [
        {
            **asdict(row.pattern),
            "programs": {name: [asdict(speed) for speed in speeds] for name, speeds in row.speeds.items()},
            "ratio_to_fio": row.ratio,
        }
        for row in rows
    ]


@dataclass(frozen=True)
class More:
    """What was measured besides the drive.

    Attributes:
        device: of the update and the step.
        link: None for the CPU.
        update_per_s: parameters a second.
        step: of a small model.
    """

    device: str
    link: Link | None
    update_per_s: float
    step: WholeStep


def measure_more(directory: Path) -> More:
    logging.getLogger("swapper").setLevel(logging.WARNING)  # nobody asks what was chosen for this model
    there = find_device()
    device = there or torch.device("cpu")
    link = None if there is None else measure_link(there)
    return More(str(device), link, measure_update(device), measure_step(directory, device))


def lines_of(more: More) -> list[str]:
    step, lines = more.step, []
    if more.link is not None:
        up, down = more.link.up_bytes_per_s / 1e9, more.link.down_bytes_per_s / 1e9
        lines.append(f"Link to {more.device}: {up:.1f} GB/s up, {down:.1f} GB/s down, from page-locked memory")
    lines.append(f"Update on {more.device}: {more.update_per_s / 1e9:.2f} billion parameters a second (AdamW, fp32)")
    lines.append(
        f"Step of {step.parameters / 1e6:.0f} million parameters on {more.device}: {step.wall_s:.2f} s with parameters and "
        f"optimizer state on this drive ({step.read_bytes / 1e6:.0f} MB read, {step.written_bytes / 1e6:.0f} MB written), "
        f"{step.plain_s:.2f} s in memory with plain torch"
    )
    return lines


def draw(rows: list[PatternRates], path: Path) -> None:
    """Draw bars of GB/s by pattern and program."""
    names = list(dict.fromkeys(name for row in rows for name in row.speeds))
    labels = [f"{row.pattern.kind} {format_bytes(row.pattern.piece_bytes)} x{row.pattern.depth}" for row in rows]
    values = {name: [(row.rate(name) or 0) / 1e9 for row in rows] for name in names}
    if path.suffix == ".html":
        path.write_text(_page(labels, values))
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(6, len(rows)), 4), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(names)
    for n, name in enumerate(names):
        axes.bar([at + n * width for at in range(len(rows))], values[name], width, label=name)
    axes.set_xticks([at + 0.4 - width / 2 for at in range(len(rows))], labels, rotation=45, ha="right")
    axes.set_ylabel("GB/s")
    axes.legend()
    figure.savefig(path, dpi=120)


def _page(labels: list[str], values: dict[str, list[float]]) -> str:
    colors = ("#1f77b4", "#ff7f0e", "#2ca02c")
    most = max((value for found in values.values() for value in found), default=1) or 1
    lines = []
    for n, label in enumerate(labels):
        lines.append(f"<h3>{html.escape(label)}</h3>")
        for color, (name, found) in zip(colors, values.items(), strict=False):
            if found[n]:
                bar = f"<div style='background:{color};height:1em;width:{found[n] / most * 60:.1f}%'></div>"
                lines.append(f"<div class='row'><span>{html.escape(name)}</span>{bar}<b>{found[n]:.2f} GB/s</b></div>")
    style = "body{font-family:sans-serif;margin:2em}.row{display:flex;gap:1em;align-items:center}span{width:6em}"
    return f"<!doctype html><meta charset=utf-8><title>swapper bench</title><style>{style}</style>" + "\n".join(lines)


def _choices(text: str) -> list[str]:
    chosen = [word.strip() for word in text.split(",") if word.strip()]
    if not chosen or any(word not in KINDS for word in chosen):
        raise ConfigError(f"--kinds {text}: any of {', '.join(KINDS)}, with commas")
    return chosen


def _pieces(text: str, file_bytes: int) -> list[int]:
    found = [parse_bytes(word, "--sizes") for word in text.split(",")]
    if any(piece % 4096 or piece * 4 > file_bytes for piece in found):
        raise ConfigError(f"--sizes {text}: multiples of 4096, at most a quarter of --file-size")
    return found


def _depths(text: str) -> list[int]:
    try:
        found = [int(word) for word in text.split(",")]
    except ValueError:
        found = [0]
    if not all(1 <= depth <= 4096 for depth in found):
        raise ConfigError(f"--depths {text}: numbers from 1 to 4096, with commas")
    return found


# --- swapper tune -------------------------------------------------------------------------------------------------------

SIZES = (1 << 20, 256 << 10, 512 << 10, 2 << 20, 4 << 20)
DEPTHS = (32, 4, 8, 16, 64, 128)
GOOD_ENOUGH = 0.97
"""The smallest setting that reaches this fraction of the best is chosen: less in flight; a drive's noise is larger."""


def tune(
    directory: Annotated[Path, typer.Argument(help="A directory on the drive.")],
    file_size: Annotated[str, typer.Option(help="Size of each of the two files.")] = "512MiB",
    seconds: Annotated[float, typer.Option(min=0.05, help="For each measurement; there are some 24.")] = 0.5,
    backend: Annotated[str, typer.Option(help="auto, uring, aio or threads.")] = "auto",
    keep: Annotated[bool, typer.Option(help="Write down the result, for swapper to find.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures and settings as JSON.")] = False,
) -> None:
    """Find and store the settings that suit a drive; print them as a DeepSpeed configuration."""
    console = make_console(stderr=as_json)
    with reported(console, words=ARGUMENT):
        file_bytes = max(parse_bytes(file_size, "--file-size") >> 20, 32) << 20
        check_directory(directory, 2 * file_bytes)
        with _measuring(console, 2 * (len(SIZES) + len(DEPTHS) - 1) + 2) as advance:
            tuning = find(directory, file_bytes, seconds, backend, advance)
        where = keep_tuning(directory, tuning) if keep else None
    if as_json:
        found = {
            "directory": str(directory.absolute()),
            **asdict(tuning),
            "kept_in": None if where is None else str(where),
        }
        print(json.dumps({**found, "deepspeed": tuning.deepspeed_config()}, indent=2))
        return
    console.print(
        f"{format_bytes(tuning.piece_bytes)} x {tuning.depth} by {tuning.backend}: "
        f"{tuning.read_bytes_per_s / 1e9:.2f} GB/s read, {tuning.write_bytes_per_s / 1e9:.2f} GB/s written, "
        f"{tuning.both_bytes_per_s / 1e9:.2f} GB/s both ways, {tuning.busy_bytes_per_s / 1e9:.2f} while torch computes, "
        f"{tuning.slowing_byte_s * 1e9:.2f} s longer for each GB",
    )
    if where is not None:
        console.print(f"Kept in {where}.")
    console.print("For DeepSpeed:")
    print(json.dumps(tuning.deepspeed_config(), indent=2))


def find(directory: Path, file_bytes: int, seconds: float, backend: str, advance: Callable[[], None]) -> Tuning:
    """Return the best settings: sizes are tried at a fair depth, then depths at the best size.

    Args:
        directory: on the drive.
        file_bytes: of each of the two files.
        seconds: of each measurement.
        backend: of the engine.
        advance: called before each measurement.
    """
    engine = _C.Engine(backend=backend)
    name = engine.backend
    engine.close()
    with files_for(directory, file_bytes) as paths:

        def measure(pattern: Pattern) -> Speed:
            advance()
            return measure_engine(pattern, paths, name)

        def speeds(piece_bytes: int, depth: int) -> tuple[float, float]:
            pattern = Pattern("read", piece_bytes, depth, file_bytes, seconds, POOL_BYTES)
            read, write = (measure(of) for of in (pattern, replace(pattern, kind="write")))
            return read.bytes_per_s, write.bytes_per_s

        found = search(speeds, name)
        pattern = Pattern("both", found.piece_bytes, found.depth, file_bytes, seconds, POOL_BYTES)
        both = measure(pattern)
        advance()
        busy = measure_while_computing(pattern, paths, name)
        return replace(
            found, both_bytes_per_s=both.bytes_per_s, busy_bytes_per_s=busy.bytes_per_s,
            slowing_byte_s=both.slowing_byte_s,
        )  # fmt: skip


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
