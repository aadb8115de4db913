"""Operations that go past the class of a cold parameter: by what was made while its data was there, or in its own module."""

from __future__ import annotations

import copy
import io
from typing import Any

import torch
from torch import nn

import swapper
from e2e.cold_operations import cold, works
from e2e.models import Block, Net, finish_step, loss_of, tokens, train_step
from e2e.twins import Twins, assert_same, send_away
from swapper.runtime.process import rng_states, set_rng_states

# --- what was made while the data was there, used when it is not ------------------------------------------------------


@works("a graph that is made inside gather and gone through outside")
def escaped_graph(pair: Twins) -> None:
    scale = torch.ones(512, 1, requires_grad=True)
    with pair.manager.gather(cold(pair)):
        penalty = (cold(pair) * scale).square().sum()
    expected = torch.autograd.grad((pair.plain.head.weight * scale).square().sum(), [pair.plain.head.weight, scale])
    send_away(pair.manager)
    try:
        actual = torch.autograd.grad(penalty, [cold(pair), scale])
    except swapper.SwapperError as error:
        assert "manager.gather" in str(error)
    else:
        assert_same(actual, expected)


@works("regularization inside gather and backward inside")
def regularization_inside(pair: Twins) -> None:
    def run(model: Any, optimizer: Any) -> torch.Tensor:
        batch = tokens()
        with pair.manager.gather(pair.swapped):
            loss = loss_of(model, batch) + 1e-3 * sum(p.square().sum() for p in model.parameters())
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    pair.train(run, steps=2)


@works("a graph over a graph")
def double_backward(pair: Twins) -> None:
    """A gradient penalty: its backward needs the parameters again, at times that no module's forward announces."""

    def run(model: Any, _: Any) -> Any:
        hidden = torch.randn(2, 128, requires_grad=True)
        result = model.blocks[1](model.blocks[0](hidden)).square().sum()
        (gradient,) = torch.autograd.grad(result, hidden, create_graph=True)
        if model is pair.swapped:
            send_away(pair.manager)
        gradient.square().sum().backward()
        found = [p.grad.clone() for p in model.blocks[0].parameters() if p.grad is not None]
        model.zero_grad()
        return found

    random_state = rng_states()
    try:
        actual = run(pair.swapped, None)
    except swapper.SwapperError as error:
        assert "create_graph" in str(error) or "manager.gather" in str(error)
    else:
        set_rng_states(random_state)
        assert_same(actual, run(pair.plain, None))
    pair.swapped.zero_grad()


class Auxiliary(Block):
    """Leaves a term of the loss in an attribute, as mixtures of experts do."""

    def forward(self, value: Any) -> Any:
        result = super().forward(value)
        self.penalty = self.up.weight.square().sum() * 1e-3
        return result


@works("a loss that a module leaves in an attribute")
def auxiliary_loss(pair: Twins) -> None:
    directory = pair.directory / "auxiliary"
    directory.mkdir()
    other = Twins(directory, Net(make_block=Auxiliary))

    def run(model: Any, optimizer: Any) -> torch.Tensor:
        loss = loss_of(model, tokens()) + sum(block.penalty for block in model.blocks)
        if model is other.swapped:
            send_away(other.manager)
        return finish_step(loss, optimizer)

    try:
        other.train(run, steps=3)
    except swapper.SwapperError as error:
        assert "manager.gather" in str(error)
        other.close()
    else:
        other.finish()


@works("state_dict")
def state_dict(pair: Twins) -> None:
    assert_same(dict(pair.swapped.state_dict()), dict(pair.plain.state_dict()))
    assert torch.equal(cold(pair).detach() * 2, pair.plain.head.weight.detach() * 2)


@works("nn.Parameter of it")
def wrap(pair: Twins) -> None:
    try:
        nn.Parameter(cold(pair))
    except RuntimeError as error:  # torch's own: what `detach` gives, which only shows the parameter, cannot become one
        assert "type ColdParameter" in str(error)
    else:
        raise AssertionError("it was made a parameter")


@works("state_dict of a part")
def state_dict_of_a_part(pair: Twins) -> None:
    assert_same(dict(pair.swapped.blocks[1].state_dict()), dict(pair.plain.blocks[1].state_dict()))


@works("torch.save of the state_dict")
def save_state_dict(pair: Twins) -> None:
    saved = io.BytesIO()
    torch.save(pair.swapped.state_dict(), saved)
    saved.seek(0)
    assert_same(dict(torch.load(saved)), dict(pair.plain.state_dict()))


@works("conversions that change nothing")
def convert_to_the_same(pair: Twins) -> None:
    assert pair.swapped.to(pair.plain.head.weight.device) is pair.swapped and pair.swapped.float() is pair.swapped


@works("a state_dict taken inside gather")
def escaped_state_dict(pair: Twins) -> None:
    with pair.manager.gather(pair.swapped):
        state = pair.swapped.state_dict()
    expected = copy.deepcopy(dict(pair.plain.state_dict()))
    pair.both(train_step)
    send_away(pair.manager)
    assert_same(dict(state), expected)


# --- parameters that a module's own forward changes -------------------------------------------------------------------


class Renormed(Net):
    """nn.Embedding(max_norm=...) changes its weight in place, in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(512, 128, max_norm=0.5)


@works("a module whose forward changes its weight")
def changes_itself(pair: Twins) -> None:
    directory = pair.directory / "renormed"
    directory.mkdir()
    other = Twins(directory, Renormed())
    try:
        other.train(train_step, steps=4)
    except swapper.SwapperError as error:
        assert "embedding.weight" in str(error)
        assert "manager.gather" in str(error)
        other.close()
    else:
        other.finish()
