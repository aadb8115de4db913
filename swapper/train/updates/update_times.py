"""Measures how long the sweep takes to update a parameter on this processor: the sweep itself, on memory of a trial.

So what a session does is what is measured: the user's own optimizers, upcast gradients, masters, decoding and encoding of state,
slices. Pages are not in it: all of a trial's memory is resident.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import nn

from swapper.modules.groups import Group
from swapper.modules.operations import least_seconds
from swapper.paging.pager import Pager
from swapper.paging.planning.layout import TensorSpec, plan_group
from swapper.runtime.counters import Counters
from swapper.train.layout.inventory import (
    Inventory,
    find_places,
    find_trainables,
    make_sections,
    state_specs_of,
    updated_dtype,
)
from swapper.train.optimizer.entries import StateEntries
from swapper.train.optimizer.optimizer_probe import copy_for_trial
from swapper.train.optimizer.optimizer_proxy import OptimizerProxies
from swapper.train.optimizer.optimizer_set import OptimizerSet
from swapper.train.updates.sweep import GroupUpdate, Sweep

TRIAL_ELEMENTS = 1 << 22
"""Elements of a trial: with their state more than a processor's cache. A larger parameter that may be cut is cut to that."""
SMALL_ELEMENTS = 1 << 10
"""Elements of the trial that finds what an update costs whatever its size."""


@dataclass(frozen=True)
class UpdateTimes:
    """Seconds of updates.

    Attributes:
        element_s: for one element, by group.
        parameter_s: for a parameter, or a part of one in a slice, in addition.
    """

    element_s: Mapping[int, float]
    parameter_s: float = 0.0


def find_update_times(inventory: Inventory, optimizers: OptimizerSet, page_bytes: int) -> UpdateTimes:
    """Measure one parameter of each kind: of an optimizer's group, a dtype, codecs, and of a shape if it may not be cut.

    Others of its kind count by their elements.
    """
    kinds: dict[Any, list[tuple[int, str, nn.Parameter]]] = {}
    for group in inventory.groups:
        for name, parameter in group.parameters:
            if name in inventory.forms and id(parameter) in inventory.settings and parameter.numel():
                kinds.setdefault(_kind(inventory, name, parameter), []).append((group.index, name, parameter))
    element_s: dict[int, float] = {}
    elements: dict[int, int] = {}
    parameter_s = 0.0
    for members in kinds.values():
        _, name, parameter = max(members, key=lambda member: member[2].numel())
        shape = _trial_shape(parameter, inventory.forms[name].may_cut)
        seconds, numel = _measure(inventory, optimizers, name, parameter, shape, page_bytes), torch.Size(shape).numel()
        if inventory.forms[name].may_cut and numel > SMALL_ELEMENTS:
            small = (SMALL_ELEMENTS // shape[-1] or 1, *shape[1:]) if len(shape) > 1 else (SMALL_ELEMENTS,)
            fixed = _measure(inventory, optimizers, name, parameter, small, page_bytes)
            parameter_s = max(parameter_s, fixed)
            seconds = max(seconds - fixed, 0.0)
        for index, _, other in members:
            element_s[index] = element_s.get(index, 0.0) + seconds / numel * other.numel()
            elements[index] = elements.get(index, 0) + other.numel()
    return UpdateTimes({index: seconds / elements[index] for index, seconds in element_s.items()}, parameter_s)


def _kind(inventory: Inventory, name: str, parameter: nn.Parameter) -> Any:
    codecs = tuple((key, codec.name) for key, codec in inventory.codecs.get(name, {}).items())
    may_cut = inventory.forms[name].may_cut
    return inventory.settings[id(parameter)], parameter.dtype, codecs, None if may_cut else tuple(parameter.shape)


def _trial_shape(parameter: nn.Parameter, may_cut: bool) -> tuple[int, ...]:
    shape = tuple(parameter.shape)
    if not may_cut or parameter.numel() <= TRIAL_ELEMENTS:
        return shape
    row = max(parameter.numel() // shape[0], 1)
    return (max(TRIAL_ELEMENTS // row, 1), *shape[1:])


def _measure(
    inventory: Inventory, optimizers: OptimizerSet, name: str, like: nn.Parameter, shape: Sequence[int], page_bytes: int
) -> float:
    """Return the seconds of an update of a parameter of this shape, like one of the inventory."""
    with torch.no_grad():
        parameter = nn.Parameter(torch.empty(tuple(shape), dtype=like.dtype, device="meta"))
    form, codecs = inventory.forms[name], inventory.codecs.get(name, {})
    group = Group(0, name, ((name, parameter),))
    specs = state_specs_of(name, parameter, updated_dtype(parameter, inventory.master_dtype), form, codecs)
    param = TensorSpec(name, "param", parameter.dtype, tuple(shape))
    plans = [*plan_group(0, "param", [param]), *plan_group(0, "state", specs)]
    settings = {id(parameter): inventory.settings[id(like)]}
    trial = replace(inventory, groups=[group], plans=plans, settings=settings, staying_state=frozenset())
    sections = make_sections(plans, [0] * len(plans), lambda plan: True, page_bytes)
    for section in sections:
        section.attach(torch.zeros(section.plan.nbytes, dtype=torch.uint8), None)
    trainable = find_trainables(trial, find_places(sections))[0]
    proxies = OptimizerProxies(OptimizerSet([copy_for_trial(member) for member in optimizers.members]))
    sweep = Sweep(
        [trainable], proxies, StateEntries({name: form}), cast(Pager, _NoPager()), page_bytes, Counters(),
        lambda _, gradient, begin, end: gradient.view(-1)[begin:end], lambda _: None,
    )  # fmt: skip
    gradients = (torch.full(tuple(shape), 1e-3, dtype=like.dtype),)
    member = optimizers.locate(settings[id(parameter)])[0]

    def update() -> None:
        sweep.begin(member)
        with torch.no_grad():
            sweep.update(GroupUpdate(trainable, gradients))
        sweep.end()

    update()  # makes the state
    return least_seconds(update, times=3)


class _NoPager:
    """A pager for sections that are all resident."""

    def lease(self, access: Any) -> None: ...

    def release(self, access: Any, changed: Any = frozenset()) -> None: ...

    def wait(self, access: Any) -> None: ...
