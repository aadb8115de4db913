"""Describes a manager in a few lines, and at its start what was chosen and why. Reads nothing and changes nothing."""

from __future__ import annotations

from swapper.runtime.sizes import format_bytes
from swapper.runtime.stats import StepStats
from swapper.train.session.plan import Plan
from swapper.train.session.session_slot import SessionSlot

_WHOLE = {"param": "params", "state": "optimizer_state", "grad": "gradients"}


def overview(current: SessionSlot, stats: StepStats, host_bytes: int) -> str:
    """Return what `print(manager)` shows: directory, condition, models, placement, budget, last step."""
    lines = [("directory", ", ".join(map(str, current.directory.drives.directories))), ("condition", current.condition)]
    if current.run is None:
        lines.append(("host memory", f"{format_bytes(host_bytes)} at most"))
    else:
        lines += [("model", _models(current.run.plan)), *current.run.plan.placement_lines()]
    lines.append(("last step", f"{stats.step}: {stats.brief}" if stats.step else "none in this process"))
    return "\n".join(f"{name:<18}{text}" for name, text in lines)


def chosen(plan: Plan, resources: str) -> list[tuple[str, str]]:
    """Return (what, choice and reason), for the log at the start.

    Args:
        resources: describes transfers and memory.
    """
    found = [("model", _models(plan))]
    for family, option in _WHOLE.items():
        if size := plan.inventory.family_bytes(family):
            found.append((option, f"{format_bytes(size)} on {plan.places[family]}, {_why(plan, family, option)}"))
    found += [line for line in plan.placement_lines() if line[0] not in ("parameters", "optimizer state", "gradients")]
    return [*found, ("commits", _commits(plan)), ("drive", _drive(plan)), ("resources", resources)]


def _models(plan: Plan) -> str:
    given, optimizers = plan.request.given[0], plan.request.given_optimizers
    models = given.values() if isinstance(given, dict) else given if isinstance(given, list | tuple) else [given]
    kinds = ", ".join(type(model).__name__ for model in models)
    steppers = (
        ", ".join(type(optimizer).__name__ for optimizer in optimizers) if plan.inventory.forms else "no optimizer"
    )
    return f"{kinds}, {format_bytes(plan.inventory.family_bytes('param'))} of parameters, {steppers}"


def _why(plan: Plan, family: str, option: str) -> str:
    wish, options = getattr(plan.request.options, option), plan.request.options
    if wish == plan.places[family]:
        return f"as {option}={wish!r} says"
    if wish == "device":
        return f"and on the device, as {option}={wish!r} says"
    if family == "grad":
        return (
            "by default, and where the update needs them"
            if options.update == "step"
            else f"for update={options.update!r}"
        )
    return {"host": "since it fits host_memory", "nvme": "since it does not fit host_memory with the rest"}[
        plan.places[family]
    ]


def _commits(plan: Plan) -> str:
    if plan.commit_every is None:
        why = (
            "some of what a step changes stays in memory" if plan.request.manager.commit_every == "free" else "as asked"
        )
        return f"none, {why}: a killed run resumes from its last snapshot"
    return "each step" if plan.commit_every == 1 else f"every {plan.commit_every} steps"


def _drive(plan: Plan) -> str:
    if plan.tuning is None:
        return "its speed is not known, so no step can be compared with its limit: run `swapper tune DIR` once"
    read, write = plan.tuning.read_bytes_per_s, plan.tuning.write_bytes_per_s
    return f"reads {format_bytes(read)} and writes {format_bytes(write)} a second, as `swapper tune` measured"
