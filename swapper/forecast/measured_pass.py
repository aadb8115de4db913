"""Measures a forward and backward of a model whose weights need not be there.

[Note: measured passes] A copy of the model runs with the user's own code. Its parameters all lie in one small memory, each
somewhere else, larger than a processor's cache: so a model of which no weight exists, or that is larger than memory, takes the
time of a real one. Activations are as large as they will be. Gradients are dropped as they come.
"""

from __future__ import annotations

import copy
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import nn

from swapper.device.device import Device
from swapper.modules.groups import Unit
from swapper.runtime.free_memory import Watch, peak_resident_bytes, return_free_memory
from swapper.tensors.torch_private import is_sharded, pytree

log = logging.getLogger("swapper")

SCRATCH_BYTES = 64 << 20
"""Memory of the weights, of each dtype; more if one of them is larger. More than most caches."""
MAX_PASSES, ENOUGH_S = 5, 1.0
"""A short pass is measured this many times at most, until all have taken this many seconds. Medians count."""


@dataclass(frozen=True)
class MeasuredPass:
    """A forward, and backward, as it was.

    Attributes:
        seconds: by phase ("forward" or "backward") and group.
        peak_bytes: of memory beyond the weights; None where the system does not say.
    """

    seconds: Mapping[tuple[str, int], float]
    peak_bytes: int | None


class _Clock:
    """Divides time among phases and groups. Operations outside of units count for the group before.

    Args:
        device: what was queued there is over before another group's time begins.
    """

    def __init__(self, device: Device | None) -> None:
        self._device = device
        self.seconds: defaultdict[tuple[str, int], float] = defaultdict(float)
        self._now = "forward", 0
        self._since_s = time.perf_counter()

    def enter(self, phase: str | None = None, group: int | None = None) -> None:
        if self._device is not None:
            self._device.synchronize()
        now_s = time.perf_counter()
        self.seconds[self._now] += now_s - self._since_s
        self._since_s = now_s
        self._now = phase or self._now[0], self._now[1] if group is None else group


def measure_pass(
    model: nn.Module,
    units: Sequence[Unit],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    train: bool,
    dtypes: Mapping[int, torch.dtype] | None = None,
    device: Device | None = None,
) -> MeasuredPass:
    """Run `model(*args, **kwargs)` on a copy, and with `train` the backward of its loss. [Note: measured passes]

    The loss is the result, if that is a tensor; else its attribute or key `loss`, else its first tensor. A result of several
    elements is summed. The model and torch's random numbers are not changed.

    Args:
        model: on the meta device or the CPU.
        units: modules by name, whose time counts for their first group.
        args, kwargs: tensors may be on the meta device: then they are zeros.
        dtypes: of parameters by id, if they are to have others than now.
        device: on which it runs. Default: the CPU.

    Raises:
        Exception: what the model raises.
    """
    log.info("predict: one step of the model is measured, without its weights")
    watch = Watch()  # memory comes and goes as in a run
    clock = _Clock(device)
    where = torch.device("cpu") if device is None else device.device
    try:
        generators = [] if where.type == "cpu" else [where]
        with torch.random.fork_rng(generators, device_type=where.type), torch.set_grad_enabled(train):
            clone = _with_scratch(model, dtypes or {}, where)
            _time_units(clone, {unit.name: unit.groups[0] for unit in units if unit.groups}, clock)
            given = pytree.tree_map_only(torch.Tensor, partial(_real, where=where), (tuple(args), dict(kwargs)))
            return _measure(lambda: _run(clone, given, train, clock), clock)
    finally:
        watch.end()


def _measure(run: Callable[[], None], clock: _Clock) -> MeasuredPass:
    """Run it once for what torch makes at a first use, then for its memory and its time."""
    run()
    return_free_memory()
    before_bytes = peak_resident_bytes(reset=True)
    after_bytes = None
    found: list[Mapping[tuple[str, int], float]] = []
    began_s = time.perf_counter()
    while len(found) < MAX_PASSES and (not found or time.perf_counter() - began_s < ENOUGH_S):
        run()
        found.append(dict(clock.seconds))
        if len(found) == 1:
            after_bytes = peak_resident_bytes()
    timed = found[1:] or found  # the first one took its memory from the system
    seconds = {key: median(each.get(key, 0.0) for each in timed) for key in found[0]}
    peak_bytes = None if before_bytes is None or after_bytes is None else max(after_bytes - before_bytes, 0)
    return MeasuredPass(seconds, peak_bytes)


def _run(clone: nn.Module, given: tuple[Any, Any], train: bool, clock: _Clock) -> None:
    clock.enter("forward", 0)
    clock.seconds.clear()
    loss = loss_of(clone(*given[0], **given[1]))
    if train:
        clock.enter("backward")
        loss.backward()
    clock.enter()


def _real(tensor: torch.Tensor, where: torch.device) -> torch.Tensor:
    """Return the tensor on a device, of zeros if it has no values."""
    made = torch.zeros_like(tensor, device=where) if tensor.is_meta else tensor.detach().to(where)
    return made.requires_grad_(tensor.requires_grad)


def _with_scratch(model: nn.Module, dtypes: Mapping[int, torch.dtype], where: torch.device) -> nn.Module:
    """Return a copy of `model` whose parameters are parts of one memory for each dtype, and whose buffers are its own."""
    parameters = list(model.parameters())
    wanted = [dtypes.get(id(parameter), parameter.dtype) for parameter in parameters]
    sizes: dict[torch.dtype, int] = {}
    for parameter, dtype in zip(parameters, wanted, strict=True):
        sizes[dtype] = max(sizes.get(dtype, SCRATCH_BYTES // dtype.itemsize), parameter.numel())
    scratch = {dtype: torch.zeros(numel, dtype=dtype, device=where) for dtype, numel in sizes.items()}
    memo: dict[int, Any] = {id(buffer): _real(buffer, where).clone() for buffer in model.buffers()}
    begins = dict.fromkeys(sizes, 0)
    for parameter, dtype in zip(parameters, wanted, strict=True):
        begin = begins[dtype] if begins[dtype] + parameter.numel() <= sizes[dtype] else 0
        begins[dtype] = begin + parameter.numel()
        part = scratch[dtype][begin : begin + parameter.numel()].view(parameter.shape)
        memo[id(parameter)] = nn.Parameter(part, parameter.requires_grad)
    return _copy_unsharded(model, memo) if is_sharded(model) else copy.deepcopy(model, memo)


def _copy_unsharded(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Return a deep copy of a model as it was before `fully_shard`: its modules' own classes, without FSDP2's hooks.

    Args:
        memo: what takes the place of an object, by its id: of each parameter.
    """
    sharded = [module for module in model.modules() if is_sharded(module)]
    states = [module._get_fsdp_state() for module in sharded]  # type: ignore[operator]
    classes = [type(module) for module in sharded]
    for state in states:
        memo[id(state)] = state
    try:
        for module, cls in zip(sharded, classes, strict=True):  # FSDP2's class, FSDPModule, the module's own
            module.__class__ = cls.__mro__[2]
        clone = copy.deepcopy(model, memo)
    finally:
        for module, cls in zip(sharded, classes, strict=True):
            module.__class__ = cls
    for module in clone.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key, hook in [*hooks.items()]:
                if any(getattr(hook, "__self__", None) is state for state in states):
                    del hooks[key]
    return clone


def _time_units(model: nn.Module, group_of: Mapping[str, int], clock: _Clock) -> None:
    """Have `clock` know whose time it is: in a forward its module's, in a backward that of the module whose result's gradient
    has come."""

    def note_entering(group: int) -> Callable[..., None]:
        return lambda *_: clock.enter(group=group)

    def note_results(group: int) -> Callable[..., None]:
        def note(module: nn.Module, args: Any, result: Any) -> None:
            for leaf in pytree.tree_leaves(result):
                if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                    leaf.register_hook(note_entering(group))

        return note

    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(_drop_gradient)
    for name, module in model.named_modules():
        if name in group_of:
            module.register_forward_pre_hook(note_entering(group_of[name]), prepend=True)
            module.register_forward_hook(note_results(group_of[name]))


def _drop_gradient(parameter: torch.Tensor) -> None:
    parameter.grad = None


def loss_of(result: Any) -> torch.Tensor:
    """Return the loss of a model's result: see `measure_pass`."""
    found = result
    if not isinstance(found, torch.Tensor):
        found = result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", None)
    if not isinstance(found, torch.Tensor):
        found = next(leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor))
    return found if found.numel() == 1 else found.float().sum()
