"""The optimizer's update on a device: the same bits, any optimizer, within the budget; and no slot is used before its event."""

from __future__ import annotations

from typing import Any

import pytest
from infer.host_device import HostDevice
from torch import nn
from torch.optim import SGD

import swapper
from e2e.device_twins import (
    MIB,
    MakeTwins,
    forget_copies,
    on_device,
    short_of_memory,
    step_again,
)
from e2e.models import loss_of, tokens, train_step
from swapper.device.device_storage import DeviceStorage
from swapper.train.device.device_sweep import DeviceSweep, _Slot
from swapper.train.updates.update_rates import faster_place

__all__ = ["on_device"]


def test_a_slice_whose_update_does_not_wait_for_its_state_is_noticed(on_device: MakeTwins, monkeypatch: Any) -> None:
    pair = on_device(update_on="device", device_memory=8 * MIB, optimizer_state="host", params="host")
    pair.train(train_step, steps=1)
    update = DeviceSweep.update

    def without_waiting(self: DeviceSweep, group: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(DeviceStorage, "wait_on_current_stream", lambda storage: None)
            update(self, group)

    monkeypatch.setattr(DeviceSweep, "update", without_waiting)
    with pytest.raises(AssertionError):
        pair.train(train_step, steps=2)
        pair.assert_same_parameters()
    forget_copies(pair)


def test_a_slot_that_is_used_again_before_its_copies_are_over_is_noticed(
    on_device: MakeTwins, monkeypatch: Any
) -> None:
    pair = on_device(update_on="device", device_memory=16 * MIB, optimizer_state="nvme", params="nvme")
    monkeypatch.setattr(_Slot, "is_free", property(lambda self: True, lambda self, value: None))
    with pytest.raises(AssertionError, match=r"memory was changed before its copy was over|used again before"):
        pair.train(train_step, steps=2)
    forget_copies(pair)


def test_a_device_without_room_for_slices_fails_the_step_and_it_can_be_taken_again(on_device: MakeTwins) -> None:
    device = HostDevice("late")
    pair = on_device(update_on="device", device=device, device_memory=8 * MIB)
    pair.train(train_step, steps=2)
    loss_of(pair.swapped, batch := tokens()).backward()
    with (
        short_of_memory(device, MIB // 4),
        pytest.raises(swapper.BudgetError, match="left for the update of a slice"),
    ):
        pair.optimizer.step()
    step_again(pair, batch)
    pair.finish(paged=False)


@pytest.mark.parametrize("rate, place", [(0.0, "device"), (1.0, "cpu")])
def test_auto_takes_what_is_faster(on_device: MakeTwins, monkeypatch: Any, rate: float, place: str) -> None:
    times = iter([0.5, rate])
    monkeypatch.setattr("swapper.train.updates.update_rates.least_seconds", lambda act: next(times, 0.5))
    pair = on_device(update_on="auto", device_memory=8 * MIB, budget=64 * MIB)
    assert pair.manager.current.run.plan.request.updates_there == (place == "device")
    pair.train(train_step, steps=2)
    pair.finish(paged=False)


def test_auto_leaves_an_optimizer_that_cannot_be_tried_on_the_cpu(on_device: MakeTwins) -> None:
    class Matrices(SGD):
        """As Muon: it takes nothing but matrices, and notes on itself what it did."""

        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, lr=1e-2)
            self.seen: list[int] = []

        def step(self, closure: Any = None) -> None:
            self.seen.append(1)
            if any(parameter.dim() != 2 for group in self.param_groups for parameter in group["params"]):
                raise ValueError("matrices only")
            super().step(closure)

    optimizer = Matrices(nn.Linear(8, 8, bias=False).parameters())
    assert faster_place(optimizer, HostDevice("late")) == "cpu"
    assert optimizer.seen == []
