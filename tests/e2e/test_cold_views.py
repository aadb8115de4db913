"""Views of cold parameters, in the ways of use that tests of single operations leave out."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from devices import PLACES
from torch import nn

import swapper
from e2e.models import finish_step
from e2e.twins import Twins, send_away

MakeTwins = Callable[..., Twins]
WIDTH = 160


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    return finish_step(model(torch.randn(4, WIDTH)).square().mean(), optimizer)


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_views_of_cold_parameters_answer_as_those_of_plain_ones_or_say_why_not(
    twins: MakeTwins, place: Callable[[], dict[str, Any]]
) -> None:
    pair = twins(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(12))), **place())
    pair.train(step, steps=2)
    send_away(pair.manager)
    weight, plain = pair.swapped[3].weight, pair.plain[3].weight
    row, number = weight[5], weight[2, 3]
    assert "ColdView(away, shape=(160,)" in repr(row) and f"{weight}" == repr(weight)
    with pytest.raises(RuntimeError, match="detach it"):
        copy.deepcopy(row)
    assert torch.equal(copy.deepcopy(row.detach()), plain[5])
    with pytest.raises(swapper.ColdParameterError, match="pickling a view"):
        pickle.dumps(row)
    (found,) = torch.autograd.grad(number, weight)
    (expected,) = torch.autograd.grad(plain[2, 3], plain)
    assert torch.equal(found, expected)
    assert torch.equal(torch.stack(list(weight)), plain)
    assert torch.ones(3, dtype=torch.float64).type_as(weight).dtype == torch.float32
    send_away(pair.manager)
    with torch.no_grad():
        assert torch.equal(torch.clamp(input=weight, max=row), torch.clamp(input=plain, max=plain[5]))
    with pytest.raises(swapper.ColdParameterError):
        pair.swapped[4].bias.requires_grad_(False)[:].copy_(torch.ones(WIDTH, requires_grad=True))
    pair.swapped[4].bias.requires_grad_(True)
    del row, number
    pair.train(step, steps=2)
    pair.finish()


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_data_changed_by_what_needs_a_gradient_is_written_and_its_graph_kept(
    twins: MakeTwins, place: Callable[[], dict[str, Any]]
) -> None:
    """As peft merges adapters; a parameter itself must stay a leaf."""
    pair = twins(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(12))), **place())
    pair.train(step, steps=1)

    def change(model: nn.Module, _: object) -> list[torch.Tensor]:
        found = []
        weight = model[3].weight  # type: ignore[index]
        for frozen in (True, False):
            weight.requires_grad_(not frozen)
            for take in (lambda: weight.data, lambda: weight.data[2:5], lambda: weight.data.view(-1)):
                part = take()
                factor = torch.full(part.shape, 0.5, requires_grad=True)
                part += factor
                part *= factor
                (part.sum() * 2).backward()
                found += [factor.grad, part.detach().clone(), weight.detach().clone()]
            del part
            weight.data = weight.data.clone() * torch.full((), 0.5, requires_grad=True)
            assert weight.is_leaf and weight.requires_grad is not frozen
        return found

    pair.both(change)
    pair.train(step, steps=2)
    pair.finish()
