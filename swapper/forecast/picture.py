"""Draws a forecast: the timeline of a step, and what lies in which tier as stacked bars."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from swapper.errors import ConfigError
from swapper.forecast.compute import ComputeTimes
from swapper.forecast.machine import Forecast, Machine, Setting
from swapper.forecast.search import FAMILIES
from swapper.forecast.step import simulate
from swapper.forecast.virtual_drive import DriveRates, VirtualDrive
from swapper.paging.dry_run import Task

SUFFIXES = (".svg", ".png", ".html")
COLORS = {"forward": "#4c78a8", "backward": "#f58518", "step": "#54a24b", "read": "#72b7b2", "write": "#e45756"}
FAMILY_COLORS = dict(zip((*FAMILIES.values(), "pool"), ("#4c78a8", "#54a24b", "#f58518", "#bab0ac"), strict=True))
TIERS = {"host": "host memory", "nvme": "NVMe"}
PAGE = b"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>swapper plan</title>
<style>
body { background: #fff; color-scheme: light; margin: 0 auto; max-width: 1200px; }
div { overflow-x: auto; }
svg { display: block; height: auto; min-width: 860px; width: 100%; }
</style>
<div>PICTURE</div>
</html>
"""
"""A picture is as wide as the window, but not narrower than its labels can be read: then it is scrolled."""


class RecordingDrive(VirtualDrive):
    """A virtual drive that notes when it reads, writes, and lets others compute.

    Attributes:
        spans: (kind, begin, end) in seconds; kinds are the phases of computing, "read" and "write". Neighbors are one.
    """

    def __init__(self, rates: DriveRates) -> None:
        super().__init__(rates)
        self.spans: list[tuple[str, float, float]] = []
        self.phase = "forward"
        self._last: dict[str, int] = {}

    def compute(self, seconds: float) -> None:
        began_s = self.now_s
        super().compute(seconds)
        self._note(self.phase, began_s)

    def _advance(self, end_s: float) -> bool:
        began_s, reads, writes = self.now_s, bool(self._reads), bool(self._writes)
        has_moved = super()._advance(end_s)
        if has_moved:
            for kind, is_busy in (("read", reads), ("write", writes)):
                if is_busy:
                    self._note(kind, began_s)
        return has_moved

    def _note(self, kind: str, began_s: float) -> None:
        last = self._last.get(kind)
        if last is not None and self.spans[last][2] >= began_s - 1e-9:
            self.spans[last] = (kind, self.spans[last][1], self.now_s)
        elif self.now_s > began_s:
            self._last[kind] = len(self.spans)
            self.spans.append((kind, began_s, self.now_s))


@dataclass(frozen=True)
class NotedTimes(ComputeTimes):
    """Times of computing that tell a drive the phase of each task."""

    drive: RecordingDrive = field(kw_only=True)

    def of(self, task: Task) -> float:
        self.drive.phase = "step" if task.updated else task.phase
        return super().of(task)


def check_picture(path: Path) -> None:
    """Raise ConfigError unless a picture can be drawn with this name."""
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"--picture {path}: end its name with one of {', '.join(SUFFIXES)}")
    _figure_class()


def _figure_class() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("--picture needs matplotlib: pip install 'torch-swapper[chart]'") from error
    return Figure


def draw(path: Path, machine: Machine, setting: Setting, forecast: Forecast) -> None:
    """Draw the forecast into a new file: .svg, .png, or .html, which has the picture in it.

    Args:
        path: of the file.
        machine, setting: as of `Forecaster.plan`.
        forecast: what is drawn.

    Raises:
        ConfigError: matplotlib is not installed; the file exists.
    """
    spans = timeline(machine, setting, forecast)
    figure = _figure_class()(figsize=(11, 5.5), layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=(3, 2))
    rows = {"computing": 2, "read": 1, "write": 0}
    for kind, color in COLORS.items():
        row = rows.get(kind, rows["computing"])
        bars = [(begin, end - begin) for what, begin, end in spans if what == kind]
        above.broken_barh(bars, (row - 0.4, 0.8), facecolors=color)
    above.set_xlim(0, forecast.step.wall_s)
    above.set_yticks(list(rows.values()), list(rows))
    above.set_xlabel("seconds")
    above.set_title(f"a predicted step: {forecast.step.wall_s:.2f} s", loc="left")
    _legend(above, {kind: color for kind, color in COLORS.items() if kind not in rows})
    for number, tier in enumerate(TIERS):
        left = 0.0
        for family, nbytes in tier_bytes(forecast, tier, machine).items():
            below.barh(number, nbytes / 1e9, left=left, color=FAMILY_COLORS[family])
            left += nbytes / 1e9
        below.annotate(f"{left:.3g} GB", (left, number), (4, 0), textcoords="offset points", va="center")
    below.set_yticks(range(len(TIERS)), list(TIERS.values()))
    below.margins(x=0.15)
    below.set_xlabel("GB a node")
    below.set_title("tiers", loc="left")
    _legend(below, FAMILY_COLORS)
    _save(figure, path)


def timeline(machine: Machine, setting: Setting, forecast: Forecast) -> list[tuple[str, float, float]]:
    """Return (kind, begin, end) of what happens in the last simulated step, in seconds from its begin.

    Args: as of `draw`.
    """
    drive = RecordingDrive(machine.rank_drive)
    times = {of.name: getattr(forecast.compute, of.name) for of in fields(forecast.compute)}
    step = simulate(forecast.plan, drive, NotedTimes(**times, drive=drive), setting.passes)
    began_s = drive.now_s - step.wall_s
    return [(kind, max(begin - began_s, 0.0), end - began_s) for kind, begin, end in drive.spans if end > began_s]


def tier_bytes(forecast: Forecast, tier: str, machine: Machine) -> dict[str, int]:
    """Return the bytes of a node in a tier, by what they are.

    Args:
        forecast, machine: as of `draw`.
        tier: "host" or "nvme".
    """
    plan, found = forecast.plan, {}
    for family, name in FAMILIES.items():
        if plan.places[family] == tier:
            found[name] = plan.inventory.family_bytes(family) * machine.of_node
    if tier == "host":
        found["pool"] = plan.budget.pool_bytes * machine.of_node
    return found


def _legend(axes: Any, colors: Mapping[str, str]) -> None:
    """Put the legend above the axes, where it hides nothing."""
    from matplotlib.patches import Patch

    handles = [Patch(color=color, label=label) for label, color in colors.items()]
    axes.legend(handles=handles, loc="lower right", bbox_to_anchor=(1, 1), ncols=len(handles), frameon=False)


def _save(figure: Any, path: Path) -> None:
    from matplotlib import rc_context

    stream = io.BytesIO()
    with rc_context({"svg.fonttype": "none"}):  # letters, not their outlines: they can be searched, and copied
        figure.savefig(stream, format="svg" if path.suffix != ".png" else "png")
    content = stream.getvalue()
    if path.suffix == ".html":
        content = PAGE.replace(b"PICTURE", content[content.index(b"<svg") :])
    with path.open("xb") as file:
        file.write(content)
