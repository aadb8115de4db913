"""Measures the update that a step does in addition to the model's own code, by the sweep.

Updates are those of a session: the sweep itself updates a group's parameters, all in memory. So the user's own optimizers, upcast
gradients, masters, decoding and encoding of state, and slices are in it. What is updated may be in a cache, as in a step, where the
engine has just brought and checked it.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from swapper.io.tensor_bytes import SECTOR_BYTES
from swapper.modules.groups import Group
from swapper.paging.dry_run import DryStore
from swapper.paging.host_memory import Pool
from swapper.paging.layout import TensorSpec, plan_group
from swapper.paging.pager import Pager
from swapper.paging.schedule import Schedule
from swapper.paging.virtual_drive import VirtualDrive
from swapper.runtime.counters import Counters
from swapper.train.gradients.grads import Gradients
from swapper.train.groups.processor import Processor
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
from swapper.train.planning.update_place import min_seconds
from swapper.train.updates.sweep import Sweep

UPDATES = 3
"""Of which the fastest counts."""
ELEMENTS, GROUP_ELEMENTS = 1 << 22, 1 << 24
"""Most of a parameter, and of a group, in a trial of updates: larger parameters that may be cut are cut to it."""


def measure_updates(inventory: Inventory, optimizers: OptimizerSet, page_bytes: int) -> dict[int, float]:
    """Return the seconds of an element's update, on average, by group. One of several equal groups is measured."""
    known: dict[object, float] = {}
    found: dict[int, float] = {}
    for group in inventory.groups:
        parameters = [
            (name, p) for name, p in group.parameters if name in inventory.forms and id(p) in inventory.settings
        ]
        if not any(parameter.numel() for _, parameter in parameters):
            continue
        kind = tuple(
            (
                inventory.settings[id(p)],
                p.dtype,
                p.shape,
                inventory.forms[name].may_cut,
                *inventory.codecs[name].items(),
            )
            for name, p in parameters
        )
        if kind not in known:
            known[kind] = _element_seconds(inventory, optimizers, parameters, page_bytes)
        found[group.index] = known[kind]
    return found


def _element_seconds(
    inventory: Inventory, optimizers: OptimizerSet, parameters: list[tuple[str, nn.Parameter]], page_bytes: int
) -> float:
    most = ELEMENTS
    while most > 1 << 16 and sum(min(parameter.numel(), most) for _, parameter in parameters) > GROUP_ELEMENTS:
        most //= 2
    shapes = [_shape(p, most if inventory.forms[name].may_cut else p.numel()) for name, p in parameters]
    named = [
        (name, nn.Parameter(torch.empty(shape, dtype=p.dtype, device="meta")))
        for (name, p), shape in zip(parameters, shapes, strict=True)
    ]
    specs = [
        spec
        for name, p in named
        for spec in state_specs_of(
            name, p, updated_dtype(p, inventory.master_dtype), inventory.forms[name], inventory.codecs[name]
        )
    ]
    params = [TensorSpec(name, "param", p.dtype, tuple(p.shape)) for name, p in named]
    plans = [*plan_group(0, "param", params), *plan_group(0, "state", specs)]
    sections = make_sections(plans, [0] * len(plans), lambda plan: True, page_bytes)
    for section in sections:
        section.attach(torch.zeros(section.plan.nbytes, dtype=torch.uint8, device="cpu"), None)
    settings = {id(mine): inventory.settings[id(its)] for (_, mine), (_, its) in zip(named, parameters, strict=True)}
    trial = replace(inventory, groups=[Group(0, "trial", tuple(named))], settings=settings, staying_state=frozenset())
    trainable = find_trainables(trial, find_places(sections))[0]
    pager = Pager([], Pool(0, 0, SECTOR_BYTES, 0), DryStore(VirtualDrive()), Schedule([]), Counters())
    proxies = OptimizerProxies(OptimizerSet([copy_for_trial(member) for member in optimizers.members]))
    no_slots = Gradients([], [], pager, {}, lambda: None, Processor(pager))  # gradients are tensors of their own
    sweep = Sweep([trainable], proxies, StateEntries(inventory.forms), pager, page_bytes, no_slots)
    gradients = [
        torch.full(shape, 1e-3, dtype=p.dtype, device="cpu") for (_, p), shape in zip(named, shapes, strict=True)
    ]

    def update() -> None:
        for member in sweep.members:
            of = sweep.groups_of(member)
            given = tuple(g if at in of else None for g, at in zip(gradients, trainable.settings, strict=True))
            if any(gradient is not None for gradient in given):
                sweep.begin(member)
                sweep.update(GroupUpdate(trainable, given))
                sweep.end()

    with torch.no_grad():
        update()  # makes the state
        return min_seconds(update, UPDATES) / max(sum(gradient.numel() for gradient in gradients), 1)


def _shape(parameter: nn.Parameter, most: int) -> torch.Size:
    """Return the shape of a parameter of at most this many elements, or of one row."""
    shape = parameter.shape
    if parameter.numel() <= most:
        return shape
    return torch.Size((max(most // max(parameter.numel() // shape[0], 1), 1), *shape[1:]))
