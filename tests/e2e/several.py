"""Several optimizers as the twins' one: Muon for matrices and AdamW for the rest, and what tests of them share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from e2e.twins import Twins, assert_same_state

needs_muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon came with torch 2.9")


class Several(list[Any]):
    """Optimizers of one model that step together, for code that knows one."""

    def step(self) -> None:
        for optimizer in self:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self:
            optimizer.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> list[dict[str, Any]]:
        return [optimizer.state_dict() for optimizer in self]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        for optimizer, state in zip(self, states, strict=True):
            optimizer.load_state_dict(state)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self for group in optimizer.param_groups]


def muon_and_adamw(parameters: Iterable[nn.Parameter]) -> Several:
    """Return Muon for the matrices and AdamW for the rest."""
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for parameter in parameters:
        (matrices if parameter.dim() == 2 else others).append(parameter)
    return Several([torch.optim.Muon(matrices, lr=1e-2), AdamW(others, lr=1e-3)])


def by_turns(make: Callable[[list[nn.Parameter], int], Optimizer], count: int = 2) -> Callable[..., Several]:
    """Return a function that deals parameters to `count` optimizers in turn, so that each group has some of each."""

    def make_all(parameters: Iterable[nn.Parameter]) -> Several:
        given = list(parameters)
        return Several(make(given[number::count], number) for number in range(count))

    return make_all


class SeveralTwins(Twins):
    """Twins with several optimizers."""

    def offload(self) -> None:
        super().offload()
        assert isinstance(self.optimizer, list)
        self.optimizer = Several(self.optimizer)

    def assert_same_state(self) -> None:
        pairs = zip(self.optimizer.state_dict(), self.plain_optimizer.state_dict(), strict=True)
        for actual, expected in pairs:
            assert_same_state(actual, expected)


@pytest.fixture
def several(tmp_path: Path) -> Iterator[Callable[..., SeveralTwins]]:
    """Makes twins in directories of their own."""
    made: list[SeveralTwins] = []

    def make(model: nn.Module, *arguments: Any, **options: Any) -> SeveralTwins:
        directory = tmp_path / f"several-{len(made)}"
        directory.mkdir()
        made.append(SeveralTwins(directory, model, *arguments, **options))
        return made[-1]

    yield make
    while made:
        made.pop().close()
