"""Updates during backward: whatever the order and the way in which modules use parameters, none is updated too early."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

from e2e.early import train
from e2e.models import WIDTH, Biased, Net, finish_step, train_step
from e2e.twins import Twins

MakeTwins = Callable[..., Twins]


class Layers(nn.Module):
    """Layers that are used in an order that each call chooses.

    Args:
        count: how many there are.
    """

    def __init__(self, count: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))

    def forward(self, hidden: torch.Tensor, *order: int) -> torch.Tensor:
        for number in order:
            hidden = torch.tanh(self.layers[number](hidden))
        return hidden


def layered(order: Callable[[int], tuple[int, ...]]) -> Callable[[Any, Any], torch.Tensor]:
    turns: dict[int, int] = {}

    def run(model: Any, optimizer: Any) -> torch.Tensor:
        turn = turns[id(model)] = turns.get(id(model), -1) + 1
        loss = model(torch.randn(4, WIDTH), *order(turn)).square().mean()
        return finish_step(loss, optimizer)

    return run


ORDERS: dict[str, Callable[[int], tuple[int, ...]]] = {
    "halves in turns": lambda turn: (0, 1, 2) if turn % 2 else (3, 4, 5),
    "another order each time": lambda turn: (0, 1, 2, 3, 4, 5)[turn % 6 :] + (0, 1, 2, 3, 4, 5)[: turn % 6],
    "the first one again at the end": lambda turn: (0, 1, 2, 3, 4, 5, 0),
    "one three times": lambda turn: (1, 2, 1, 3, 4, 1, 5),
}


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("params", ["nvme", "host"])
def test_every_order_of_modules_is_bit_equal(backward: MakeTwins, name: str, params: str) -> None:
    pair = backward(Layers(), partial(SGD, lr=1e-2, momentum=0.9), params=params, room_bytes=1 << 20)
    pair.train(layered(ORDERS[name]), steps=5)
    pair.finish(paged=False)


class Detached(Layers):
    """Uses each layer's weight once more, detached, two layers before: no gradient of it tells when it is needed last."""

    def forward(self, hidden: torch.Tensor, *order: int) -> torch.Tensor:
        for number in order:
            hidden = torch.tanh(self.layers[number](hidden))
            hidden = hidden + hidden @ self.layers[min(number + 2, 5)].weight.detach()
        return hidden


@pytest.mark.parametrize("params", ["nvme", "host"])
def test_parameters_that_other_modules_use_detached_wait_for_the_step(backward: MakeTwins, params: str) -> None:
    """Where parameters are on NVMe each use is seen. In memory the graph holds another tensor of theirs."""
    run = layered(lambda turn: (0, 1, 2, 3, 4, 5))
    pair = backward(Detached(), partial(SGD, lr=1e-2), room_bytes=2 << 20, params=params)
    pair.train(run, steps=3)
    pair.finish(paged=False)


class Direct(Net):
    """The head multiplies with the embedding's weight directly, in no module's forward but the whole one's."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden: Any = self.embedding(tokens) + self.position(tokens.shape[1])
        for block in self.blocks:
            hidden = block(hidden)
        return F.linear(self.norm(hidden), self.embedding.weight)


class Segments(Net):
    """Several blocks in one segment of reentrant checkpointing."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden: Any = self.embedding(tokens) + self.position(tokens.shape[1])
        for first in range(0, len(self.blocks), 2):
            segment = nn.Sequential(*self.blocks[first : first + 2])
            hidden = checkpoint(lambda h, run=segment: run(h), hidden, use_reentrant=True)
        return self.head(self.norm(hidden))


class Nested(Net):
    """Checkpoints within a checkpoint."""

    def __init__(self, reentrant: bool, **options: Any) -> None:
        super().__init__(**options)
        self.reentrant = reentrant

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        def segment(hidden: torch.Tensor, first: int) -> torch.Tensor:
            for block in self.blocks[first : first + 2]:
                hidden = checkpoint(block, hidden, use_reentrant=self.reentrant)
            return hidden

        hidden: Any = self.embedding(tokens) + self.position(tokens.shape[1])
        for first in range(0, len(self.blocks), 2):
            hidden = checkpoint(segment, hidden, first, use_reentrant=self.reentrant)
        return self.head(self.norm(hidden))


WAYS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "a weight used directly": (Direct, 3),
    "segments of several modules": (lambda: Segments(depth=6), 4),
    "nested, reentrant": (lambda: Nested(True), 2),
    "nested": (lambda: Nested(False), 4),
    "blocks that pass on what the first has made": (lambda: Biased(depth=5), 4),
}


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("params", ["nvme", "host"])
def test_every_way_of_using_parameters_is_bit_equal(backward: MakeTwins, name: str, params: str) -> None:
    make, least = WAYS[name]
    pair = backward(make(), params=params)
    early = train(pair, train_step, steps=3)
    assert all(len(groups) >= least for groups in early), early
    pair.finish(paged=False)
