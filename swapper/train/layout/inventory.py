"""Lists the tensors of a model and its optimizer, to be placed. Pure: checks and lists, moves nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar, Protocol

import torch
from torch import nn

from swapper.codecs import StateCodec
from swapper.errors import ConfigError, StateError, UnsupportedError
from swapper.formats.stored import StoredTensor
from swapper.modules.groups import Group, Unit, partition
from swapper.paging.layout import SectionPlan, TensorSpec, plan_group
from swapper.paging.section import Section
from swapper.train.layout.given_values import FrozenFiles
from swapper.train.layout.model_checks import check_model, check_state
from swapper.train.layout.slices import NO_GROUP, CodedTensor, ParameterLocations, TensorLocation, Trainable
from swapper.train.layout.state_codecs import MASTER, StateCodecs, coded_kind, coded_specs
from swapper.train.optimizer.entries import StateForm
from swapper.train.optimizer.optimizer_probe import OptimizerProbe
from swapper.train.optimizer.optimizer_set import OptimizerSet, check_dtypes, check_masters, check_supported

log = logging.getLogger("swapper")

KINDS = ("param", MASTER, "grad")
"""Kinds of a tensor in addition to the keys of the optimizer's state."""


@dataclass(frozen=True)
class Inventory:
    """A model's groups and units, and the sections of all tensors.

    Attributes:
        plans: sections of parameters and optimizer state, in the order of the container.
        grad_plans: sections of gradients.
        settings: for the id of each parameter in an optimizer, the number of its group in the OptimizerSet.
        ranges: the numbers of each optimizer's groups.
        optimizer_of: for the name of each parameter in an optimizer, the optimizer's number.
        forms: for the name of each trained parameter, the form of its state.
        probe: finds the forms of the optimizer's state.
        master_dtype: dtype of master weights, or None.
        staying_state: groups whose optimizer state stays on a device; unknown before everything is placed.
        frozen: the user's files of frozen parameters, if they stay there.
        codecs: by name of a parameter and key, the codecs of the state that is stored encoded.
    """

    groups: list[Group]
    units: list[Unit]
    plans: list[SectionPlan]
    grad_plans: list[SectionPlan]
    settings: dict[int, int]
    ranges: list[range]
    optimizer_of: dict[str, int]
    forms: dict[str, StateForm]
    probe: OptimizerProbe
    master_dtype: torch.dtype | None
    staying_state: frozenset[int] = frozenset()
    frozen: FrozenFiles | None = None
    codecs: dict[str, dict[str, StateCodec]] = field(default_factory=dict)

    @property
    def names(self) -> dict[int, str]:
        """Names of all parameters, by id."""
        return {id(parameter): name for group in self.groups for name, parameter in group.parameters}

    @property
    def external(self) -> frozenset[str]:
        """Names of the parameters that are read from the user's files."""
        return frozenset(slot.spec.owner for plan in self.plans if plan.external is not None for slot in plan.slots)

    def check_files(self) -> None:
        """Raise CheckpointError if an external file of frozen parameters has changed."""
        if self.frozen is not None:
            self.frozen.check_unchanged()

    @property
    def unchanging(self) -> frozenset[int]:
        """Indices of the `plans` without trained tensors: parameters that were frozen at `offload`."""
        trained = {slot.spec.owner for plan in self.grad_plans for slot in plan.slots}
        return frozenset(
            number
            for number, plan in enumerate(self.plans)
            if plan.family == "param" and not any(slot.spec.owner in trained for slot in plan.slots)
        )

    @cached_property
    def kinds(self) -> frozenset[int]:
        """One group of each kind, the layers of a transformer being one: groups with equal sections have equal slices."""
        plans: dict[int, list[SectionPlan]] = {}
        for plan in (*self.plans, *self.grad_plans):
            plans.setdefault(plan.group, []).append(plan)
        kinds: dict[object, int] = {}
        for group in self.groups:
            number = {name: at for at, (name, _) in enumerate(group.parameters)}
            slots = [(plan, slot.offset, slot.spec) for plan in plans.get(group.index, ()) for slot in plan.slots]
            tensors = tuple(
                (plan.family, plan.dtype, plan.nbytes, offset, number[spec.owner], spec.kind, spec.shape)
                for plan, offset, spec in slots
            )
            forms = tuple(self.forms.get(name) for name in number)
            kinds.setdefault((tensors, forms, group.index in self.staying_state), group.index)
        return frozenset(kinds.values())

    def with_state_staying(self, groups: frozenset[int]) -> Inventory:
        """Return it with the state of these groups on a device; itself, with what it has found out, if that is so already."""
        return self if groups == self.staying_state else replace(self, staying_state=groups)

    def family_bytes(self, family: str) -> int:
        return sum(p.nbytes for p in (*self.plans, *self.grad_plans) if p.family == family)


class LaidOutModel(Protocol):
    """What the layout reads of a model that was given. See GivenModel."""

    is_sharded: ClassVar[bool]
    module: nn.Module
    padded_numel: Mapping[int, int]
    whole_shapes: Mapping[int, torch.Size]

    def find_external(self, frozen: FrozenFiles, wanted: Mapping[str, nn.Parameter]) -> dict[str, StoredTensor]: ...


def take_inventory(
    given: LaidOutModel,
    optimizers: OptimizerSet,
    master_weights: torch.dtype | None,
    may_be_meta: bool = False,
    before: Inventory | None = None,
    device: torch.device | None = None,
    frozen: FrozenFiles | None = None,
    state_codecs: StateCodecs | None = None,
    trained_before: Collection[str] | None = None,
) -> Inventory:
    """List everything to be placed.

    Args:
        given, optimizers: the user's.
        master_weights: torch.float32, or None.
        may_be_meta: parameters may be on the meta device: their values come later.
        before: the present inventory, if the model is offloaded already and more is to be trained: everything trained
            so far stays trained, frozen or not, and so does everything that has joined a group since.
        device: of the model, if not the CPU; it may be there already.
        frozen: files of the frozen parameters, which stay there.
        state_codecs: the codecs of the optimizer's state. Default: it is stored as it is.
        trained_before: names of the parameters that a resumed run trains: one that is frozen now keeps its state. None: the run is
            new, and a frozen parameter keeps the state that its optimizer has.

    Raises:
        ConfigError: master_weights is not None or torch.float32; or there are `frozen` files, and all is trained.
        CheckpointError: `frozen` does not fit the model.
        UnsupportedError: the model or the optimizer cannot be offloaded exactly.
        StateError: the model is offloaded already.
    """
    model = given.module
    if master_weights not in (None, torch.float32):
        raise ConfigError(f"master_weights={master_weights!r} is not known: use None or torch.float32")
    if before is None:
        check_model(model, may_be_meta, device, frozen is not None, given.is_sharded)
    for member in optimizers.members:
        check_supported(member)
    settings = _settings(model, optimizers)
    probe = OptimizerProbe(optimizers) if before is None else before.probe
    groups, units = partition(model)
    if before is not None:
        _check_same_parameters(groups, before.groups)
    with_state = _with_state(groups, optimizers, frozen is not None) if trained_before is None else trained_before
    with_gradient = _with_gradient(groups, settings, before, with_state)
    ranges = optimizers.ranges
    optimizer_of = _optimizer_of(groups, settings, ranges, before)
    external = {} if frozen is None else _find_external(frozen, given, groups, with_gradient, before is not None)
    updated_ones = [(name, p) for group in groups for name, p in group.parameters if name in with_gradient]
    known = {} if before is None else before.forms
    forms = _find_forms(updated_ones, settings, optimizers, probe, master_weights, known)
    chosen = state_codecs or StateCodecs({})
    codecs: dict[str, dict[str, StateCodec]] = {}
    param_plans: list[SectionPlan] = []
    state_plans: list[SectionPlan] = []
    grad_plans: list[SectionPlan] = []
    for group in groups:
        state: dict[int, list[TensorSpec]] = {}  # by optimizer
        for name, parameter in group.parameters:
            if name not in forms:
                continue
            updated = updated_dtype(parameter, master_weights)
            check_state(name, parameter, optimizers.state_of(parameter), forms[name], updated)
            shape = given.whole_shapes.get(id(parameter), parameter.shape)
            codecs[name] = chosen.of(name, parameter, updated, forms[name], shape)
            part = state.setdefault(optimizer_of.get(name, 0), [])
            part += state_specs_of(name, parameter, updated, forms[name], codecs[name])
        for parameters in _apart(group.parameters, with_gradient, optimizer_of):
            specs = [_spec(n, "param", p, given.padded_numel.get(id(p), 0)) for n, p in parameters]
            param_plans += plan_group(group.index, "param", [spec for spec in specs if spec.owner not in external])
            if frozen is not None:
                param_plans += frozen.plan(group.index, [(s, external[s.owner]) for s in specs if s.owner in external])
            trained = [_spec(n, "grad", p) for n, p in parameters if n in with_gradient]
            grad_plans += plan_group(group.index, "grad", trained)
        for part in state.values():
            state_plans += plan_group(group.index, "state", part)
    chosen.check_keys(forms.values(), optimizers.name)
    plans = [*param_plans, *state_plans]  # the order in which a checkpoint's pickle meets them
    return Inventory(
        groups=groups,
        units=units,
        plans=plans,
        grad_plans=grad_plans,
        settings=settings,
        ranges=ranges,
        optimizer_of=optimizer_of,
        forms=forms,
        probe=probe,
        master_dtype=master_weights,
        frozen=frozen,
        codecs=codecs,
    )


def _find_forms(
    trained: Sequence[tuple[str, nn.Parameter]],
    settings: Mapping[int, int],
    optimizers: OptimizerSet,
    probe: OptimizerProbe,
    master_weights: torch.dtype | None,
    known: Mapping[str, StateForm],
) -> dict[str, StateForm]:
    """Return the form of the state of each trained parameter: that in `known`, or else found out."""
    forms: dict[str, StateForm] = {}
    dtypes: dict[int, set[torch.dtype]] = {}  # by group of the optimizer
    for name, parameter in trained:
        if name in known:  # it may have left its group since
            forms[name] = known[name]
        elif (index := settings.get(id(parameter))) is not None:
            updated = updated_dtype(parameter, master_weights)
            forms[name] = probe.form(index, updated, parameter.dim())
            dtypes.setdefault(index, set()).add(updated)
            if updated != parameter.dtype:
                check_masters(optimizers.members[optimizers.locate(index)[0]])
    check_dtypes(optimizers, dtypes)
    return forms


def _find_external(
    frozen: FrozenFiles, given: LaidOutModel, groups: Sequence[Group], with_gradient: frozenset[str], may_be_none: bool
) -> dict[str, StoredTensor]:
    wanted = {name: p for group in groups for name, p in group.parameters if name not in with_gradient}
    if not wanted and not may_be_none:
        raise ConfigError(
            f"external= ({str(frozen.source.path)!r}) has frozen parameters, and the model has none: call requires_grad_(False) "
            "before manager.offload"
        )
    return given.find_external(frozen, wanted)


def _with_state(groups: Sequence[Group], optimizers: OptimizerSet, is_external: bool) -> set[str]:
    """Return the names of the frozen parameters whose state the optimizer keeps: they were trained, or it begins with state.

    Args:
        is_external: frozen parameters are read from the user's files, and have no state here.
    """
    found = {
        name
        for group in groups
        for name, parameter in group.parameters
        if not parameter.requires_grad and optimizers.state_of(parameter)
    }
    if found and is_external:
        log.warning(
            "external=: the optimizer's state of frozen parameters (%s) is not kept, for they are read from the files: leave them "
            "out of the optimizer, or out of external=",
            min(found),
        )
    return set() if is_external else found


def _with_gradient(
    groups: Sequence[Group], settings: dict[int, int], before: Inventory | None, with_state: Collection[str]
) -> frozenset[str]:
    """Return the names of the parameters that have, had or will have gradients. See `take_inventory`.

    Args:
        with_state: names of those that have state, frozen or not.
    """
    had = {slot.spec.owner for plan in before.grad_plans for slot in plan.slots} if before is not None else set()
    joined = settings.keys() - before.settings.keys() if before is not None else set()
    return frozenset(
        name
        for group in groups
        for name, parameter in group.parameters
        if parameter.requires_grad
        or name in had
        or id(parameter) in joined
        or (name in with_state and id(parameter) in settings)
        or (before is not None and parameter.grad is not None)
    )


def _check_same_parameters(groups: Sequence[Group], before: Sequence[Group]) -> None:
    ours, theirs = ({name: p for group in some for name, p in group.parameters} for some in (groups, before))
    if ours.keys() != theirs.keys() or any(ours[name] is not theirs[name] for name in ours):
        changed = sorted({name for name in {*ours, *theirs} if ours.get(name) is not theirs.get(name)})
        raise StateError(
            f"the model has other parameters than when it was offloaded ({', '.join(changed[:3])}): what is trained can be "
            "changed after manager.offload, the set of its parameters cannot"
        )


def _apart(
    parameters: Sequence[tuple[str, nn.Parameter]], with_gradient: frozenset[str], optimizer_of: dict[str, int]
) -> list[list[tuple[str, nn.Parameter]]]:
    """Return parts that no step changes together, in order of first appearance: frozen ones, and those of each optimizer.

    So content that never changes is separate, and a step of one optimizer touches no page of another's parameters.
    """
    kinds = {name: name in with_gradient and (optimizer_of.get(name, 0),) for name, _ in parameters}
    return [[(name, p) for name, p in parameters if kinds[name] == kind] for kind in dict.fromkeys(kinds.values())]


def _optimizer_of(
    groups: Sequence[Group], settings: dict[int, int], ranges: Sequence[range], before: Inventory | None
) -> dict[str, int]:
    """Return the optimizer of each parameter that has or, in an earlier inventory, had one."""
    found = {
        name: next(member for member, numbers in enumerate(ranges) if settings[id(parameter)] in numbers)
        for group in groups
        for name, parameter in group.parameters
        if id(parameter) in settings
    }
    return found if before is None else {**found, **before.optimizer_of}


def find_places(sections: Sequence[Section]) -> dict[tuple[str, str], TensorLocation]:
    """Return the location of each tensor by (parameter's name, kind)."""
    slots = ((section, slot) for section in sections for slot in section.plan.slots)
    return {(slot.spec.owner, slot.spec.kind): TensorLocation(section, slot) for section, slot in slots}


def find_trainables(inventory: Inventory, places: dict[tuple[str, str], TensorLocation]) -> list[Trainable]:
    """Return, for each group with trainable parameters, the locations of their state."""
    trainables = []
    for group in inventory.groups:
        found = Trainable(group.index, [], [], [])
        for name, parameter in group.parameters:
            if name not in inventory.forms:
                continue
            form = inventory.forms[name]
            coded = {key: _coded(places, name, key, c) for key, c in inventory.codecs.get(name, {}).items()}
            of_key = {key.name: places[name, key.name] for key in form.keys if key.name not in coded}
            like = {key.name for key in form.keys if key.is_like(parameter.dim())}
            state = {key: place for key, place in of_key.items() if key in like}
            if updated_dtype(parameter, inventory.master_dtype) != parameter.dtype and MASTER not in coded:
                state = {MASTER: places[name, MASTER], **state}
            others = {key: place for key, place in of_key.items() if key not in like}
            found.parameters.append(parameter)
            grad = places.get((name, "grad"))
            paged_grad = grad if grad is not None and grad.section.page_count else None
            stays = group.index in inventory.staying_state
            param = places[name, "param"]
            orders = {key.name: key.order for key in form.keys if key.order and not form.may_cut}
            found.places.append(
                ParameterLocations(name, param, state, others, form.may_cut, paged_grad, stays, coded, orders)
            )
            found.settings.append(inventory.settings.get(id(parameter), NO_GROUP))
        if found.parameters:
            trainables.append(found)
    return trainables


def _coded(places: dict[tuple[str, str], TensorLocation], name: str, key: str, codec: StateCodec) -> CodedTensor:
    numel = places[name, "param"].slot.spec.numel
    parts = tuple(places[name, coded_kind(key, codec.name, suffix)] for suffix, _, _ in codec.parts(numel))
    return CodedTensor(codec, parts, numel)


def make_sections(
    plans: Sequence[SectionPlan],
    file_offsets: Sequence[int],
    resident: Callable[[SectionPlan], bool],
    page_bytes: int,
    first_page: int = 0,
) -> list[Section]:
    """Return sections without memory; pages of those that are not `resident` are numbered from `first_page`."""
    sections = []
    for plan, offset in zip(plans, file_offsets, strict=True):
        section = Section(plan, offset, None if resident(plan) else page_bytes, first_page)
        section.guards_writes = plan.family == "param"
        first_page += section.page_count
        sections.append(section)
    return sections


def _settings(model: nn.Module, optimizers: OptimizerSet) -> dict[int, int]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    settings: dict[int, int] = {}
    for index, group in enumerate(optimizers.param_groups):
        for number, parameter in enumerate(group["params"]):
            if id(parameter) not in names:
                raise UnsupportedError(
                    f"parameter {number} of {optimizers.describe(index)} (shape {list(parameter.shape)}) is not one of the "
                    "model's: build the optimizer from model.parameters(), or offload all models, offload([model, other], ...)"
                )
            if id(parameter) in settings:
                raise UnsupportedError(
                    f"parameter {names[id(parameter)]} is in {optimizers.describe(settings[id(parameter)])} and in "
                    f"{optimizers.describe(index)}, and both would update it: give it to one of them"
                )
            settings[id(parameter)] = index
    return settings


def updated_dtype(parameter: nn.Parameter, master_weights: torch.dtype | None) -> torch.dtype:
    """Return the dtype of the tensor that the optimizer updates: the master's, if there is one."""
    narrow = master_weights is not None and parameter.dtype in (torch.bfloat16, torch.float16)
    return torch.float32 if narrow else parameter.dtype


def _spec(name: str, kind: str, parameter: nn.Parameter, padded_numel: int = 0) -> TensorSpec:
    return TensorSpec(name, kind, parameter.dtype, tuple(parameter.shape), padded_numel)


def state_specs_of(
    name: str, parameter: nn.Parameter, updated: torch.dtype, form: StateForm, codecs: dict[str, StateCodec]
) -> list[TensorSpec]:
    """Return one parameter's state in its section's order: other shapes, master, then its own shape."""
    shape = tuple(parameter.shape)
    for key in form.keys:
        if key.name in KINDS:
            raise UnsupportedError(f"the optimizer state of {name} has the key {key.name!r}, which swapper uses itself")
    specs = [(k, TensorSpec(name, k.name, k.dtype, k.shape(shape))) for k in form.keys if k.name not in codecs]
    others = [spec for key, spec in specs if not key.is_like(len(shape))]
    has_master = updated != parameter.dtype and MASTER not in codecs
    master = [TensorSpec(name, MASTER, updated, shape)] if has_master else []
    coded = [spec for key, codec in codecs.items() for spec in coded_specs(name, key, codec, shape)]
    return [*others, *master, *(spec for key, spec in specs if key.is_like(len(shape))), *coded]
