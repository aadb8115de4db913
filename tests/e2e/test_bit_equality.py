"""Training is exactly what plain torch does with the same optimizer, bit for bit: losses, parameters, optimizer state."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Adam, AdamW

from e2e.models import Net, train_step
from e2e.twins import Twins

MakeTwins = Callable[..., Twins]


@pytest.mark.parametrize("fused", [False, True], ids=["default", "fused"])
def test_fp32_is_bit_equal_over_20_steps(twins: MakeTwins, fused: bool) -> None:
    pair = twins(Net(), partial(AdamW, lr=1e-3, fused=fused))
    losses = pair.train(train_step, steps=20)
    assert len({loss.item() for loss in losses}) == 20  # it learns
    pair.finish()


OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "adamw foreach": partial(AdamW, lr=1e-3, foreach=True),
    "adamw amsgrad": partial(AdamW, lr=1e-3, amsgrad=True),
    "adamw fused amsgrad": partial(AdamW, lr=1e-3, amsgrad=True, fused=True),
    "adamw maximize": partial(AdamW, lr=1e-4, maximize=True),
    "adamw tensor lr": lambda parameters: AdamW(parameters, lr=torch.tensor(1e-3)),
    "adam": partial(Adam, lr=1e-3),
    "adam weight decay": partial(Adam, lr=1e-3, weight_decay=0.1, betas=(0.8, 0.9), eps=1e-6),
    "adam fused": partial(Adam, lr=1e-3, fused=True, weight_decay=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_setting_of_the_optimizer_is_bit_equal(twins: MakeTwins, name: str) -> None:
    pair = twins(Net(), OPTIMIZERS[name])
    pair.train(train_step, steps=5)
    pair.finish()


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0, "lr": 3e-3}]


@pytest.mark.parametrize("fused", [False, True], ids=["default", "fused"])
def test_parameter_groups_with_settings_of_their_own_are_bit_equal(twins: MakeTwins, fused: bool) -> None:
    pair = twins(Net(), partial(AdamW, lr=1e-3, fused=fused), select=two_groups)
    pair.train(train_step, steps=5)
    pair.finish()


def test_groups_in_another_order_than_the_model_are_bit_equal(twins: MakeTwins) -> None:
    pair = twins(Net(), select=lambda model: list(model.parameters())[::-1])
    pair.train(train_step, steps=5)
    pair.finish()


@pytest.mark.parametrize("fused", [False, True], ids=["default", "fused"])
def test_bf16_with_fp32_masters_is_bit_equal_to_the_same_arithmetic_in_memory(twins: MakeTwins, fused: bool) -> None:
    pair = twins(Net(depth=6).bfloat16(), partial(AdamW, lr=1e-3, fused=fused), master=True)
    pair.train(train_step, steps=20)
    pair.finish()


@pytest.mark.parametrize("fused", [False, True], ids=["default", "fused"])
def test_bf16_without_masters_is_bit_equal(twins: MakeTwins, fused: bool) -> None:
    pair = twins(Net(depth=8).bfloat16(), partial(AdamW, lr=1e-3, fused=fused))
    pair.train(train_step, steps=8)
    pair.finish()


def half_and_half() -> Net:
    """Norms and the head in fp32, the rest in bf16: groups with two dtypes."""
    model = Net(depth=6).bfloat16()
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.float()
            module.register_forward_pre_hook(lambda _, args: (args[0].float(),))
            module.register_forward_hook(lambda _, args, output: output.bfloat16())
    return model


@pytest.mark.parametrize("master", [False, True], ids=["plain", "masters"])
def test_dtypes_side_by_side_in_one_model_are_bit_equal(twins: MakeTwins, master: bool) -> None:
    pair = twins(half_and_half(), master=master)
    pair.train(train_step, steps=5)
    pair.finish()


class Odd(nn.Module):
    """Parameters of unusual shapes, beside a net that is large enough to be paged."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 7))
        self.one = nn.Parameter(torch.ones(1))
        self.prime = nn.Parameter(torch.randn(101, 211))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.net(batch) * self.scale * self.one + self.prime.sum() * 1e-3 + self.empty.sum()


@pytest.mark.parametrize("fused", [False, True], ids=["default", "fused"])
def test_scalar_empty_and_odd_sized_parameters_are_bit_equal(twins: MakeTwins, fused: bool) -> None:
    pair = twins(Odd(), partial(AdamW, lr=1e-3, fused=fused))
    pair.train(train_step, steps=4)
    pair.finish()


def test_double_precision_is_bit_equal(twins: MakeTwins) -> None:
    pair = twins(Net(depth=2).double())
    pair.train(train_step, steps=4)
    pair.finish()


def test_dropout_draws_the_same_numbers(twins: MakeTwins) -> None:
    pair = twins(Net(dropout=0.2))
    pair.train(train_step, steps=5)
    pair.finish()
