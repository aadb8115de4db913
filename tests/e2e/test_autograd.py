"""Users' calls between forward and step: checkpointing, accumulation, retained graphs, evaluation in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from e2e.models import VOCABULARY, WIDTH, Net, loss_of, tokens, train_step
from e2e.twins import Twins

MakeTwins = Callable[..., Twins]


def test_autograd_grad_for_inputs_and_parameters_is_bit_equal(twins: MakeTwins) -> None:
    def run(model: Any, optimizer: Any) -> Any:
        hidden = torch.randn(2, 4, WIDTH, requires_grad=True)
        result = hidden
        for block in model.blocks:
            result = block(result)
        wanted = [hidden, model.blocks[0].up.weight, model.blocks[3].norm.bias]
        gradients = torch.autograd.grad(result.square().mean(), wanted)
        assert all(p.grad is None for p in model.parameters())
        return [gradients, train_step(model, optimizer)]

    pair = twins(Net())
    pair.train(run, steps=3)
    pair.finish()


def test_a_partial_backward_into_hidden_states_is_bit_equal(twins: MakeTwins) -> None:
    """The graph cut in two by hand, the upper half's gradient fed to the lower: as pipelines do."""

    def run(model: Any, optimizer: Any) -> torch.Tensor:
        batch = tokens()
        lower = model.embedding(batch) + model.position(batch.shape[1])
        for block in model.blocks[:2]:
            lower = block(lower)
        cut = lower.detach().requires_grad_()
        upper = cut
        for block in model.blocks[2:]:
            upper = block(upper)
        loss = F.cross_entropy(model.head(model.norm(upper)).view(-1, VOCABULARY), batch.view(-1))
        loss.backward()
        lower.backward(cut.grad)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    pair = twins(Net())
    pair.train(run, steps=3)
    pair.finish()


def test_a_forward_inside_a_backward_hook_is_bit_equal(twins: MakeTwins) -> None:
    def run(model: Any, optimizer: Any) -> list[torch.Tensor]:
        found = []
        batch = tokens()
        hidden = model.embedding(batch)
        hidden.register_hook(lambda _: found.append(model.blocks[3](torch.ones(1, WIDTH)).detach()))
        for block in model.blocks:
            hidden = block(hidden)
        loss = F.cross_entropy(model.head(model.norm(hidden)).view(-1, VOCABULARY), batch.view(-1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return [loss.detach(), *found]

    pair = twins(Net())
    pair.train(run, steps=3)
    pair.finish()


def test_an_update_between_a_forward_and_its_backward_raises_as_in_plain_torch(twins: MakeTwins) -> None:
    pair = twins(Net())
    pair.train(train_step, steps=1)

    def run(model: Any, optimizer: Any) -> str:
        early = loss_of(model, tokens())
        loss_of(model, tokens()).backward()
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation") as caught:
            early.backward()
        optimizer.zero_grad()
        return type(caught.value).__name__

    pair.both(run)
    pair.train(train_step, steps=2)
    pair.finish()
