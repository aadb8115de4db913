"""`swapper.offload_activations` on an accelerator: down to host memory, on to the drive, up again; gradients are plain torch's.

The accelerator is of host memory, with copies that run late (late_device.py).
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from infer.host_device import ORDERS, HostDevice

import swapper
from e2e.late_device import LateDevice
from e2e.models import Net, train_step
from e2e.saved_activations import (
    WIDTH,
    Residual,
    assert_equal,
    assert_failures_are_errors,
    gradients,
    retained_and_double,
    swapped_only,
)
from e2e.twins import Twins

MakeTwins = Callable[..., Twins]
CPU = torch.device("cpu")
LARGEST = 2 * 128 * 3 * WIDTH * 4


def offload(manager: swapper.SwapManager, device: LateDevice, **options: Any) -> Any:
    """Activations of `manager` with the CPU's tensors on `device`."""
    given = {"to": "auto", "host_memory": "2MiB", "device_memory": "1MiB", "min_bytes": "4KiB", **options}
    activations = swapper.offload_activations(manager, **given)
    activations._devices[CPU] = device
    return activations


def cache_of(activations: Any) -> Any:
    return activations._device_caches[CPU]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    "options",
    [
        {"to": "host", "host_memory": "64MiB", "device_memory": 1},
        {"to": "host", "host_memory": "64MiB"},
        {"to": "nvme", "host_memory": "2MiB"},
        {"to": "nvme", "host_memory": 1, "device_memory": 1},
        {"to": "auto", "host_memory": "2MiB"},
        {"to": "auto", "host_memory": "5MiB", "device_memory": "3MiB"},
    ],
    ids=str,
)
def test_gradients_are_plain_torchs(manager: swapper.SwapManager, order: str, options: dict[str, Any]) -> None:
    model, value = Residual(), torch.randn(2, 128, WIDTH)
    expected = gradients(model, lambda: model(value).square().mean())
    activations = offload(manager, LateDevice(order), **options)
    for _ in range(3):
        with activations:
            assert_equal(gradients(model, lambda: model(value).square().mean()), expected)
    counters = activations.counters
    assert counters.saved > counters.storages > 0
    assert counters.down_bytes > 0 and counters.up_bytes > 0
    assert (counters.written_bytes > 0) == (options["to"] != "host")


def test_no_more_on_the_device_and_in_memory_than_asked_for(manager: swapper.SwapManager) -> None:
    model, value = Residual(8), torch.randn(2, 128, WIDTH)
    activations = offload(manager, LateDevice("late"), host_memory="3MiB", device_memory="2MiB")
    for _ in range(2):
        with activations:
            model(value).sum().backward()
    counters = activations.counters
    assert counters.device_peak_bytes <= (2 << 20) + 2 * LARGEST < counters.down_bytes // 2
    assert counters.peak_bytes <= (3 << 20) + LARGEST
    assert counters.written_bytes > 0
    gc.collect()
    activations._cache._find_engine().drain()
    with activations:
        pass
    assert (counters.device_held_bytes, counters.held_bytes) == (0, 0)
    cache_of(activations)._end_oldest(cache_of(activations)._going_up)
    assert activations._locked.used_bytes == 0


def test_the_newest_stay_and_only_what_is_too_much_is_copied(manager: swapper.SwapManager) -> None:
    model, value = Residual(8), torch.randn(2, 128, WIDTH)
    activations = offload(manager, LateDevice("late"), to="host", host_memory="64MiB", device_memory="4MiB")
    moved = []
    for _ in range(3):
        before = activations.counters.down_bytes
        with activations:
            model(value).sum().backward()
        moved.append(activations.counters.down_bytes - before)
    assert moved[1] == moved[2]
    assert (
        0 <= moved[1] - (moved[0] - (4 << 20)) <= LARGEST
    )  # in the first forward everything is, in case that more comes


def test_host_memory_that_is_full_leaves_tensors_on_the_device(manager: swapper.SwapManager) -> None:
    model, value = Residual(), torch.randn(2, 128, WIDTH)
    expected = gradients(model, lambda: model(value).square().mean())
    activations = offload(manager, LateDevice("late"), to="host", host_memory="2MiB", device_memory=1)
    for _ in range(2):
        with activations:
            assert_equal(gradients(model, lambda: model(value).square().mean()), expected)
    counters = activations.counters
    assert counters.peak_bytes <= 2 << 20 and counters.written_bytes == 0
    assert counters.device_peak_bytes > 2 << 20


@pytest.mark.usefixtures("stand_in")
def test_to_host_leaves_tensors_of_the_cpu_alone(manager: swapper.SwapManager) -> None:
    with swapper.offload_activations(manager, to="host", min_bytes=1) as activations:
        (torch.randn(64, 64, requires_grad=True) * 2).sin().sum().backward()
    assert (activations.counters.storages, activations.counters.left_alone) == (0, 1)


@pytest.mark.parametrize("order", ["late", "by chance 1"])
@pytest.mark.parametrize("checkpointing", [None, False, True])
def test_together_with_the_pager(twins: MakeTwins, order: str, checkpointing: bool | None) -> None:
    pair = twins(Net(depth=6, dropout=0.1, checkpointing=checkpointing))
    activations = offload(pair.manager, LateDevice(order), host_memory="64KiB", device_memory="16KiB", to="nvme")
    pair.train(swapped_only(pair, activations, train_step), steps=3)
    assert activations.counters.written_bytes > 0 and activations.counters.up_bytes > 0
    pair.finish()


@pytest.mark.parametrize("order", ["late", "by chance 1"])
@pytest.mark.parametrize("checkpointing", [None, False])
def test_together_with_parameters_on_the_device(twins: MakeTwins, order: str, checkpointing: bool | None) -> None:
    device = HostDevice(order)
    model = Net(depth=6, dropout=0.1, checkpointing=checkpointing)
    pair = twins(model, device=device, device_memory="2MiB", room_bytes=1 << 20)
    activations = offload(pair.manager, LateDevice(order), host_memory="64KiB", device_memory="16KiB", to="nvme")
    pair.train(swapped_only(pair, activations, train_step), steps=3)
    assert activations.counters.written_bytes > 0 and activations.counters.up_bytes > 0
    assert device.peak_bytes <= 2 << 20
    pair.finish()


@pytest.mark.whole
@pytest.mark.parametrize("order", ["late", "by chance 2"])
def test_retain_graph_and_double_backward(manager: swapper.SwapManager, order: str) -> None:
    value = torch.randn(64, 64, requires_grad=True)
    expected = retained_and_double(value)
    with offload(manager, LateDevice(order), to="nvme", host_memory=1, device_memory=1) as activations:
        assert_equal(retained_and_double(value), expected)
    assert activations.counters.up_bytes > activations.counters.down_bytes > 0


def test_microbatches_of_one_context(manager: swapper.SwapManager) -> None:
    model, values = Residual(), [torch.randn(2, 128, WIDTH) for _ in range(3)]

    def run() -> torch.Tensor:
        losses = [model(value).square().mean() for value in values[:2]]  # two graphs at one time
        sum(losses).backward()
        return model(values[2]).square().mean()

    expected = gradients(model, run)
    activations = offload(manager, LateDevice("late"))
    for _ in range(2):
        with activations:
            assert_equal(gradients(model, run), expected)


def test_what_was_changed_in_place_is_noticed_where_the_copy_is_still_to_come(manager: swapper.SwapManager) -> None:
    value = torch.randn(64, 64, requires_grad=True)
    with offload(manager, LateDevice("late"), device_memory="1MiB"):
        hidden = value * 2
        result = hidden.sin().sum()
        hidden.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            result.backward()


def test_graphs_that_nobody_runs_backward_leave_nothing(manager: swapper.SwapManager) -> None:
    model, value = Residual(), torch.randn(2, 128, WIDTH)
    activations = offload(manager, LateDevice("late"))
    with activations:
        for _ in range(3):
            result = model(value).sum()
            del result
        assert len(activations._known) == 0
    assert activations.counters.device_held_bytes == 0
    assert cache_of(activations)._live_bytes == 0


def test_a_stream_of_the_users_own_gets_the_content_too(manager: swapper.SwapManager) -> None:
    device, seen = LateDevice("late"), []

    class Elsewhere(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, value: torch.Tensor) -> torch.Tensor:
            context.save_for_backward(value)
            return value.sum()

        @staticmethod
        def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
            before, device.module.current = device.module.current, side
            [saved] = context.saved_tensors
            [again] = context.saved_tensors
            device.module.current = before
            seen.extend([saved, again])
            return gradient.expand(saved.shape)

    side = type(device.module.current)(is_compute=True)
    value = torch.randn(64, 64, requires_grad=True) * 1
    for memory in (1, "1MiB"):  # brought for that stream, and still there from another one
        with offload(manager, device, device_memory=memory):
            Elsewhere.apply(value).backward(retain_graph=True)
    assert len(seen) == 4 and all(torch.equal(one, value) for one in seen)


def test_two_managers_on_one_device(manager: swapper.SwapManager, tmp_path: Path) -> None:
    model, value, device = Residual(), torch.randn(2, 128, WIDTH), LateDevice("late")
    expected = gradients(model, lambda: model(value).square().mean())
    (tmp_path / "other").mkdir()
    with swapper.SwapManager(tmp_path / "other", host_memory="64MiB") as other:
        both = [offload(each, device, to="nvme") for each in (manager, other)]
        for _ in range(2):
            torch.manual_seed(1)
            with both[0]:
                first = model(value).square().mean()
            with both[1]:
                second = model(value).square().mean()
                model.zero_grad()
                first.backward()
                assert_equal([parameter.grad.clone() for parameter in model.parameters()], expected)
                model.zero_grad()
                second.backward()
        assert all(activations.counters.written_bytes > 0 for activations in both)


# --- bad input --------------------------------------------------------------------------------------------------------


def test_a_device_without_memory_in_backward_is_named_and_the_step_can_be_run_again(
    manager: swapper.SwapManager,
) -> None:
    model, value = Residual(), torch.randn(2, 128, WIDTH)
    expected = gradients(model, lambda: model(value).square().mean())
    device = LateDevice("late", capacity_bytes=LARGEST // 8)
    activations = offload(manager, device, to="host", host_memory="64MiB")
    with activations, pytest.raises(swapper.BudgetError, match="lower device_memory of offload_activations"):
        gradients(model, lambda: model(value).square().mean())
    device.module.capacity_bytes = 2 * LARGEST  # less than what would be brought ahead
    for _ in range(2):
        with activations:
            assert_equal(gradients(model, lambda: model(value).square().mean()), expected)
    assert device.module.times_emptied > 0


def test_a_device_that_is_lost_is_named_in_forward_and_backward(manager: swapper.SwapManager) -> None:
    value = torch.randn(64, 64, requires_grad=True)
    device = LateDevice("late")
    activations = offload(manager, device, device_memory=1)
    with activations:
        result = (value * 2).sin().sum()
        device.module.is_lost = True
        with pytest.raises(swapper.DeviceError, match="can be used again in a new process only"):
            result.backward()
        with pytest.raises(swapper.DeviceError):
            (value * 2).sin().sum()
        del result
        device.module.is_lost = False


@pytest.mark.parametrize("seed", range(4))
def test_transfers_that_fail_are_errors_and_never_gradients(manager: swapper.SwapManager, seed: int) -> None:
    assert_failures_are_errors(offload(manager, LateDevice(f"by chance {seed}"), to="nvme"), seed)


def test_a_full_drive_is_named(small_tmpfs: Path) -> None:
    model, value = Residual(8), torch.randn(2, 128, WIDTH)
    with swapper.SwapManager(small_tmpfs, host_memory="64MiB") as manager:
        activations = offload(manager, LateDevice("late"), to="nvme")
        with activations, pytest.raises(swapper.IoError, match="No space left"):
            model(value).sum()


# --- the device of the tests notices what it is for ----------------------------------------------------------------------


def drop_waits(device: LateDevice, of: Callable[[Any], bool]) -> None:
    """Have streams for which `of` is true not wait for anything."""
    wait = device.let_wait
    device.let_wait = lambda stream, event: None if of(stream) else wait(stream, event)  # type: ignore[method-assign]


@pytest.mark.parametrize("who", ["compute", "down", "up"])
def test_a_wait_that_is_left_out_is_noticed(manager: swapper.SwapManager, who: str) -> None:
    model, value = Residual(), torch.randn(2, 128, WIDTH)
    expected = gradients(model, lambda: model(value).square().mean())
    device = LateDevice("late")
    drop_waits(device, lambda stream: stream.is_compute if who == "compute" else stream is device.streams[who == "up"])
    activations = offload(manager, device, to="host", host_memory="64MiB")
    with pytest.raises(AssertionError), activations:
        assert_equal(gradients(model, lambda: model(value).square().mean()), expected)
    device.is_over = True


def test_host_memory_that_is_written_before_its_copy_is_over_is_noticed(
    manager: swapper.SwapManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swapper.train.activations.saved_tensor_cache.Arrival.done", True)
    model, value = Residual(), torch.randn(2, 128, WIDTH)
    expected = gradients(model, lambda: model(value).square().mean())
    with offload(manager, LateDevice("late"), to="nvme", host_memory="3MiB", device_memory="3MiB"):
        actual = gradients(model, lambda: model(value).square().mean())
    with pytest.raises(AssertionError):
        assert_equal(actual, expected)
