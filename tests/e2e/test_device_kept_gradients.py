"""Gradients that stay on the device until the update there: torch's own tensors, the same bits, and nothing of them is copied."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from infer.host_device import HostDevice
from torch import nn

import swapper
from e2e.device_twins import MIB, MakeTwins, accumulate, on_device
from e2e.models import Net, loss_of, tokens, train_step
from e2e.twins import adamw, smallest_budget, smallest_device_budget
from swapper.train.gradients.cold_grad import ColdGradient

__all__ = ["on_device"]

KEPT = {"update_on": "device", "gradients": "device"}


def cold(model: nn.Module) -> list[bool]:
    return [type(parameter.grad) is ColdGradient for parameter in model.parameters()]


def test_they_are_ordinary_tensors_and_nothing_of_them_is_copied(on_device: MakeTwins) -> None:
    pair = on_device(device_memory=16 * MIB, **KEPT)
    size = sum(p.nbytes for p in pair.plain.parameters())
    state = 2 * size
    pair.train(train_step, steps=1)
    before = pair.manager.counters.downloaded_bytes
    loss_of(pair.swapped, batch := tokens()).backward()
    assert pair.manager.counters.downloaded_bytes == before
    loss_of(pair.plain, batch).backward()
    for ours, theirs in zip(pair.swapped.parameters(), pair.plain.parameters(), strict=True):
        assert type(ours.grad) is torch.Tensor and torch.equal(ours.grad, theirs.grad)
    up = pair.manager.counters.uploaded_bytes
    pair.optimizer.step()
    assert pair.manager.counters.downloaded_bytes == before + size + state  # parameters and state, which were updated
    assert pair.manager.counters.uploaded_bytes == up + state  # parameters are there
    assert not pair.manager.current.run._grad_sections


@pytest.mark.parametrize("to_none", [True, False])
def test_zeroing_scaling_and_values_are_torchs_own(on_device: MakeTwins, to_none: bool) -> None:
    pair = on_device(Net().to(torch.bfloat16), master=True, device_memory=16 * MIB, **KEPT)

    def step(model: Any, optimizer: Any) -> torch.Tensor:
        loss = loss_of(model, tokens())
        (loss * 256).backward()
        for parameter in model.parameters():
            parameter.grad.mul_(1 / 256)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        nn.utils.clip_grad_value_(model.parameters(), 1e-3)
        optimizer.step()
        optimizer.zero_grad(set_to_none=to_none)
        return torch.stack([loss.detach(), norm])

    pair.train(step, steps=3)
    pair.finish(paged=False)


def test_auto_keeps_as_many_as_there_is_room_for_and_the_others_go_down(on_device: MakeTwins) -> None:
    device = HostDevice("late")
    for budget in range(4 * MIB, 14 * MIB, MIB // 2):
        pair = on_device(device_memory=budget, update_on="device", optimizer_state="nvme", wait=True)
        kept = pair.plan().on_device.gradients
        if 0 < len(kept) < len(pair.plan().inventory.groups):
            break
    else:
        raise AssertionError("no budget keeps a part of them")
    pair.options["device"] = device
    pair.offload()
    pair.train(accumulate, steps=2)
    loss_of(pair.swapped, tokens()).backward()
    assert {True, False} == set(cold(pair.swapped))
    norm = pair.manager.clip_grad_norm_(1e9)
    assert norm.isfinite()
    pair.optimizer.zero_grad()
    pair.train(accumulate, steps=1)
    assert "on the device, " in str(pair.manager.current.run.plan)
    pair.finish(paged=False)


def test_a_small_budget_keeps_none_of_them_unless_it_was_asked_for(on_device: MakeTwins) -> None:
    pair = on_device(device_memory=3 * MIB, update_on="device")
    loss_of(pair.swapped, tokens()).backward()
    assert all(cold(pair.swapped))


def test_a_budget_that_is_too_small_is_refused_with_the_smallest_that_works(
    tmp_path: Path, on_device: MakeTwins
) -> None:
    device = HostDevice("late")
    budget = smallest_device_budget(tmp_path, Net(), device=device, **KEPT)
    size = sum(p.nbytes for p in Net().parameters())
    assert budget > size
    pair = on_device(device_memory=budget, device=device, **KEPT)
    pair.train(accumulate, steps=2)
    assert device.peak_bytes <= budget - size
    pair.finish(paged=False)


def test_host_memory_has_no_room_for_them_and_needs_none(on_device: MakeTwins) -> None:
    without = on_device(device_memory=16 * MIB, wait=True, update_on="device", gradients="host").plan()
    kept = on_device(device_memory=16 * MIB, wait=True, **KEPT).plan()
    assert kept.budget.resident_bytes + 2 * MIB < without.budget.resident_bytes
    assert "on the device" in str(kept) and kept.scratch_bytes == 0


@pytest.mark.parametrize("params", ["auto", "host"])
@pytest.mark.parametrize("optimizer_state", ["auto", "nvme"])
def test_memory_that_gradients_on_the_device_need_not_counts_from_the_start(
    tmp_path: Path, params: str, optimizer_state: str
) -> None:
    """A budget that is enough because of them is one; and a run goes on in the budget that it had."""
    options: dict[str, Any] = {"params": params, "optimizer_state": optimizer_state, "device": HostDevice("late")}
    options |= {"device_memory": 16 * MIB, "accelerator": swapper.Accelerator(update_on="device")}
    model = Net()
    smallest = smallest_budget(tmp_path / "probe", model, adamw(model.parameters()), **options)
    size = sum(parameter.nbytes for parameter in model.parameters())
    budgets = [smallest - size // 2, *range(smallest, smallest + 8 * MIB, MIB)]
    for number, budget in enumerate(budgets):
        places = []
        for _ in range(2):
            torch.manual_seed(0)
            model = Net()
            with swapper.SwapManager(tmp_path / str(number), budget, resume="auto") as manager:
                _, optimizer = manager.offload(model, adamw(model.parameters()), **options)
                plan = manager.current.run.plan
                places.append((plan.places, plan.budget.page_bytes, plan.on_device.gradients))
                train_step(model, optimizer)
        assert places[0] == places[1], budget


def test_a_gradient_that_is_a_part_of_something_larger_does_not_keep_that(on_device: MakeTwins) -> None:
    class Fused(nn.Module):
        """Its gradients are views of one tensor, which autograd does not part."""

        def __init__(self) -> None:
            super().__init__()
            self.queries, self.keys = (nn.Parameter(torch.randn(64, 64)) for _ in range(2))

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            return value @ torch.cat([self.queries, self.keys]).t()

    pair = on_device(Fused(), device_memory=16 * MIB, **KEPT)
    pair.both(lambda model, optimizer: model(torch.ones(4, 64)).square().mean().backward())
    size = pair.plain.keys.nbytes
    assert {p.grad.untyped_storage().nbytes() for p in pair.plain.parameters()} == {2 * size}
    assert {p.grad.untyped_storage().nbytes() for p in pair.swapped.parameters()} == {size}
    pair.assert_same_parameters()
    pair.close()


def test_more_to_train_keeps_the_gradients_that_there_are(on_device: MakeTwins) -> None:
    model = Net()
    for parameter in model.blocks[1].parameters():
        parameter.requires_grad_(False)
    pair = on_device(model, device_memory=16 * MIB, **KEPT)

    def unfreeze(model: Any, optimizer: Any) -> torch.Tensor:
        loss = loss_of(model, tokens())
        loss.backward()
        added = list(model.blocks[1].parameters())
        for parameter in added:
            parameter.requires_grad_(True)
        optimizer.add_param_group({"params": added})
        loss_of(model, tokens()).backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    pair.train(train_step, steps=1)
    pair.both(unfreeze)
    pair.train(train_step, steps=2)
    pair.finish(paged=False)


def test_gradients_from_before_offload_are_taken_along(on_device: MakeTwins) -> None:
    model = Net()
    loss_of(model, tokens()).backward()
    pair = on_device(model, device_memory=16 * MIB, **KEPT)
    pair.train(accumulate, steps=2)
    pair.close()
    assert all(parameter.grad is None for parameter in pair.swapped.parameters())


@pytest.mark.whole
@pytest.mark.parametrize(
    "options, match",
    [
        ({"update_on": "cpu"}, "gradients='device' needs update_on='device'"),
        ({"update_on": "device", "device": "cpu", "device_memory": "auto"}, "needs a device"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(on_device: MakeTwins, options: dict[str, Any], match: str) -> None:
    with pytest.raises(swapper.ConfigError, match=match):
        on_device(budget=64 * MIB, gradients="device", **options)
