"""Shared by the tests of saved activations: a model that saves a lot, its gradients, and transfers that fail."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import swapper
from e2e.twins import Twins
from swapper import _C

WIDTH = 256


class Residual(nn.Module):
    """Blocks whose activations are 256 KiB and more: views of one storage, dropout, a tensor that is used late and early."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.wide = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(depth))
        self.narrow = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        for wide, narrow in zip(self.wide, self.narrow, strict=True):
            a, b, c = wide(value).chunk(3, dim=-1)
            value = (
                value + F.dropout(narrow(torch.tanh(a) * b.transpose(0, 1).sigmoid().transpose(0, 1)), 0.1) * c.exp()
            )
        return value


def gradients(model: nn.Module, run: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(1)
    run().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def retained_and_double(value: torch.Tensor) -> list[torch.Tensor]:
    """Return gradients of a graph that is run backward twice, and a gradient of one of them."""
    hidden = (value * 2).tanh()
    result = (hidden.exp() * hidden).sum()
    [first] = torch.autograd.grad(result, value, retain_graph=True)
    [second] = torch.autograd.grad(result, value, create_graph=True)
    [third] = torch.autograd.grad(second.square().sum(), value)
    return [first, second.detach(), third]


def assert_equal(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected, strict=True):
        assert torch.equal(one, other)


def assert_failures_are_errors(activations: Any, seed: int) -> None:
    """A forward or backward with a transfer that fails raises, or gives plain torch's gradients; the next one is right again."""
    model, value = Residual(), torch.randn(2, 128, WIDTH)
    expected = gradients(model, lambda: model(value).square().mean())
    chaos = {"seed": seed, "eio": 0.05, "enospc": 0.02, "short": 0.2, "reorder": 0.3}
    activations._owner._own_engine = _C.Engine(backend="chaos", chaos=chaos)
    failures = 0
    for _ in range(6):
        try:
            with activations:
                actual = gradients(model, lambda: model(value).square().mean())
        except swapper.IoError:
            failures += 1
        else:
            assert_equal(actual, expected)
    assert failures > 0
    activations._owner._own_engine = None
    with activations:
        assert_equal(gradients(model, lambda: model(value).square().mean()), expected)


def swapped_only(pair: Twins, activations: Any, step: Callable[..., Any]) -> Callable[..., Any]:
    """Return `step`, under `activations` for the swapped model."""

    def run(model: nn.Module, optimizer: Any) -> Any:
        with activations if model is pair.swapped else contextlib.nullcontext():
            return step(model, optimizer)

    return run
