"""Measures what a step does in addition to the model's own code: the update, by the sweep, and what bytes that come take.

Updates are those of a session: the sweep itself updates a group's parameters, all in memory. So the user's own optimizers, upcast
gradients, masters, decoding and encoding of state, and slices are in it. What is updated may be in a cache, as in a step, where the
engine has just brought and checked it.
"""

from __future__ import annotations

import functools
import mmap
import os
import time
from dataclasses import replace
from statistics import median

import torch
from torch import nn

from swapper import _C
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

TRIALS, UPDATES = 5, 3
MUCH_BYTES = 16 << 20
"""Of what is mapped or checked in a trial."""
ELEMENTS, GROUP_ELEMENTS, MIN_ELEMENTS = 1 << 22, 1 << 24, 1 << 16
"""Most of a parameter, and of a group, in a trial of updates: larger parameters that may be cut are cut to it."""


# --- updates ----------------------------------------------------------------------------------------------------------


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
            (inventory.settings[id(p)], p.dtype, p.shape, *inventory.codecs[name].items()) for name, p in parameters
        )
        if kind not in known:
            known[kind] = _element_seconds(inventory, optimizers, parameters, page_bytes)
        found[group.index] = known[kind]
    return found


def _element_seconds(
    inventory: Inventory, optimizers: OptimizerSet, parameters: list[tuple[str, nn.Parameter]], page_bytes: int
) -> float:
    most = min(ELEMENTS, max(GROUP_ELEMENTS // len(parameters), MIN_ELEMENTS))
    named = []
    for name, parameter in parameters:
        rows, *others = parameter.shape or (1,)
        if inventory.forms[name].may_cut and parameter.numel() > most:
            rows = max(most * rows // parameter.numel(), 1)
        shape = (rows, *others) if parameter.shape else ()
        named.append((name, nn.Parameter(torch.empty(shape, dtype=parameter.dtype, device="meta"))))
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
    gradients = [torch.full(p.shape, 1e-3, dtype=p.dtype, device="cpu") for _, p in named]

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


# --- pages ------------------------------------------------------------------------------------------------------------


@functools.cache
def checking_seconds() -> float:
    """Return what the checksum of a byte takes."""
    memory = torch.zeros(MUCH_BYTES, dtype=torch.uint8, device="cpu")
    return min_seconds(lambda: _C.crc32_address(memory.data_ptr(), memory.nbytes), TRIALS) / MUCH_BYTES


@functools.cache
def mapping_seconds() -> float:
    """Return what the first touch of a byte takes in a new mapping of memory that is there."""

    def touch() -> float:
        began_s = time.thread_time()
        sum(memory[:: mmap.PAGESIZE])
        return time.thread_time() - began_s

    with os.fdopen(os.memfd_create("swapper-trial"), "wb") as file:
        file.truncate(MUCH_BYTES)
        times_s = []
        for _ in range(TRIALS + 1):  # the first one makes the memory
            with mmap.mmap(file.fileno(), MUCH_BYTES) as memory:
                times_s.append(touch() - touch())
    return max(median(times_s[1:]), 0.0) / MUCH_BYTES
