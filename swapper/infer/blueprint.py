"""What a loaded model will consist of: which tensors stream, in which runs, and which are small enough to stay. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from torch import nn

from swapper.core.layout import SECTOR_BYTES, round_up
from swapper.infer.matching import Match, Weight
from swapper.infer.runs import Run, plan_runs
from swapper.modules.groups import Group, Unit, by_module

SMALL_BYTES = 64 << 10
"""A tensor of at most this size always stays in memory: a page of its own would waste a frame, a read of its own time."""


@dataclass(frozen=True)
class StreamedGroup:
    """A group's streamed weights, and the runs that hold them (a run's places count the parts of all `weights`)."""

    index: int
    weights: list[Weight] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)

    @property
    def made_bytes(self) -> int:
        """What is made from the file's bytes while the group is in use."""
        return sum(weight.made_bytes for weight in self.weights)


@dataclass(frozen=True)
class Blueprint:
    """All of it.

    Attributes:
        groups: every group of the model, also those of which nothing streams.
        units: every module.
        working_sets: for each unit, the groups that are leased while it runs: its own and those of the units around it.
        small: weights that stay; `small_runs` hold their parts.
        buffer_bytes: of the buffers that come from the checkpoint.
    """

    groups: list[StreamedGroup]
    units: list[Unit]
    working_sets: list[tuple[int, ...]]
    small: list[Weight]
    small_runs: list[Run]
    buffer_bytes: int

    @property
    def fixed_bytes(self) -> int:
        """Host memory beside the pool: what stays, and the most that is converted at one time."""
        small = sum(round_up(run.nbytes, SECTOR_BYTES) for run in self.small_runs)
        made = max((sum(self.groups[g].made_bytes for g in s) for s in self.working_sets), default=0)
        return small + sum(weight.made_bytes for weight in self.small) + made + self.buffer_bytes

    @property
    def streamed_bytes(self) -> int:
        return sum(run.nbytes for group in self.groups for run in group.runs)


def draw(model: nn.Module, matched: Match) -> Blueprint:
    """Return the blueprint of `model` with the tensors that `match` found."""
    by_id = {id(weight.parameter): weight for weight in matched.weights}
    small = [weight for weight in matched.weights if weight.recipe.stored_bytes <= SMALL_BYTES]
    stays = {id(weight.parameter) for weight in small}
    groups, units = by_module(model)
    streamed = [_streamed(group, by_id, stays) for group in groups]
    return Blueprint(
        streamed,
        units,
        _working_sets(units),
        small,
        plan_runs([part for weight in small for part in weight.recipe.parts]),
        sum(place.recipe.stored_bytes for place in matched.buffers),
    )


def _streamed(group: Group, by_id: dict[int, Weight], stays: set[int]) -> StreamedGroup:
    weights = [by_id[id(p)] for _, p in group.parameters if id(p) in by_id and id(p) not in stays]
    return StreamedGroup(group.index, weights, plan_runs([part for weight in weights for part in weight.recipe.parts]))


def _working_sets(units: Sequence[Unit]) -> list[tuple[int, ...]]:
    by_name = {unit.name: unit for unit in units}
    sets = []
    for unit in units:
        parts = unit.name.split(".") if unit.name else []
        around = ["", *accumulate(parts, lambda a, b: f"{a}.{b}")]
        sets.append(tuple(dict.fromkeys(g for name in around if name in by_name for g in by_name[name].groups)))
    return sets
