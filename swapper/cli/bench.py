"""Implements `swapper bench DIR`: compares swapper's engine with fio and DeepNVMe in a directory."""

from __future__ import annotations

import html
import importlib.util
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from swapper.bench.drive import check_directory
from swapper.bench.measure import (
    KINDS,
    Pattern,
    Speed,
    files_for,
    has_fio,
    measure_deepnvme,
    measure_engine,
    measure_fio,
)
from swapper.cli.command import ARGUMENT, reported
from swapper.errors import ConfigError
from swapper.runtime.sizes import format_bytes, parse_bytes


@dataclass
class Row:
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
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures there; - prints them.")] = None,
    chart: Annotated[Path | None, typer.Option(help="Draw them: FILE.png (needs matplotlib) or FILE.html.")] = None,
) -> None:
    """Measure the drive under a directory with swapper's engine."""
    console = Console(stderr=str(json_file) == "-")
    with reported(console, words=ARGUMENT):
        if chart is not None and chart.suffix not in (".png", ".html"):
            raise ConfigError(f"--chart {chart}: name a .png or .html file")
        file_bytes = max(parse_bytes(file_size, "--file-size") >> 20, 8) << 20
        check_directory(directory, 2 * file_bytes)
        patterns = [
            Pattern(kind, piece, depth, file_bytes, seconds)
            for kind in _choices(kinds)
            for piece in _pieces(sizes, file_bytes)
            for depth in _depths(depths)
        ]
        rows = measure_all(directory, patterns, programs(backend) if peers else programs(backend, ()), rounds, console)
    if str(json_file) == "-":
        print(json.dumps(as_json(rows), indent=2))
    else:
        console.print(table_of(rows))
        if json_file is not None:
            json_file.write_text(json.dumps(as_json(rows), indent=2) + "\n")
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
) -> list[Row]:
    rows = [Row(pattern) for pattern in patterns]
    refused: set[str] = set()
    with files_for(directory, patterns[0].file_bytes) as paths, console.status("measuring"):
        for _ in range(rounds):
            for row in rows:
                for program, measure in measures.items():
                    if program in refused or (program == "DeepNVMe" and row.pattern.kind == "both"):
                        continue
                    try:
                        row.speeds.setdefault(program, []).append(measure(row.pattern, paths))
                    except OSError as error:
                        if program == "swapper":
                            raise
                        refused.add(program)
                        console.print(f"without {program}: {error}", soft_wrap=True, highlight=False, markup=False)
    return rows


def table_of(rows: list[Row]) -> Table:
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


def as_json(rows: list[Row]) -> list[dict[str, object]]:
    return [
        {
            **asdict(row.pattern),
            "programs": {name: [asdict(speed) for speed in speeds] for name, speeds in row.speeds.items()},
            "ratio_to_fio": row.ratio,
        }
        for row in rows
    ]


def draw(rows: list[Row], path: Path) -> None:
    """Draw bars of GB/s by pattern and program."""
    names = list(dict.fromkeys(name for row in rows for name in row.speeds))
    labels = [f"{row.pattern.kind} {format_bytes(row.pattern.piece_bytes)} x{row.pattern.depth}" for row in rows]
    values = {name: [(row.rate(name) or 0) / 1e9 for row in rows] for name in names}
    if path.suffix == ".html":
        path.write_text(_page(labels, values))
        return
    try:
        import matplotlib
    except ImportError:
        print("a .png needs matplotlib (pip install 'torch-swapper[chart]'); a .html does not", file=sys.stderr)
        raise typer.Exit(2) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(max(6, len(rows)), 4))
    width = 0.8 / len(names)
    for n, name in enumerate(names):
        axes.bar([at + n * width for at in range(len(rows))], values[name], width, label=name)
    axes.set_xticks([at + 0.4 - width / 2 for at in range(len(rows))], labels, rotation=45, ha="right")
    axes.set_ylabel("GB/s")
    axes.legend()
    figure.tight_layout()
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
