"""Several optimizers of one model: each steps its own parameters as in plain torch, bit for bit, and a training step is whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import StepLR

import swapper
from e2e.models import Net, train_step
from e2e.several import SeveralTwins, by_turns, muon_and_adamw, needs_muon, several

__all__ = ["several"]

MakeTwins = Callable[..., SeveralTwins]


def adamw_and_sgd(parameters: list[nn.Parameter], number: int) -> Any:
    return AdamW(parameters, lr=1e-3) if number == 0 else SGD(parameters, lr=1e-2, momentum=0.9)


OPTIMIZERS = {
    "muon and adamw": pytest.param(muon_and_adamw, marks=needs_muon),
    "adamw and sgd": pytest.param(by_turns(adamw_and_sgd)),
    "three": pytest.param(by_turns(lambda parameters, number: AdamW(parameters, lr=10.0 ** -(2 + number)), 3)),
}


@pytest.mark.parametrize("update", ["step", "deferred"])
@pytest.mark.parametrize("gradients", ["host", "nvme"])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_several_optimizers_equal_plain_torch(several: MakeTwins, make: Any, gradients: str, update: str) -> None:
    pair = several(Net(depth=8), make, gradients=gradients, update=update)
    pair.train(train_step, steps=4)
    assert pair.manager is not None and pair.manager.step == 4
    pair.finish()


@pytest.mark.parametrize("update", ["step", "deferred"])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_they_have_fp32_masters(several: MakeTwins, make: Any, update: str) -> None:
    pair = several(Net(depth=8).to(torch.bfloat16), make, master=True, update=update)
    pair.train(train_step, steps=3)
    pair.finish()


@pytest.mark.parametrize("placement", [("host", "nvme"), ("host", "host"), ("nvme", "host")])
def test_they_work_in_every_placement(several: MakeTwins, placement: tuple[str, str]) -> None:
    params, state = placement
    pair = several(Net(), by_turns(adamw_and_sgd), params=params, optimizer_state=state)
    pair.train(train_step, steps=3)
    pair.finish(paged=False)


def test_each_has_schedulers_groups_and_a_state_of_its_own(several: MakeTwins) -> None:
    pair = several(Net(), by_turns(adamw_and_sgd))
    schedulers = {
        id(model): [StepLR(optimizer, 1 + number, 0.5) for number, optimizer in enumerate(optimizers)]
        for model, optimizers in ((pair.plain, pair.plain_optimizer), (pair.swapped, pair.optimizer))
    }

    def run(model: Any, optimizers: Any) -> list[Any]:
        train_step(model, optimizers)
        for scheduler in schedulers[id(model)]:
            scheduler.step()
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        states = [
            {names[id(p)]: {key: value.sum().item() for key, value in state.items()} for p, state in one.state.items()}
            for one in optimizers
        ]
        return [[group["lr"] for group in optimizers.param_groups], states]

    pair.train(run, steps=3)
    for original, paged in zip(pair.original, pair.optimizer, strict=True):
        assert paged.param_groups is original.param_groups
    pair.finish()


def test_the_state_of_one_is_not_the_others(several: MakeTwins) -> None:
    pair = several(Net(), by_turns(adamw_and_sgd))
    pair.train(train_step, steps=1)
    adamw, sgd = pair.optimizer
    parameter = adamw.param_groups[0]["params"][0]
    assert parameter in adamw.state and parameter not in sgd.state and not sgd.state[parameter]
    with pytest.raises(swapper.StateError, match=r"the state of optimizers\[1\] \(SGD\) was given a parameter"):
        sgd.state[parameter] = {"momentum_buffer": torch.zeros(parameter.shape)}

    def edit(_: Any, optimizers: Any) -> None:
        for parameter in optimizers[1].param_groups[0]["params"]:
            optimizers[1].state[parameter]["momentum_buffer"].mul_(2)
        optimizers[0].state.clear()

    pair.both(edit)
    pair.train(train_step, steps=2)
    pair.finish()


def test_state_dicts_of_each_are_taken_over_and_given(several: MakeTwins) -> None:
    pair = several(Net(), by_turns(adamw_and_sgd))
    pair.train(train_step, steps=2)
    for ours, theirs in zip(pair.optimizer, pair.plain_optimizer, strict=True):
        ours.load_state_dict(theirs.state_dict())
    for ours, theirs in zip(by_turns(adamw_and_sgd)(pair.plain.parameters()), pair.optimizer, strict=True):
        ours.load_state_dict(theirs.state_dict())
    pair.train(train_step, steps=1)
    pair.finish()


def test_clipping_and_plans_see_all(several: MakeTwins) -> None:
    pair = several(Net(), by_turns(adamw_and_sgd), gradients="nvme")

    def run(model: Any, optimizers: Any) -> torch.Tensor:
        loss = model(torch.arange(8).view(1, 8)).square().mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizers.step()
        optimizers.zero_grad()
        return norm

    pair.train(run, steps=3)
    assert pair.manager is not None
    read = pair.manager.current.run.plan.traffic.total_read_bytes
    assert pair.manager.stats().read_bytes == pytest.approx(read, rel=0.1)
    pair.finish()


@pytest.mark.parametrize("update", ["step", "deferred"])
def test_a_gradscaler_steps_each(several: MakeTwins, update: str) -> None:
    """In one iteration one of the optimizers has infinite gradients, in another both: plain torch skips those steps."""
    pair = several(Net(), by_turns(adamw_and_sgd), update=update)
    scalers = {id(model): torch.amp.GradScaler("cpu", init_scale=64.0) for model in (pair.plain, pair.swapped)}
    iteration = iter([0, 0, 1, 1, 2, 2, 3, 3, 4, 4])

    def run(model: Any, optimizers: Any) -> Any:
        scaler, number = scalers[id(model)], next(iteration)
        scaler.scale(model(torch.arange(8).view(1, 8)).square().mean()).backward()
        for index, optimizer in enumerate(optimizers):
            if (number, index) in ((1, 0), (3, 0), (3, 1)):
                optimizer.param_groups[0]["params"][0].grad.fill_(torch.inf)
            if number == 2:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
        scaler.update()
        optimizers.zero_grad()
        return scaler.get_scale()

    pair.train(run, steps=5)
    assert pair.manager is not None and pair.manager.step == 4  # both were skipped in one
    pair.finish()
