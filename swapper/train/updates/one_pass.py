"""Updates a piece of a parameter and its state in one pass of C++ without the GIL, if the optimizer is torch's Adam or AdamW.

[Note: fused AdamW] One pass decodes, does AdamW and encodes (swapper/codecs/coded_adamw.py) where both moments are stored
rounded, masters encoded too ("8bit" and "bf16"), and the optimizer is torch's own AdamW without amsgrad. On a device kernels
do the three, with the same bits. The order of operations is not torch's: results differ from codecs around torch's AdamW in
the last bits of fp32, far below what rounding the moments changes. Whether it is used follows from the optimizer and the
codecs alone, so results do not depend on placements and budgets.

[Note: as torch does] Other state of torch's Adam and AdamW, above all exact state, is updated by a pass with torch's
bits (swapper/codecs/coded_adamw.py): a piece's gradients are widened, and parameters rounded, in the same pass. What
it does not have is left to the optimizer: amsgrad, `fused`, settings that are tensors, subnormal numbers flushed to
zero. A trial compares it with torch's AdamW and Adam, once a process; if their bits differ, the optimizer itself is
run.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim import Adam, AdamW, Optimizer

from swapper.codecs import CODECS, CodedState, adamw_
from swapper.codecs.coded_adamw import TorchAdamStep, TorchArithmetic, arithmetics, torch_adam_
from swapper.device.kernels import AdamWStep
from swapper.errors import StateError
from swapper.train.layout.slices import ParameterLocations
from swapper.train.optimizer.entries import PAGED
from swapper.train.optimizer.optimizer_proxy import OptimizerProxy, Work

log = logging.getLogger("swapper")

ADAMW = "torch.optim.adamw.AdamW"
ADAM = "torch.optim.adam.Adam"
MOMENTS = {"exp_avg", "exp_avg_sq"}
"""Keys of the state, whose codecs all round."""
STATE = {"step", *MOMENTS}

States = Mapping[str, CodedState]
OnePass = Callable[[torch.Tensor, torch.Tensor, States, float, Mapping[str, Any]], int]
"""Updates (parameters, gradients, state by key, number of the step, settings of the parameter's group), flat; returns how many
elements the codes cannot hold."""


def find_pass(
    kind: str, settings: Mapping[str, Any], places: ParameterLocations, entries: Mapping[str, Any]
) -> OnePass | None:
    """Return what updates a parameter in one pass, None if the optimizer itself must.

    Args:
        kind: the optimizer's class.
        settings: of the parameter's group.
        entries: of its state.
    """
    if is_fused(kind, settings, places):
        return update_fused
    return find_torchs_pass(kind, settings) if _fits(places, entries) else None


def is_fused(kind: str, settings: Mapping[str, Any], places: ParameterLocations) -> bool:
    """Return True if swapper's AdamW updates a parameter. See [Note: fused AdamW]."""
    if not places.coded or kind != ADAMW:
        return False
    wanted = {*MOMENTS, "master"} if places.has_master else MOMENTS
    is_plain = settings.get("decoupled_weight_decay", True) and not settings.get("amsgrad")
    return places.coded.keys() == wanted and bool(is_plain)


def update_fused(
    param: torch.Tensor, gradient: torch.Tensor, states: States, step: float, settings: Mapping[str, Any]
) -> int:
    """See OnePass and [Note: fused AdamW]."""
    beta1, beta2 = settings["betas"]
    numbers = AdamWStep(
        int(step),
        float(settings["lr"]),
        (float(beta1), float(beta2)),
        float(settings["eps"]),
        float(settings["weight_decay"]),
    )
    return adamw_(
        param,
        gradient,
        states.get("master"),
        states["exp_avg"],
        states["exp_avg_sq"],
        numbers,
        factor=-1.0 if settings.get("maximize") else 1.0,
        threads=torch.get_num_threads(),
    )


def not_held(lost: int, places: ParameterLocations) -> StateError:
    """Return the error for `lost` values of a parameter's new state that its codecs cannot hold."""
    names = ", ".join(repr(coded.codec.name) for coded in places.coded.values())
    return StateError(
        f"the new state of {places.name} has {lost} values that its codecs ({names}) cannot hold: they are not finite. Look "
        "for an infinite or NaN gradient (clip it, or skip the step)"
    )


# --- [Note: as torch does] ----------------------------------------------------------------------------------------------

OTHER_ARITHMETIC = ("amsgrad", "fused", "capturable", "differentiable")
"""Settings that a pass does not have."""
NUMBERS = ("lr", "eps", "weight_decay")
MOST = 1e18
"""Of a number in the settings: larger ones may overflow in fp32, where torch raises."""


def find_torchs_pass(kind: str, settings: Mapping[str, Any]) -> OnePass | None:
    """Return the pass that does what an optimizer does with these settings of a group, None if there is none."""
    if not _has_torchs_arithmetic(kind, settings) or (arithmetic := find_arithmetic()) is None:
        return None
    return functools.partial(update_as_torch, arithmetic)


def _has_torchs_arithmetic(kind: str, settings: Mapping[str, Any]) -> bool:
    betas = settings.get("betas")
    return (
        kind in (ADAMW, ADAM)
        and not any(settings.get(name) for name in OTHER_ARITHMETIC)
        and isinstance(betas, tuple | list)
        and all(isinstance(beta, float) and 0 <= beta < 1 for beta in betas)
        and all(isinstance(settings.get(name), float | int) and 0 <= settings[name] < MOST for name in NUMBERS)
        and sys.float_info.min * 0.5 > 0  # else subnormal numbers are zeros, as of torch.set_flush_denormal
    )


def _fits(places: ParameterLocations, entries: Mapping[str, Any]) -> bool:
    """Return True if a parameter's state is torch's Adam's, in fp32 or encoded."""
    exact = {key: place.slot.spec.dtype for key, place in places.state.items()}
    keys = {*MOMENTS, "master"} if places.has_master else MOMENTS
    halves = (torch.bfloat16, torch.float16)
    return (
        {*exact, *places.coded} == keys
        and all(dtype is torch.float32 for dtype in exact.values())
        and places.param.slot.spec.dtype in (halves if places.has_master else (torch.float32,))
        and places.may_cut
        and places.others.keys() == {"step"}
        and (not entries or (entries.keys() == STATE and all(entry is PAGED for entry in entries.values())))
    )


def update_as_torch(
    arithmetic: TorchArithmetic,
    param: torch.Tensor,
    gradient: torch.Tensor,
    states: States,
    step: float,
    settings: Mapping[str, Any],
) -> int:
    """See OnePass and [Note: as torch does]."""
    numbers = step_of(step, settings)
    moments = states["exp_avg"], states["exp_avg_sq"]
    threads = torch.get_num_threads()
    return torch_adam_(param, gradient, states.get("master"), *moments, numbers, arithmetic, threads=threads)


def step_of(step: float, settings: Mapping[str, Any]) -> TorchAdamStep:
    """Return the numbers of a step with the settings of a group."""
    beta1, beta2 = settings["betas"]
    return TorchAdamStep(
        step,
        float(settings["lr"]),
        (beta1, beta2),
        float(settings["eps"]),
        float(settings["weight_decay"]),
        bool(settings["decoupled_weight_decay"]),
        bool(settings.get("maximize")),
    )


TRIAL_ELEMENTS = 40_001
"""Odd, and more than torch gives to one thread: so each of its threads has elements apart from its vector code."""
TRIAL_STEPS = 2


@functools.cache
def find_arithmetic() -> TorchArithmetic | None:
    """Return how torch computes on this processor; None if a pass cannot do as it does. See [Note: as torch does]."""
    found = next((one for one in arithmetics() if all(_is_torchs(one, *trial) for trial in _trials())), None)
    if found is None:
        log.info("Adam and AdamW over exact state are left to torch's optimizers: a trial of one pass gave other bits")
    return found


def _trials() -> list[tuple[Optimizer, torch.Tensor]]:
    """Return optimizers of each kind and the values that they begin with."""
    noise, sizes = torch.randn(
        2, TRIAL_ELEMENTS, dtype=torch.float32, device="cpu", generator=torch.Generator().manual_seed(0)
    )
    values, dummy = noise * torch.exp2(4 * sizes), [torch.zeros(1, device="cpu", requires_grad=True)]
    return [
        (AdamW(dummy, lr=3e-3, betas=(0.9, 0.99), weight_decay=0.1), values),
        (Adam(dummy, lr=3e-3, betas=(0.3, 0.95), weight_decay=0.1, maximize=True), values),
    ]


@torch.no_grad()
def _is_torchs(arithmetic: TorchArithmetic, optimizer: Optimizer, values: torch.Tensor) -> bool:
    """Return True if steps of the pass are the optimizer's, bit for bit."""
    settings, fp32 = optimizer.param_groups[0], CODECS["fp32"]
    found, wanted = values.clone(), Work(0, values.clone(), values, {})
    moments = torch.zeros_like(values), torch.zeros_like(values)
    exp_avg, exp_avg_sq = (CodedState(fp32, (moment,)) for moment in moments)
    proxy = OptimizerProxy(optimizer)
    for step in range(1, TRIAL_STEPS + 1):
        gradient = values.roll(step) / step
        torch_adam_(found, gradient, None, exp_avg, exp_avg_sq, step_of(step, settings), arithmetic)
        wanted.gradient = gradient
        proxy.update([wanted])
    ours = {"parameter": found, "exp_avg": moments[0], "exp_avg_sq": moments[1]}
    theirs = {"parameter": wanted.tensor, **wanted.state}
    return all(torch.equal(tensor.view(torch.int32), theirs[key].view(torch.int32)) for key, tensor in ours.items())
