"""Training on a device: the same losses, parameters and state, bit for bit, within two budgets; and nothing before its event."""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from infer.host_device import HostDevice
from torch import nn

import swapper
from e2e.device_twins import MIB, SMALL, MakeTwins, lose, on_device, short_of_memory
from e2e.models import Net, loss_of, tokens, train_step
from e2e.saved_activations import swapped_only
from e2e.twins import scalers_of, smallest_device_budget
from swapper.train.gradients.cold_grad import ColdGradient
from swapper.train.groups.train_device import TrainingDevice

__all__ = ["on_device"]


# --- the same bits ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_masters_and_scaling_are_bit_equal(on_device: MakeTwins, dtype: torch.dtype) -> None:
    pair = on_device(Net().to(dtype), master=dtype is torch.bfloat16)
    scalers = scalers_of(pair, 2.0**24)

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


def test_a_budget_for_all_of_it_brings_each_parameter_once_a_step(on_device: MakeTwins) -> None:
    pair = on_device(device_memory=64 * MIB, params="device", update_on="cpu")
    pair.train(train_step, steps=6)
    size = sum(p.nbytes for p in pair.plain.parameters())
    assert 6 * size <= pair.manager.counters.uploaded_bytes <= 7 * size  # some of it for the step to come
    assert pair.manager.counters.downloaded_bytes == 6 * size
    pair.finish(paged=False)


def test_a_small_budget_brings_what_does_not_stay_twice_a_step(on_device: MakeTwins) -> None:
    pair = on_device(update_on="cpu")
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
    pair.resume(Net(), device=HostDevice("late"))
    pair.train(train_step, steps=2)
    pair.finish(paged=False)


def test_activations_may_be_offloaded_too(on_device: MakeTwins) -> None:
    pair = on_device()
    activations = swapper.offload_activations(pair.manager, min_bytes=4096)

    pair.train(swapped_only(pair, activations, partial(train_step, batch=8)), steps=3)
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


def test_a_change_that_cannot_be_brought_home_lets_all_that_was_gathered_go(
    on_device: MakeTwins, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = on_device(device_memory=64 * MIB)
    pair.train(train_step, steps=1)
    blocks, groups = list(pair.swapped.blocks.parameters()), pair.manager.current.run.model.groups

    def fail(self: TrainingDevice, image: object) -> None:
        monkeypatch.undo()  # the others are brought home
        raise swapper.IoError("read", "the drive", 0, 4096, 5)

    monkeypatch.setattr(TrainingDevice, "copy_back", fail)
    with pytest.raises(swapper.IoError), pair.manager.gather(blocks, write=True):
        assert sum(len(group.home.pins) for group in groups) > 1
    assert not any(group.home.pins for group in groups)
    pair.train(train_step, steps=1)
    pair.finish(paged=False)


def test_what_is_kept_of_a_gather_is_told_of_once_and_is_there_after_the_close(
    on_device: MakeTwins, caplog: pytest.LogCaptureFixture
) -> None:
    pair = on_device()
    pair.train(train_step, steps=1)
    with pair.manager.gather(pair.swapped.blocks[1]):
        assert torch.equal(pair.swapped.blocks[1].up.bias, pair.plain.blocks[1].up.bias)
    assert "still refers" not in caplog.text
    for _ in range(2):
        with pair.manager.gather(pair.swapped.blocks[1]):
            kept = pair.swapped.blocks[1].up.bias.detach()
    assert caplog.text.count("still refers to memory of the device that has blocks.1.") == 1
    pair.train(train_step, steps=2)
    pair.close()
    assert torch.equal(kept, pair.plain.blocks[1].up.bias)


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


@pytest.mark.whole
@pytest.mark.parametrize(
    "options, match",
    [
        ({"optimizer_state": "device", "update_on": "cpu"}, "optimizer_state='device' needs update_on='device'"),
        ({"gradients": "device", "update_on": "cpu"}, "gradients='device' needs update_on='device'"),
        ({"device": "cpu"}, "device_memory=.* goes with a device"),
        ({"device": "cpu", "device_memory": "auto", "params": "device"}, "params='device' needs a device"),
        ({"device": "meta"}, "holds no weights"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(on_device: MakeTwins, options: dict[str, Any], match: str) -> None:
    with pytest.raises(swapper.ConfigError, match=match):
        on_device(budget=64 * MIB, **options)


@pytest.mark.whole
@pytest.mark.parametrize("update_on", ["cpu", "device"])
@pytest.mark.parametrize("is_before", [True, False])
def test_ddp_is_refused_where_gradients_leave_the_device_before_it_averages_them(
    on_device: MakeTwins, tmp_path: Path, update_on: str, is_before: bool
) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'ranks'}", rank=0, world_size=1)
    try:
        with pytest.raises(
            swapper.UnsupportedError,
            match=r"DistributedDataParallel does not go with gradients that leave.*gradients='device'",
        ):
            model = nn.Sequential(nn.parallel.DistributedDataParallel(Net())) if is_before else Net()
            pair = on_device(model, update_on=update_on, gradients="host", device_memory=8 * MIB, wait=True)
            pair.offload()
            nn.parallel.DistributedDataParallel(pair.swapped)
    finally:
        torch.distributed.destroy_process_group()


def test_micro_batches_together_are_refused_by_name(on_device: MakeTwins) -> None:
    pair = on_device()
    with pytest.raises(swapper.UnsupportedError, match="an accelerator"):
        pair.manager.accumulate_batches(partial(loss_of, pair.swapped), [tokens(), tokens()])
    pair.close()


def test_inputs_on_another_device_are_named(on_device: MakeTwins) -> None:
    pair = on_device()
    with pytest.raises(swapper.DeviceError, match=r"Net runs on (cpu|cuda:0) and was given tensors on meta only"):
        pair.swapped(tokens().to("meta"))
    pair.train(train_step, steps=2)


def test_all_of_the_parameters_cannot_be_on_a_device_that_is_too_small(on_device: MakeTwins) -> None:
    with pytest.raises(swapper.BudgetError, match=r"params='device' needs all parameters on (cpu|cuda:0) at once"):
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
    block = pair.swapped.blocks[1 if when == "forward" else 2]
    with contextlib.ExitStack() as stack:
        handle = (block.register_forward_hook if when == "forward" else block.register_full_backward_hook)(
            lambda *_: stack.enter_context(short_of_memory(device, MIB // 4))
        )
        with pytest.raises(
            swapper.BudgetError, match=r"has no .* left for .*after everything that is not in use was given up"
        ):
            loss_of(pair.swapped, tokens()).backward()
        handle.remove()
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
    if when != "step":
        block = pair.swapped.blocks[2]
        register = block.register_forward_pre_hook if when == "forward" else block.register_full_backward_hook
        register(lambda *_: lose(device))
    with pytest.raises(swapper.DeviceError, match=r"cpu failed at .*as asked for"):
        loss_of(pair.swapped, tokens()).backward()
        lose(device)
        pair.optimizer.step()
    pair.manager.close()
    device.module.is_lost = False
