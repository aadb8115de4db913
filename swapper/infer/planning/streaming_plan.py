"""Plans a loaded model: the tensors that stream, their ranges in the files, and the small ones that stay. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from torch import nn

from swapper.device.device_memory import place_in_storage
from swapper.formats.stored import FileRange, plan_runs
from swapper.infer.experts import ExpertWeights, are_experts, find_recipes, takes_single_experts
from swapper.infer.matching import Match, Weight
from swapper.infer.weight_rows import PARTS_IN_MEMORY, RowPartitionedLinear, can_look_up, cut
from swapper.io.tensor_bytes import SECTOR_BYTES, round_up
from swapper.modules.groups import Group, Unit, by_module, taken_parameters, working_sets

SLOTS_BYTES = 256 << 10
MIN_STAGING_BYTES = 1 << 20
MAX_STAGING_BYTES = 4 << 20
"""Bytes. The engine's staging memory is a multiple of SLOTS_BYTES, between these: choices."""
MIN_EXPERTS = 2
"""Experts that memory must hold: one in use, one being read."""
SPARE_BYTES = 4 << 20
"""Bytes left for partly filled pages when the experts' cache is sized: a choice."""
SMALL_BYTES = 64 << 10
"""Bytes. A tensor of at most this size always stays in memory: it would waste a frame, and a read of its own."""


@dataclass(frozen=True)
class StreamedGroup:
    """A group's streamed weights, and the file ranges (`runs`) that hold them; a run's places count all parts."""

    index: int
    weights: list[Weight] = field(default_factory=list)
    runs: list[FileRange] = field(default_factory=list)

    @property
    def image_bytes(self) -> int:
        """Device memory of its weights, as they are stored."""
        return place_in_storage(part.nbytes for weight in self.weights for part in weight.recipe.parts)[1]

    @property
    def made_bytes(self) -> int:
        """Memory of the results that are computed from the file's bytes while the group is in use."""
        return sum(weight.made_bytes for weight in self.weights)


@dataclass(frozen=True)
class StreamingPlan:
    """A loaded model's weights, and how each is read.

    Attributes:
        working_sets: for each unit, the groups that are leased while it runs: its own and its ancestors'.
        small: weights that stay; `small_runs` hold their parts.
        buffer_bytes: of the buffers that come from the checkpoint.
        lookups: tables of embeddings whose rows are looked up in the file.
        experts: for each layer of experts, the parameters whose experts are read one by one.
        demanded: for each expert that is a module of its own, the groups that are read when it runs.
        cuts: linear maps that are multiplied by some of their rows at a time.
        joined: files that consist of ranges of others.
    """

    groups: list[StreamedGroup]
    units: list[Unit]
    working_sets: list[tuple[int, ...]]
    small: list[Weight]
    small_runs: list[FileRange]
    buffer_bytes: int
    lookups: list[Weight] = field(default_factory=list)
    experts: list[list[ExpertWeights]] = field(default_factory=list)
    demanded: list[tuple[int, ...]] = field(default_factory=list)
    cuts: list[RowPartitionedLinear] = field(default_factory=list)
    joined: Collection[Path] = ()

    @cached_property
    def used_groups(self) -> set[int]:
        """Groups that a unit's forward needs as a whole: they have a place in the order of a pass."""
        return {group for unit in self.units for group in unit.groups} - _flat(self.demanded)

    @property
    def runs_of_used(self) -> list[list[int]]:
        """Sizes of the runs of each group, none for those that are not used as a whole."""
        used = self.used_groups
        return [[run.nbytes for run in group.runs] if group.index in used else [] for group in self.groups]

    @property
    def unplanned_bytes(self) -> list[int]:
        """Sizes of the groups that are read by rows, parts or experts; a forward may still use one as a whole."""
        apart = self.used_groups | _flat(self.demanded)
        return [sum(run.nbytes for run in g.runs) for g in self.groups if g.runs and g.index not in apart]

    @property
    def fixed_bytes(self) -> int:
        """Host memory in addition to the pool: resident weights, and the most that is converted at once."""
        return self.stored_bytes + self.made_bytes

    @property
    def stored_bytes(self) -> int:
        """The part of `fixed_bytes` that has the file's bytes."""
        small = sum(round_up(run.nbytes, SECTOR_BYTES) for run in self.small_runs)
        return small + self.buffer_bytes + self.parts_bytes

    @property
    def made_bytes(self) -> int:
        """Memory of the results computed from small weights, and of the most from others at once."""
        return self.made_at_once_bytes + sum(weight.made_bytes for weight in self.small)

    @property
    def made_at_once_bytes(self) -> int:
        """Memory of the most results that are computed while they are used."""
        made = max((sum(self.groups[g].made_bytes for g in s) for s in self.working_sets), default=0)
        return max(made, max((linear.made_bytes for linear in self.cuts), default=0))

    @property
    def images(self) -> dict[int, int]:
        """Device memory of each group that is used as a whole, by index, as its weights are stored."""
        return {g.index: g.image_bytes for g in self.groups if g.runs and g.index in self.used_groups}

    @property
    def fixed_device_bytes(self) -> int:
        """Device memory other than images: resident weights, and the most of conversions, parts and experts at once."""
        _, small_bytes = place_in_storage(part.nbytes for weight in self.small for part in weight.recipe.parts)
        return small_bytes + self.buffer_bytes + self.made_bytes + 2 * self._slot_bytes + self.min_experts_bytes

    @property
    def parts_bytes(self) -> int:
        """Memory that parts of matrices are read into."""
        return PARTS_IN_MEMORY * self._slot_bytes

    @property
    def _slot_bytes(self) -> int:
        """Memory of the largest part of a matrix."""
        return max((linear.slot_bytes for linear in self.cuts), default=0)

    @property
    def staging_bytes(self) -> int:
        """Staging memory of the engine: more if a drive may be unable to transfer some run directly."""
        runs = [run for group in self.groups for run in group.runs]
        needs_slots = any(run.file_offset % SECTOR_BYTES or run.path in self.joined for run in runs)
        most = MAX_STAGING_BYTES if needs_slots else MIN_STAGING_BYTES
        return min(most, max(SLOTS_BYTES, round_up(self.streamed_bytes // 32, SLOTS_BYTES)))

    def cache_bytes(self, budget_bytes: int) -> int:
        """Memory for experts: the rest of the budget, and at least MIN_EXPERTS of them."""
        if not self.experts and not self.demanded:
            return 0
        everything = sum(weights.stored_bytes for layer in self.experts for weights in layer)
        everything += sum(weight.recipe.stored_bytes for expert in self._expert_weights for weight in expert)
        largest = self.largest_expert_bytes
        dense = sum(nbytes for runs in self.runs_of_used for nbytes in runs)
        left = budget_bytes - self.fixed_bytes - self.staging_bytes - dense - dense // 16 - SPARE_BYTES
        return max(min(left, everything + largest), self.min_experts_bytes)

    @property
    def min_experts_bytes(self) -> int:
        """Memory of the experts that are read and used at once."""
        return MIN_EXPERTS * self.largest_expert_bytes

    @property
    def largest_expert_bytes(self) -> int:
        """Memory of one expert while it is read: its stored bytes, and the result."""
        sizes = [sum(weights.largest_bytes for weights in layer) for layer in self.experts]
        sizes += [sum(w.recipe.stored_bytes + w.made_bytes for w in expert) for expert in self._expert_weights]
        return max(sizes, default=0)

    @property
    def made_expert_bytes(self) -> int:
        """Memory of the results computed for one expert."""
        sizes = [sum(weights.made_bytes for weights in layer) for layer in self.experts]
        return max([*sizes, *(sum(w.made_bytes for w in expert) for expert in self._expert_weights)], default=0)

    @property
    def _expert_weights(self) -> list[list[Weight]]:
        """The weights of each expert that is a module of its own."""
        return [[weight for group in expert for weight in self.groups[group].weights] for expert in self.demanded]

    @property
    def streamed_bytes(self) -> int:
        return sum(run.nbytes for group in self.groups for run in group.runs)


def build_streaming_plan(model: nn.Module, matched: Match, joined: Collection[Path] = ()) -> StreamingPlan:
    """Return the plan of `model` with the tensors that `match` found; `joined` are files that consist of ranges of others."""
    by_id = {id(weight.parameter): weight for weight in matched.weights}
    small = [weight for weight in matched.weights if weight.recipe.stored_bytes <= SMALL_BYTES]
    stays = {id(weight.parameter) for weight in small}
    groups, units = by_module(model)
    units = _with_taken(groups, units)
    streamed = [_streamed(group, by_id, stays) for group in groups]
    small_runs = plan_runs([part for weight in small for part in weight.recipe.parts])
    buffer_bytes = sum(place.recipe.stored_bytes for place in matched.buffers)
    return StreamingPlan(streamed, units, _working_sets(units), small, small_runs, buffer_bytes, joined=joined)


def _with_taken(groups: Sequence[Group], units: Sequence[Unit]) -> list[Unit]:
    """Add to each unit's groups those that its own code takes from submodules; embedding tables are read on access."""
    group_of = {id(parameter): group.index for group in groups for _, parameter in group.parameters}
    for unit in units:
        if isinstance(unit.module, nn.Embedding):
            group_of.pop(id(unit.module._parameters.get("weight")), None)
    found = []
    for unit in units:
        taken = [group_of[id(p)] for p in taken_parameters(unit.module) if id(p) in group_of]
        found.append(replace(unit, groups=tuple(dict.fromkeys((*unit.groups, *taken)))))
    return found


def with_lookups(plan: StreamingPlan) -> StreamingPlan:
    """Return a plan in which embeddings look up rows instead of having their tables in memory."""
    lookups: list[Weight] = []
    units = []
    for unit in plan.units:
        weights = [weight for group in unit.groups for weight in plan.groups[group].weights]
        of_module = [w for w in weights if w.parameter is unit.module._parameters.get("weight")]
        if of_module and can_look_up(unit.module, of_module[0].recipe):
            lookups.append(of_module[0])
            unit = replace(unit, groups=())
        units.append(unit)
    return replace(plan, units=units, working_sets=_working_sets(units), lookups=lookups)


def with_single_experts(plan: StreamingPlan) -> StreamingPlan:
    """Return a plan in which experts that a layer holds in one parameter are read one by one."""
    layers: list[list[ExpertWeights]] = []
    units = []
    for unit in plan.units:
        own = {id(parameter) for parameter in unit.module._parameters.values()}
        weights = [w for group in unit.groups for w in plan.groups[group].weights if id(w.parameter) in own]
        found = [(w, find_recipes(w.name, w.parameter, w.recipe)) for w in weights]
        if found and all(recipes for _, recipes in found) and takes_single_experts(unit.module):
            layers.append([ExpertWeights(w.parameter, recipes) for w, recipes in found if recipes])
            unit = replace(unit, groups=())
        units.append(unit)
    demanded = _expert_modules(units)
    return replace(plan, units=units, working_sets=_working_sets(units, demanded), experts=layers, demanded=demanded)


def _expert_modules(units: Sequence[Unit]) -> list[tuple[int, ...]]:
    """Return the groups of each expert that is a module of its own, and whose weights no other module uses."""
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


def with_cuts(plan: StreamingPlan) -> Iterator[StreamingPlan]:
    """Yield plans in which linear maps are multiplied by parts: first only the largest, in the end all that can be."""
    users = Counter(group for unit in plan.units for group in unit.groups)
    apart = _flat(plan.demanded)
    found: dict[str, RowPartitionedLinear] = {}
    for unit in plan.units:
        weights = {id(w.parameter): w for group in unit.groups for w in plan.groups[group].weights}
        own = unit.module._parameters
        weight, bias = (weights.pop(id(own.get(name)), None) for name in ("weight", "bias"))
        linear = None if weight is None or weights else cut(unit.module, weight, bias)
        if linear is not None and all(users[group] == 1 and group not in apart for group in unit.groups):
            found[unit.name] = linear
    for nbytes in sorted({linear.stored_bytes for linear in found.values()}, reverse=True):
        chosen = {name: linear for name, linear in found.items() if linear.stored_bytes >= nbytes}
        units = [replace(unit, groups=()) if unit.name in chosen else unit for unit in plan.units]
        yield replace(plan, units=units, working_sets=_working_sets(units, plan.demanded), cuts=list(chosen.values()))


def _streamed(group: Group, by_id: dict[int, Weight], stays: set[int]) -> StreamedGroup:
    weights = [by_id[id(p)] for _, p in group.parameters if id(p) in by_id and id(p) not in stays]
    return StreamedGroup(group.index, weights, plan_runs([part for weight in weights for part in weight.recipe.parts]))


def _flat(demanded: Sequence[Sequence[int]]) -> set[int]:
    return {group for expert in demanded for group in expert}


def _working_sets(units: Sequence[Unit], demanded: Sequence[Sequence[int]] = ()) -> list[tuple[int, ...]]:
    apart = _flat(demanded)
    return [tuple(sorted(groups - apart)) for groups in working_sets(list(units))]
