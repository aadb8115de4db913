"""Measures what a step does in addition to the model's own code: the update, by the sweep, and what pages take of the processors.

Updates are those of a session: the sweep itself updates a group's parameters, all in memory. So the user's own optimizers, upcast
gradients, masters, decoding and encoding of state, and slices are in it. What is updated may be in a cache, as in a step, where the
engine has just brought and checked it. For pages a small model is loaded from a file, and used: hooks, leases, pages that are
mapped and first touched, and the engine's thread are in it.
"""

from __future__ import annotations

import functools
import mmap
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
from torch import nn

from swapper import _C
from swapper.errors import BudgetError, ConfigError
from swapper.infer.load_model import load
from swapper.infer.loaded_model import loaded
from swapper.io.tensor_bytes import SECTOR_BYTES
from swapper.modules.groups import Group
from swapper.paging.dry_run import DryStore
from swapper.paging.host_memory import Pool
from swapper.paging.layout import TensorSpec, plan_group
from swapper.paging.pager import Pager
from swapper.paging.schedule import Schedule
from swapper.paging.virtual_drive import PagingCosts, VirtualDrive
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
MUCH_BYTES = 64 << 20
"""Of a cache: in a step neither data nor Python's code are in one, and Python takes twice as long."""
ELEMENTS, GROUP_ELEMENTS = 1 << 22, 1 << 24
"""Most of a parameter, and of a group, in a trial of updates: larger parameters that may be cut are cut to it."""
LAYERS = 8
STAYING_BYTES, SMALL_BYTES, LARGE_BYTES = 128 << 10, 512 << 10, 4 << 20
"""Of a layer that stays, and of layers of few and of many pages, which do not."""


def cold_seconds(act: Callable[[], object]) -> float:
    """Return the median of the seconds of several calls, before each of which nothing of it is in a cache."""
    other, found = torch.zeros(MUCH_BYTES, dtype=torch.uint8, device="cpu"), []
    for _ in range(TRIALS):
        _checksum(other)
        found.append(min_seconds(act, 1))
    return median(found)


def _checksum(memory: torch.Tensor) -> None:
    _C.crc32_address(memory.data_ptr(), memory.nbytes)


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


# --- pages ------------------------------------------------------------------------------------------------------------


@functools.cache
def measure_paging(has_checksums: bool) -> PagingCosts:
    """Return what pages take, in a second or so; once a process: they are the machine's.

    Args:
        has_checksums: the engine takes checksums of what moves.
    """
    other = torch.zeros(MUCH_BYTES, dtype=torch.uint8, device="cpu")
    (use_s, _, _, _), few, many = (_layer_costs(nbytes, other) for nbytes in (STAYING_BYTES, SMALL_BYTES, LARGE_BYTES))
    mapped_byte_s = _mapped_byte_seconds()
    (few_s, few_pages), (many_s, many_pages) = ((of[0] - of[1] * mapped_byte_s, of[2]) for of in (few, many))
    page_s = max(many_s - few_s, 0.0) / (many_pages - few_pages)
    return PagingCosts(
        use_s=use_s,
        access_s=max(few_s - few_pages * page_s, use_s),
        page_s=page_s,
        mapped_byte_s=mapped_byte_s,
        transfer_s=many[3],
        checked_byte_s=min_seconds(lambda: _checksum(other), TRIALS) / MUCH_BYTES if has_checksums else 0.0,
        takes_turns=torch.get_num_threads() >= len(os.sched_getaffinity(0)),
    )


def _mapped_byte_seconds() -> float:
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


class _Layer(nn.Module):
    """A module that touches each page of its weight, and computes nothing but what empties the caches first.

    Attributes:
        apart_s: the thread's seconds of that.
    """

    apart_s = 0.0

    def __init__(self, nbytes: int, other: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(nbytes, dtype=torch.uint8, device="cpu"), requires_grad=False)
        self._other = (other,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        began_s = time.thread_time()
        _checksum(*self._other)
        _Layer.apart_s += time.thread_time() - began_s
        self.weight[:: mmap.PAGESIZE].max()
        return x


def _layer_costs(nbytes: int, other: torch.Tensor) -> tuple[float, float, float, float]:
    """Use LAYERS layers of this many bytes, with as little memory as works; small ones stay.

    Returns, of a layer, the seconds of the thread that uses it, the bytes and the pages that come, and the seconds of the engine's
    thread for a page.
    """
    model: nn.Module = nn.Sequential(*(_Layer(nbytes, other) for _ in range(LAYERS)))
    with tempfile.TemporaryDirectory(prefix="swapper-") as folder:
        path = Path(folder) / "trial.pt"
        try:
            torch.save(model.state_dict(), path)
        except (OSError, RuntimeError) as error:
            raise ConfigError(
                f"predict writes {LAYERS * nbytes >> 20} MiB to {tempfile.gettempdir()} for a trial, which failed ({error}): "
                "name a directory with space in the environment's TMPDIR"
            ) from error
        try:
            model = load(model, path, host_memory=1)
        except BudgetError as error:
            model = load(model, path, host_memory=error.smallest_bytes or MUCH_BYTES)
        try:
            counters, found = loaded(model).counters, []
            for _ in range(TRIALS + 1):
                before_bytes = counters.read_bytes["param"]
                _Layer.apart_s, began_s, all_s = 0.0, time.thread_time(), time.process_time()
                model(torch.zeros(1, device="cpu"))
                thread_s = time.thread_time() - began_s
                engine_s = time.process_time() - all_s - thread_s
                found.append((thread_s - _Layer.apart_s, engine_s, counters.read_bytes["param"] - before_bytes))
        finally:
            loaded(model).unload()
    used_s, engine_s, moved = (median(each) / LAYERS for each in zip(*found[1:], strict=True))
    pages = moved / max(counters.frame_bytes, 1)
    return used_s, moved, pages, engine_s / max(pages, 1)
