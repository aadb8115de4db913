"""Gradients that the user assigns (PCGrad, SAM, GradNorm, flat buffers) are those that plain torch trains with, or refused.

The matrix is: way, where gradients live, when parameters are updated. Where a gradient's data is with its parameter
everything is followed; where it is elsewhere, `grad` has no data, and can be assigned to its own parameter only, as
long as it is its newest.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import devices
import pytest
import torch
from infer.host_device import HostDevice
from torch import nn

import swapper
from e2e.twins import Twins
from swapper.runtime.process import rng_states, set_rng_states

MakeTwins = Callable[..., Twins]
WIDTH = 160  # a layer's weight is larger than what stays in memory
KEPT: dict[int, Any] = {}  # by id of a model: gradients of an earlier step


def layers() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))


def backward(model: nn.Module) -> torch.Tensor:
    loss = model(torch.randn(4, WIDTH)).square().mean()
    loss.backward()
    return loss.detach()


PLACES: dict[str, dict[str, Any]] = {
    "nvme": {"gradients": "nvme"},
    "host": {"gradients": "host"},
    "with the parameters": {"params": "host"},
    "off the device": {"device": "late", "device_memory": 1 << 20},
    "on the device": {"device": "late", "device_memory": 8 << 20, "update_on": "device", "gradients": "device"},
}
AWAY = ("nvme", "off the device")


@pytest.fixture
def pair(twins: MakeTwins) -> Callable[..., Twins]:
    def make(place: str, **options: Any) -> Twins:
        options = {**PLACES[place], "room_bytes": 1 << 19, **options}
        if "device" in options:
            options["device"] = HostDevice(options["device"])
        return twins(layers(), **options)

    return make


@pytest.fixture(autouse=True)
def forget_kept() -> Iterator[None]:
    yield
    KEPT.clear()


# --- ways: each is done between backward and step ------------------------------------------------------------------------


def a_tensor(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape)


def a_tensor_for_each_second(model: nn.Module) -> None:
    for parameter in list(model.parameters())[::2]:
        parameter.grad = torch.randn(parameter.shape)


def one_for_some(model: nn.Module) -> None:
    model[1].weight.grad = torch.randn(WIDTH, WIDTH).T
    model[2].bias.grad = None


def one_tensor_for_two(model: nn.Module) -> None:
    model[1].weight.grad = model[3].weight.grad = torch.randn(WIDTH, WIDTH)


def its_own_again(model: nn.Module) -> None:
    kept = model[1].weight.grad
    model[1].weight.grad = None
    model[1].weight.grad = kept


def anothers(model: nn.Module) -> None:
    model[1].weight.grad = model[2].weight.grad


def exchanged(model: nn.Module) -> None:
    model[1].weight.grad, model[2].weight.grad = model[2].weight.grad, model[1].weight.grad


def an_earlier_one(model: nn.Module) -> None:
    kept = model[1].weight.grad
    model.zero_grad()
    backward(model)
    model[1].weight.grad = kept


def that_of_an_earlier_step(model: nn.Module) -> None:
    model[1].weight.grad = KEPT[id(model)]


def an_earlier_one_and_another_backward(model: nn.Module) -> None:
    an_earlier_one(model)
    backward(model)


def anothers_and_another_backward(model: nn.Module) -> None:
    anothers(model)
    backward(model)


def exchanged_and_another_backward(model: nn.Module) -> None:
    exchanged(model)
    backward(model)


def a_tensor_and_another_backward(model: nn.Module) -> None:
    kept = model[2].weight.grad = torch.randn(WIDTH, WIDTH)
    model[1].weight.grad = torch.randn(WIDTH, WIDTH)
    backward(model)
    kept.mul_(2)  # torch accumulates in place


def one_tensor_for_two_and_another_backward(model: nn.Module) -> None:
    one_tensor_for_two(model)
    backward(model)


def parts_of_one_buffer(model: nn.Module) -> None:
    """As those who reduce all gradients at one time have them."""
    flat = torch.zeros(sum(parameter.numel() for parameter in model.parameters()))
    at = 0
    for parameter in model.parameters():
        parameter.grad = flat[at : at + parameter.numel()].view(parameter.shape)
        at += parameter.numel()
    backward(model)
    flat.mul_(3)


FOLLOWED = [
    *(
        a_tensor,
        a_tensor_for_each_second,
        one_for_some,
        one_tensor_for_two,
        its_own_again,
        a_tensor_and_another_backward,
    ),
    *(one_tensor_for_two_and_another_backward, parts_of_one_buffer),
]
WITH_DATA = [
    *(anothers, exchanged, an_earlier_one, that_of_an_earlier_step, an_earlier_one_and_another_backward),
    *(anothers_and_another_backward, exchanged_and_another_backward),
]


@pytest.mark.parametrize("update", ["step", "deferred"])
@pytest.mark.parametrize("place", PLACES)
def test_assigned_gradients_are_those_that_are_used(pair: MakeTwins, place: str, update: str) -> None:
    made = pair(place, update=update)
    for way in [*FOLLOWED, *(() if place in AWAY or devices.NAME else WITH_DATA)]:

        def step(model: nn.Module, optimizer: Any, way: Any = way) -> torch.Tensor:
            loss = backward(model)
            way(model)
            optimizer.step()
            KEPT[id(model)] = model[1].weight.grad
            optimizer.zero_grad()
            return loss

        KEPT.clear()
        made.train(lambda model, optimizer: step(model, optimizer, its_own_again), steps=1)
        made.train(step, steps=2)
        made.assert_same_parameters()
    made.assert_same_state()


@pytest.mark.parametrize("way", [its_own_again, a_tensor_for_each_second])
def test_an_earlier_gradient_may_die_at_any_lease_of_a_step(pair: MakeTwins, way: Any) -> None:
    """As one does that the program has kept, or the traceback of an exception: the newer one is still to be used."""
    made = pair("nvme", update="deferred")
    pager = made.manager.current.run.pager
    lease, left, kept = pager.lease, -1, list[Any]()

    def drop(access: Any) -> None:
        nonlocal left
        if left == 0:
            kept.clear()
        left -= 1
        lease(access)

    def step(model: nn.Module, optimizer: Any, keeps: bool = False) -> torch.Tensor:
        loss = backward(model)
        way(model)
        kept.extend(parameter.grad for parameter in model.parameters() if keeps)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    pager.lease = drop
    for number in itertools.count():
        made.both(lambda model, optimizer: step(model, optimizer, keeps=True))
        left = number
        made.both(step)
        if left >= 0:
            break
    made.both(step)
    assert number > 10
    made.assert_same_parameters()
    made.assert_same_state()


@pytest.mark.parametrize("place", AWAY)
@pytest.mark.parametrize("update", ["step", "deferred", "backward"])
def test_gradients_without_data_are_refused_where_they_are_not_their_own(
    pair: MakeTwins, place: str, update: str
) -> None:
    def step(model: nn.Module, optimizer: Any, way: Any = None, clips: bool = False) -> None:
        if way is None:
            backward(model)
        else:
            with made.manager.accumulate():
                backward(model)
                way(model)
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        KEPT[id(model)] = model[1].weight.grad
        optimizer.zero_grad()

    made = pair(place, update=update)
    made.train(step, steps=1)
    for way in WITH_DATA:
        state = rng_states()
        for clips in (False, True) if update == "step" else (False,):
            with pytest.raises((swapper.StateError, swapper.ColdParameterError), match=r"gradient of \d"):
                step(made.swapped, made.optimizer, way, clips)
            made.optimizer.zero_grad()
        set_rng_states(state)
        made.train(step, steps=1)
    made.assert_same_parameters()
    made.assert_same_state()


@pytest.mark.parametrize("place", PLACES)
def test_with_updates_in_backward_what_is_assigned_before_is_used_and_what_is_assigned_later_refused(
    pair: MakeTwins, place: str
) -> None:
    made = pair(place, update="backward")

    def step(model: nn.Module, optimizer: Any, way: Any) -> torch.Tensor:
        with made.manager.accumulate() if model is made.swapped else contextlib.nullcontext():
            backward(model)
            way(model)
        loss = backward(model)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    for way in (a_tensor, one_for_some, its_own_again):
        made.train(lambda model, optimizer, way=way: step(model, optimizer, way), steps=2)
        made.assert_same_parameters()
    made.assert_same_state()
    backward(made.swapped)
    made.swapped[3].weight.grad = torch.randn(WIDTH, WIDTH)
    with pytest.raises(swapper.StateError, match=r"the gradient of 3\.weight was changed between"):
        made.optimizer.step()


@pytest.mark.parametrize("place", PLACES)
def test_what_hooks_assign_in_a_backward_is_used(pair: MakeTwins, place: str) -> None:
    """Also where the update follows at once."""
    made = pair(place, update="backward")

    def double(parameter: torch.Tensor) -> None:
        parameter.grad = torch.ones(parameter.shape)

    for model in (made.plain, made.swapped):
        model[3].weight.register_post_accumulate_grad_hook(double)

    def step(model: nn.Module, optimizer: Any) -> torch.Tensor:
        loss = backward(model)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    made.train(step, steps=3)
    made.assert_same_parameters()
    made.assert_same_state()


@pytest.mark.whole
@pytest.mark.parametrize("place", ["nvme", "host", "with the parameters"])
def test_what_no_gradient_can_be_is_refused_by_name(pair: MakeTwins, place: str) -> None:
    made = pair(place)
    weight = made.swapped[1].weight
    for wrong in (
        torch.zeros(3),
        torch.zeros(WIDTH, WIDTH, dtype=torch.float64),
        torch.zeros(WIDTH, WIDTH, device="meta"),
    ):
        with pytest.raises((RuntimeError, TypeError)):
            weight.grad = wrong
    with pytest.raises(TypeError):
        weight.grad = 3
    backward(made.swapped)
    weight.grad = torch.zeros(WIDTH, WIDTH).to_sparse()
    with pytest.raises(swapper.UnsupportedError, match=r"1\.weight.*sparse"):
        made.optimizer.step()
    made.swapped.zero_grad()
    made.optimizer.step()


def test_one_from_nvme_is_refused_where_gradients_have_data(twins: MakeTwins) -> None:
    """At the step, and where autograd would add to it."""
    model = nn.ModuleDict({"large": nn.Linear(WIDTH, WIDTH, bias=False), "other": nn.Linear(WIDTH, WIDTH, bias=False)})
    first = twins(model["large"], gradients="nvme")
    second = twins(model["other"], gradients="host")
    first.swapped(torch.randn(2, WIDTH)).sum().backward()
    second.swapped(torch.randn(2, WIDTH)).sum().backward()
    second.swapped.weight.grad = first.swapped.weight.grad
    with pytest.raises(swapper.StateError, match="gradient of weight"):
        second.optimizer.step()
    with pytest.raises(swapper.StateError, match="gradient of weight"):
        second.swapped(torch.randn(2, WIDTH)).sum().backward()
    second.optimizer.zero_grad()


@pytest.mark.parametrize("place", ["nvme", "host", "with the parameters"])
def test_more_to_train_finds_assigned_gradients(pair: MakeTwins, place: str) -> None:
    """The layout changes with gradients pending."""
    made = pair(place, wait=True)
    for model in (made.plain, made.swapped):
        model[0].requires_grad_(False)
    made.original = torch.optim.AdamW(made.swapped[1:].parameters(), lr=1e-3)
    made.plain_optimizer = torch.optim.AdamW(made.plain[1:].parameters(), lr=1e-3)
    made.room_bytes = 4 << 20
    made.offload()

    def step(model: nn.Module, optimizer: Any) -> None:
        backward(model)
        a_tensor(model)
        model[0].zero_grad()
        model[0].requires_grad_(True)
        optimizer.add_param_group({"params": list(model[0].parameters())})
        optimizer.step()
        optimizer.zero_grad()

    made.train(step, steps=1)
    made.assert_same_parameters()
    if place == "nvme":
        backward(made.swapped)
        exchanged(made.swapped)
        with pytest.raises(swapper.StateError, match="gradient of"):
            made.manager.current.run.model.gradients.present()
        made.optimizer.zero_grad()


@pytest.mark.parametrize("place", PLACES)
def test_one_buffer_for_all_gradients_stays_what_is_used(pair: MakeTwins, place: str) -> None:
    """For several steps: made before the first, reduced in each, and zeroed as a whole."""
    made = pair(place)
    buffers: dict[int, torch.Tensor] = {}

    def begin(model: nn.Module, optimizer: Any) -> None:
        flat = buffers[id(model)] = torch.zeros(sum(parameter.numel() for parameter in model.parameters()))
        for parameter, part in zip(
            model.parameters(), flat.split([p.numel() for p in model.parameters()]), strict=True
        ):
            parameter.grad = part.view(parameter.shape)

    def step(model: nn.Module, optimizer: Any) -> torch.Tensor:
        buffers[id(model)].zero_()
        backward(model)
        loss = backward(model)
        buffers[id(model)].div_(2)
        optimizer.step()
        return loss

    made.both(begin)
    made.train(step, steps=3)
    made.assert_same_parameters()
    made.assert_same_state()
    assert all(p.grad._base is not None for p in made.swapped.parameters())
