"""The returned optimizer is a drop-in: schedulers, gradients, hooks, state dicts and earlier state, as in plain torch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR, ReduceLROnPlateau, StepLR

import swapper
from e2e import third_party
from e2e.models import Net, loss_of, tokens, train_step
from e2e.twins import Twins, assert_same, scalers_of

MakeTwins = Callable[..., Twins]

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "step": partial(StepLR, step_size=2, gamma=0.5),
    "cosine": partial(CosineAnnealingLR, T_max=5),
    "one cycle": partial(OneCycleLR, max_lr=1e-2, total_steps=10),  # changes the betas too
    "plateau": partial(ReduceLROnPlateau, patience=0, threshold=10.0),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_made_before_and_after_offload_act(twins: MakeTwins, name: str, when: str) -> None:
    pair = twins(Net(), wait=True)
    make = SCHEDULERS[name]
    schedulers = {id(pair.plain): make(pair.plain_optimizer)}
    if when == "before":
        schedulers[id(pair.swapped)] = make(pair.original)
    pair.offload()
    if when == "after":
        schedulers[id(pair.swapped)] = make(pair.optimizer)

    def run(model: Any, optimizer: Any) -> tuple[torch.Tensor, float, Any]:
        loss = train_step(model, optimizer)
        scheduler = schedulers[id(model)]
        scheduler.step(loss) if name == "plateau" else scheduler.step()
        return loss, optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["betas"]

    results = pair.train(run, steps=5)
    assert len({rate for _, rate, _ in results}) > 1
    pair.finish()


def test_settings_changed_by_hand_act(twins: MakeTwins) -> None:
    pair = twins(Net())
    assert pair.optimizer.param_groups is pair.original.param_groups
    for rate, decay in ((1e-3, 0.0), (1e-4, 0.5), (0.0, 0.1)):

        def change(_: Any, optimizer: Any, rate: float = rate, decay: float = decay) -> None:
            optimizer.param_groups[0].update(lr=rate, weight_decay=decay)

        pair.both(change)
        pair.train(train_step, steps=1)
    pair.finish()


def test_clipping_values_and_own_arithmetic_on_gradients_are_bit_equal(
    twins: MakeTwins, gradients_that_stay: dict[str, str]
) -> None:
    def run(model: Any, optimizer: Any) -> torch.Tensor:
        loss = loss_of(model, tokens())
        loss.backward()
        nn.utils.clip_grad_value_(model.parameters(), 1e-3)
        for number, parameter in enumerate(model.parameters()):
            if number % 3 == 0:
                parameter.grad.mul_(0.5)
            elif number % 3 == 1:
                parameter.grad = parameter.grad * 2
            else:
                parameter.grad = None
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    pair = twins(Net(), **gradients_that_stay)
    pair.train(run, steps=3)
    pair.finish()


@pytest.mark.whole
@pytest.mark.parametrize("fused", [False, True], ids=["default", "fused"])
def test_a_gradient_scaler_skips_and_scales_as_in_plain_torch(twins: MakeTwins, fused: bool) -> None:
    pair = twins(Net(), partial(AdamW, lr=1e-3, fused=fused))
    scalers = scalers_of(pair, 1024.0)
    for factor in (float("inf"), 1.0, 1.0, float("inf"), float("nan"), 1.0):

        def run(model: Any, optimizer: Any, factor: float = factor) -> tuple[torch.Tensor, float]:
            scaler = scalers[id(model)]
            loss = loss_of(model, tokens())
            scaler.scale(loss * factor).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            return loss.detach(), scaler.get_scale()

        pair.train(run, steps=1)
    pair.finish()


def test_a_gradient_scaler_and_a_fused_optimizer_of_fp16_are_refused(twins: MakeTwins) -> None:
    pair = twins(Net().half(), partial(torch.optim.AdamW, fused=True))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(loss_of(pair.swapped, tokens())).backward()
    with pytest.raises(swapper.UnsupportedError, match="unscaled in fp16"):
        scaler.step(pair.optimizer)
    pair.check_pager()


@pytest.mark.parametrize("options", [{}, {"gradients": "nvme"}, {"update": "deferred"}], ids=str)
@pytest.mark.parametrize("unscale", [False, True], ids=["scaled", "unscaled"])
@pytest.mark.parametrize("settings", [{"fused": True}, {"fused": True, "amsgrad": True}, {"fused": False}], ids=str)
def test_steps_that_a_gradient_scaler_skips_leave_the_state_that_torch_has(
    twins: MakeTwins, settings: dict[str, Any], unscale: bool, options: dict[str, Any]
) -> None:
    """torch's fused optimizers begin their state in a step that is skipped, the others do not."""
    pair = twins(Net(), partial(AdamW, lr=1e-3, **settings), **options)
    scalers = scalers_of(pair, 1024.0)

    def run(model: Any, optimizer: Any, factor: float) -> tuple[torch.Tensor, float]:
        scaler = scalers[id(model)]
        loss = loss_of(model, tokens())
        scaler.scale(loss * factor).backward()
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss.detach(), scaler.get_scale()

    for factor in (float("inf"), float("nan"), 1.0, float("inf"), 1.0):
        pair.train(partial(run, factor=factor), steps=1)
        states = [optimizer.state_dict()["state"] for optimizer in (pair.plain_optimizer, pair.optimizer)]
        assert [list(state) for state in states[0].values()] == [list(state) for state in states[1].values()]
        pair.assert_same_state()
    assert len(pair.optimizer.state) == len(pair.plain_optimizer.state) > 0
    pair.finish()


def test_gradients_that_are_kept_keep_their_values(twins: MakeTwins, gradients_that_stay: dict[str, str]) -> None:
    """As in methods that compare the gradients of two batches."""

    def run(model: Any, optimizer: Any) -> list[torch.Tensor]:
        loss_of(model, tokens()).backward()
        kept = [parameter.grad for parameter in model.parameters()]
        optimizer.zero_grad()
        loss_of(model, tokens()).backward()
        differences = [parameter.grad - old for parameter, old in zip(model.parameters(), kept, strict=True)]
        optimizer.step()
        optimizer.zero_grad()
        loss_of(model, tokens()).backward()
        optimizer.zero_grad(set_to_none=False)
        return [*kept, *differences]

    pair = twins(Net(), **gradients_that_stay)
    pair.train(run, steps=3)
    pair.finish()


def test_a_step_without_gradients_changes_nothing(twins: MakeTwins) -> None:
    pair = twins(Net())
    pair.both(lambda _, optimizer: optimizer.step())
    pair.train(train_step, steps=2)
    pair.both(lambda _, optimizer: optimizer.step())
    pair.train(train_step, steps=1)
    pair.finish()


@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_on_the_optimizers_step_are_called(twins: MakeTwins, when: str) -> None:
    pair = twins(Net(), wait=True)
    calls: dict[str, list[str]] = {"plain": [], "swapped": []}

    def put_hooks(optimizer: Any, notes: list[str]) -> None:
        optimizer.register_step_pre_hook(lambda *_: notes.append("before"))
        optimizer.register_step_post_hook(lambda *_: notes.append("after"))

    put_hooks(pair.plain_optimizer, calls["plain"])
    if when == "before":
        put_hooks(pair.original, calls["swapped"])
    pair.offload()
    if when == "after":
        put_hooks(pair.optimizer, calls["swapped"])
    pair.train(train_step, steps=2)
    assert calls["swapped"] == calls["plain"] == ["before", "after"] * 2
    pair.finish()


# --- state that was there before, and state that comes and goes ---------------------------------------------------------


@pytest.mark.parametrize("master", [False, True], ids=["plain", "masters"])
def test_an_optimizer_that_has_taken_steps_brings_its_state(twins: MakeTwins, master: bool) -> None:
    """Plain torch takes three steps; offload takes model, state and gradients over; both go on alike."""
    model = Net(depth=8).bfloat16() if master else Net()
    optimizer = AdamW(model.parameters(), lr=1e-3, amsgrad=True)
    for _ in range(3):
        train_step(model, optimizer)
    loss_of(model, tokens()).backward()
    pair = twins(model, partial(AdamW, lr=1e-3, amsgrad=True), master=master, wait=True)
    load = pair.plain_optimizer.inner if master else pair.plain_optimizer
    load.load_state_dict(optimizer.state_dict())
    pair.original.load_state_dict(optimizer.state_dict())
    pair.offload()
    assert not pair.original.state  # it has gone to where the manager placed it
    pair.assert_same_parameters()  # gradients too
    pair.train(train_step, steps=3)
    pair.finish()


def test_the_state_dict_loads_into_plain_torch_and_back(twins: MakeTwins) -> None:
    pair = twins(Net())
    pair.train(train_step, steps=3)
    state = pair.optimizer.state_dict()
    assert_same(state, pair.plain_optimizer.state_dict())
    pair.plain_optimizer.load_state_dict(state)
    pair.train(train_step, steps=2)
    pair.optimizer.load_state_dict(copy.deepcopy(pair.plain_optimizer.state_dict()))
    pair.train(train_step, steps=2)
    pair.finish()


def test_loading_an_earlier_state_goes_back_to_it(twins: MakeTwins) -> None:
    pair = twins(Net(), partial(AdamW, lr=1e-3))
    pair.train(train_step, steps=2)
    saved = copy.deepcopy(pair.optimizer.state_dict())
    pair.both(lambda _, optimizer: optimizer.param_groups[0].update(lr=0.5))
    pair.train(train_step, steps=2)
    pair.both(lambda _, optimizer: optimizer.load_state_dict(saved))
    assert pair.optimizer.param_groups[0]["lr"] == 1e-3
    assert pair.optimizer.param_groups is pair.original.param_groups
    pair.train(train_step, steps=2)
    pair.finish()


def test_a_loaded_state_is_copied_and_replaces_all_settings(twins: MakeTwins) -> None:
    """A tensor in it may be changed by neither side, and a setting that it lacks is gone, or as the class has it."""
    pair = twins(Net(), partial(AdamW, lr=torch.tensor(1e-3), amsgrad=False))
    pair.train(train_step, steps=1)
    saved = copy.deepcopy(pair.plain_optimizer.state_dict())
    del saved["param_groups"][0]["amsgrad"]
    loaded = {id(pair.plain_optimizer): copy.deepcopy(saved), id(pair.optimizer): copy.deepcopy(saved)}

    def load(_: Any, optimizer: Any) -> None:
        optimizer.param_groups[0]["own"] = 1
        given = loaded[id(optimizer)]
        optimizer.load_state_dict({**given, "state": copy.deepcopy(given["state"])})  # plain torch uses these
        assert "own" not in optimizer.param_groups[0]
        optimizer.param_groups[0]["lr"].mul_(0.5)

    for _ in range(2):
        pair.both(load)
        pair.train(train_step, steps=1)
    assert_same(loaded[id(pair.optimizer)], saved)
    pair.finish()


def test_loading_the_state_of_a_fresh_optimizer_starts_anew(twins: MakeTwins) -> None:
    pair = twins(Net())
    fresh = AdamW(Net().parameters(), lr=2e-3).state_dict()
    pair.train(train_step, steps=2)
    pair.both(lambda _, optimizer: optimizer.load_state_dict(copy.deepcopy(fresh)))
    pair.train(train_step, steps=2)
    pair.finish()


def wrong_group_count(state: dict[str, Any]) -> None:
    state["param_groups"].append({**state["param_groups"][0], "params": []})


def wrong_parameter_count(state: dict[str, Any]) -> None:
    state["param_groups"][0]["params"].append(99)


def wrong_shape(state: dict[str, Any]) -> None:
    state["state"][2]["exp_avg"] = torch.zeros(3, 3)


def another_optimizers(state: dict[str, Any]) -> None:
    for entry in state["state"].values():
        entry.clear()
        entry["momentum_buffer"] = torch.zeros(2)


def lacking(state: dict[str, Any]) -> None:
    del state["state"][1]["exp_avg_sq"]


@pytest.mark.parametrize("spoil", [wrong_group_count, wrong_parameter_count, wrong_shape, another_optimizers, lacking])
def test_a_state_dict_that_does_not_fit_is_refused_and_nothing_changes(
    twins: MakeTwins, spoil: Callable[[dict[str, Any]], None]
) -> None:
    pair = twins(Net())
    pair.train(train_step, steps=2)
    state = copy.deepcopy(pair.optimizer.state_dict())
    spoil(state)
    with pytest.raises((ValueError, RuntimeError, KeyError)) as caught:
        pair.optimizer.load_state_dict(state)
    assert str(caught.value)
    pair.train(train_step, steps=1)
    pair.finish()


def test_a_parameter_that_is_unfrozen_after_offload_is_trained_or_refused(twins: MakeTwins) -> None:
    """Never silently left as it was, while plain torch would train it."""
    model = Net()
    model.blocks[1].requires_grad_(False)
    pair = twins(model, select=lambda model: list(model.parameters()))
    pair.train(train_step, steps=2)
    pair.both(lambda model, _: model.blocks[1].requires_grad_(True) and None)
    try:
        pair.train(train_step, steps=2)
    except RuntimeError as error:
        assert "blocks.1" in str(error)
        assert "before manager.offload" in str(error)
    else:
        pair.finish()


def two_dtypes() -> nn.Module:
    model = Net(depth=2)
    model.blocks[0].to(torch.bfloat16)
    return model


def test_adafactor_with_two_dtypes_in_a_group_is_refused(twins: MakeTwins) -> None:
    """torch takes the epsilon of a group's first parameter for all of them."""
    with pytest.raises(swapper.UnsupportedError, match=r"torch\.bfloat16 and torch\.float32.*a group of its own"):
        twins(two_dtypes(), torch.optim.Adafactor)


def test_adafactor_with_a_group_for_each_dtype_is_exact(twins: MakeTwins) -> None:
    def by_dtype(parameters: Any) -> torch.optim.Optimizer:
        groups: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in parameters:
            groups.setdefault(parameter.dtype, []).append(parameter)
        return torch.optim.Adafactor([{"params": members} for members in groups.values()])

    pair = twins(two_dtypes(), by_dtype)
    for parameter, other in zip(pair.swapped.parameters(), pair.plain.parameters(), strict=True):
        parameter.grad, other.grad = torch.ones(other.shape, dtype=other.dtype), torch.ones_like(other)
    pair.optimizer.step()
    pair.plain_optimizer.step()
    pair.finish(paged=False)


@pytest.mark.parametrize("update", ["step", "deferred"])
@pytest.mark.parametrize("params", ["nvme", "host"])
def test_a_method_of_the_users_class_reads_gradients_and_changes_state(
    twins: MakeTwins, params: str, update: str, gradients_that_stay: dict[str, str]
) -> None:
    pair = twins(Net(), third_party.Sophia, params=params, update=update, **gradients_that_stay)

    def estimate(model: Any, optimizer: Any) -> int:
        loss_of(model, tokens(2)).backward()
        count: int = optimizer.update_hessian(scale=0.5)
        optimizer.zero_grad()
        return count

    random_state = torch.get_rng_state()
    with pytest.raises(swapper.StateError, match=r"Sophia\.update_hessian\(\).*call it after the first step"):
        estimate(pair.swapped, pair.optimizer)
    pair.optimizer.zero_grad()
    torch.set_rng_state(random_state)
    for _ in range(2):
        pair.train(train_step, steps=2)
        pair.both(estimate)
    assert pair.original.estimates == 2
    pair.train(train_step, steps=1)
    pair.finish(paged=False)


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"update": "backward"}, r"update='step'"), ({"master": True}, "Leave out master_weights")],
    ids=["backward", "masters"],
)
def test_a_method_that_would_not_see_gradients_is_refused(
    twins: MakeTwins, options: dict[str, Any], reason: str
) -> None:
    pair = twins(Net().bfloat16(), third_party.Sophia, **options)
    pair.train(train_step, steps=1)
    with pytest.raises(swapper.UnsupportedError, match=rf"Sophia\.update_hessian\(\) cannot be called.*{reason}"):
        pair.optimizer.update_hessian()
    pair.train(train_step, steps=1)
    pair.finish(paged=False)


def test_the_default_dtype_may_change_after_the_first_step(twins: MakeTwins) -> None:
    pair = twins(Net())
    pair.train(train_step, steps=1)
    torch.set_default_dtype(torch.float64)
    try:
        pair.train(train_step, steps=2)
    finally:
        torch.set_default_dtype(torch.float32)
    pair.train(train_step, steps=1)
    pair.finish(paged=False)
