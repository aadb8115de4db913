"""Loops over parameters inside a forward, at the smallest budget: those without autograd run, others name a budget that works."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import devices
import pytest
import torch
from torch import nn

import swapper
from e2e.twins import Twins, leased_pages

MakeTwins = Callable[..., Twins]
WIDTH = 128


def average_by_data(model: Encoders) -> Any:
    for key, query in zip(model.key.parameters(), model.query.parameters(), strict=True):
        key.data.mul_(0.9).add_(query.data, alpha=0.1)
    return 0


def average(model: Encoders) -> Any:
    for key, query in zip(model.key.parameters(), model.query.parameters(), strict=True):
        key.lerp_(query, 0.1)
    return 0


def norms(model: Encoders) -> Any:
    return sum(parameter.norm() for parameter in model.parameters())


def penalty(model: Encoders) -> Any:
    return sum(parameter.square().sum() for parameter in model.parameters())


class Encoders(nn.Module):
    """Two encoders, of which one may follow the other, with something over all parameters in the forward."""

    def __init__(self, loop: Callable[[Encoders], Any], when: str, with_graph: bool = False) -> None:
        super().__init__()
        self.loop, self.when, self.with_graph = loop, when, with_graph
        self.query = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(10)))
        self.key = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(10))).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self._look() if self.when == "before" else 0
        query = self.query(x)
        with torch.no_grad():
            key = self.key(x)
        found = self._look() if self.when == "after" else found
        return (query - key).square().mean() + 1e-3 * found

    def _look(self) -> Any:
        with torch.set_grad_enabled(self.with_graph):
            return self.loop(self)


def step(model: nn.Module, optimizer: Any) -> torch.Tensor:
    loss = model(torch.randn(4, WIDTH))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


@pytest.mark.parametrize("update", ["step", "deferred", "backward"])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("loop", [average, average_by_data, norms])
def test_a_loop_without_autograd_runs_at_the_smallest_budget(
    twins: MakeTwins, loop: Callable[[Encoders], Any], when: str, update: str
) -> None:
    room = {"device_memory": 4 << 20} if devices.NAME else {}  # which holds what a forward has used until that is over
    pair = twins(Encoders(loop, when), update=update, **room)
    pair.train(step, steps=3)
    assert leased_pages(pair.manager) == []
    pair.finish(paged=False)


@devices.without_device("the budget that it raises is host_memory: test_on_a_device_its_budget_is_named")
def test_a_loop_with_autograd_names_a_budget_that_works(twins: MakeTwins) -> None:
    pair = twins(Encoders(penalty, "before", with_graph=True))
    budget = pair.manager._options.host_bytes
    with pytest.raises(
        swapper.BudgetError, match=r"enough for all of them; or do that outside of the forward"
    ) as error:
        pair.swapped(torch.randn(4, WIDTH))
    pair.close()
    named = error.value.missing_bytes
    pair = twins(Encoders(penalty, "before", with_graph=True), budget=budget + named)
    pair.train(step, steps=3)
    pair.finish(paged=False)


def test_on_a_device_its_budget_is_named(twins: MakeTwins) -> None:
    options = {"device": devices.device_of_tests(), "update_on": "cpu"}
    pair = twins(Encoders(penalty, "before", with_graph=True), device_memory=1 << 20, **options)
    with pytest.raises(swapper.BudgetError, match="raise device_memory by") as error:
        pair.swapped(torch.randn(4, WIDTH))
    assert error.value.option == "device_memory"
    pair.close()
    budget = (1 << 20) + error.value.missing_bytes
    pair = twins(Encoders(penalty, "before", with_graph=True), device_memory=budget, **options)
    pair.train(step, steps=3)
    pair.finish(paged=False)


def test_such_a_penalty_outside_of_the_forward_runs_at_the_smallest_budget(twins: MakeTwins) -> None:
    pair = twins(Encoders(penalty, "never"))

    def with_penalty(model: Any, optimizer: Any) -> torch.Tensor:
        loss = model(torch.randn(4, WIDTH)) + 1e-3 * penalty(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    pair.train(with_penalty, steps=3)
    pair.finish(paged=False)
