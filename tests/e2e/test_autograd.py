"""What users do between forward and step: checkpointing, accumulation, retained graphs, evaluation in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from e2e.models import VOCABULARY, WIDTH, Net, finish_step, loss_of, tokens, train_step
from e2e.twins import Twins

MakeTwins = Callable[..., Twins]


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("kind", ["plain", "tied", "used twice", "dropout", "frozen"])
def test_activation_checkpointing_is_bit_equal(twins: MakeTwins, kind: str, use_reentrant: bool) -> None:
    model = Net(
        checkpointing=use_reentrant,
        tied=kind == "tied",
        passes=2 if kind == "used twice" else 1,
        dropout=0.2 if kind == "dropout" else 0.0,
    )
    if kind == "frozen":
        model.blocks[1].requires_grad_(False)
        model.blocks[3].down.requires_grad_(False)
    pair = twins(model)
    pair.train(train_step, steps=3)
    pair.finish()


@pytest.mark.parametrize("count", [2, 5])
def test_gradient_accumulation_is_bit_equal(twins: MakeTwins, count: int) -> None:
    def run(model: Any, optimizer: Any) -> list[torch.Tensor]:
        losses = []
        for _ in range(count):
            loss = loss_of(model, tokens()) / count
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        return losses

    pair = twins(Net())
    pair.train(run, steps=3)
    pair.finish()


def test_two_forwards_before_one_backward_are_bit_equal(twins: MakeTwins) -> None:
    def run(model: Any, optimizer: Any) -> torch.Tensor:
        first, second = tokens(), tokens()
        loss = loss_of(model, first) + loss_of(model, second)
        return finish_step(loss, optimizer)

    pair = twins(Net())
    pair.train(run, steps=3)
    pair.finish()


def test_two_forwards_then_two_backwards_in_either_order_are_bit_equal(twins: MakeTwins) -> None:
    def run(model: Any, optimizer: Any) -> tuple[torch.Tensor, torch.Tensor]:
        first, second = loss_of(model, tokens()), loss_of(model, tokens())
        first.backward()
        second.backward()
        third, fourth = loss_of(model, tokens()), loss_of(model, tokens())
        fourth.backward()
        third.backward()
        optimizer.step()
        optimizer.zero_grad()
        return first.detach(), fourth.detach()

    pair = twins(Net())
    pair.train(run, steps=3)
    pair.finish()


def test_a_forward_whose_result_is_thrown_away_changes_nothing(twins: MakeTwins) -> None:
    def run(model: Any, optimizer: Any) -> torch.Tensor:
        loss_of(model, tokens())
        model.blocks[1](torch.ones(1, WIDTH))
        return train_step(model, optimizer)

    pair = twins(Net())
    pair.train(run, steps=3)
    pair.finish()


def test_a_retained_graph_can_be_gone_through_again(twins: MakeTwins) -> None:
    def run(model: Any, optimizer: Any) -> torch.Tensor:
        loss = loss_of(model, tokens())
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        return finish_step(loss, optimizer)

    pair = twins(Net())
    pair.train(run, steps=3)
    pair.finish()


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


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_between_steps_is_bit_equal_and_changes_nothing(twins: MakeTwins, mode: Callable[[], Any]) -> None:
    def evaluate(model: Any, _: Any) -> torch.Tensor:
        model.eval()
        with mode():
            result = model(tokens(4))
        model.train()
        return result.clone()

    pair = twins(Net(dropout=0.1))
    for _ in range(3):
        pair.train(train_step, steps=1)
        pair.train(evaluate, steps=2)
    pair.finish()


def test_evaluation_between_forward_and_backward_is_bit_equal(twins: MakeTwins) -> None:
    def run(model: Any, optimizer: Any) -> tuple[torch.Tensor, torch.Tensor]:
        loss = loss_of(model, tokens())
        with torch.no_grad():
            between = model(tokens())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach(), between

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


@pytest.mark.parametrize("policy", ["bf16"])
def test_autocast_is_bit_equal(twins: MakeTwins, policy: str) -> None:
    def run(model: Any, optimizer: Any) -> torch.Tensor:
        batch = tokens()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(batch)
        loss = F.cross_entropy(logits.float().view(-1, VOCABULARY), batch.view(-1))
        return finish_step(loss, optimizer)

    pair = twins(Net(passes=2))
    pair.train(run, steps=3)
    pair.finish()
