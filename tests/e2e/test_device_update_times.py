"""Updates in forward (`update="deferred"`) and in backward on a device: the same bits, wherever the update itself is made.

All that the CPU's suites hold can be run on a device of host memory too: SWAPPER_TEST_DEVICE=late (twins.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from infer.host_device import HostDevice
from torch import nn

import swapper
from e2e.device_twins import MIB, MakeTwins, assert_can_be_closed, lose, on_device, short_of_memory
from e2e.early import updated_early
from e2e.models import Halves, Net, loss_of, tokens, train_step
from e2e.twins import Twins, alternating_halves, assert_same, fail_in_the_middle
from swapper.runtime.process import rng_states, set_rng_states

__all__ = ["on_device"]

PLACES = ("cpu", "device")
KEPT = {"update_on": "device", "optimizer_state": "device", "device_memory": 32 * MIB, "commit_every": 1}
WAYS: dict[str, dict[str, Any]] = {
    **{place: {"update_on": place, "device_memory": 8 * MIB} for place in PLACES},
    "state stays": {**KEPT, "gradients": "host"},
    "all stays": {**KEPT, "gradients": "device"},
}


@pytest.fixture(params=WAYS)
def deferred(request: Any, on_device: MakeTwins) -> MakeTwins:
    return partial(on_device, update="deferred", **WAYS[request.param])


@pytest.fixture(params=WAYS)
def backward(request: Any, on_device: MakeTwins) -> MakeTwins:
    return partial(on_device, update="backward", **WAYS[request.param])


# --- the same bits ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("update_on, memory", [("cpu", MIB * 3 // 2), ("device", 3 * MIB)])
@pytest.mark.parametrize("update", ["deferred", "backward"])
def test_a_budget_smaller_than_the_model_is_kept_to(
    on_device: MakeTwins, update: str, update_on: str, memory: int
) -> None:
    device = HostDevice("late")
    pair = on_device(
        Net(depth=8), update=update, update_on=update_on, device=device, device_memory=memory, gradients="nvme"
    )
    assert memory < sum(p.nbytes for p in pair.plain.parameters())
    pair.train(train_step, steps=3)
    assert device.peak_bytes <= memory
    pair.finish(paged=False)


def test_what_a_forward_does_not_reach_is_updated_before_the_next_gradients_come(deferred: MakeTwins) -> None:
    pair = deferred(Halves())
    pair.train(alternating_halves(pair), steps=5)
    pair.finish(paged=False)


@pytest.mark.parametrize("update", ["step", "deferred", "backward"])
def test_what_was_updated_is_brought_once_and_what_is_frozen_stays(on_device: MakeTwins, update: str) -> None:
    model = Net()
    model.blocks[1].requires_grad_(False)
    pair = on_device(model, update=update, device_memory=64 * MIB, update_on="cpu")

    def evaluate(model: Any, _: Any) -> torch.Tensor:
        return torch.no_grad()(loss_of)(model, tokens())

    pair.train(train_step, steps=2)
    pair.both(evaluate)  # and all of it is there
    before = pair.manager.counters.uploaded_bytes
    pair.train(train_step, steps=3)
    pair.both(evaluate)
    trained = sum(p.nbytes for p in pair.plain.parameters() if p.requires_grad)
    assert pair.manager.counters.uploaded_bytes - before == 3 * trained
    pair.finish(paged=False)


# --- whoever looks, and runs that go on -------------------------------------------------------------------------------

LOOKS: dict[str, Callable[[Twins, Path], Any]] = {
    "evaluation": lambda pair, _: pair.both(lambda model, _: torch.no_grad()(loss_of)(model, tokens())),
    "gather": lambda pair, _: pair.assert_same_parameters(),
    "state": lambda pair, _: pair.assert_same_state(),
    "the model's state_dict": lambda pair, _: assert_same(
        dict(pair.swapped.state_dict()), dict(pair.plain.state_dict())
    ),
    "snapshot": lambda pair, path: assert_snapshot(pair, path),
}


def assert_snapshot(pair: Twins, path: Path) -> None:
    pair.manager.snapshot(path / "snapshot.pt").wait()
    content = torch.load(path / "snapshot.pt")
    assert_same(dict(content["model"]), dict(pair.plain.state_dict()))
    assert_same(content["optimizer"]["state"], pair.plain_optimizer.state_dict()["state"])


@pytest.mark.parametrize("name", LOOKS)
@pytest.mark.parametrize("place", ["nvme", "host"])
def test_whoever_looks_sees_the_whole_step(deferred: MakeTwins, tmp_path: Path, name: str, place: str) -> None:
    pair = deferred(params=place, optimizer_state=place)
    pair.train(train_step, steps=2)
    assert pair.manager.current.run.model.update_is_open
    LOOKS[name](pair, tmp_path)
    assert name == "evaluation" or not pair.manager.current.run.model.update_is_open
    pair.train(train_step, steps=2)
    pair.finish(paged=False)


@pytest.mark.parametrize("update", ["deferred", "backward"])
@pytest.mark.parametrize("update_on", PLACES)
def test_a_run_that_is_closed_goes_on(on_device: MakeTwins, update: str, update_on: str) -> None:
    pair = on_device(update=update, update_on=update_on, device_memory=8 * MIB)
    pair.train(train_step, steps=3)
    pair.resume(Net(), device=HostDevice("late"))
    pair.train(train_step, steps=2)
    pair.finish(paged=False)


def test_between_backward_and_step_nothing_can_be_looked_at(backward: MakeTwins, tmp_path: Path) -> None:
    pair = backward()
    pair.train(train_step, steps=1)
    pair.both(lambda model, _: loss_of(model, tokens()).backward())
    assert updated_early(pair)
    for look in (
        lambda: loss_of(pair.swapped, tokens()),
        lambda: pair.manager.gather(pair.swapped).__enter__(),
        lambda: pair.manager.snapshot(tmp_path / "early.pt"),
        lambda: pair.optimizer.state_dict(),
        lambda: nn.utils.clip_grad_norm_(pair.swapped.parameters(), 0.1),
        lambda: pair.optimizer.zero_grad(set_to_none=False),
    ):
        with pytest.raises(
            (swapper.StateError, swapper.UnsupportedError, swapper.ColdParameterError), match="backward"
        ):
            look()
    pair.both(lambda _, optimizer: optimizer.step())
    pair.both(lambda _, optimizer: optimizer.zero_grad())
    pair.train(train_step, steps=1)
    pair.finish(paged=False)


# --- what fails -------------------------------------------------------------------------------------------------------


def fail_one_update(pair: Twins) -> None:
    """Have the update of one of the next slices fail, once, when its kernels are about to be queued."""
    if pair.options["update_on"] == "cpu":
        fail_in_the_middle(pair)
        return
    (proxy,) = pair.manager.current.run.model._sweep._proxies._proxies
    update, calls = proxy.update, iter(range(100))

    def fail_once(works: Any) -> None:
        if next(calls) == 2:
            proxy.update = update
            raise RuntimeError("a fault in the middle")
        update(works)

    proxy.update = fail_once


def test_a_deferred_update_that_fails_can_be_done_again(deferred: MakeTwins) -> None:
    pair = deferred()
    pair.train(train_step, steps=2)
    fail_one_update(pair)
    with pytest.raises(RuntimeError, match="in the middle"):
        pair.swapped(tokens())
    pair.check_pager()
    assert pair.manager.current.run.model.update_is_open
    pair.train(train_step, steps=2)
    pair.finish(paged=False)


@pytest.mark.parametrize("when", ["update", "backward"])
def test_a_backward_that_fails_is_undone(backward: MakeTwins, when: str) -> None:
    pair = backward()
    pair.train(train_step, steps=2)
    state = rng_states()

    def fail(*_: Any) -> None:
        raise RuntimeError("a fault in the middle")

    handle = pair.swapped.blocks[0].register_full_backward_hook(fail) if when == "backward" else None
    if when == "update":
        fail_one_update(pair)
    with pytest.raises(RuntimeError, match="in the middle"):
        loss_of(pair.swapped, tokens()).backward()
    if handle is not None:
        handle.remove()
        assert updated_early(pair)
    pair.optimizer.zero_grad()
    set_rng_states(state)
    pair.train(train_step, steps=2)
    pair.finish(paged=False)


def test_a_step_in_backward_that_is_never_taken_is_undone(backward: MakeTwins) -> None:
    pair = backward()
    pair.train(train_step, steps=2)
    loss_of(pair.swapped, tokens()).backward()
    assert updated_early(pair)
    pair.resume(Net(), device=HostDevice("late"))
    pair.train(train_step, steps=1)
    pair.finish(paged=False)


@pytest.mark.parametrize("update, commit_every", [("deferred", 1), ("deferred", None), ("backward", 1)])
def test_a_device_without_room_for_slices_fails_the_pass_and_it_can_be_run_again(
    on_device: MakeTwins, update: str, commit_every: int | None
) -> None:
    device = HostDevice("late")
    pair = on_device(update=update, update_on="device", device=device, device_memory=8 * MIB, commit_every=commit_every)
    pair.train(train_step, steps=2)
    state = rng_states()
    part = pair.manager.current.run.placed.processor
    new_storage = part.new_storage

    with contextlib.ExitStack() as stack:

        def short(nbytes: int) -> Any:
            stack.enter_context(short_of_memory(device, MIB // 8))
            return new_storage(nbytes)

        part.new_storage = short
        with pytest.raises(swapper.BudgetError, match="left for the update of a slice"):
            loss_of(pair.swapped, tokens()).backward()
        del part.new_storage
    pair.optimizer.zero_grad()
    set_rng_states(state)
    pair.train(train_step, steps=2)
    pair.finish(paged=False)


@pytest.mark.parametrize("update", ["deferred", "backward"])
@pytest.mark.parametrize("update_on", PLACES)
def test_a_device_that_is_lost_is_named_and_nothing_hangs(on_device: MakeTwins, update: str, update_on: str) -> None:
    device = HostDevice("late")
    pair = on_device(update=update, update_on=update_on, device=device, device_memory=8 * MIB)
    pair.train(train_step, steps=2)
    pair.swapped.blocks[1].register_forward_hook(lambda *_: lose(device))
    with pytest.raises(swapper.DeviceError, match=r"cpu failed at .*as asked for"):
        loss_of(pair.swapped, tokens()).backward()
    assert_can_be_closed(pair, device)
