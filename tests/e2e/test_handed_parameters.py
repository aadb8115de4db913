"""Parameters that leave their module: as views that it returns, or handed to another one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from e2e.models import (
    LENGTH,
    VOCABULARY,
    WIDTH,
    Net,
    Position,
    train_step,
)
from e2e.twins import Twins

MakeTwins = Callable[..., Twins]


class Sampler(nn.Module):
    """A module that returns its parameter itself, and one that hands a view out in a container."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(256, WIDTH))

    def forward(self) -> dict[str, Any]:
        return {"whole": self.weight, "views": [self.weight[:LENGTH], self.weight.t()[:, LENGTH:]]}


class Handed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.position = Position()
        self.sampler = Sampler()

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        table = self.sampler()
        bias = self.position(batch.shape[1]) + table["views"][0]
        scale = table["views"][1].mean() + table["whole"].std()
        self.net(batch)  # everything else is brought in, and goes: what was handed out must not go with its frame
        return self.net(batch) * scale + (bias @ table["whole"].t()).sum()


def test_views_of_its_own_parameters_that_a_module_returns_stay_valid(twins: MakeTwins) -> None:
    pair = twins(Handed())
    pair.train(train_step, steps=4)
    pair.finish()


class Borrower(nn.Module):
    """Uses a weight that is handed to it, and a child's without calling the child."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (
            self.down(F.gelu(F.linear(hidden, self.child.weight)))
            + F.linear(F.linear(hidden, weight), weight.t()) * self.scale
        )


class Lender(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.weight = nn.Linear(WIDTH, 4096)  # large enough for a group of its own
        self.borrower = Borrower()
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = F.embedding(batch, self.net.embedding.weight)
        return self.net(batch) + self.head(self.borrower(hidden, self.weight.weight))


def test_a_weight_handed_to_another_module_is_bit_equal(twins: MakeTwins) -> None:
    pair = twins(Lender())
    pair.train(train_step, steps=4)
    pair.finish()
