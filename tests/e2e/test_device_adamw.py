"""`update_with="kernel"`: swapper's AdamW updates slices on the device, with the bits of its plain arithmetic in memory."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from infer.host_device import HostDevice
from torch import nn

import swapper
from e2e.device_twins import MIB, MakeTwins, accumulate, on_device
from e2e.models import Net, train_step
from e2e.twins import Twins, adamw
from swapper.device.kernels import AdamWSlice, AdamWStep, reference_
from swapper.runtime.process import rng_states, set_rng_states
from swapper.train.state.optim import packed_groups

__all__ = ["on_device"]

KERNEL = {"update_on": "device", "update_with": "kernel", "device_memory": 24 * MIB}


class PlainKernel:
    """The same in memory: each parameter as a whole, by the arithmetic in plain torch."""

    def __init__(self, model: nn.Module, optimizer: Any, seed: int | None = None) -> None:
        self.parameters = dict(model.named_parameters())
        self.masters = {name: p.detach().float().clone() for name, p in self.parameters.items()}
        self.param_groups = optimizer.param_groups
        self.state: dict[str, dict[str, torch.Tensor]] = {}
        self.seed = seed

    @torch.no_grad()
    def step(self) -> None:
        group = self.param_groups[0]
        for name, parameter in self.parameters.items():
            if parameter.grad is None:
                continue
            master = self.masters[name]
            new = {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(master),
                "exp_avg_sq": torch.zeros_like(master),
            }
            state = self.state.setdefault(name, new)
            state["step"] += 1
            seed = None if self.seed is None else self.seed + zlib.crc32(name.encode())
            step = AdamWStep(int(state["step"]), group["lr"], group["betas"], group["eps"], group["weight_decay"], seed)
            if parameter.dtype == torch.float32:
                master.copy_(parameter)
            part = AdamWSlice(
                master.view(-1), state["exp_avg"].view(-1), state["exp_avg_sq"].view(-1), parameter.grad.view(-1),
                None if parameter.dtype == torch.float32 else parameter.view(-1),
            )  # fmt: skip
            reference_(part, step, None, None)
            if parameter.dtype == torch.float32:
                parameter.copy_(master)

    def zero_grad(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        names = list(self.parameters)
        state = {names.index(name): self.state[name] for name in sorted(self.state, key=names.index)}
        return {"state": state, "param_groups": packed_groups(self.param_groups)}


def with_kernel(on_device: MakeTwins, model: nn.Module | None = None, seed: int | None = None, **options: Any) -> Twins:
    given = {"master": True, "stochastic_rounding": seed, **KERNEL, **options}
    pair = on_device(model or Net().to(torch.bfloat16), **given)
    pair.plain_optimizer = PlainKernel(pair.plain, pair.original, seed)
    return pair


@pytest.mark.parametrize("state", ["nvme", "host", "device"])
@pytest.mark.parametrize("gradients", ["nvme", "host", "device"])
def test_the_bits_are_those_of_its_plain_arithmetic_wherever_things_live(
    on_device: MakeTwins, state: str, gradients: str
) -> None:
    """Accumulated and clipped."""
    pair = with_kernel(on_device, optimizer_state=state, gradients=gradients)
    pair.train(accumulate, steps=3)
    pair.finish(paged=False)


@pytest.mark.parametrize("state", ["nvme", "device"])
def test_stochastic_rounding_has_the_same_chance_wherever_a_parameter_is_cut(on_device: MakeTwins, state: str) -> None:
    pair = with_kernel(on_device, seed=11, optimizer_state=state)
    pair.train(train_step, steps=3)
    assert any(not torch.equal(pair.plain_optimizer.masters[n].bfloat16(), p) for n, p in pair.plain.named_parameters())
    pair.finish(paged=False)


def test_parameters_of_fp32_among_others_are_their_own_masters(on_device: MakeTwins) -> None:
    model = Net().to(torch.bfloat16)
    model.head.float()
    model.head.register_forward_pre_hook(lambda module, inputs: (inputs[0].float(),))
    pair = with_kernel(on_device, model)
    pair.train(train_step, steps=3)
    pair.finish(paged=False)


def test_settings_that_a_scheduler_changes_count(on_device: MakeTwins) -> None:
    pair = with_kernel(on_device)

    def step(model: Any, optimizer: Any) -> torch.Tensor:
        loss = train_step(model, optimizer)
        if optimizer is pair.optimizer:  # they share their settings
            optimizer.param_groups[0]["lr"] *= 0.5
        return loss

    pair.train(step, steps=3)
    pair.finish(paged=False)


def test_what_comes_out_is_near_torchs(on_device: MakeTwins) -> None:
    pair = on_device(Net().to(torch.bfloat16), master=True, **KERNEL)
    for _ in range(3):
        random_state = rng_states()
        train_step(pair.plain, pair.plain_optimizer)
        set_rng_states(random_state)
        train_step(pair.swapped, pair.optimizer)
    state = pair.optimizer.state_dict()["state"]
    assert [list(entries) for entries in state.values()] == [["step", "exp_avg", "exp_avg_sq"]] * len(state)
    for ours, theirs in zip(pair.swapped.parameters(), pair.plain.parameters(), strict=True):
        with pair.manager.gather(ours):
            torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-3)


def test_a_run_goes_on_with_it(on_device: MakeTwins, tmp_path: Path) -> None:
    pair = with_kernel(on_device, seed=3, commit_every=1, optimizer_state="nvme")
    pair.train(train_step, steps=2)
    pair.resume(Net().to(torch.bfloat16), device=HostDevice("late"))
    pair.train(train_step, steps=2)
    pair.finish(paged=False)


def test_the_plan_says_so(on_device: MakeTwins) -> None:
    assert "on the device, by AdamW as one kernel" in str(with_kernel(on_device).manager.current.run.plan)


def test_a_setting_that_it_does_not_know_is_refused_in_the_step_too(on_device: MakeTwins) -> None:
    pair = with_kernel(on_device, commit_every=1)
    pair.train(train_step, steps=1)
    pair.optimizer.param_groups[0]["maximize"] = True
    with pytest.raises(swapper.UnsupportedError, match="does not support maximize=True"):
        train_step(pair.swapped, pair.optimizer)
    pair.close()


def with_settings(**settings: Any) -> Any:
    return lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, **settings)


@pytest.mark.whole
@pytest.mark.parametrize(
    "make, options, match",
    [
        (lambda p: torch.optim.SGD(p, lr=1e-3), {}, "does what torch.optim.AdamW does, not SGD"),
        (lambda p: torch.optim.Adam(p, lr=1e-3), {}, "does what torch.optim.AdamW does, not Adam"),
        (with_settings(amsgrad=True), {}, "does not support amsgrad=True"),
        (with_settings(fused=True), {}, "does not support fused=True"),
        (adamw, {"master": False}, "updates fp32 masters: pass master_weights=torch.float32"),
        (adamw, {"update_on": "cpu"}, "update_with='kernel' needs"),
        (adamw, {"device": "cpu", "device_memory": "auto", "update_on": "cpu"}, "update_with='kernel' needs"),
        (adamw, {"update_with": "magic"}, "update_with='magic' is not known"),
        (
            adamw,
            {"update_with": "optimizer", "stochastic_rounding": 1},
            "stochastic_rounding needs update_with='kernel'",
        ),
        (adamw, {"stochastic_rounding": -1}, "seed=-1 must be from 0"),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(
    on_device: MakeTwins, make: Any, options: dict[str, Any], match: str
) -> None:
    given = {"master": True, **KERNEL, **options}
    with pytest.raises((swapper.ConfigError, swapper.UnsupportedError), match=match):
        on_device(Net().to(torch.bfloat16), make, budget=64 * MIB, **given)


def test_stochastic_rounding_of_fp16_is_refused(on_device: MakeTwins) -> None:
    with pytest.raises(
        swapper.ConfigError, match=r"is for parameters of float32 or bfloat16, and .* is torch\.float16"
    ):
        on_device(Net().half(), master=True, budget=64 * MIB, stochastic_rounding=1, **KERNEL)
