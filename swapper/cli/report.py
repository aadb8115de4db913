"""Implements `swapper trace SCRIPT`, which runs a script with every manager in it traced, and `swapper report TRACE`.

The report is one HTML page of a trace, which needs nothing else, for any browser.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from swapper.cli.command import check_output, make_console, reported
from swapper.errors import CheckpointError, ConfigError
from swapper.runtime.counters import ENVIRONMENT, FAMILIES, TRACKS
from swapper.runtime.records import parse_json

PAGE = Path(__file__).with_name("report_page.html")
BINS = 240
"""Intervals of a step in which the drive's bytes are added up: a picture is a few hundred points wide."""
MAX_SPANS = 2000
"""Spans of a track that are drawn: the longest."""
MAX_WAITS = 15
"""Modules whose waits are listed."""


def report(
    trace: Annotated[Path, typer.Argument(help="What `swapper trace` or manager.trace has written.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The page; must not exist. [default: TRACE.html]")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the page's figures instead.")] = False,
) -> None:
    """Make one HTML page of a trace: a step's timeline, the drive's use, waits by module, memory by kind."""
    with reported(make_console(stderr=True)):
        found = figures(trace)
        if as_json:
            typer.echo(json.dumps(found))
            return
        target = trace.with_suffix(".html") if output is None else output
        check_output("--output", target)
        with target.open("x") as stream:
            stream.write(page_of(found))
    typer.echo(f"report: {target}")


def page_of(found: dict[str, object]) -> str:
    """Return the page that shows these figures."""
    return PAGE.read_text().replace("/*FIGURES*/null", json.dumps(found).replace("<", "\\u003c"))


def figures(path: Path) -> dict[str, object]:
    """Return what the page shows of a trace: its steps, in seconds and bytes.

    Raises:
        CheckpointError: it is no trace of swapper, or has no whole phase.
    """
    try:
        return _figures(path, parse_json(path.read_bytes(), finite=False))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
        raise CheckpointError(f"{path} is no trace of swapper ({error!r}): make one with `swapper trace`") from error


def _figures(path: Path, content: dict[str, Any]) -> dict[str, object]:
    events = content["traceEvents"]
    spans = [_span(event) for event in events if event["ph"] == "X"]
    memory = [(event["ts"] / 1e6, event["args"]) for event in events if event["ph"] == "C"]
    about = content.get("otherData") or {}
    stats = {step.get("step"): step for step in about.get("steps", ())}
    bounds: dict[int, tuple[float, float]] = {}
    for span in spans:
        number = span["args"].get("step")
        if span["track"] == "phases" and isinstance(number, int):
            begin, end = bounds.get(number, (span["begin"], span["end"]))
            bounds[number] = min(begin, span["begin"]), max(end, span["end"])
    if not bounds:
        raise CheckpointError(f"{path} has no phase of a step: trace a script that trains")
    groups = about.get("groups") or {}
    steps = [_step(number, *bounds[number], spans, memory, groups, stats.get(number)) for number in sorted(bounds)]
    return {"name": path.name, "drive": about.get("drive"), "steps": steps}


def _span(event: dict[str, Any]) -> dict[str, Any]:
    begin = event["ts"] / 1e6
    return {
        "track": event["cat"], "name": str(event["name"]), "begin": begin, "end": begin + event["dur"] / 1e6,
        "args": event["args"], "lane": event["tid"] % 1000,
    }  # fmt: skip


def _step(
    number: int,
    begin: float,
    end: float,
    spans: Iterable[dict[str, Any]],
    memory: Sequence[tuple[float, dict[str, int]]],
    groups: dict[str, str],
    stats: dict[str, object] | None,
) -> dict[str, object]:
    inside = [span for span in spans if span["end"] > begin and span["begin"] < end]
    tracks = {}
    for track in TRACKS:
        of = sorted((s for s in inside if s["track"] == track), key=lambda s: s["begin"] - s["end"])[:MAX_SPANS]
        tracks[track] = [[s["name"], _what(s), s["begin"] - begin, s["end"] - begin, s["lane"]] for s in of]
    return {
        "number": number,
        "seconds": end - begin,
        "tracks": tracks,
        "drive": {
            kind: _bytes_by_bin(begin, end, [s for s in inside if s["track"] == kind]) for kind in ("reads", "writes")
        },
        "waits": _waits_by_module(begin, end, [s for s in inside if s["track"] == "waits"], groups),
        "memory": _memory(begin, end, memory),
        "stats": stats,
    }


def _memory(begin: float, end: float, samples: Sequence[tuple[float, dict[str, int]]]) -> list[list[object]]:
    """Return [seconds into the step, bytes by kind] from its begin to its end: between two samples it is as at the first."""
    before = [kinds for at, kinds in samples if at < begin][-1:]
    inside = [[at - begin, kinds] for at, kinds in samples if begin <= at <= end]
    found = [*([0.0, kinds] for kinds in before), *inside]
    return [*found, [end - begin, found[-1][1]]] if found else []


def _what(span: dict[str, Any]) -> str:
    return str(span["args"].get("what") or ", ".join(f"{name} {value}" for name, value in span["args"].items()))


def _bytes_by_bin(begin: float, end: float, transfers: Iterable[dict[str, Any]]) -> list[float]:
    """Return the bytes a second in each of BINS intervals: a transfer's bytes are spread evenly over its time."""
    bins, width = [0.0] * BINS, max(end - begin, 1e-9) / BINS
    for span in transfers:
        rate = span["args"].get("nbytes", 0) / max(span["end"] - span["begin"], 1e-9)
        first = max(int((span["begin"] - begin) / width), 0)
        for number in range(first, BINS):
            low, high = begin + number * width, begin + (number + 1) * width
            if low >= span["end"]:
                break
            bins[number] += rate * max(min(high, span["end"]) - max(low, span["begin"]), 0.0) / width
    return bins


def _waits_by_module(
    begin: float, end: float, waits: Iterable[dict[str, Any]], groups: dict[str, str]
) -> list[list[object]]:
    """Return [module, kind of wait, seconds], the longest first."""
    seconds: dict[tuple[str, str], float] = defaultdict(float)
    for span in waits:
        what = _what(span)
        found = re.match(r"page \d+ \(group (\d+) (\w+) ", what)
        kind = span["name"].removeprefix("wait for a ")
        module = f"{groups.get(found[1], found[1])}, {FAMILIES.get(found[2], found[2])}" if found else what
        seconds[module, kind] += min(span["end"], end) - max(span["begin"], begin)
    ordered = sorted(seconds.items(), key=lambda item: -item[1])
    return [[module, kind, value] for (module, kind), value in ordered[:MAX_WAITS] if value > 0]


def trace(
    command: Annotated[
        list[str], typer.Argument(help="A Python script, or a command such as torchrun, and its arguments.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The JSON file; must not exist.")] = Path("trace.json"),
) -> None:
    """Run a script and record its managers, for https://ui.perfetto.dev or chrome://tracing. Exit code: the script's.

    Each process and each further manager has its own file: trace.rank-1.json, trace-2.json. Put the script's own
    options after it.
    """
    console = make_console(stderr=True)
    with reported(console):
        check_output("--output", output)
        words = [sys.executable, *command] if command[0].endswith(".py") else command
        try:
            child = subprocess.Popen(words, env={**os.environ, ENVIRONMENT: str(output.absolute())})
        except OSError as error:
            raise ConfigError(f"{command[0]}: {error.strerror}") from error
    signal.signal(signal.SIGINT, lambda *_: None)  # the terminal sends it to the script too, which decides
    signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    code = child.wait()
    found = sorted(output.absolute().parent.glob(f"{output.stem}*{output.suffix}"))
    if output.exists():
        names = ", ".join(path.name for path in found)
        console.print(f"trace: {escape(names)}; open with https://ui.perfetto.dev, or `swapper report`")
    else:
        console.print("no trace: no manager was closed after an offload")
    raise typer.Exit(code if code >= 0 else 128 - code)
