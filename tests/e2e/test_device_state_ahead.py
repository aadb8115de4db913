"""State that goes up to a device before its gradients are there: it is used, and never an outdated one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from infer.host_device import ORDERS, HostDevice
from torch import nn

import swapper
from e2e.device_twins import MIB, MakeTwins, accumulate, on_device, short_of_memory, step_again, used
from e2e.models import Net, loss_of, tokens, train_step
from e2e.twins import Twins
from swapper.train.updates.device_slots import StateAhead

__all__ = ["on_device", "used"]

UPDATES = ("step", "deferred", "backward")
STAYING = {
    "params": "device", "gradients": "device", "optimizer_state": "host", "update_on": "device", "device_memory": 16 * MIB,
    "commit_every": None,
}  # fmt: skip


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("gradients", ["device", "host"])
def test_it_is_used_and_changes_no_bit(
    on_device: MakeTwins, used: list[bool], update: str, order: str, gradients: str
) -> None:
    """Nothing is looked at between steps, so copies of the step before may still be queued."""
    pair = on_device(Net(tied=True), order=order, update=update, **{**STAYING, "gradients": gradients})
    batches = [tokens() for _ in range(4)]
    for model, optimizer in ((pair.plain, pair.plain_optimizer), (pair.swapped, pair.optimizer)):
        for batch in batches:
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert any(used)
    pair.finish(paged=False)


def test_gradients_that_are_clipped_are_waited_for_and_the_state_is_not(on_device: MakeTwins, used: list[bool]) -> None:
    pair = on_device(update="step", **STAYING)
    pair.train(accumulate, steps=3)
    assert any(used)
    pair.finish(paged=False)


def halve(model: nn.Module, optimizer: Any, manager: swapper.SwapManager | None) -> None:
    for state in optimizer.state.values():
        state["exp_avg"].mul_(0.5)


def load(model: nn.Module, optimizer: Any, manager: swapper.SwapManager | None) -> None:
    saved = optimizer.state_dict()
    for state in saved["state"].values():
        state["exp_avg_sq"] = state["exp_avg_sq"] * 4
    optimizer.load_state_dict(saved)


def change_parameters(model: nn.Module, optimizer: Any, manager: swapper.SwapManager | None) -> None:
    """Their masters follow."""
    if manager is None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
    else:
        with manager.gather(model, write=True), torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)


def drop_some_gradients(model: nn.Module, optimizer: Any, manager: swapper.SwapManager | None) -> None:
    for parameter in [*model.parameters()][::2]:
        parameter.grad = None


def read(model: nn.Module, optimizer: Any, manager: swapper.SwapManager | None) -> None:
    assert all(torch.isfinite(state["exp_avg"]).all() for state in optimizer.state.values())


@pytest.mark.parametrize("change", [halve, load, change_parameters, drop_some_gradients, read])
@pytest.mark.parametrize("update", ["step", "deferred"])
def test_what_changes_between_backward_and_step_is_what_the_update_uses(
    on_device: MakeTwins, used: list[bool], update: str, change: Callable[..., None]
) -> None:
    pair = on_device(update=update, **STAYING)
    pair.train(train_step, steps=1)
    for _ in range(3):
        batch = tokens()
        for model, optimizer, manager in (
            (pair.plain, pair.plain_optimizer, None),
            (pair.swapped, pair.optimizer, pair.manager),
        ):
            loss_of(model, batch).backward()
            change(model, optimizer, manager)
            optimizer.step()
            optimizer.zero_grad()
    pair.train(train_step, steps=2)
    assert any(used)
    pair.finish(paged=False)


def test_a_step_that_fails_leaves_none_behind(
    on_device: MakeTwins, used: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair: Twins = on_device(update="step", **{**STAYING, "commit_every": 1})
    pair.train(train_step, steps=2)
    batch = tokens()
    loss_of(pair.swapped, batch).backward()
    with monkeypatch.context() as patch:
        patch.setattr(StateAhead, "take", lambda self, *of: (_ for _ in ()).throw(RuntimeError("a fault")))
        with pytest.raises(RuntimeError, match="a fault"):
            pair.optimizer.step()
    step_again(pair, batch)
    pair.train(train_step, steps=2)
    assert any(used)
    pair.finish(paged=False)


def test_it_drops_nothing_that_stays_if_the_device_is_short_of_memory(on_device: MakeTwins, used: list[bool]) -> None:
    device = HostDevice()
    pair = on_device(update="step", device=device, **STAYING)
    batch = tokens()
    loss = loss_of(pair.swapped, batch)
    images = pair.manager.current.run.placed.processor._images
    assert all(image.is_filled for image in images)
    with short_of_memory(device, device.module.used_bytes):
        loss.backward()
    assert all(image.is_filled for image in images)
    step_again(pair, batch)
    assert used and not any(used)
    pair.train(train_step, steps=2)
    pair.finish(paged=False)
