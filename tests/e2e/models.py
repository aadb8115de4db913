"""Small models that have what real ones have. Each is a few pages larger than the smallest pool that it can train with."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

VOCABULARY = 512
WIDTH = 128
LENGTH = 16
LAYER_WIDTH = 256


@dataclasses.dataclass
class Output:
    """An output that pytree does not know."""

    hidden: torch.Tensor
    extra: dict[str, Any]


def hidden_of(output: Any) -> torch.Tensor:
    """Return the tensor inside what a block may return."""
    if isinstance(output, Output):
        return output.hidden
    if isinstance(output, dict):
        return output["hidden"][0]
    return output


class Block(nn.Module):
    """A residual feed-forward block. Its activation works in place, on what a module has just returned.

    Args:
        wrap: makes of the block's result what it returns.
    """

    def __init__(self, wrap: Callable[[torch.Tensor], Any] = lambda hidden: hidden) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.act = nn.ReLU(inplace=True)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.wrap = wrap

    def forward(self, value: Any) -> Any:
        hidden = hidden_of(value)
        return self.wrap(hidden + self.down(self.act(self.up(self.norm(hidden)))))


class Position(nn.Module):
    """Returns a view of its own parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(256, WIDTH) * 0.1)  # 128 KiB: too large to stay in memory

    def forward(self, length: int) -> torch.Tensor:
        return self.table[:length]


class Net(nn.Module):
    """A language model of blocks.

    Args:
        depth: number of blocks.
        make_block: makes one.
        tied: the head uses the embedding's weight.
        passes: how many times the blocks are run through.
        checkpointing: None, or use_reentrant of torch's activation checkpointing.
        dropout: after each block.
    """

    def __init__(
        self,
        depth: int = 4,
        make_block: Callable[[], nn.Module] = Block,
        tied: bool = False,
        passes: int = 1,
        checkpointing: bool | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.position = Position()
        self.blocks = nn.ModuleList(make_block() for _ in range(depth))
        self.dropout = nn.Dropout(dropout)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.passes = passes
        self.checkpointing = checkpointing
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden: Any = self.embedding(tokens) + self.position(tokens.shape[1])
        for _ in range(self.passes):
            for block in self.blocks:
                if self.checkpointing is None:
                    hidden = block(hidden)
                else:
                    hidden = checkpoint(block, hidden, use_reentrant=self.checkpointing)
                if isinstance(hidden, torch.Tensor):
                    hidden = self.dropout(hidden)
        return self.head(self.norm(hidden_of(hidden)))


class Biased(Net):
    """Its blocks all return, with their own result, the bias that the first one has made: that is no other's own (as in T5)."""

    class Block(Block):
        def __init__(self, makes_bias: bool) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.randn(WIDTH) * 0.1) if makes_bias else None

        def forward(self, value: torch.Tensor, bias: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
            bias = self.bias.tanh() if bias is None else bias
            return super().forward(value) + bias, bias

    def __init__(self, depth: int = 10) -> None:
        super().__init__(depth=0)
        self.blocks.extend(Biased.Block(makes_bias=number == 0) for number in range(depth))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden, bias = self.embedding(tokens) + self.position(tokens.shape[1]), None
        for block in self.blocks:
            hidden, bias = block(hidden, bias=bias)
        return self.head(self.norm(hidden))


class Staged(Net):
    """Its blocks are in lists in a list, as those of PoolFormer."""

    def __init__(self, depth: int = 10) -> None:
        super().__init__(depth)
        blocks = list(self.blocks)
        self.blocks = nn.ModuleList(nn.ModuleList(blocks[n : n + 5]) for n in range(0, depth, 5))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden: Any = self.embedding(tokens) + self.position(tokens.shape[1])
        for stage in self.blocks:
            for block in stage:
                hidden = block(hidden)
        return self.head(self.norm(hidden))


class Dropping(Net):
    """Each forward leaves out a few blocks by chance, as models do that are trained with layerdrop."""

    def __init__(self, depth: int, seed: int = 0) -> None:
        super().__init__(depth)
        self.chance = random.Random(seed)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        left_out = set(self.chance.sample(range(len(self.blocks)), k=self.chance.randint(0, 2)))
        hidden: Any = self.embedding(tokens) + self.position(tokens.shape[1])
        for number, block in enumerate(self.blocks):
            if number not in left_out:
                hidden = block(hidden)
        return self.head(self.norm(hidden))


class Shuffled(Net):
    """Each forward has its blocks in another order."""

    def __init__(self, depth: int, seed: int = 0) -> None:
        super().__init__(depth)
        self.chance = random.Random(seed)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden: Any = self.embedding(tokens) + self.position(tokens.shape[1])
        for number in self.chance.sample(range(len(self.blocks)), k=len(self.blocks)):
            hidden = self.blocks[number](hidden)
        return self.head(self.norm(hidden))


class Halves(nn.Module):
    """Of its layers a forward uses one half, 0 or 1."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))

    def forward(self, hidden: torch.Tensor, half: int) -> torch.Tensor:
        for layer in list(self.layers)[4 * half : 4 * half + 4]:
            hidden = torch.relu(layer(hidden))
        return hidden


def layers() -> nn.Module:
    """As regular as models of any size are: a page more or less does not count."""
    return nn.Sequential(*(nn.Linear(LAYER_WIDTH, LAYER_WIDTH) for _ in range(12)))


def layers_step(model: nn.Module, optimizer: Any) -> torch.Tensor:
    """A step of `layers`, or of what takes the same; returns the loss."""
    optimizer.zero_grad()
    loss = model(torch.randn(4, LAYER_WIDTH)).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def tokens(batch: int = 2, length: int = LENGTH) -> torch.Tensor:
    """Return a batch, different at each call; the same for the plain and the swapped run, which start from the same seed."""
    return torch.randint(0, VOCABULARY, (batch, length))


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Return the loss of predicting the batch's own tokens."""
    logits = model(batch)
    return F.cross_entropy(logits.float().view(-1, logits.shape[-1]), batch.view(-1))


def train_step(model: nn.Module, optimizer: Any, batch: int = 2) -> torch.Tensor:
    """One ordinary step; returns the loss."""
    return finish_step(loss_of(model, tokens(batch)), optimizer)


def finish_step(loss: torch.Tensor, optimizer: Any) -> torch.Tensor:
    """What is left of an ordinary step when there is a loss; returns it."""
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


class Convolutions(nn.Module):
    """Convolutions and batch norms, whose buffers change in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 64, 3, padding=1)
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(True)) for _ in range(6))
        )
        self.last = nn.Linear(64 * 16, 2048)
        self.out = nn.Linear(2048, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.out(self.last(F.max_pool2d(self.layers(self.first(images)), 2).flatten(1)))


def image_step(model: Any, optimizer: Any) -> torch.Tensor:
    loss = F.cross_entropy(model(torch.randn(4, 3, 8, 8)), torch.arange(4))
    return finish_step(loss, optimizer)
