"""Gradients of several backwards are added up on the device, and copied to host memory once a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from e2e.device_twins import MIB, MakeTwins, accumulate, on_device
from e2e.models import WIDTH, Net, loss_of, tokens, train_step
from e2e.twins import Twins
from swapper.train.gradients.device_grads import DeviceGradients

__all__ = ["on_device"]

ROOM = {"device_memory": 64 * MIB}


def size_of(pair: Twins) -> int:
    return sum(parameter.nbytes for parameter in pair.plain.parameters())


def gradients_of(pair: Twins) -> DeviceGradients:
    found = pair.manager.current.run.model.gradients.paged
    assert isinstance(found, DeviceGradients)
    return found


@pytest.mark.parametrize("gradients", ["host", "nvme"])
@pytest.mark.parametrize("update_on", ["cpu", "device"])
def test_they_are_copied_once_a_step_and_nothing_of_them_is_copied_back(
    on_device: MakeTwins, gradients: str, update_on: str
) -> None:
    pair = on_device(gradients=gradients, update_on=update_on, optimizer_state="nvme", **ROOM)
    pair.train(accumulate, steps=1)  # nothing is known of its backwards
    counters, size = pair.manager.counters, size_of(pair)
    up, down = counters.uploaded_bytes, counters.downloaded_bytes
    pair.train(accumulate, steps=3)
    updated = 3 * size if update_on == "device" else 0  # parameters and state
    assert counters.downloaded_bytes - down == 3 * (size + updated)
    # Parameters of the step after the last one may be on their way; gradients would be two more copies a step.
    assert counters.uploaded_bytes - up <= 3 * (size + (updated + size if updated else 0)) + size
    pair.finish(paged=False)


@pytest.mark.parametrize("order", ["late", "by chance 1"])
@pytest.mark.parametrize("update", ["step", "deferred", "backward"])
def test_steps_of_other_numbers_of_backwards_are_bit_equal(on_device: MakeTwins, order: str, update: str) -> None:
    pair = on_device(update=update, order=order, **ROOM)
    for count in (3, 3, 1, 2, 3):
        pair.train(lambda model, optimizer, count=count: backwards(pair, model, optimizer, count), steps=1)
    pair.finish(paged=False)


def backwards(pair: Twins, model: nn.Module, optimizer: Any, count: int) -> torch.Tensor:
    for _ in range(count - 1):
        with pair.manager.accumulate():
            loss_of(model, tokens()).backward()
    loss = loss_of(model, tokens())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


@pytest.mark.parametrize("to_none", [True, False])
def test_clipping_between_and_after_backwards_is_bit_equal(on_device: MakeTwins, to_none: bool) -> None:
    pair = on_device(**ROOM)

    def step(model: nn.Module, optimizer: Any) -> torch.Tensor:
        norms = []
        for _ in range(3):
            loss_of(model, tokens()).backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
            nn.utils.clip_grad_norm_(model.parameters(), 0.5, norm_type=1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=to_none)
        return torch.stack(norms)

    pair.train(step, steps=3)
    pair.finish(paged=False)


class InTwoDtypes(Net):
    """With a layer in fp64, and numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(WIDTH, WIDTH, dtype=torch.double)
        self.scales = nn.ParameterList(torch.tensor(1 + n / 100) for n in range(16))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        value = super().forward(tokens)
        rows = self.wide.weight[: value.shape[-1], 0].float()
        return value * sum(s * rows[n] for n, s in enumerate(self.scales))


@pytest.mark.parametrize("gradients", ["host", "nvme"])
def test_clipping_multiplies_a_number_in_the_wider_dtype(on_device: MakeTwins, gradients: str) -> None:
    pair = on_device(InTwoDtypes(), gradients=gradients, **ROOM)

    def step(model: nn.Module, optimizer: Any) -> torch.Tensor:
        loss_of(model, tokens()).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
        optimizer.step()
        optimizer.zero_grad()
        return norm

    pair.train(step, steps=3)
    pair.finish(paged=False)


def test_one_that_is_dropped_leaves_its_memory_and_does_not_come_again(on_device: MakeTwins) -> None:
    pair = on_device(gradients="host", **ROOM)
    pair.train(accumulate, steps=2)
    pair.both(lambda model, optimizer: loss_of(model, tokens()).backward())
    assert gradients_of(pair)._sum_bytes == size_of(pair)
    pair.both(lambda model, optimizer: optimizer.zero_grad())
    pair.train(train_step, steps=1)
    assert gradients_of(pair)._sum_bytes == 0 and not gradients_of(pair)._sums
    pair.finish(paged=False)


def kept_bytes(pair: Twins, budget: int) -> Sequence[int]:
    pair.options["device_memory"] = budget
    on_device = pair.plan().on_device
    assert on_device is not None
    assert on_device.image_bytes + on_device.sum_bytes + on_device.down_bytes <= budget
    return on_device.sum_bytes, len(on_device.resident_set)


def test_they_have_what_parameters_leave_of_the_budget(on_device: MakeTwins) -> None:
    pair = on_device(wait=True)
    for budget in range(4 * MIB, 16 * MIB, MIB // 2):
        sum_bytes, resident = kept_bytes(pair, budget)
        assert sum_bytes == 0 or resident == len(pair.plan().inventory.groups)
        if 0 < sum_bytes < size_of(pair) // 2:
            break
    else:
        raise AssertionError("no budget keeps a part of them")
    pair.offload()
    pair.train(accumulate, steps=2)
    pair.both(lambda model, optimizer: loss_of(model, tokens()).backward())
    assert 0 < gradients_of(pair)._sum_bytes <= sum_bytes
    pair.train(accumulate, steps=2)
    pair.finish(paged=False)


def test_without_the_wait_for_a_sum_its_update_is_wrong(on_device: MakeTwins, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = on_device(gradients="host", **ROOM)
    pair.train(lambda model, optimizer: backwards(pair, model, optimizer, 3), steps=2)
    monkeypatch.setattr(DeviceGradients, "_copy_sums", lambda self, keys: None)
    with pytest.raises(AssertionError):
        pair.train(lambda model, optimizer: backwards(pair, model, optimizer, 2), steps=1)
        pair.assert_same_parameters()
