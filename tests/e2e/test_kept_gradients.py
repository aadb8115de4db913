"""Gradients of parameters that are always in memory are autograd's own: no copy, no place, and torch's in all they do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import devices
import pytest
import torch
from torch import nn

import swapper
from e2e.models import Net, loss_of, tokens
from e2e.twins import Twins, adamw

MakeTwins = Callable[..., Twins]

IN_MEMORY = {"params": "host"}


class Sliced(nn.Module):
    """Multiplies by a parameter whose gradient arrives as a part of something much larger."""

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, weight)
            return x @ weight

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x, weight = ctx.saved_tensors
            large = torch.zeros(100 * len(weight), weight.shape[1])
            large[: len(weight)] = x.mT @ grad
            return grad @ weight.mT, large[: len(weight)]

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64, generator=torch.Generator().manual_seed(0)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.Product.apply(x, self.weight)  # type: ignore[no-any-return,no-untyped-call]


def same_memory_as_autograds(model: nn.Module) -> list[bool]:
    """Run a backward; tell of each parameter whether its gradient is where autograd made it."""
    made: dict[nn.Parameter, int] = {}
    handles = [
        parameter.register_hook(lambda gradient, parameter=parameter: made.update({parameter: gradient.data_ptr()}))
        for parameter in model.parameters()
    ]
    loss_of(model, tokens()).backward()
    for handle in handles:
        handle.remove()
    return [parameter.grad.data_ptr() == made[parameter] for parameter in model.parameters()]


@devices.without_device("gradients leave a device for host memory")
def test_they_are_where_autograd_made_them(twins: MakeTwins) -> None:
    pair = twins(Net(), **IN_MEMORY)
    plain, swapped = same_memory_as_autograds(pair.plain), same_memory_as_autograds(pair.swapped)
    assert swapped == plain
    assert any(swapped)
    pair.both(lambda model, optimizer: optimizer.zero_grad())
    assert not any(same_memory_as_autograds(twins(Net()).swapped)), "parameters on NVMe wait in their gradients' places"
    pair.finish(paged=False)


@pytest.mark.parametrize("update", ["step", "deferred", "backward"])
def test_nothing_is_set_aside_twice(twins: MakeTwins, update: str) -> None:
    """The budget counts them, and the run's own memory does not have them."""
    pair = twins(Net(), update=update, **IN_MEMORY)
    plan = pair.manager.current.run.plan
    gradients = sum(section.nbytes for section in plan.inventory.grad_plans)
    assert plan.budget.resident_bytes >= 2 * gradients  # parameters too
    assert "on host" in next(line for line in str(plan).splitlines() if line.startswith("gradients"))
    assert bool(plan.make_grad_sections(0)) == bool(devices.NAME)  # those of a device arrive there
    pair.finish(paged=False)


def test_one_that_is_a_part_of_something_larger_does_not_keep_that(tmp_path: Path) -> None:
    model = Sliced()
    with swapper.SwapManager(tmp_path, host_memory="64MB") as manager:
        model, optimizer = manager.offload(model, adamw(model.parameters()), params="host")
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
        model(x).sum().backward()
        gradient = model.weight.grad
        assert gradient.untyped_storage().nbytes() < 2 * gradient.nbytes
        assert torch.equal(gradient, x.mT @ torch.ones(8, 64))
        optimizer.step()
