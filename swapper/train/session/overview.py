"""Describes a manager in words."""

from __future__ import annotations

from swapper.runtime.sizes import format_bytes
from swapper.runtime.stats import StepStats
from swapper.train.planning.plan_text import describe_models, placement_lines
from swapper.train.session.session_slot import SessionSlot


def overview(current: SessionSlot, stats: StepStats, host_bytes: int) -> str:
    """Return what `print(manager)` shows: directory, condition, models, placement, budget, last step."""
    lines = [("directory", ", ".join(map(str, current.directory.drives.directories))), ("condition", current.condition)]
    if current.run is None:
        lines.append(("host memory", f"{format_bytes(host_bytes)} at most"))
    else:
        lines += [("model", describe_models(current.run.plan)), *placement_lines(current.run.plan)]
    lines.append(("last step", f"{stats.step}: {stats.brief}" if stats.step else "none in this process"))
    return "\n".join(f"{name:<18}{text}" for name, text in lines)
