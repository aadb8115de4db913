"""Optimizer state that stays on the device: the same bits, nothing of it is copied but to be kept, and each wait is needed."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from infer.host_device import HostDevice

import swapper
from e2e.device_twins import (
    MIB,
    MakeTwins,
    accumulate,
    assert_can_be_closed,
    forget_copies,
    lose,
    on_device,
    short_of_memory,
    step_again,
)
from e2e.models import Net, loss_of, tokens, train_step
from e2e.twins import assert_same, smallest_device_budget
from swapper.device.copies import Downloads
from swapper.device.device_memory import DeviceStorage
from swapper.paging.pager import Pager
from swapper.train.groups.train_device import TrainingDevice
from swapper.train.state.resident_state import DeviceResidentState
from swapper.train.updates.device_sweep import DeviceSweep

__all__ = ["on_device"]

KEPT = {"update_on": "device", "optimizer_state": "device", "device_memory": 24 * MIB}


def test_nothing_of_it_is_copied_from_the_second_step_on(on_device: MakeTwins) -> None:
    pair = on_device(gradients="device", params="device", **KEPT)
    size = sum(p.nbytes for p in pair.plain.parameters())
    pair.train(train_step, steps=2)
    counters = pair.manager.counters
    up, down, read = counters.uploaded_bytes, counters.downloaded_bytes, dict(counters.read_bytes)
    pair.train(train_step, steps=3)
    assert counters.downloaded_bytes - down == 3 * size  # what was updated of the parameters
    assert (
        counters.uploaded_bytes - up <= (2 * 3 + 1) * size
    )  # to be updated, and for the next forward, which begins early
    assert counters.read_bytes["state"] == read["state"]
    plan = pair.manager.current.run.plan
    assert plan.traffic.read_bytes.get("state", 0) == plan.traffic.written_bytes.get("state", 0) == 0
    assert plan.commit_every is None and "on the device" in str(plan)
    pair.finish(paged=False)


def test_it_can_be_looked_at_at_any_time_and_replaced(on_device: MakeTwins) -> None:
    pair = on_device(**KEPT)
    pair.train(train_step, steps=2)
    for ours, theirs in zip(pair.swapped.parameters(), pair.plain.parameters(), strict=True):
        assert_same(dict(pair.optimizer.state[ours]), dict(pair.plain_optimizer.state[theirs]))
    pair.assert_same_state()
    before = {n: {k: v.clone() for k, v in s.items()} for n, s in pair.optimizer.state_dict()["state"].items()}
    pair.train(train_step, steps=2)
    pair.assert_same_state()
    groups = pair.plain_optimizer.state_dict()["param_groups"]
    for optimizer in (pair.optimizer, pair.plain_optimizer):
        optimizer.load_state_dict({"state": before, "param_groups": groups})
    pair.train(train_step, steps=2)
    pair.finish(paged=False)


def test_masters_follow_parameters_that_are_changed_in_a_gather(on_device: MakeTwins) -> None:
    pair = on_device(Net().to(torch.bfloat16), master=True, **KEPT)
    pair.train(train_step, steps=2)
    with torch.no_grad():
        with pair.manager.gather(pair.swapped.head.weight, write=True) as weight:
            weight[::2] += 1
        pair.plain.head.weight[::2] += 1
        number = [name for name, _ in pair.plain.named_parameters()].index("head.weight")
        pair.plain_optimizer.masters[number][::2] = pair.plain.head.weight[::2].float()
    pair.train(train_step, steps=2)
    pair.finish(paged=False)


@pytest.mark.parametrize("state", ["device", "auto"])
def test_a_run_goes_on_and_a_snapshot_opens_in_plain_torch(tmp_path: Path, on_device: MakeTwins, state: str) -> None:
    pair = on_device(commit_every=2, **{**KEPT, "optimizer_state": state})
    pair.train(train_step, steps=3)
    ticket = pair.manager.snapshot(tmp_path / "snapshot.pt")
    expected = {n: {k: v.clone() for k, v in s.items()} for n, s in pair.plain_optimizer.state_dict()["state"].items()}
    pair.train(train_step, steps=1)
    ticket.wait()
    saved = torch.load(tmp_path / "snapshot.pt")
    assert_same(saved["optimizer"]["state"], expected)
    pair.resume(Net(), device=HostDevice("late"), optimizer_state=state)
    assert pair.manager.step == 4
    assert pair.manager.current.run.plan.on_device.state
    pair.train(train_step, steps=2)
    pair.finish(paged=False)


def test_groups_that_stay_are_updated_whole(on_device: MakeTwins, monkeypatch: Any) -> None:
    updated: list[int] = []
    update = DeviceSweep._update_by_kernels

    def note(self: DeviceSweep, run: Any) -> Any:
        updated.append(len(run))
        return update(self, run)

    monkeypatch.setattr(DeviceSweep, "_update_by_kernels", note)
    monkeypatch.setattr("swapper.train.groups.memory_use.WHOLE_SHARE", 1)
    pair = on_device(params="host", gradients="device", **{**KEPT, "device_memory": 16 * MIB})
    pair.train(train_step, steps=1)
    assert len(updated) == len(pair.manager.current.run.plan.inventory.groups)
    assert sum(updated) == len(list(pair.plain.parameters()))
    sweep = pair.manager.current.run.model._sweep
    assert len(updated) < sum(len(of.all_slices(sweep._page_bytes)) for of in sweep.trainables)
    pair.train(train_step, steps=2)
    pair.finish(paged=False)


@pytest.mark.parametrize("gradients", ["host", "device"])
def test_a_step_that_fails_half_way_is_undone_where_the_one_before_is_committed(
    on_device: MakeTwins, monkeypatch: Any, gradients: str
) -> None:
    pair = on_device(commit_every=1, gradients=gradients, **KEPT)
    pair.train(train_step, steps=2)
    update, calls = DeviceSweep._update_on_device, itertools.count()

    def fail_once(self: DeviceSweep, *others: Any, **named: Any) -> Any:
        if next(calls) == 3:
            raise RuntimeError("a fault in the middle")
        return update(self, *others, **named)

    loss_of(pair.swapped, batch := tokens()).backward()
    monkeypatch.setattr(DeviceSweep, "_update_on_device", fail_once)
    with pytest.raises(RuntimeError, match="a fault in the middle"):
        pair.optimizer.step()
    step_again(pair, batch)
    pair.train(train_step, steps=2)
    pair.finish(paged=False)


def test_more_to_train_takes_it_along(on_device: MakeTwins) -> None:
    model = Net()
    for parameter in model.blocks[1].parameters():
        parameter.requires_grad_(False)
    pair = on_device(model, **KEPT)

    def unfreeze(model: Any, optimizer: Any) -> None:
        added = list(model.blocks[1].parameters())
        for parameter in added:
            parameter.requires_grad_(True)
        optimizer.add_param_group({"params": added})

    pair.train(train_step, steps=2)
    pair.both(unfreeze)
    pair.train(train_step, steps=2)
    pair.finish(paged=False)


def test_what_has_no_gradient_is_left_alone(on_device: MakeTwins) -> None:
    pair = on_device(**KEPT)

    def step(model: Any, optimizer: Any) -> None:
        loss_of(model, tokens()).backward()
        for parameter in [*model.blocks[0].parameters(), model.blocks[1].up.weight]:
            parameter.grad = None
        optimizer.step()
        optimizer.zero_grad()

    pair.train(train_step, steps=1)
    pair.train(step, steps=2)
    pair.finish(paged=False)


@pytest.mark.parametrize("when", ["look", "step"])
def test_a_device_that_is_lost_with_it_is_named_and_nothing_hangs(on_device: MakeTwins, when: str) -> None:
    device = HostDevice("late")
    pair = on_device(device=device, commit_every=1, **KEPT)
    pair.train(train_step, steps=2)
    if when == "step":
        loss_of(pair.swapped, tokens()).backward()
    else:
        pair.manager.current.run.committer.finish()
        pair.manager.current.run.model.optimizer_state.kept.ready(range(100))
    lose(device)
    with pytest.raises(swapper.DeviceError, match="as asked for"):
        pair.optimizer.step() if when == "step" else pair.optimizer.state_dict()
    assert_can_be_closed(pair, device)


def test_groups_that_are_trained_later_leave_the_frames_for_slices(on_device: MakeTwins) -> None:
    """In the smallest pool: slices come right after a group's state, of which frames were full."""
    pair = on_device(Net(), room_bytes=0, gradients="device", **KEPT)
    names = [name for name, _ in pair.plain.named_parameters()]
    groups = list(dict.fromkeys(name.rpartition(".")[0].rpartition(".")[0] or name for name in names))
    for group in reversed(groups):

        def step(model: Any, optimizer: Any, group: str = group) -> None:
            loss_of(model, tokens()).backward()
            for name, parameter in model.named_parameters():
                if not name.startswith((group, "embedding", "head")):
                    parameter.grad = None
            optimizer.step()
            optimizer.zero_grad()

        pair.train(step, steps=1)
    pair.train(train_step, steps=1)
    pair.finish(paged=False)


# --- the budget -------------------------------------------------------------------------------------------------------


def test_a_budget_that_is_too_small_is_refused_with_the_smallest_that_works(
    tmp_path: Path, on_device: MakeTwins
) -> None:
    device = HostDevice("late")
    budget = smallest_device_budget(tmp_path, Net(), **{**KEPT, "device": device})
    assert budget > 2 * sum(p.nbytes for p in Net().parameters())
    pair = on_device(**{**KEPT, "device_memory": budget, "device": device})
    pair.train(accumulate, steps=2)
    assert device.peak_bytes <= budget
    pair.finish(paged=False)


def test_auto_keeps_that_of_as_many_groups_as_there_is_room_for(on_device: MakeTwins) -> None:
    for budget in range(4 * MIB, 24 * MIB, MIB // 2):
        pair = on_device(wait=True, **{**KEPT, "device_memory": budget, "optimizer_state": "auto"})
        found = pair.plan().on_device
        if found.state and len(found.state) < len(found.gradients):
            break
    else:
        raise AssertionError("no budget keeps a part of it")
    pair.options["device"] = (device := HostDevice("late"))
    pair.offload()
    pair.train(accumulate, steps=3)
    assert device.peak_bytes <= budget
    assert "on the device, " in str(pair.manager.current.run.plan)
    pair.finish(paged=False)


def test_a_device_without_room_for_it_fails_the_step_and_it_can_be_taken_again(on_device: MakeTwins) -> None:
    device = HostDevice("late")
    pair = on_device(commit_every=1, device=device, **KEPT)
    loss_of(pair.swapped, batch := tokens()).backward()
    with (
        short_of_memory(device, 3 * MIB),
        pytest.raises(swapper.BudgetError, match="left for the optimizer state that stays there"),
    ):
        pair.optimizer.step()
    step_again(pair, batch)
    pair.train(train_step, steps=1)
    pair.finish(paged=False)


@pytest.mark.whole
@pytest.mark.parametrize(
    "options, match",
    [
        ({"update_on": "cpu"}, "optimizer_state='device' needs update_on='device'"),
        ({"update_on": "device", "device": "cpu", "device_memory": "auto"}, "needs a device"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(on_device: MakeTwins, options: dict[str, Any], match: str) -> None:
    with pytest.raises(swapper.ConfigError, match=match):
        on_device(budget=64 * MIB, optimizer_state="device", **options)


# --- what is waited for -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("waits", [True, False])
def test_state_that_is_used_before_its_copy_is_over_is_noticed(
    on_device: MakeTwins, monkeypatch: Any, waits: bool
) -> None:
    pair = on_device(device=HostDevice("late"), **KEPT)
    pair.train(train_step, steps=2)
    for state in pair.plain_optimizer.state.values():
        state["exp_avg"].add_(1)
    pair.optimizer.load_state_dict(pair.plain_optimizer.state_dict())
    model = pair.manager.current.run.model
    if not waits:
        monkeypatch.setattr(TrainingDevice, "finish", lambda on_device: None)
        monkeypatch.setattr(DeviceStorage, "wait_on_current_stream", lambda storage: None)
    model.optimizer_state.kept.ready(trainable.group for trainable in model._sweep.trainables)
    same = []
    for trainable in model._sweep.trainables:
        for parameter, places in zip(trainable.parameters, trainable.places, strict=True):
            here = model.optimizer_state.kept.view(trainable.group, places.state["exp_avg"]).view(parameter.shape)
            name = model._names[id(parameter)]
            there = pair.plain_optimizer.state[pair.plain.get_parameter(name)]["exp_avg"]
            same.append(torch.equal(here, there))
    assert all(same) == waits
    forget_copies(pair)


@pytest.mark.usefixtures("stand_in")
def test_a_place_that_is_looked_at_before_its_copy_is_over_is_noticed(on_device: MakeTwins, monkeypatch: Any) -> None:
    pair = on_device(**KEPT)
    pair.train(train_step, steps=2)
    bring = DeviceResidentState._bring_page

    def without_waiting(self: DeviceResidentState, *others: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(Downloads, "finish", lambda downloads: None)
            bring(self, *others)

    monkeypatch.setattr(DeviceResidentState, "_bring_page", without_waiting)
    with pytest.raises(AssertionError):
        pair.assert_same_state()
    forget_copies(pair)


@pytest.mark.parametrize("waits", [True, False])
def test_state_that_comes_anew_while_kernels_use_it_is_noticed(
    on_device: MakeTwins, monkeypatch: Any, waits: bool
) -> None:
    """The device of the tests does not know when kernels run: here it is told that they used the state a moment ago."""
    device = HostDevice("late")
    pair = on_device(device=device, **KEPT)
    pair.train(train_step, steps=2)
    pair.optimizer.load_state_dict(pair.plain_optimizer.state_dict())
    kept = pair.manager.current.run.model.optimizer_state.kept
    for group in kept._groups.values():
        device.taken[group.storage.identity] = device.module.compute.tick()
    if not waits:
        monkeypatch.setattr(DeviceStorage, "invalidate", lambda storage: storage.__setattr__("_filler", None))
        with pytest.raises(AssertionError, match="earlier kernels may still use"):
            kept.ready(kept._groups)
    else:
        kept.ready(kept._groups)
        pair.train(train_step, steps=1)
    forget_copies(pair)


def test_pages_whose_parameters_masters_follow_are_leased_until_their_copies_are_over(
    on_device: MakeTwins, monkeypatch: Any
) -> None:
    """Kernels of the CPU run at once, and with them what they wait for: that it is waited for is seen by the order of calls."""
    pair = on_device(Net().to(torch.bfloat16), master=True, **KEPT)
    pair.train(train_step, steps=1)
    calls: list[str] = []
    finish, release = TrainingDevice.finish, Pager.release
    monkeypatch.setattr(TrainingDevice, "finish", lambda on_device: (calls.append("finish"), finish(on_device)))

    def note(pager: Pager, access: Any, *others: Any) -> None:
        if access.key is None and not access.writes and access.pages:
            calls.append("release")
        release(pager, access, *others)

    monkeypatch.setattr(Pager, "release", note)
    model = pair.manager.current.run.model
    for trainable in model._sweep.trainables:
        calls.clear()
        model._sweep.refresh_masters(trainable, {})
        assert calls == ["finish", "release"] * (len(calls) // 2) and calls
