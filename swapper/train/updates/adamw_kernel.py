"""Updates with swapper's own AdamW (device/kernels.py), if the user chose it: one pass over a slice instead of torch's
many. Encoded state may imply it: [Note: fused AdamW], one_pass.py.

Its order of operations is not torch's, so it is never chosen automatically. The state is torch.optim.AdamW's, with the
same keys: `state_dict` shows it, and a run may resume with either. It reads gradients after torch's own clipping and
unscaling, in their dtype, wherever they were: results do not depend on where anything lives.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from swapper.device.kernels import PARAMETERS, AdamWSlice, AdamWStep, kernel, update_, uses_kernel
from swapper.errors import ConfigError, UnsupportedError
from swapper.train.updates.sweep import Update

OTHER_ARITHMETIC = ("amsgrad", "maximize", "capturable", "differentiable", "fused")
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
    step = AdamWStep(
        int(before) + 1,
        float(group["lr"]),
        (float(group["betas"][0]), float(group["betas"][1])),
        float(group["eps"]),
        float(group["weight_decay"]),
        seed,
    )
    update_(part, step, torch.full((1,), -1.0, device=work.tensor.device) if group.get("maximize") else None)
    work.state = {"step": before + 1, "exp_avg": first, "exp_avg_sq": second}


def _check_settings(group: Mapping[str, Any]) -> None:
    for name in OTHER_ARITHMETIC:
        if group.get(name):
            raise UnsupportedError(
                f"update_with='kernel' does not support {name}={group[name]!r} of the optimizer's groups: leave it out, or pass "
                "update_with='optimizer'"
            )
