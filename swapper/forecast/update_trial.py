"""Measures updates as a session does them: the sweep itself updates parameters of a trial, all in memory.

So the user's own optimizers, upcast gradients, masters, decoding and encoding of state, and slices are in it; pages are not.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch import nn

from swapper.io.tensor_bytes import SECTOR_BYTES
from swapper.modules.groups import Group
from swapper.paging.dry_run import CountingStore
from swapper.paging.host_memory import Pool
from swapper.paging.layout import TensorSpec, plan_group
from swapper.paging.pager import Pager
from swapper.paging.schedule import Schedule
from swapper.paging.virtual_drive import VirtualDrive
from swapper.runtime.counters import Counters
from swapper.train.layout.inventory import (
    Inventory,
    find_places,
    find_trainables,
    make_sections,
    state_specs_of,
    updated_dtype,
)
from swapper.train.layout.slices import GroupUpdate
from swapper.train.optimizer.entries import StateEntries
from swapper.train.optimizer.optimizer_proxy import OptimizerProxies
from swapper.train.optimizer.optimizer_set import OptimizerSet, copy_for_trial
from swapper.train.updates.sweep import Sweep

TRIAL_ELEMENTS = 1 << 22
"""Elements of a trial: with their state more than a processor's cache. A larger parameter that may be cut is cut to that."""
SMALL_ELEMENTS, SMALL_PIECES = 1 << 10, 9
"""Elements and number of the parameters whose updates show what one takes whatever its size."""
TRIALS = 5


def measure_updates(inventory: Inventory, optimizers: OptimizerSet, page_bytes: int) -> tuple[dict[int, float], float]:
    """Return the seconds of an element's update, by group, with its part of a slice; and of a piece of a slice in addition.

    One parameter of each kind is measured: of an optimizer's group, a dtype, codecs, and of a shape if it may not be cut.
    """
    kinds: dict[Any, list[tuple[int, str, nn.Parameter]]] = {}
    for group in inventory.groups:
        for name, parameter in group.parameters:
            if name in inventory.forms and id(parameter) in inventory.settings and parameter.numel():
                kinds.setdefault(_kind(inventory, name, parameter), []).append((group.index, name, parameter))
    seconds: dict[int, float] = {}
    elements: dict[int, int] = {}
    piece_s = None
    for members in kinds.values():
        _, name, largest = max(members, key=lambda member: member[2].numel())
        may_cut = inventory.forms[name].may_cut
        shape = _trial_shape(largest, TRIAL_ELEMENTS if may_cut else largest.numel())
        element_s = _measure(inventory, optimizers, name, largest, shape, page_bytes) / torch.Size(shape).numel()
        if may_cut and piece_s is None:
            small = _trial_shape(largest, SMALL_ELEMENTS)
            one, several = (
                _measure(inventory, optimizers, name, largest, small, page_bytes, count) for count in (1, SMALL_PIECES)
            )
            piece_s = max(several - one, 0.0) / (SMALL_PIECES - 1)
        for index, _, parameter in members:
            seconds[index] = seconds.get(index, 0.0) + element_s * parameter.numel()
            elements[index] = elements.get(index, 0) + parameter.numel()
    return {index: of / elements[index] for index, of in seconds.items()}, piece_s or 0.0


def _kind(inventory: Inventory, name: str, parameter: nn.Parameter) -> Any:
    codecs = tuple((key, codec.name) for key, codec in inventory.codecs.get(name, {}).items())
    may_cut = inventory.forms[name].may_cut
    return inventory.settings[id(parameter)], parameter.dtype, codecs, None if may_cut else tuple(parameter.shape)


def _trial_shape(parameter: nn.Parameter, elements: int) -> tuple[int, ...]:
    shape = tuple(parameter.shape)
    if parameter.numel() <= elements:
        return shape
    return (max(elements // max(parameter.numel() // shape[0], 1), 1), *shape[1:])


class _Gradients:
    """Gradients in memory. See GradientSource."""

    def make_ready(self, update: GroupUpdate) -> None:
        return

    def part(self, parameter: nn.Parameter, gradient: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        return gradient.view(-1)[begin:end]


def _measure(
    inventory: Inventory,
    optimizers: OptimizerSet,
    name: str,
    like: nn.Parameter,
    shape: Sequence[int],
    page_bytes: int,
    count: int = 1,
) -> float:
    """Return the seconds of an update of `count` parameters of this shape, like one of the inventory."""
    named = {
        f"{name}.{number}": nn.Parameter(torch.empty(tuple(shape), dtype=like.dtype, device="meta"))
        for number in range(count)
    }
    form, codecs = inventory.forms[name], inventory.codecs.get(name, {})
    params = [TensorSpec(each, "param", like.dtype, tuple(shape)) for each in named]
    specs = [
        spec
        for each, parameter in named.items()
        for spec in state_specs_of(each, parameter, updated_dtype(parameter, inventory.master_dtype), form, codecs)
    ]
    plans = [*plan_group(0, "param", params), *plan_group(0, "state", specs)]
    index = inventory.settings[id(like)]
    trial = replace(
        inventory, groups=[Group(0, name, tuple(named.items()))], plans=plans,
        settings=dict.fromkeys(map(id, named.values()), index), staying_state=frozenset(),
        forms=dict.fromkeys(named, form), codecs=dict.fromkeys(named, codecs),
    )  # fmt: skip
    sections = make_sections(plans, [0] * len(plans), lambda plan: True, page_bytes)
    for section in sections:
        section.attach(torch.zeros(section.plan.nbytes, dtype=torch.uint8, device="cpu"), None)
    trainable = find_trainables(trial, find_places(sections))[0]
    pager = Pager([], Pool(0, 0, SECTOR_BYTES, 0), CountingStore(VirtualDrive()), Schedule([]), Counters())
    sweep = Sweep(
        [trainable], OptimizerProxies(OptimizerSet([copy_for_trial(member) for member in optimizers.members])),
        StateEntries(trial.forms), pager, page_bytes, _Gradients(),
    )  # fmt: skip
    gradients = tuple(torch.full(tuple(shape), 1e-3, dtype=like.dtype, device="cpu") for _ in named)
    member = optimizers.locate(index)[0]

    def update() -> float:
        began_s = time.perf_counter()
        sweep.begin(member)
        with torch.no_grad():
            sweep.update(GroupUpdate(trainable, gradients))
        sweep.end()
        return time.perf_counter() - began_s

    update()  # makes the state
    return median(update() for _ in range(TRIALS))
