"""Defines the update of some elements of a parameter, and does it in one pass where that is possible.

In host memory that is a pass of C++ without the GIL, if the optimizer is torch's Adam or AdamW.

[Note: fused AdamW] One pass decodes, does AdamW and encodes (swapper/codecs/coded_adamw.py) where both moments are stored
rounded, masters encoded too ("8bit" and "bf16"), and the optimizer is torch's own AdamW without amsgrad. On a device kernels
do the three, with the same bits. The order of operations is not torch's: results differ from codecs around torch's AdamW in
the last bits of fp32, far below what rounding the moments changes. Whether it is used follows from the optimizer and the
codecs alone, so results do not depend on placements and budgets.

[Note: as torch does] Other state of torch's Adam and AdamW, above all exact state, is updated by a pass with torch's bits
(swapper/codecs/coded_adamw.py): a piece's gradients are widened, and parameters rounded, in the same pass. What it does not have
is left to the optimizer: amsgrad, `fused`, settings that are tensors, subnormal numbers flushed to zero. A trial compares it
with torch's AdamW and Adam, once a process; if their bits differ, the optimizer itself is run.

[Note: chosen AdamW] With update_with="kernel" a device updates with swapper's own AdamW (device/kernels.py) too: one pass over a
slice instead of torch's many. Its order of operations is not torch's, so it is never chosen automatically. The state is
torch.optim.AdamW's, with the same keys: `state_dict` shows it, and a run may resume with either. It reads gradients after torch's
own clipping and unscaling, in their dtype, wherever they were: results do not depend on where anything lives.
"""

from __future__ import annotations

import functools
import logging
import sys
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Adam, AdamW, Optimizer

from swapper.codecs import CODECS, CodedState, adamw_
from swapper.codecs.coded_adamw import TorchAdamStep, TorchArithmetic, arithmetics, torch_adam_
from swapper.device.kernels import PARAMETERS, AdamWSlice, AdamWStep, kernel, update_, uses_kernel
from swapper.errors import ConfigError, StateError, UnsupportedError
from swapper.train.layout.slices import ParameterLocations
from swapper.train.optimizer.entries import PAGED
from swapper.train.optimizer.optimizer_proxy import OptimizerProxy, Work

log = logging.getLogger("swapper")

ADAMW = "torch.optim.adamw.AdamW"
ADAM = "torch.optim.adam.Adam"
MOMENTS = {"exp_avg", "exp_avg_sq"}
"""Keys of the state, whose codecs all round."""
STATE = {"step", *MOMENTS}


@dataclass(slots=True)
class Update:
    """The update of elements [begin, end) of a parameter.

    Attributes:
        work: the optimizer's input.
        places: the parameter's.
        state_tensors: in sections, by key: the optimizer's new state is stored there.
        target: of the updated tensor.
        rounded: the parameter's elements, if `target` is a master.
        decoded: state that is stored encoded, by key, for as long as the run: the new values are stored there first.
        by_kernel: swapper's AdamW updates it, and writes `rounded` too.
    """

    work: Work
    places: ParameterLocations
    begin: int
    end: int
    state_tensors: dict[str, torch.Tensor]
    target: torch.Tensor
    rounded: torch.Tensor | None
    decoded: dict[str, torch.Tensor] = field(default_factory=dict)
    by_kernel: bool = False


ALIGNMENT_ELEMENTS = 16
"""Elements. A gradient begins on a cache line, as separately allocated memory would."""


class UpcastBuffer:
    """Upcasts gradients to the dtype of the updated tensors, in one memory for all gradients of a run of the optimizer.

    So that memory stays in the processor's cache, and the heap allocates no tensor for each run. Owns memory for
    `numel` elements of the last requested dtype, allocated at the first use.
    """

    def __init__(self, numel: int) -> None:
        self._numel = numel
        self._memory: torch.Tensor | None = None
        self._used = 0

    def begin_run(self) -> None:
        """Begin a run: results of earlier calls are not used any more."""
        self._used = 0

    def widen(self, gradient: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the gradient in `dtype`: itself, a copy valid until the next `begin_run`, or, if too large, its own
        copy."""
        if gradient.dtype == dtype:
            return gradient
        begin, end = self._used, self._used + gradient.numel()
        if end > self._numel or (begin > 0 and (self._memory is None or self._memory.dtype != dtype)):
            return gradient.to(dtype)
        if self._memory is None or self._memory.dtype != dtype:
            self._memory = torch.empty(self._numel, dtype=dtype, device="cpu")
        self._used = -(-end // ALIGNMENT_ELEMENTS) * ALIGNMENT_ELEMENTS
        return self._memory[begin:end].view(gradient.shape).copy_(gradient)


# --- one pass ---------------------------------------------------------------------------------------------------------

States = Mapping[str, CodedState]
OnePass = Callable[[torch.Tensor, torch.Tensor, States, float], int]
"""Updates (parameters, gradients, state by key, number of the step), flat, by the settings of a group; returns how many elements
the codes cannot hold."""


@dataclass(frozen=True, slots=True)
class AllowedPasses:
    """What the settings of a group allow in a step. (What a parameter's state allows is decided once.)

    Attributes:
        fused: updates those whose state is all rounded. [Note: fused AdamW]
        torchs: updates others that fit. [Note: as torch does]
        reads_once: the optimizer itself reads memory once, as torch's fused ones do.
    """

    fused: OnePass | None
    torchs: OnePass | None
    reads_once: bool


def find_passes(kind: str, settings: Mapping[str, Any]) -> AllowedPasses:
    """Return what updates in one pass with these settings of a group of an optimizer of class `kind`."""
    fused = functools.partial(update_fused, settings) if is_fused(kind, settings) else None
    return AllowedPasses(fused, find_torchs_pass(kind, settings), bool(settings.get("fused")))


def is_fused(kind: str, settings: Mapping[str, Any]) -> bool:
    """Return True if swapper's AdamW updates parameters whose state `is_rounded`. See [Note: fused AdamW]."""
    is_plain = settings.get("decoupled_weight_decay", True) and not settings.get("amsgrad")
    return kind == ADAMW and bool(is_plain)


def is_rounded(places: ParameterLocations) -> bool:
    """Return True if both moments of a parameter, and its master, are stored encoded."""
    return places.coded.keys() == ({*MOMENTS, "master"} if places.has_master else MOMENTS)


def update_fused(
    settings: Mapping[str, Any], param: torch.Tensor, gradient: torch.Tensor, states: States, step: float
) -> int:
    """See OnePass and [Note: fused AdamW]."""
    moments, numbers = (states["exp_avg"], states["exp_avg_sq"]), _adamw_step(step, settings)
    factor, threads = -1.0 if settings.get("maximize") else 1.0, torch.get_num_threads()
    return adamw_(param, gradient, states.get("master"), *moments, numbers, factor=factor, threads=threads)


def _adamw_step(step: float, settings: Mapping[str, Any], seed: int | None = None) -> AdamWStep:
    beta1, beta2 = settings["betas"]
    return AdamWStep(
        step=int(step),
        lr=float(settings["lr"]),
        betas=(float(beta1), float(beta2)),
        eps=float(settings["eps"]),
        weight_decay=float(settings["weight_decay"]),
        seed=seed,
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
    return functools.partial(update_as_torch, arithmetic, settings)


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


def fits(places: ParameterLocations, entries: Mapping[str, Any]) -> bool:
    """Return True if a parameter's state, with these entries, is torch's Adam's, in fp32 or encoded."""
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
    settings: Mapping[str, Any],
    param: torch.Tensor,
    gradient: torch.Tensor,
    states: States,
    step: float,
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


NOT_IN_KERNEL = ("amsgrad", "maximize", "capturable", "differentiable", "fused")
"""Settings of torch.optim.AdamW that the kernel does not support."""


@dataclass(frozen=True, slots=True)
class AdamWKernel:
    """The kernel's rounding.

    Attributes:
        seed: of stochastic rounding of the parameters; None rounds to nearest.
    """

    seed: int | None = None

    def check(self, optimizer: Optimizer, master_weights: torch.dtype | None, device: torch.device) -> None:
        """Raise ConfigError or UnsupportedError if the kernel cannot update this run."""
        if type(optimizer) is not torch.optim.AdamW:
            raise ConfigError(f"update_with='kernel' does what torch.optim.AdamW does, not {type(optimizer).__name__}")
        if master_weights is not torch.float32:
            raise ConfigError("update_with='kernel' updates fp32 masters: pass master_weights=torch.float32 too")
        AdamWStep(1, seed=self.seed)
        for group in optimizer.param_groups:
            _check_settings(group)
        if uses_kernel(device):
            kernel("arithmetic")

    def check_parameters(self, dtypes: Mapping[str, torch.dtype]) -> None:
        """Raise ConfigError for parameters of an unsupported dtype; `dtypes` has the trained ones, by name."""
        known = (torch.float32, *(PARAMETERS if self.seed is None else (torch.bfloat16,)))
        for name, dtype in dtypes.items():
            if dtype not in known:
                how = "update_with='kernel'" + (" with stochastic_rounding" if self.seed is not None else "")
                names = " or ".join(str(one).removeprefix("torch.") for one in known)
                raise ConfigError(f"{how} is for parameters of {names}, and {name} is {dtype}")

    def update(self, updates: Iterable[Update], settings: Callable[[int], Mapping[str, Any]]) -> None:
        """Update slices that are on the device, the rounded parameters too.

        Args:
            settings: returns those of the step, by number of the optimizer's group.

        Raises:
            UnsupportedError: one of them was changed to an unsupported value.
        """
        for one in updates:
            group = settings(one.work.settings)
            _check_settings(group)
            update_by_kernel(one, group, self.seed_of(one.places.name))

    def seed_of(self, name: str) -> int | None:
        """Return the seed of a parameter: with one seed for all, elements of the same number would be rounded alike."""
        return None if self.seed is None else (self.seed + zlib.crc32(name.encode())) % (1 << 63)


def update_by_kernel(one: Update, group: Mapping[str, Any], seed: int | None = None) -> None:
    """Update one slice, whose state is zeros if there is none yet; `group` has its settings."""
    work = one.work
    before = work.state.get("step", torch.zeros((), dtype=torch.float32, device="cpu"))
    first, second = one.state_tensors["exp_avg"], one.state_tensors["exp_avg_sq"]
    part = AdamWSlice(
        work.tensor.view(-1),
        first.view(-1),
        second.view(-1),
        work.gradient.reshape(-1),
        None if one.rounded is None else one.rounded.view(-1),
        one.begin,
    )
    step = _adamw_step(int(before) + 1, group, seed)
    update_(part, step, torch.full((1,), -1.0, device=work.tensor.device) if group.get("maximize") else None)
    work.state = {"step": before + 1, "exp_avg": first, "exp_avg_sq": second}


def _check_settings(group: Mapping[str, Any]) -> None:
    for name in NOT_IN_KERNEL:
        if group.get(name):
            raise UnsupportedError(
                f"update_with='kernel' does not support {name}={group[name]!r} of the optimizer's groups: leave it out, or pass "
                "update_with='optimizer'"
            )
