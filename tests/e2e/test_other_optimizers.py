"""An optimizer that manager.offload was not given, on parameters that the manager has: its first step is refused, and says so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.optimizer import _global_optimizer_pre_hooks

import swapper
from e2e.twins import Twins

MakeTwins = Callable[..., Twins]
WIDTH = 160


def layers() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))


def backward(model: nn.Module) -> None:
    model(torch.randn(4, WIDTH)).square().mean().backward()


def values(manager: swapper.SwapManager, model: nn.Module) -> list[torch.Tensor]:
    with manager.gather(model):
        return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.whole
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("params", ["auto", "host", "nvme"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_model_that_was_offloaded_without_its_optimizer_is_not_trained_by_it(
    tmp_path: Path, params: str, when: str, fused: bool
) -> None:
    model = layers()
    early = AdamW(model.parameters(), lr=1e-2, fused=fused)
    with swapper.SwapManager(tmp_path, "64MiB") as manager:
        manager.offload(model, params=params)
        optimizer = early if when == "before" else AdamW(model.parameters(), lr=1e-2, fused=fused)
        before = values(manager, model)
        backward(model)
        with pytest.raises(
            swapper.StateError, match=r"AdamW\.step\(\) would change parameter 0\.weight.*offload\(model, opt"
        ):
            optimizer.step()
        assert not optimizer.state
        assert all(map(torch.equal, values(manager, model), before))
        model.zero_grad()
        optimizer.step()  # there is nothing that it would change
        with pytest.raises(swapper.StateError, match=r"AdamW\.step\(\) would change parameter 0\.weight"):
            optimizer.step(lambda: backward(model))


@pytest.mark.whole
@pytest.mark.parametrize("update", ["step", "deferred", "backward"])
def test_a_second_optimizer_beside_that_of_the_manager_is_refused(twins: MakeTwins, update: str) -> None:
    def step(model: nn.Module, optimizer: Any) -> None:
        backward(model)
        optimizer.step()
        model.zero_grad()

    pair = twins(layers(), select=lambda model: list(model[:2].parameters()), update=update)
    pair.train(step, steps=2)
    head = SGD(pair.swapped[2].parameters(), lr=0.1)
    same = SGD(pair.swapped[:1].parameters(), lr=0.1)
    state = torch.get_rng_state()
    backward(pair.swapped)
    for optimizer, name in ((head, "2.weight"), (same, "0.weight")):
        with pytest.raises(swapper.StateError, match=rf"parameter {name} past the manager.*another optimizer"):
            optimizer.step()
    torch.set_rng_state(state)
    if update == "backward":
        pair.optimizer.step()  # what backward has updated is of a step
    else:
        pair.swapped.zero_grad()
        pair.train(step, steps=2)
        pair.finish(paged=False)


def test_the_users_own_is_refused_until_the_manager_is_closed(tmp_path: Path) -> None:
    model = layers()
    original = AdamW(model.parameters())
    with swapper.SwapManager(tmp_path, "64MiB") as manager:
        manager.offload(model, original, params="host", optimizer_state="host")
        with pytest.raises(swapper.StateError, match="taken over by manager"):
            original.step()
    original.step()


def test_what_has_nothing_of_the_model_steps_as_ever(tmp_path: Path) -> None:
    """Another model's; one that has the model's frozen parameters too; and an average that follows the model."""
    model, head = layers(), nn.Linear(WIDTH, 1)
    model.requires_grad_(False)
    optimizer = AdamW([*model.parameters(), *head.parameters()], lr=0.1)
    with swapper.SwapManager(tmp_path, "64MiB") as manager:
        manager.offload(model, params="nvme")
        before = head.weight.detach().clone()
        head(model(torch.randn(4, WIDTH))).square().mean().backward()
        optimizer.step()
        assert not torch.equal(head.weight, before)


class SharesGroups(Optimizer):
    """As Lookahead has it."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__([{"params": list(g["params"])} for g in inner.param_groups], {})
        self.param_groups = inner.param_groups
        self.inner = inner

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


class OwnGroups(SharesGroups):
    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner)
        self.param_groups = [dict(group) for group in inner.param_groups]


@pytest.mark.whole
@pytest.mark.parametrize("wrapper", [SharesGroups, OwnGroups])
def test_an_optimizer_that_wraps_the_managers_steps_it(twins: MakeTwins, wrapper: Callable[[Any], Any]) -> None:
    pair = twins(layers())

    def step(model: nn.Module, optimizer: Any) -> None:
        backward(model)
        wrapper(optimizer).step()
        model.zero_grad()

    pair.train(step, steps=3)
    pair.finish(paged=False)


def test_a_manager_that_is_closed_leaves_no_hook(tmp_path: Path) -> None:
    count = len(_global_optimizer_pre_hooks)
    manager = swapper.SwapManager(tmp_path, "64MiB")
    model = layers()
    manager.offload(model, params="host")
    assert len(_global_optimizer_pre_hooks) == count + 1
    manager.close()
    assert len(_global_optimizer_pre_hooks) == count
