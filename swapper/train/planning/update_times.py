"""Measures updates, for the prediction of a step and to choose where they run. All tensors are a trial's.

`find_update_times` has the sweep itself update parameters on memory of a trial. So what a session does is what is measured: the
user's own optimizers, upcast gradients, masters, decoding and encoding of state, slices. Pages are not in it: all is resident.

`faster_place` compares an update on the CPU with one on an accelerator, with state copied both ways: the user's own optimizer
updates some millions of fp32 elements on the CPU; and registered memory is copied to the device and back at once, as in an update
there. Those copies limit it, not its kernels.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean, median
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from swapper import _C
from swapper.codecs import CODECS, CodedState
from swapper.device.device import Device
from swapper.device.device_storage import DeviceStorage
from swapper.io.alignment import SECTOR_BYTES, round_up
from swapper.io.registered import Registration, slabs
from swapper.modules.groups import Group
from swapper.modules.operations import ColdCaches, min_seconds
from swapper.paging.pager import Pager
from swapper.paging.planning.layout import TensorSpec, plan_group
from swapper.paging.planning.schedule import Access
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
from swapper.train.optimizer.optimizer_proxy import OptimizerProxies, OptimizerProxy, Work
from swapper.train.optimizer.optimizer_set import OptimizerSet, copy_for_trial, kind_of
from swapper.train.updates.one_pass import MOMENTS, find_torchs_pass
from swapper.train.updates.sweep import Sweep

TRIAL_ELEMENTS = 1 << 22
"""Elements of a trial: with their state more than a processor's cache. A larger parameter that may be cut is cut to that."""
TRIALS = 5
SMALL_ELEMENTS = 1 << 10
"""Elements of the trials that find what an update costs whatever its size."""
SMALL_PIECES = 9
"""Pieces of a slice in the second of these trials; the first has one. The difference is of several, as it is small."""


@dataclass(frozen=True)
class UpdateTimes:
    """Seconds of updates.

    Attributes:
        element_s: for one element, by group.
        piece_s: for a parameter, or a part of one in a slice, in addition.
        slice_s: for a slice, in addition: its first piece finds the processor's cache empty.
    """

    element_s: Mapping[int, float]
    piece_s: float = 0.0
    slice_s: float = 0.0


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
    fixed: list[tuple[float, float]] = []  # of a slice, and of a piece
    for members in kinds.values():
        _, name, parameter = max(members, key=lambda member: member[2].numel())
        shape = _trial_shape(parameter, inventory.forms[name].may_cut)
        of_all = _measure(inventory, optimizers, name, parameter, shape, page_bytes)
        seconds, numel = of_all.seconds, torch.Size(shape).numel()
        if inventory.forms[name].may_cut and numel > SMALL_ELEMENTS:
            small = (SMALL_ELEMENTS // shape[-1] or 1, *shape[1:]) if len(shape) > 1 else (SMALL_ELEMENTS,)
            one, several = (
                _measure(inventory, optimizers, name, parameter, small, page_bytes, count)
                for count in (1, SMALL_PIECES)
            )
            fixed.append(fixed_seconds(one, several))
            seconds = max(seconds - of_all.slices * fixed[-1][0] - of_all.pieces * fixed[-1][1], 0.0)
        for index, _, other in members:
            element_s[index] = element_s.get(index, 0.0) + seconds / numel * other.numel()
            elements[index] = elements.get(index, 0) + other.numel()
    slice_s, piece_s = (mean(of) for of in zip(*fixed, strict=True)) if fixed else (0.0, 0.0)
    return UpdateTimes({index: seconds / elements[index] for index, seconds in element_s.items()}, piece_s, slice_s)


@dataclass(frozen=True)
class Trial:
    """The seconds of an update, and of how many slices and pieces it was."""

    seconds: float
    slices: int
    pieces: int


def fixed_seconds(one: Trial, several: Trial) -> tuple[float, float]:
    """Return what a slice, and a piece of it, take whatever their size: of a slice with one piece, and one or more with several."""
    pieces = several.pieces - several.slices * one.pieces
    piece_s = max(several.seconds - several.slices * one.seconds, 0.0) / pieces if pieces else 0.0
    piece_s = min(piece_s, one.seconds)
    return one.seconds - piece_s, piece_s


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
    inventory: Inventory,
    optimizers: OptimizerSet,
    name: str,
    like: nn.Parameter,
    shape: Sequence[int],
    page_bytes: int,
    count: int = 1,
) -> Trial:
    """Measure an update of `count` parameters of this shape, like one of the inventory."""
    with torch.no_grad():
        named = {
            f"{name}.{number}": nn.Parameter(torch.empty(tuple(shape), dtype=like.dtype, device="meta"))
            for number in range(count)
        }
    form, codecs = inventory.forms[name], inventory.codecs.get(name, {})
    group = Group(0, name, tuple(named.items()))
    params = [TensorSpec(each, "param", like.dtype, tuple(shape)) for each in named]
    specs = [
        spec
        for each, parameter in named.items()
        for spec in state_specs_of(each, parameter, updated_dtype(parameter, inventory.master_dtype), form, codecs)
    ]
    plans = [*plan_group(0, "param", params), *plan_group(0, "state", specs)]
    index = inventory.settings[id(like)]
    trial = replace(
        inventory, groups=[group], plans=plans, settings=dict.fromkeys(map(id, named.values()), index),
        staying_state=frozenset(), forms=dict.fromkeys(named, form), codecs=dict.fromkeys(named, codecs),
    )  # fmt: skip
    sections = make_sections(plans, [0] * len(plans), lambda plan: True, page_bytes)
    for section in sections:
        section.attach(torch.zeros(section.plan.nbytes, dtype=torch.uint8, device="cpu"), None)
    trainable = find_trainables(trial, find_places(sections))[0]
    proxies = OptimizerProxies(OptimizerSet([copy_for_trial(member) for member in optimizers.members]))
    counters = Counters()
    sweep = Sweep(
        [trainable], proxies, StateEntries(trial.forms), cast(Pager, _NoPager()), page_bytes, counters,
        lambda _, gradient, begin, end: gradient.view(-1)[begin:end], lambda _: None,
    )  # fmt: skip
    gradients = tuple(torch.full(tuple(shape), 1e-3, dtype=like.dtype, device="cpu") for _ in named)
    member = optimizers.locate(index)[0]

    def update() -> float:
        before_s = counters.update_s
        sweep.begin(member)
        with torch.no_grad():
            sweep.update(GroupUpdate(trainable, gradients))
        sweep.end()
        return counters.update_s - before_s

    update()  # makes the state
    slices = trainable.all_slices(page_bytes)
    return Trial(median(update() for _ in range(TRIALS)), len(slices), sum(len(part.pieces) for part in slices))


class _NoPager:
    """A pager for sections that are all resident, whose slices find the processor's cache empty."""

    def __init__(self) -> None:
        self._caches = ColdCaches()

    def lease(self, access: Access) -> None: ...

    def release(self, access: Access, changed: Collection[int] = frozenset()) -> None: ...

    def wait(self, access: Access) -> None:
        self._caches.make()


log = logging.getLogger("swapper")

ELEMENTS = 1 << 22  # of the trial: 16 MiB in fp32, more than a cache
COPIED_BYTES = 256 << 20
"""Each way: enough for a link's full speed. A quarter of the free memory of a small device."""


def faster_place(optimizer: Optimizer, device: Device) -> str:
    """Return "cpu" or "device". An optimizer without parameters, or one that cannot be tried, stays on the CPU."""
    trial = _try(optimizer)
    if trial is None:
        return "cpu"
    on_cpu_s, state_bytes = trial
    copied_s = (4 * ELEMENTS + state_bytes) * copy_seconds(device)  # parameters and state, each way
    gradients_s = copied_s * 4 * ELEMENTS / (4 * ELEMENTS + state_bytes)  # stay on the device if they are used there
    place = "device" if copied_s < on_cpu_s + gradients_s else "cpu"
    log.info(
        "update_on='auto' chose %r: for a million elements an update on the CPU takes %.3g ms, after %.3g ms for gradients, and "
        "the copies of an update on %s take %.3g ms",
        place, on_cpu_s * 1e9 / ELEMENTS, gradients_s * 1e9 / ELEMENTS, device, copied_s * 1e9 / ELEMENTS,
    )  # fmt: skip
    return place


def copy_seconds(device: Device) -> float:
    """Return the seconds of a byte that is copied to the device while another one is copied from it, in registered memory."""
    nbytes = min(COPIED_BYTES, max(round_up(device.free_bytes() // 8, SECTOR_BYTES), SECTOR_BYTES))
    arena = _C.Arena(2 * nbytes, node=device.node)
    registration = Registration(device, arena, slabs(0, 2 * nbytes, SECTOR_BYTES))
    registration.wait()
    source, target = (torch.frombuffer(arena.view(at, nbytes), dtype=torch.uint8) for at in (0, nbytes))
    storage, there = DeviceStorage(device, nbytes), device.empty(nbytes)
    up, down = device.new_stream(), device.new_stream()

    def copy() -> None:
        storage.invalidate()
        storage.fill([(0, source)], up)
        storage.all_is_queued()
        device.let_wait(down, device.record(device.current_stream()))
        device.wait_for(device.copy([(target, there)], down).over)
        storage.wait_for_copies()

    try:
        copy()
        return min_seconds(copy) / nbytes
    finally:
        device.wait_for(device.record(down))
        storage.wait_for_copies()
        storage.free()
        registration.close()
        arena.close()


def update_seconds(optimizer: Optimizer) -> float | None:
    """Return how long the optimizer takes to update one element on the CPU; None if it cannot be tried."""
    trial = _try(optimizer)
    return None if trial is None else trial[0] / ELEMENTS


def _try(optimizer: Optimizer) -> tuple[float, int] | None:
    """Return the seconds of an update of ELEMENTS, and the bytes of their state; None if the optimizer does not take them."""
    if not optimizer.param_groups or not any(group["params"] for group in optimizer.param_groups):
        return None
    proxy = OptimizerProxy(copy_for_trial(optimizer))
    tensor = torch.zeros(ELEMENTS, dtype=torch.float32, device="cpu")
    work = Work(0, tensor, torch.ones(ELEMENTS, dtype=torch.float32, device="cpu"), {})
    in_one_pass = find_torchs_pass(kind_of(optimizer), settings := optimizer.param_groups[0])

    def update() -> None:
        gradient = torch.ones(ELEMENTS, dtype=torch.float32, device="cpu")
        if in_one_pass is not None and work.state:
            states = {key: CodedState(CODECS["fp32"], (work.state[key],)) for key in MOMENTS}
            in_one_pass(tensor, gradient, states, 1.0, settings)
            return
        work.gradient = gradient
        with torch.no_grad():
            proxy.update([work])

    try:
        update()  # makes the state
    except Exception:  # it does not take such a tensor (Muon needs matrices); the probe reports unsupported optimizers
        return None
    kept = [v for v in work.state.values() if isinstance(v, torch.Tensor) and v.shape == tensor.shape]
    return min_seconds(update), tensor.nbytes * len(kept)
