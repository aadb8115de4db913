"""The optimizer's update on a device: the same bits, any optimizer, within the budget; and no slot is used before its event."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from infer.host_device import BYTES_PER_S, ORDERS, HostDevice, Stream
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
from e2e.models import Net, loss_of, tokens, train_step
from swapper.device.device_memory import DeviceStorage
from swapper.train.groups.train_device import TrainingDevice
from swapper.train.planning.update_place import faster_place
from swapper.train.updates import device_slots, device_sweep
from swapper.train.updates.device_slots import UpdateSlot
from swapper.train.updates.device_sweep import DeviceSweep

__all__ = ["on_device"]


@pytest.mark.usefixtures("stand_in")
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
    pair.manager.current.run.model._sweep._results.forget()  # the error, which keeps what it was about


@pytest.mark.usefixtures("stand_in")
def test_a_slot_that_is_used_again_before_its_copies_are_over_is_noticed(
    on_device: MakeTwins, monkeypatch: Any
) -> None:
    pair = on_device(update_on="device", device_memory=16 * MIB, optimizer_state="nvme", params="nvme")
    pair.train(train_step, steps=1)
    passed = pair.manager.current.run.placed.processor.device.record(Stream())
    monkeypatch.setattr(UpdateSlot, "in_flight", property(lambda self: 0, lambda self, value: None))
    monkeypatch.setattr(UpdateSlot, "last_use", property(lambda self: passed, lambda self, value: None))
    with pytest.raises(
        AssertionError, match=r"memory was changed before its copy was over|used again before|may still"
    ):
        pair.train(train_step, steps=2)
    forget_copies(pair)


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(
    "update_on, gradients", [("cpu", "host"), ("cpu", "nvme"), ("device", "host"), ("device", "device")]
)
def test_the_time_of_all_copies_is_counted_by_the_devices_clock(
    on_device: MakeTwins, update_on: str, gradients: str
) -> None:
    pair = on_device(update_on=update_on, gradients=gradients, optimizer_state="nvme", device_memory=64 * MIB)
    pair.train(train_step, steps=2)
    stats = pair.manager.stats()
    assert stats.uploaded_bytes > 0 and stats.upload_s > 0 and "accelerator: " in str(stats)
    pair.manager.current.run.placed.processor.finish()
    counters = pair.manager.counters
    assert counters.upload_s == pytest.approx(counters.uploaded_bytes / BYTES_PER_S) and counters.uploaded_bytes > 0
    assert counters.download_s == pytest.approx(counters.downloaded_bytes / BYTES_PER_S)


@pytest.mark.parametrize("commit_every", [1, None])
def test_a_device_without_room_for_slices_fails_the_step_and_it_can_be_taken_again(
    on_device: MakeTwins, commit_every: int | None
) -> None:
    """Also without a commit: nothing was changed yet."""
    device = HostDevice("late")
    pair = on_device(update_on="device", device=device, device_memory=8 * MIB, commit_every=commit_every)
    pair.train(train_step, steps=2)
    loss_of(pair.swapped, batch := tokens()).backward()
    with (
        short_of_memory(device, MIB // 4),
        pytest.raises(swapper.BudgetError, match="left for the update of a slice"),
    ):
        pair.optimizer.step()
    step_again(pair, batch)
    pair.finish(paged=False)


@pytest.mark.parametrize("rate, place", [(0.0, "device"), (100.0, "cpu")])
def test_auto_takes_what_is_faster(on_device: MakeTwins, monkeypatch: Any, rate: float, place: str) -> None:
    times = iter([0.5, rate])
    monkeypatch.setattr("swapper.train.planning.update_place.min_seconds", lambda act: next(times, 0.5))
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


@pytest.mark.parametrize("update", ["step", "deferred", "backward"])
def test_a_slice_is_copied_up_while_the_one_before_is_updated(
    on_device: MakeTwins, monkeypatch: Any, update: str
) -> None:
    """Its copies know nothing of that update's kernels, once the ring has memory for all of its slices."""
    device = HostDevice("late")
    options = {
        "optimizer_state": "nvme",
        "params": "nvme",
        "update": update,
        "device_memory": 16 * MIB,
        "device": device,
    }
    pair = on_device(update_on="device", **options)
    updates: list[Any] = []  # moments on the compute stream before each
    overlaps: list[bool] = []
    bring_up, update_now = TrainingDevice.bring_up, DeviceSweep._update_on_device

    def noted(self: TrainingDevice, storage: DeviceStorage, pieces: Any, last_use: Any = None) -> None:
        if last_use is not None:
            copies = device.new_stream()
            device.let_wait(copies, last_use)
            overlaps.append(not copies.knows(updates[-2]))
        bring_up(self, storage, pieces, last_use)

    def update_on_device(self: DeviceSweep, *arguments: Any, **named: Any) -> Any:
        updates.append(device.current_stream().tick())
        return update_now(self, *arguments, **named)

    monkeypatch.setattr(TrainingDevice, "bring_up", noted)
    monkeypatch.setattr(DeviceSweep, "_update_on_device", update_on_device)
    pair.train(train_step, steps=2)
    assert overlaps and all(overlaps)
    pair.finish(paged=False)


def test_neighbors_of_a_slice_are_one_copy(on_device: MakeTwins, monkeypatch: Any) -> None:
    """Here biases and norms, which are of whole alignments: a parameter's state, and gradients and parameters of several."""
    pair = on_device(
        update_on="device", device_memory=16 * MIB, optimizer_state="nvme", params="host", gradients="host"
    )
    tensors, copies = [], []
    bring_up, merge_spans, parts_of = TrainingDevice.bring_up, device_slots.merge_spans, device_sweep.parts_of

    def begin(*of: Any) -> Any:
        tensors.clear()
        return parts_of(*of)

    def note_tensors(spans: Any) -> Any:
        tensors.append(len(spans))
        return merge_spans(spans)

    def note_copies(self: TrainingDevice, storage: DeviceStorage, pieces: Any, last_use: Any = None) -> None:
        copies.append((sum(tensors), len(pieces)))
        bring_up(self, storage, pieces, last_use)

    monkeypatch.setattr(device_sweep, "parts_of", begin)
    monkeypatch.setattr(device_slots, "merge_spans", note_tensors)
    monkeypatch.setattr(TrainingDevice, "bring_up", note_copies)
    pair.train(train_step, steps=2)
    assert max(before - after for before, after in copies) > 2, copies
    pair.finish(paged=False)


class Scaled(Net):
    """With a parameter of one number, whose moments are as small as its counter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return super().forward(batch) * self.scale


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("state", ["nvme", "device"])
@pytest.mark.parametrize("make_model", [Net, Scaled])
def test_counters_that_are_on_the_device_come_back_with_their_slice(
    on_device: MakeTwins, make_model: Callable[[], nn.Module], state: str, order: str
) -> None:
    def fused(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-2, fused=True)

    options = {"update_on": "device", "device_memory": 8 * MIB, "optimizer_state": state}
    pair = on_device(make_model(), fused, order=order, **options)
    pair.train(train_step, steps=3)
    pair.finish(paged=False)  # compares them too


class FromTheStart(torch.optim.Optimizer):
    """Makes its state in its constructor alone, as Adagrad before torch 2.13."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-2})
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["sum"] = torch.full_like(parameter, 0.125)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    sum_ = self.state[parameter]["sum"].addcmul_(parameter.grad, parameter.grad)
                    parameter.addcdiv_(parameter.grad, sum_.sqrt(), value=-group["lr"])


@pytest.mark.whole
@pytest.mark.parametrize("update_on", ["cpu", "device"])
@pytest.mark.parametrize("state", ["nvme", "device"])
def test_state_that_the_constructor_makes(on_device: MakeTwins, update_on: str, state: str) -> None:
    state = state if update_on == "device" else "nvme"
    options = {"update_on": update_on, "optimizer_state": state, "commit_every": 1}
    pair = on_device(Net(), FromTheStart, device_memory=32 * MIB, **options)
    pair.train(train_step, steps=2)
    pair.resume(Net(), FromTheStart)
    pair.train(train_step, steps=2)
    pair.finish(paged=False)


@pytest.mark.whole
def test_state_that_the_constructor_makes_without_a_device(twins: MakeTwins) -> None:
    pair = twins(Net(), FromTheStart)
    pair.train(train_step, steps=3)
    pair.finish()
