"""Draws a forecast: the timeline of a step, and what lies in which tier as stacked bars."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from swapper.cli.planning.forecast import Forecast, Machine, Setting
from swapper.cli.planning.search import FAMILIES
from swapper.errors import ConfigError
from swapper.paging.dry_run import Task
from swapper.paging.virtual_drive import DriveRates, VirtualDrive
from swapper.train.session.compute_times import ComputeTimes

SUFFIXES = (".svg", ".png", ".html")
COLORS = {"forward": "#4c78a8", "backward": "#f58518", "step": "#54a24b", "read": "#72b7b2", "write": "#e45756"}
TIERS = {"host": "host memory", "nvme": "NVMe"}


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
    """Raise ConfigError unless a picture can be drawn and put there."""
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"--picture {path}: end its name with one of {', '.join(SUFFIXES)}")
    if path.exists():
        raise ConfigError(f"--picture {path} exists: name a new file, or remove it")
    if not path.parent.is_dir():
        raise ConfigError(f"--picture {path}: its directory does not exist")
    _figure_class()


def _figure_class() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("--picture needs matplotlib: pip install 'torch-swapper[chart]'") from error
    return Figure


def draw(path: Path, machine: Machine, setting: Setting, forecast: Forecast) -> None:
    """Draw the forecast into a new file: .svg, .png, or .html, which has the picture in it.

    Raises:
        ConfigError: matplotlib is not installed; the file exists.
    """
    spans = timeline(machine, setting, forecast)
    figure = _figure_class()(figsize=(11, 5.5), layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=(3, 2))
    rows = {"computing": 2, "read": 1, "write": 0}
    for kind, begin, end in spans:
        row = rows.get(kind, rows["computing"])
        above.broken_barh([(begin, end - begin)], (row - 0.4, 0.8), facecolors=COLORS[kind])
    above.set_yticks(list(rows.values()), list(rows))
    above.set_xlabel("seconds")
    above.set_title(f"a predicted step: {forecast.step.wall_s:.2f} s")
    phases = [kind for kind in COLORS if kind not in rows]
    above.legend(handles=[_patch(COLORS[kind], kind) for kind in phases], loc="upper right", ncols=len(phases))
    for number, (tier, name) in enumerate(TIERS.items()):
        left = 0.0
        for family, nbytes in tier_bytes(forecast, tier, machine).items():
            below.barh(number, nbytes / 1e9, left=left, color=_family_color(family))
            left += nbytes / 1e9
        below.text(left, number, f" {name}: {left:.1f} GB", va="center")
    below.set_yticks(range(len(TIERS)), list(TIERS.values()))
    below.margins(x=0.25)
    below.set_xlabel("GB a node")
    names = (*FAMILIES.values(), "pool")
    below.legend(handles=[_patch(_family_color(name), name) for name in names], loc="lower right", ncols=len(names))
    _save(figure, path)


def timeline(machine: Machine, setting: Setting, forecast: Forecast) -> list[tuple[str, float, float]]:
    """Return (kind, begin, end) of what happens in the last simulated step, in seconds from its begin."""
    drive = RecordingDrive(machine.rank_drive)
    times = {of.name: getattr(forecast.compute, of.name) for of in fields(forecast.compute)}
    step = forecast.plan.simulate(drive, NotedTimes(**times, drive=drive), setting.passes)
    began_s = drive.now_s - step.wall_s
    return [(kind, max(begin - began_s, 0.0), end - began_s) for kind, begin, end in drive.spans if end > began_s]


def tier_bytes(forecast: Forecast, tier: str, machine: Machine) -> dict[str, int]:
    """Return the bytes of a node in "host" or "nvme", by what they are."""
    plan, found = forecast.plan, {}
    for family, name in FAMILIES.items():
        if plan.places[family] == tier:
            found[name] = plan.inventory.family_bytes(family) * machine.of_node
    if tier == "host":
        found["pool"] = plan.budget.pool_bytes * machine.of_node
    return found


def _family_color(name: str) -> str:
    colors = ("#4c78a8", "#54a24b", "#f58518", "#bab0ac")
    return dict(zip((*FAMILIES.values(), "pool"), colors, strict=True))[name]


def _patch(color: str, label: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(color=color, label=label)


def _save(figure: Any, path: Path) -> None:
    stream = io.BytesIO()
    figure.savefig(stream, format="svg" if path.suffix != ".png" else "png")
    content = stream.getvalue()
    if path.suffix == ".html":
        image = base64.b64encode(content).decode()
        content = (
            '<!doctype html><html lang="en"><meta charset="utf-8"><title>swapper plan</title>'
            f'<img alt="timeline of a predicted step, and tiers" src="data:image/svg+xml;base64,{image}"></html>\n'
        ).encode()
    with path.open("xb") as file:
        file.write(content)
