"""Operations on several guarded tensors at once: each has its own rule, and none is used where it has no data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from devices import device_of_tests
from torch import nn

import swapper
from e2e.models import Net, loss_of, tokens, train_step
from e2e.twins import Twins

MakeTwins = Callable[..., Twins]

PLACES: dict[str, Callable[[], dict[str, Any]]] = {
    "in host memory": dict,
    "deferred": lambda: {"update": "deferred"},
    "on a device": lambda: {"device": device_of_tests(), "device_memory": 2 << 20},
    "deferred on a device": lambda: {"device": device_of_tests(), "device_memory": 2 << 20, "update": "deferred"},
    "streamed": lambda: {"device": device_of_tests(), "device_memory": 2 << 20, "params": "host"},
}
AWAY: dict[str, Callable[[], dict[str, Any]]] = {
    "on NVMe": lambda: {"gradients": "nvme"},
    "on a device": lambda: {"device": device_of_tests(), "device_memory": 2 << 20},
}


@torch.no_grad()
def in_place(state: torch.Tensor, parameter: nn.Parameter) -> None:
    state.add_(parameter, alpha=0.5)


@torch.no_grad()
def of_a_view(state: torch.Tensor, parameter: nn.Parameter) -> None:
    state.add_(parameter.data, alpha=0.5)


@torch.no_grad()
def of_a_list(state: torch.Tensor, parameter: nn.Parameter) -> None:
    state.copy_(torch.stack([state, parameter]).sum(0))


@torch.no_grad()
def of_both(state: torch.Tensor, parameter: nn.Parameter) -> None:
    parameter.sub_(state, alpha=0.5)
    state.lerp_(parameter, 0.5)


@torch.no_grad()
def by_form(state: torch.Tensor, parameter: nn.Parameter) -> None:
    state.view_as(parameter).mul_(0.5)
    state.to(parameter).add_(1)


USES = [in_place, of_a_view, of_a_list, of_both, by_form]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("use", USES)
def test_state_and_a_cold_parameter(twins: MakeTwins, use: Callable[..., None], place: str) -> None:
    def nudge(model: Any, optimizer: Any) -> None:
        for parameter in model.parameters():
            use(optimizer.state[parameter]["exp_avg"], parameter)

    pair = twins(Net(), room_bytes=1 << 20, **PLACES[place]())
    for _ in range(2):
        pair.train(train_step, steps=1)
        pair.both(nudge)
    pair.train(train_step, steps=1)
    pair.finish(paged=False)


@pytest.mark.parametrize("place", AWAY)
def test_state_and_a_gradient_that_is_away_are_refused_and_nothing_changes(twins: MakeTwins, place: str) -> None:
    pair = twins(Net(), room_bytes=1 << 20, **AWAY[place]())
    pair.train(train_step, steps=1)
    pair.both(lambda model, optimizer: loss_of(model, tokens()).backward())
    pair.both(lambda model, optimizer: nn.utils.clip_grad_norm_(model.parameters(), 1e-3))
    away = [parameter for parameter in pair.swapped.parameters() if type(parameter.grad) is not torch.Tensor]
    assert len(away) > 5
    for parameter in away:
        with pytest.raises(
            swapper.ColdParameterError, match=r"gradient of .*add_ needs its data.*gradients='(host|device)'"
        ):
            pair.optimizer.state[parameter]["exp_avg"].add_(parameter.grad)
    pair.both(lambda model, optimizer: optimizer.step())
    pair.both(lambda model, optimizer: optimizer.zero_grad())
    pair.train(train_step, steps=1)
    pair.finish(paged=False)
