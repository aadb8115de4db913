"""Training on a device: the same losses, parameters and state, bit for bit, within two budgets; and nothing before its event."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from infer.host_device import ORDERS, HostDevice
from torch import nn

import swapper
from e2e.models import Net, loss_of, tokens, train_step
from e2e.twins import Twins, adamw, smallest_device_budget
from swapper.counters import Counters
from swapper.device.downloads import Downloads
from swapper.device.storage import DeviceStorage
from swapper.device.tier import DeviceTier
from swapper.device.uploads import Uploads
from swapper.train.cold_grad import ColdGradient
from swapper.train.device_grads import DeviceGradients
from swapper.train.device_sweep import DeviceSweep, _Slot

MakeTwins = Callable[..., Twins]
MIB = 1 << 20
SMALL = 2 * MIB
"""A block has half a MiB in fp32; all of the model about 2.7."""


@pytest.fixture
def on_device(twins: MakeTwins) -> MakeTwins:
    def make(model: nn.Module | None = None, *args: Any, order: str = "late", **options: Any) -> Twins:
        return twins(
            model or Net(), *args, **{"device": HostDevice(order), "device_memory": SMALL, "room_bytes": MIB, **options}
        )

    return make


def forget_copies(pair: Twins) -> None:
    """After one of them was found to be wrong, what is left would fail too."""
    assert pair.manager is not None
    on_device = pair.manager.current.run.on_device
    for stream in (on_device._uploads._stream, on_device.downloads._stream):
        stream.done = len(stream.operations)


def accumulate(model: nn.Module, optimizer: Any) -> torch.Tensor:
    losses = []
    for _ in range(3):
        losses.append(loss_of(model, tokens()) / 3)
        losses[-1].backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    return torch.stack(losses).detach()


# --- the same bits ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("params, state", [("nvme", "nvme"), ("host", "host"), ("host", "nvme"), ("nvme", "host")])
def test_training_is_bit_equal(twins: MakeTwins, order: str, params: str, state: str) -> None:
    device = HostDevice(order)
    pair = twins(Net(), params=params, optimizer_state=state, device=device, device_memory=SMALL)
    losses = pair.train(train_step, steps=4)
    assert len({loss.item() for loss in losses}) == 4
    assert device.peak_bytes <= SMALL
    pair.finish(paged=(params, state) == ("nvme", "nvme"))


@pytest.mark.parametrize("gradients", ["host", "nvme"])
@pytest.mark.parametrize("order", ["late", "by chance 1"])
def test_accumulating_and_clipping_is_bit_equal(on_device: MakeTwins, gradients: str, order: str) -> None:
    pair = on_device(gradients=gradients, order=order)
    pair.train(accumulate, steps=3)
    pair.finish(paged=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_masters_and_scaling_are_bit_equal(on_device: MakeTwins, dtype: torch.dtype) -> None:
    pair = on_device(Net().to(dtype), master=dtype is torch.bfloat16)
    scalers = {
        id(model): torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=2)
        for model in (pair.plain, pair.swapped)
    }

    def step(model: Any, optimizer: Any) -> list[float]:
        scaler = scalers[id(model)]
        loss = loss_of(model, tokens())
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer if model is pair.swapped else _Everything(model))
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        finite = all(bool(torch.linalg.vector_norm(p.grad).isfinite()) for p in model.parameters())
        if finite:
            optimizer.step()
        optimizer.zero_grad()
        scaler.update()
        return [loss.item(), scaler.get_scale(), float(finite)]

    results = pair.train(step, steps=6)
    assert len(results) == 6
    pair.finish(paged=False)


class _Everything:
    """What a scaler looks at of an optimizer."""

    def __init__(self, model: nn.Module) -> None:
        self.param_groups = [{"params": list(model.parameters())}]


@pytest.mark.parametrize(
    "options", [{"checkpointing": False}, {"checkpointing": True}, {"tied": True}, {"passes": 2}, {"dropout": 0.1}]
)
def test_models_that_use_parameters_again_are_bit_equal(on_device: MakeTwins, options: dict[str, Any]) -> None:
    pair = on_device(Net(**options))
    pair.train(train_step, steps=3)
    pair.finish(paged=False)


def test_a_budget_for_all_of_it_brings_each_parameter_once_a_step(on_device: MakeTwins) -> None:
    pair = on_device(device_memory=64 * MIB, params="device")
    pair.train(train_step, steps=6)
    size = sum(p.nbytes for p in pair.plain.parameters())
    assert 6 * size <= pair.manager.counters.uploaded_bytes <= 7 * size  # some of it for the step to come
    assert pair.manager.counters.downloaded_bytes == 6 * size
    pair.finish(paged=False)


def test_a_small_budget_brings_what_does_not_stay_twice_a_step(on_device: MakeTwins) -> None:
    pair = on_device()
    pair.train(train_step, steps=6)
    size = sum(p.nbytes for p in pair.plain.parameters())
    assert 7 * size < pair.manager.counters.uploaded_bytes <= 13 * size
    assert pair.manager.counters.downloaded_bytes == 6 * size
    pair.finish(paged=False)


def test_a_run_goes_on_and_a_snapshot_opens_in_plain_torch(tmp_path: Path, on_device: MakeTwins) -> None:
    pair = on_device()
    pair.train(train_step, steps=3)
    pair.manager.snapshot(tmp_path / "snapshot.pt").wait()
    saved = torch.load(tmp_path / "snapshot.pt")
    for name, parameter in pair.plain.named_parameters():
        assert torch.equal(saved["model"][name], parameter)
    pair.close()
    pair.swapped = Net()
    pair.original = adamw(pair.swapped.parameters())
    with swapper.SwapManager(pair.directory, host_memory="64MiB", resume="auto") as pair.manager:
        options = {**pair.options, "device": HostDevice("late")}
        _, pair.optimizer = pair.manager.offload(pair.swapped, pair.original, **options)
        pair.train(train_step, steps=2)
        pair.finish(paged=False)


def test_activations_may_be_offloaded_too(on_device: MakeTwins) -> None:
    pair = on_device()
    activations = swapper.offload_activations(pair.manager, min_bytes=4096)

    def step(model: Any, optimizer: Any) -> torch.Tensor:
        with activations if model is pair.swapped else contextlib.nullcontext():
            loss = loss_of(model, tokens(8))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    pair.train(step, steps=3)
    pair.finish(paged=False)


# --- the update on the device -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("params, state", [("nvme", "nvme"), ("host", "host"), ("host", "nvme")])
def test_updates_on_the_device_are_bit_equal(on_device: MakeTwins, order: str, params: str, state: str) -> None:
    """Its arithmetic is the CPU's here."""
    device = HostDevice(order)
    pair = on_device(params=params, optimizer_state=state, update_on="device", device=device, device_memory=8 * MIB)
    pair.train(accumulate, steps=3)
    assert device.peak_bytes <= 8 * MIB
    pair.finish(paged=False)


OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "adamw amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-3, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "asgd": lambda p: torch.optim.ASGD(p, lr=1e-2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer_updates_on_the_device(on_device: MakeTwins, name: str) -> None:
    pair = on_device(Net(), OPTIMIZERS[name], update_on="device", device_memory=16 * MIB)
    pair.train(train_step, steps=3)
    pair.finish(paged=False)


@pytest.mark.parametrize("gradients", ["host", "nvme"])
def test_masters_are_updated_on_the_device(on_device: MakeTwins, gradients: str) -> None:
    options = {"update_on": "device", "gradients": gradients, "device_memory": 8 * MIB}
    pair = on_device(Net().to(torch.bfloat16), master=True, **options)
    pair.train(accumulate, steps=3)
    pair.finish(paged=False)


def test_a_slice_whose_update_does_not_wait_for_its_state_is_noticed(on_device: MakeTwins, monkeypatch: Any) -> None:
    pair = on_device(update_on="device", device_memory=8 * MIB, optimizer_state="host", params="host")
    pair.train(train_step, steps=1)
    update = DeviceSweep.update_all

    def without_waiting(self: DeviceSweep, updates: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(DeviceStorage, "let_compute_use", lambda storage: None)
            update(self, updates)

    monkeypatch.setattr(DeviceSweep, "update_all", without_waiting)
    with pytest.raises(AssertionError):
        pair.train(train_step, steps=2)
        pair.assert_same_parameters()
    forget_copies(pair)


def test_a_slot_that_is_used_again_before_its_copies_are_over_is_noticed(
    on_device: MakeTwins, monkeypatch: Any
) -> None:
    monkeypatch.setattr(_Slot, "is_free", property(lambda self: True, lambda self, value: None))
    pair = on_device(update_on="device", device_memory=16 * MIB, optimizer_state="nvme", params="nvme")
    with pytest.raises(AssertionError, match=r"memory was changed before its copy was over|used again before"):
        pair.train(train_step, steps=2)
    forget_copies(pair)


def test_a_device_without_room_for_slices_fails_the_step_and_it_can_be_taken_again(on_device: MakeTwins) -> None:
    device = HostDevice("late")
    pair = on_device(update_on="device", device=device, device_memory=8 * MIB)
    pair.train(train_step, steps=2)
    loss_of(pair.swapped, batch := tokens()).backward()
    capacity, device.module.capacity_bytes = device.module.capacity_bytes, MIB // 4
    with pytest.raises(swapper.BudgetError, match="left for the update of a slice"):
        pair.optimizer.step()
    device.module.capacity_bytes = capacity
    pair.optimizer.step()
    pair.optimizer.zero_grad()
    loss_of(pair.plain, batch).backward()
    pair.plain_optimizer.step()
    pair.plain_optimizer.zero_grad()
    pair.finish(paged=False)


@pytest.mark.parametrize("rate, place", [(0.0, "device"), (1.0, "cpu")])
def test_auto_takes_what_is_faster(on_device: MakeTwins, monkeypatch: Any, rate: float, place: str) -> None:
    times = iter([0.5, rate])
    monkeypatch.setattr("swapper.train.update_rates._seconds", lambda act: next(times, 0.5))
    pair = on_device(update_on="auto", device_memory=8 * MIB, budget=64 * MIB)
    assert pair.manager.current.run.plan.update_on == place
    pair.train(train_step, steps=2)
    pair.finish(paged=False)


# --- looking at it ----------------------------------------------------------------------------------------------------


def test_a_gradient_says_that_it_is_there_and_that_it_cannot_be_looked_at(on_device: MakeTwins) -> None:
    pair = on_device()
    loss_of(pair.swapped, tokens()).backward()
    gradient = pair.swapped.head.weight.grad
    assert type(gradient) is ColdGradient and gradient.shape == pair.swapped.head.weight.shape
    with pytest.raises(swapper.ColdParameterError, match=r"head\.weight is off the device"):
        gradient + 1
    pair.swapped.zero_grad()
    assert pair.swapped.head.weight.grad is None


def test_after_closing_parameters_in_host_memory_are_the_models_again(on_device: MakeTwins) -> None:
    pair = on_device(params="host", optimizer_state="host", device=(device := HostDevice("late")))
    pair.train(train_step, steps=2)
    pair.close()
    for ours, theirs in zip(pair.swapped.parameters(), pair.plain.parameters(), strict=True):
        assert type(ours) is nn.Parameter and torch.equal(ours, theirs)
    assert device.used_bytes == 0


# --- bad input --------------------------------------------------------------------------------------------------------


def test_a_device_budget_that_is_too_small_is_refused_with_the_smallest_that_works(
    tmp_path: Path, on_device: MakeTwins
) -> None:
    device = HostDevice("late")
    budget = smallest_device_budget(tmp_path, Net(), device=device)
    pair = on_device(device_memory=budget, device=device)
    pair.train(train_step, steps=2)
    assert device.peak_bytes <= budget
    pair.finish(paged=False)


@pytest.mark.parametrize(
    "options, match",
    [
        ({"update": "deferred"}, "update='deferred' is not available with device="),
        ({"update": "backward"}, "update='backward' is not available with device="),
        ({"optimizer_state": "device"}, "optimizer_state='device' is not available"),
        ({"gradients": "device"}, "gradients='device' is not available"),
        ({"device": "cpu"}, "device_memory=.* goes with a device"),
        ({"device": "cpu", "device_memory": "auto", "params": "device"}, "params='device' needs a device"),
        ({"device": "meta"}, "holds no weights"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(on_device: MakeTwins, options: dict[str, Any], match: str) -> None:
    with pytest.raises(swapper.ConfigError, match=match):
        on_device(budget=64 * MIB, **options)


def test_inputs_on_another_device_are_named(on_device: MakeTwins) -> None:
    pair = on_device()
    with pytest.raises(swapper.ConfigError, match="Net runs on cpu and was given tensors on meta only"):
        pair.swapped(tokens().to("meta"))
    pair.train(train_step, steps=2)


def test_all_of_the_parameters_cannot_be_on_a_device_that_is_too_small(on_device: MakeTwins) -> None:
    with pytest.raises(swapper.BudgetError, match="params='device' needs all parameters on cpu at one time"):
        on_device(params="device", budget=64 * MIB)


def test_two_managers_share_a_device_as_far_as_its_memory_goes(on_device: MakeTwins) -> None:
    device = HostDevice("late", capacity_bytes=5 * MIB)
    one, other = on_device(device=device), on_device(device=device)
    one.train(train_step, steps=2), other.train(train_step, steps=2)
    with pytest.raises(swapper.BudgetError, match=r"cpu has 5\.0 MiB, of which 2 other managers may use 4\.0 MiB"):
        on_device(device=device, budget=64 * MIB)
    other.finish(paged=False)
    one.train(train_step, steps=1)
    one.finish(paged=False)


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_a_device_that_runs_out_of_memory_in_a_step_fails_it_and_it_can_be_taken_again(
    on_device: MakeTwins, when: str
) -> None:
    device = HostDevice("late")
    pair = on_device(device=device, device_memory=SMALL * 3 // 4)
    pair.train(train_step, steps=2)
    capacity = device.module.capacity_bytes

    def run_short(*_: Any) -> None:
        device.module.capacity_bytes = MIB // 4

    block = pair.swapped.blocks[1 if when == "forward" else 2]
    handle = (block.register_forward_hook if when == "forward" else block.register_full_backward_hook)(run_short)
    with pytest.raises(
        swapper.BudgetError, match=r"has no .* left for .*after everything that is not in use was given up"
    ):
        loss_of(pair.swapped, tokens()).backward()
    handle.remove()
    device.module.capacity_bytes = capacity
    pair.swapped.zero_grad()
    pair.train(train_step, steps=2)
    pair.finish(paged=False)


def test_what_stays_is_given_up_where_the_device_runs_short(on_device: MakeTwins) -> None:
    device = HostDevice("late")
    pair = on_device(device=device, device_memory=64 * MIB)
    pair.train(train_step, steps=2)
    assert device.used_bytes > 2 * MIB
    device.module.capacity_bytes = 3 * MIB // 2
    pair.train(train_step, steps=2)
    assert device.used_bytes <= 3 * MIB // 2
    pair.finish(paged=False)


@pytest.mark.parametrize("when", ["forward", "backward", "step"])
def test_a_device_that_is_lost_is_named_and_nothing_hangs(on_device: MakeTwins, when: str) -> None:
    device = HostDevice("late")
    pair = on_device(device=device)
    pair.train(train_step, steps=2)

    def lose(*_: Any) -> None:
        device.module.is_lost = True

    if when != "step":
        block = pair.swapped.blocks[2]
        (block.register_forward_pre_hook if when == "forward" else block.register_full_backward_hook)(lose)
    with pytest.raises(swapper.DeviceError, match=r"cpu failed at .*as asked for"):
        loss_of(pair.swapped, tokens()).backward()
        lose()
        pair.optimizer.step()
    pair.manager.close()
    device.module.is_lost = False


# --- each wait is needed ----------------------------------------------------------------------------------------------


def two_steps(pair: Twins) -> None:
    pair.train(accumulate, steps=2)
    pair.assert_same_parameters()


def test_a_kernel_that_does_not_wait_for_its_parameters_is_noticed(on_device: MakeTwins, monkeypatch: Any) -> None:
    monkeypatch.setattr(DeviceStorage, "let_compute_use", lambda self: None)
    with pytest.raises(AssertionError):
        two_steps(on_device())


def test_gradients_that_are_used_before_they_have_arrived_are_noticed(on_device: MakeTwins, monkeypatch: Any) -> None:
    monkeypatch.setattr(DeviceGradients, "settle", lambda self: None)
    with pytest.raises(AssertionError):
        pair = on_device()
        pair.train(train_step, steps=2)
        pair.assert_same_parameters()


def downloads(device: HostDevice) -> tuple[Downloads, torch.Tensor, torch.Tensor]:
    host, source = torch.zeros(64, dtype=torch.uint8), torch.ones(64, dtype=torch.uint8)
    return Downloads(device, Counters()), host, source


def test_memory_that_is_let_go_before_its_copy_is_over_is_noticed() -> None:
    down, host, source = downloads(HostDevice("late"))
    down.send([(host, source)])
    del source
    down.finish()
    assert host.eq(1).all()
    down.send([(host, torch.ones(64, dtype=torch.uint8))])
    kept = down._in_flight.popleft()
    down._in_flight.append(dataclasses.replace(kept, sources=()))
    del kept
    with pytest.raises(AssertionError, match="let go before its copy was over"):
        down.finish()


def test_no_more_is_kept_for_copies_than_is_set_aside() -> None:
    down = Downloads(HostDevice("late"), Counters(), most_bytes=128)
    arrived: list[int] = []
    for number in range(4):
        host, source = torch.zeros(64, dtype=torch.uint8), torch.full((64,), number, dtype=torch.uint8)
        down.send([(host, source)], lambda number=number: arrived.append(number))
    assert arrived == [0, 1]
    down.finish()
    assert arrived == [0, 1, 2, 3]


def test_a_copy_that_does_not_wait_for_the_kernels_before_it_is_noticed(monkeypatch: Any) -> None:
    down, host, source = downloads(device := HostDevice("late"))
    monkeypatch.setattr(device, "let_wait", lambda stream, event: None)
    with pytest.raises(AssertionError, match="does not wait for the kernels before it"):
        down.send([(host, source)])


def test_a_place_that_is_updated_while_it_is_copied_is_noticed(on_device: MakeTwins, monkeypatch: Any) -> None:
    pair = on_device(params="host", optimizer_state="host", device_memory=64 * MIB)
    loss_of(pair.swapped, tokens()).backward()
    pair.optimizer.step()  # and brings what comes next
    with monkeypatch.context() as patch, pytest.raises(AssertionError, match="used again before its copy was over"):
        patch.setattr(Uploads, "finish", lambda self: None)
        pair.optimizer.step()
        loss_of(pair.swapped, tokens())
    forget_copies(pair)


def test_parameters_that_are_not_brought_anew_after_an_update_are_noticed(
    on_device: MakeTwins, monkeypatch: Any
) -> None:
    monkeypatch.setattr(DeviceTier, "outdate", lambda self, images: list(images))
    with pytest.raises(AssertionError):
        two_steps(on_device(device_memory=64 * MIB))


def test_an_image_that_is_filled_anew_while_kernels_use_it_is_noticed(on_device: MakeTwins, monkeypatch: Any) -> None:
    """The device of the tests does not know when kernels run: here it is told that they use a storage from a lease on."""
    use = DeviceStorage.let_compute_use
    pair = on_device(device_memory=64 * MIB, device=(device := HostDevice("late")))

    def used(self: DeviceStorage) -> None:
        use(self)
        device.taken[self.identity] = device.module.compute.tick()

    monkeypatch.setattr(DeviceStorage, "let_compute_use", used)
    pair.train(train_step, steps=2)

    def outdate(self: DeviceStorage) -> None:
        self.filled_at = self._filler = None  # and no event of those kernels

    monkeypatch.setattr(DeviceStorage, "outdate", outdate)
    with pytest.raises(AssertionError, match="earlier kernels may still use"):
        pair.train(train_step, steps=2)
