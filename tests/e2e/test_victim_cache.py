"""Parameters are cached in the memory of their gradients until backward: less is read, and no held gradient changes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import devices
import pytest
import torch
from torch.optim import AdamW

from e2e.loops import zero_before_backward
from e2e.models import Net, loss_of, tokens, train_step
from e2e.twins import Twins, penalty_of

MakeTwins = Callable[..., Twins]
cached_in_host_memory = devices.without_device(
    "parameters are not cached in the memory of gradients that a device sends"
)


def param_bytes_a_step(pair: Twins, run: Callable[[Any, Any], Any]) -> float:
    """Return how many bytes of parameters a step reads, of those that there are."""
    read = pair.read_bytes_a_step(run, steps=3)
    params = sum(p.nbytes for s in pair.manager.current.run.sections if s.plan.family == "param" for p in s.pages)
    return read / params


@cached_in_host_memory
@pytest.mark.parametrize("update", ["step", "deferred"])
def test_parameters_are_not_read_again_for_backward(twins: MakeTwins, update: str) -> None:
    def make() -> Twins:
        return twins(Net(depth=10).bfloat16(), partial(AdamW, lr=1e-3), master=True, update=update)

    early, late = make(), make()
    expected = 1.0 if update == "step" else 0.0  # the forward reads them, or has just made them
    assert param_bytes_a_step(early, train_step) <= expected + 0.1
    assert param_bytes_a_step(late, zero_before_backward) >= expected + 0.3
    early.finish()
    late.finish()


@pytest.mark.parametrize("update", ["step", "deferred"])
@pytest.mark.parametrize("part", ["gradient", "view", "detached"])
def test_a_gradient_that_somebody_keeps_keeps_its_values(
    twins: MakeTwins, update: str, part: str, gradients_that_stay: dict[str, str]
) -> None:
    pair = twins(Net(depth=6), update=update, **gradients_that_stay)
    kept: dict[int, list[torch.Tensor]] = {0: [], 1: []}

    def run(model: Any, optimizer: Any) -> torch.Tensor:
        mine = kept[int(model is pair.swapped)]
        with torch.no_grad():
            evaluated = loss_of(model, tokens())  # what was kept from the step before is still there
        loss = loss_of(model, tokens())
        seen = [gradient.clone() for gradient in mine]
        mine.clear()
        loss.backward()
        for parameter in model.parameters():
            gradient = parameter.grad
            mine.append({"gradient": gradient, "view": gradient.view(-1)[1:], "detached": gradient.detach()}[part])
        optimizer.step()
        optimizer.zero_grad()
        return [evaluated, loss.detach(), *seen]

    pair.train(run, steps=4)
    kept[0].clear()
    kept[1].clear()
    pair.finish()


def test_parameters_changed_while_others_wait_are_what_they_should_be(twins: MakeTwins) -> None:
    pair = twins(Net(depth=6), room_bytes=4 << 20)

    def run(model: Any, optimizer: Any) -> torch.Tensor:
        with torch.no_grad():
            loss_of(model, tokens())  # leaves parameters waiting
        if model is pair.swapped:
            with pair.manager.gather(model.blocks, write=True):
                halve(model)
        else:
            halve(model)
        return train_step(model, optimizer)

    def halve(model: Any) -> None:
        with torch.no_grad():
            for parameter in model.blocks.parameters():
                parameter.mul_(0.5)

    pair.train(run, steps=4)
    pair.finish(paged=False)


@cached_in_host_memory
def test_gradients_that_come_without_a_forward_drop_what_waits_in_their_place(twins: MakeTwins) -> None:
    """A penalty's backward leases nothing: what waits for the next forward is read again, and not taken for what came there."""
    pair = twins(Net(depth=6))
    waiting = []

    def run(model: Any, optimizer: Any) -> list[torch.Tensor]:
        swapped = model is pair.swapped
        penalty = penalty_of(pair, model)
        with torch.no_grad():
            evaluated = loss_of(model, tokens())
        if swapped:
            waiting.append(sum(page.kept for page in pair.manager.current.run.pager._pages))
        penalty.backward()
        loss = loss_of(model, tokens())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return [evaluated, penalty.detach(), loss.detach()]

    pair.train(run, steps=4)
    assert waiting[-1] > 0, waiting
    pair.finish()
