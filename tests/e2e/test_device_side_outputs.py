"""On a device: terms of a loss that modules leave in attributes. Their backward reads parameters before the output's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from e2e.device_twins import SMALL, MakeTwins, on_device
from e2e.models import Block, Net, finish_step, loss_of, tokens

__all__ = ["on_device"]


class Leaving(Block):
    """Leaves a term in an attribute, as mixtures of experts do."""

    def forward(self, value: Any) -> Any:
        result = super().forward(value)
        self.leave(self.up.weight.square().sum() * 1e-3)
        return result

    def leave(self, term: torch.Tensor) -> None:
        self.term = term

    def left(self) -> torch.Tensor:
        return self.term


class LeavingInADict(Leaving):
    """In a dict of a module without parameters."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.holder = nn.Identity()
        self.holder.terms = {}

    def leave(self, term: torch.Tensor) -> None:
        self.holder.terms["penalty"] = term

    def left(self) -> torch.Tensor:
        return self.holder.terms["penalty"]


class LeavingInAList(LeavingInADict):
    def leave(self, term: torch.Tensor) -> None:
        self.holder.terms = [term, None]

    def left(self) -> torch.Tensor:
        return self.holder.terms[0]


def step(model: Any, optimizer: Any) -> torch.Tensor:
    loss = loss_of(model, tokens())
    return finish_step(loss + sum(block.left() for block in model.blocks), optimizer)


@pytest.mark.parametrize("checkpointing", [None, False])
@pytest.mark.parametrize("make_block", [Leaving, LeavingInADict, LeavingInAList])
@pytest.mark.parametrize("update", ["step", "deferred", "backward"])
def test_terms_of_the_loss_in_attributes(
    on_device: MakeTwins, update: str, make_block: type[Leaving], checkpointing: bool | None
) -> None:
    model = Net(make_block=make_block, checkpointing=checkpointing)
    pair = on_device(model, update=update, device_memory=SMALL)
    pair.train(step, steps=3)
    pair.finish(paged=False)
