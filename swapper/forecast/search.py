"""Searches over forecasts: the smallest memory, the next upgrade, and settings that none dominates."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from swapper.errors import BudgetError, ConfigError, UnsupportedError
from swapper.forecast.machine import ROUGH_PAGES, Forecaster, Machine, Setting
from swapper.runtime.sizes import format_bytes
from swapper.train.layout.train_placement import PREFERENCES

GIB = 1 << 30
FAMILIES = {"param": "parameters", "state": "optimizer state", "grad": "gradients"}
TABLE_PAGES = 200
"""Rough: a table has many rows."""
CODECS, UPDATES, PASSES = ("exact", "8bit"), ("step", "deferred"), (4, 1)
EXACT_CODECS = ("exact", "split")
MEMORY_SHARES = (1, 2)
"""The table has the host memory divided by each."""


def smallest_budget(forecaster: Forecaster, machine: Machine, setting: Setting) -> int:
    """Return the smallest host memory of a node that works with these settings, as the error of a smaller one names it.

    Args: as of `Forecaster.plan`.
    """
    try:
        forecaster.plan(replace(machine, host_bytes=(1 << 20) * machine.of_node), setting)
    except BudgetError as error:
        if error.option != "host_memory" or error.smallest_bytes is None:
            raise
        return error.smallest_bytes * machine.of_node
    return (1 << 20) * machine.of_node


def find_upgrades(forecaster: Forecaster, machine: Machine, setting: Setting) -> list[dict[str, Any]]:
    """Return what each of several better machines saves, most first. All are simulated alike, and so is the machine itself.

    Args: as of `Forecaster.plan`.

    Returns:
        of each: "what", "step_s", "saved_s", and of more host memory "saved_s_a_gib".
    """

    def seconds(of: Machine) -> float:
        return forecaster.forecast(of, setting, ROUGH_PAGES).step.wall_s

    base_s, found = seconds(machine), []
    for what, better in _better(machine).items():
        step_s, more_gib = seconds(better), (better.host_bytes - machine.host_bytes) / GIB
        saved_s = base_s - step_s
        a_gib = saved_s / more_gib if more_gib else None
        found.append({"what": what, "step_s": step_s, "saved_s": saved_s, "saved_s_a_gib": a_gib})
    return sorted(found, key=lambda one: -one["saved_s"])


def _better(machine: Machine) -> dict[str, Machine]:
    drive, count, more_bytes = machine.drive, machine.drives, max(machine.host_bytes // 4 // GIB, 1) * GIB
    found = {
        f"{format_bytes(more_bytes)} more host memory": replace(machine, host_bytes=machine.host_bytes + more_bytes),
        "drives twice as fast" if count > 1 else "a drive twice as fast": replace(machine, drive=drive.faster(2)),
        "one more drive": replace(machine, drive=drive.faster((count + 1) / count), drives=count + 1),
    }
    if machine.device_bytes is not None:
        found["a link twice as fast"] = replace(machine, device=replace(machine.device, link=2 * machine.device.link))
        found["twice the device memory"] = replace(machine, device_bytes=2 * machine.device_bytes)
    if machine.ranks > 1:
        found["a network twice as fast"] = replace(machine, network=2 * machine.network)
    if machine.flops is not None:
        found["twice the operations a second"] = replace(machine, flops=2 * machine.flops)
    if machine.updates is not None:
        found["twice the updates a second"] = replace(machine, updates=2 * machine.updates)
    return found


@dataclass(frozen=True)
class SettingCosts:
    """A setting and its costs.

    Attributes:
        on_nvme: families that are placed there.
        memory_bytes: of a node: swapper's, and, without an accelerator, the inputs of matrices that autograd saves.
        written_bytes: of a node in a step.
    """

    codec: str
    update: str
    on_nvme: str
    passes: int
    step_s: float
    memory_bytes: int
    written_bytes: int

    @property
    def costs(self) -> tuple[float, int, int, bool]:
        """What is compared; the last one: results differ from those without a codec."""
        return float(f"{self.step_s:.6g}"), self.memory_bytes, self.written_bytes, self.codec not in EXACT_CODECS

    def beats(self, other: SettingCosts) -> bool:
        """Whether no cost is higher, and one is lower."""
        return self.costs != other.costs and all(ours <= its for ours, its in zip(self.costs, other.costs, strict=True))


def find_table(forecaster: Forecaster, machine: Machine, setting: Setting) -> list[SettingCosts]:
    """Return the settings that no other one beats in seconds, memory, bytes written and exactness at once, fastest first.

    Tried are codecs and times of updates, the given ones too, each placement of parameters and state, all and half of the memory,
    and more passes of fewer tokens; and gradients on NVMe where they do not fit.

    Args: as of `Forecaster.plan`.
    """
    codecs, updates = dict.fromkeys((*CODECS, setting.codec)), dict.fromkeys((*UPDATES, setting.update))
    saved_bytes = saved_for_backward(forecaster.model) * (forecaster.tokens // machine.nodes)
    if machine.device_bytes is not None:
        saved_bytes = 0  # that is counted: so more passes save none
    passes = PASSES if saved_bytes else PASSES[1:]
    rows: list[SettingCosts] = []
    for codec, (params, state), update, share in itertools.product(codecs, PREFERENCES, updates, MEMORY_SHARES):
        on = replace(machine, host_bytes=machine.host_bytes // share)
        for gradients in dict.fromkeys((setting.gradients, "nvme")):
            of = replace(setting, codec=codec, update=update, params=params, optimizer_state=state, gradients=gradients)
            try:
                for more in passes:
                    rows += _row(forecaster, on, replace(of, passes=setting.passes * more), saved_bytes, rows)
                break
            except (BudgetError, ConfigError, UnsupportedError):  # these options do not fit, or go together
                continue
    return sorted(undominated(rows), key=lambda row: row.costs)


def _row(
    forecaster: Forecaster, machine: Machine, setting: Setting, saved_bytes: int, known: Sequence[SettingCosts]
) -> list[SettingCosts]:
    """Return a row; none if one of `known` beats the least that it can be, which is not simulated then."""
    plan, here = forecaster.plan(machine, setting), machine.of_node
    memory_bytes = (plan.budget.resident_bytes + plan.budget.pool_bytes) * here + saved_bytes // setting.passes
    placement = ", ".join(family for family in FAMILIES if plan.places[family] == "nvme") or "-"
    min_s, min_bytes = forecaster.lower_bounds(machine, setting)
    row = SettingCosts(setting.codec, setting.update, placement, setting.passes, min_s, memory_bytes, min_bytes * here)
    if any(other.beats(row) for other in known):
        return []
    found = forecaster.forecast(machine, setting, TABLE_PAGES)
    return [replace(row, step_s=found.step.wall_s, written_bytes=found.written_bytes * here)]


def saved_for_backward(model: nn.Module) -> int:
    """Return the bytes of the inputs of a model's matrices for one token: what autograd saves at least, without checkpointing."""
    matrices = (p for m in model.modules() if not isinstance(m, nn.Embedding) for p in m._parameters.values())
    return sum(p.shape[1] * p.dtype.itemsize for p in matrices if p is not None and p.dim() == 2)


def undominated(rows: Sequence[SettingCosts]) -> list[SettingCosts]:
    """Return the rows that no other beats. Of those with equal costs the first stays."""
    first = {row.costs: row for row in reversed(rows)}
    return [row for row in rows if row is first[row.costs] and not any(other.beats(row) for other in rows)]
