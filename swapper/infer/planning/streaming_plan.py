"""What a loaded model will consist of: which tensors stream, in which runs, and which are small enough to stay. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import cast

from torch import nn

from swapper.device.device_storage import place_in_storage
from swapper.formats.read_plan import FileRange, plan_runs
from swapper.infer.mapping.matching import Match, Recipe, Weight
from swapper.infer.operators.embedding_rows import can_look_up
from swapper.infer.operators.experts import ExpertWeights, are_experts, find_recipes, takes_single_experts
from swapper.infer.operators.row_partitioned import PARTS_IN_MEMORY, RowPartitionedLinear, cut
from swapper.io.alignment import SECTOR_BYTES, round_up
from swapper.modules.groups import Group, Unit, by_module, taken_parameters

SLOTS_BYTES = 256 << 10
LEAST_STAGING_BYTES = 1 << 20
MOST_STAGING_BYTES = 4 << 20
LEAST_EXPERTS = 2
SPARE_BYTES = 4 << 20
SMALL_BYTES = 64 << 10
"""A tensor of at most this size always stays in memory: a page of its own would waste a frame, a read of its own time."""


@dataclass(frozen=True)
class StreamedGroup:
    """A group's streamed weights, and the runs that hold them (a run's places count the parts of all `weights`)."""

    index: int
    weights: list[Weight] = field(default_factory=list)
    runs: list[FileRange] = field(default_factory=list)

    @property
    def image_bytes(self) -> int:
        """What its weights take on a device, as they are stored."""
        return place_in_storage(part.nbytes for weight in self.weights for part in weight.recipe.parts)[1]

    @property
    def made_bytes(self) -> int:
        """What is made from the file's bytes while the group is in use."""
        return sum(weight.made_bytes for weight in self.weights)


@dataclass(frozen=True)
class StreamingPlan:
    """All of it.

    Attributes:
        groups: every group of the model, also those of which nothing streams.
        units: every module.
        working_sets: for each unit, the groups that are leased while it runs: its own and those of the units around it.
        small: weights that stay; `small_runs` hold their parts.
        buffer_bytes: of the buffers that come from the checkpoint.
        experts: for each layer of experts, the parameters whose experts are read one by one.
        demanded: for each expert that is a module of its own, the groups that are read when it runs.
        lookups: embeddings whose rows are looked up in the file, with their tables' recipes.
        cuts: linear maps that are multiplied by some of their rows at a time.
        joined: files that lie in stretches of others.
    """

    groups: list[StreamedGroup]
    units: list[Unit]
    working_sets: list[tuple[int, ...]]
    small: list[Weight]
    small_runs: list[FileRange]
    buffer_bytes: int
    lookups: list[tuple[nn.Embedding, Recipe]] = field(default_factory=list)
    experts: list[list[ExpertWeights]] = field(default_factory=list)
    demanded: list[tuple[int, ...]] = field(default_factory=list)
    cuts: list[RowPartitionedLinear] = field(default_factory=list)
    joined: Collection[Path] = ()

    @cached_property
    def used_groups(self) -> set[int]:
        """Groups that some unit's forward needs as a whole, and that are in the order of a pass."""
        return {group for unit in self.units for group in unit.groups} - _flat(self.demanded)

    @property
    def runs_of_used(self) -> list[list[int]]:
        """Sizes of the runs of each group, none for those that are not used as a whole."""
        used = self.used_groups
        return [[run.nbytes for run in group.runs] if group.index in used else [] for group in self.groups]

    @property
    def unplanned_bytes(self) -> list[int]:
        """Sizes of the groups that are read by rows, parts or experts, and that a forward may use as a whole all the same."""
        apart = self.used_groups | _flat(self.demanded)
        return [
            sum(run.nbytes for run in group.runs) for group in self.groups if group.runs and group.index not in apart
        ]

    @property
    def fixed_bytes(self) -> int:
        """Host memory beside the pool: what stays, and the most that is converted at one time."""
        return self.stored_bytes + self.made_bytes

    @property
    def stored_bytes(self) -> int:
        """Of `fixed_bytes`, what is as the file has it."""
        small = sum(round_up(run.nbytes, SECTOR_BYTES) for run in self.small_runs)
        return small + self.buffer_bytes + self.parts_bytes

    @property
    def made_bytes(self) -> int:
        """What is made of small weights, and the most that is made of others at one time."""
        made = max((sum(self.groups[g].made_bytes for g in s) for s in self.working_sets), default=0)
        made = max(made, max((linear.made_bytes for linear in self.cuts), default=0))
        return made + sum(weight.made_bytes for weight in self.small)

    @property
    def images(self) -> dict[int, int]:
        """For each group that is used as a whole, what its weights take on a device, as they are stored."""
        return {
            group.index: group.image_bytes for group in self.groups if group.runs and group.index in self.used_groups
        }

    @property
    def fixed_device_bytes(self) -> int:
        """What a device has beside images: what stays, and the most of conversions, parts of matrices and experts at one time."""
        _, small_bytes = place_in_storage(part.nbytes for weight in self.small for part in weight.recipe.parts)
        parts_bytes = max((linear.slot_bytes for linear in self.cuts), default=0)
        return (
            small_bytes + self.buffer_bytes + self.made_bytes + parts_bytes + LEAST_EXPERTS * self.largest_expert_bytes
        )

    @property
    def parts_bytes(self) -> int:
        """Memory that parts of matrices are read into."""
        return PARTS_IN_MEMORY * max((linear.slot_bytes for linear in self.cuts), default=0)

    @property
    def staging_bytes(self) -> int:
        """Slots of the engine: more where a run lies where a drive may not be able to put it by itself."""
        runs = [run for group in self.groups for run in group.runs]
        needs_slots = any(run.file_offset % SECTOR_BYTES or run.path in self.joined for run in runs)
        most = MOST_STAGING_BYTES if needs_slots else LEAST_STAGING_BYTES
        return min(most, max(SLOTS_BYTES, round_up(self.streamed_bytes // 32, SLOTS_BYTES)))

    def cache_bytes(self, budget_bytes: int) -> int:
        """Memory for experts: what all else leaves, at least that of a few."""
        if not self.experts and not self.demanded:
            return 0
        everything = sum(weights.stored_bytes for layer in self.experts for weights in layer)
        everything += sum(weight.recipe.stored_bytes for expert in self._expert_weights for weight in expert)
        largest = self.largest_expert_bytes
        dense = sum(nbytes for runs in self.runs_of_used for nbytes in runs)
        left = budget_bytes - self.fixed_bytes - self.staging_bytes - dense - dense // 16 - SPARE_BYTES
        return max(min(left, everything + largest), LEAST_EXPERTS * largest)

    @property
    def largest_expert_bytes(self) -> int:
        """What one expert takes while it is read: what is stored, and what is made of it."""
        sizes = [sum(weights.largest_bytes for weights in layer) for layer in self.experts]
        sizes += [sum(w.recipe.stored_bytes + w.made_bytes for w in expert) for expert in self._expert_weights]
        return max(sizes, default=0)

    @property
    def _expert_weights(self) -> list[list[Weight]]:
        """Of each expert that is a module of its own."""
        return [[weight for group in expert for weight in self.groups[group].weights] for expert in self.demanded]

    @property
    def streamed_bytes(self) -> int:
        return sum(run.nbytes for group in self.groups for run in group.runs)


def build_streaming_plan(model: nn.Module, matched: Match, joined: Collection[Path] = ()) -> StreamingPlan:
    """Return the blueprint of `model` with the tensors that `match` found; `joined` are files that lie in stretches of others."""
    by_id = {id(weight.parameter): weight for weight in matched.weights}
    small = [weight for weight in matched.weights if weight.recipe.stored_bytes <= SMALL_BYTES]
    stays = {id(weight.parameter) for weight in small}
    groups, units = by_module(model)
    units = _with_taken(groups, units)
    streamed = [_streamed(group, by_id, stays) for group in groups]
    return StreamingPlan(
        streamed,
        units,
        _working_sets(units),
        small,
        plan_runs([part for weight in small for part in weight.recipe.parts]),
        sum(place.recipe.stored_bytes for place in matched.buffers),
        joined=joined,
    )


def _with_taken(groups: Sequence[Group], units: Sequence[Unit]) -> list[Unit]:
    """Have each unit need also what its own code takes of its submodules; tables of embeddings are brought when that happens."""
    group_of = {id(parameter): group.index for group in groups for _, parameter in group.parameters}
    for unit in units:
        if isinstance(unit.module, nn.Embedding):
            group_of.pop(id(unit.module._parameters["weight"]), None)
    found = []
    for unit in units:
        taken = [group_of[id(p)] for p in taken_parameters(unit.module) if id(p) in group_of]
        found.append(replace(unit, groups=tuple(dict.fromkeys((*unit.groups, *taken)))))
    return found


def with_lookups(blueprint: StreamingPlan) -> StreamingPlan:
    """Return a blueprint in which embeddings look up rows instead of having their tables in memory."""
    lookups: list[tuple[nn.Embedding, Recipe]] = []
    units = []
    for unit in blueprint.units:
        weights = [weight for group in unit.groups for weight in blueprint.groups[group].weights]
        of_module = [w for w in weights if w.parameter is unit.module._parameters.get("weight")]
        if of_module and can_look_up(unit.module, of_module[0].recipe):
            lookups.append((cast(nn.Embedding, unit.module), of_module[0].recipe))
            unit = replace(unit, groups=())
        units.append(unit)
    return replace(blueprint, units=units, working_sets=_working_sets(units), lookups=lookups)


def with_single_experts(blueprint: StreamingPlan) -> StreamingPlan:
    """Return a blueprint in which experts that a layer holds in one parameter are read one by one."""
    layers: list[list[ExpertWeights]] = []
    units = []
    for unit in blueprint.units:
        own = {id(parameter) for parameter in unit.module._parameters.values()}
        weights = [w for group in unit.groups for w in blueprint.groups[group].weights if id(w.parameter) in own]
        found = [(w, find_recipes(w.name, w.parameter, w.recipe)) for w in weights]
        if found and all(recipes for _, recipes in found) and takes_single_experts(unit.module):
            layers.append([ExpertWeights(w.parameter, recipes) for w, recipes in found if recipes])
            unit = replace(unit, groups=())
        units.append(unit)
    demanded = _expert_modules(units)
    return replace(
        blueprint, units=units, working_sets=_working_sets(units, demanded), experts=layers, demanded=demanded
    )


def _expert_modules(units: Sequence[Unit]) -> list[tuple[int, ...]]:
    """Return the groups of each expert that is a module of its own, and whose weights nobody else uses."""
    lists = [unit.name for unit in units if are_experts(unit.name, unit.module)]
    users: dict[int, set[str]] = {}
    for unit in units:
        of_list = next((name for name in lists if unit.name.startswith(f"{name}.")), None)
        expert = "" if of_list is None else f"{of_list}.{unit.name[len(of_list) + 1 :].split('.')[0]}"
        for group in unit.groups:
            users.setdefault(group, set()).add(expert)
    experts: dict[str, list[int]] = {}
    for group, names in users.items():
        if len(names) == 1 and "" not in names:
            experts.setdefault(next(iter(names)), []).append(group)
    return [tuple(groups) for groups in experts.values()]


def with_cuts(blueprint: StreamingPlan) -> Iterator[StreamingPlan]:
    """Yield blueprints in which linear maps are multiplied by parts: first only the largest, in the end all that can be."""
    users = Counter(group for unit in blueprint.units for group in unit.groups)
    apart = _flat(blueprint.demanded)
    found: dict[str, RowPartitionedLinear] = {}
    for unit in blueprint.units:
        weights = {id(w.parameter): w.recipe for group in unit.groups for w in blueprint.groups[group].weights}
        own = unit.module._parameters
        weight, bias = (weights.pop(id(own.get(name)), None) for name in ("weight", "bias"))
        linear = None if weight is None or weights else cut(unit.module, weight, bias)
        if linear is not None and all(users[group] == 1 and group not in apart for group in unit.groups):
            found[unit.name] = linear
    for nbytes in sorted({linear.stored_bytes for linear in found.values()}, reverse=True):
        chosen = {name: linear for name, linear in found.items() if linear.stored_bytes >= nbytes}
        units = [replace(unit, groups=()) if unit.name in chosen else unit for unit in blueprint.units]
        yield replace(
            blueprint, units=units, working_sets=_working_sets(units, blueprint.demanded), cuts=list(chosen.values())
        )


def _streamed(group: Group, by_id: dict[int, Weight], stays: set[int]) -> StreamedGroup:
    weights = [by_id[id(p)] for _, p in group.parameters if id(p) in by_id and id(p) not in stays]
    return StreamedGroup(group.index, weights, plan_runs([part for weight in weights for part in weight.recipe.parts]))


def _flat(demanded: Sequence[Sequence[int]]) -> set[int]:
    return {group for expert in demanded for group in expert}


def _working_sets(units: Sequence[Unit], demanded: Sequence[Sequence[int]] = ()) -> list[tuple[int, ...]]:
    apart = _flat(demanded)
    by_name = {unit.name: unit for unit in units}
    sets = []
    for unit in units:
        parts = unit.name.split(".") if unit.name else []
        around = ["", *accumulate(parts, lambda a, b: f"{a}.{b}")]
        sets.append(
            tuple(
                dict.fromkeys(g for name in around if name in by_name for g in by_name[name].groups if g not in apart)
            )
        )
    return sets
