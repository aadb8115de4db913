"""Builds the model of the training measurements: plain transformer blocks.

Their work grows with the square of their width, their activations with the width.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

HEAD_WIDTH = 128
PARAMETERS_OF_WIDTH = 12
"""A block has this many times width * width parameters."""


class Block(nn.Module):
    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads = max(width // HEAD_WIDTH, 2)
        self.before, self.between = nn.LayerNorm(width, dtype=dtype), nn.LayerNorm(width, dtype=dtype)
        self.all, self.out = nn.Linear(width, 3 * width, dtype=dtype), nn.Linear(width, width, dtype=dtype)
        self.up, self.down = nn.Linear(width, 4 * width, dtype=dtype), nn.Linear(4 * width, width, dtype=dtype)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        query, key, content = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.all(self.before(value)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(query, key, content, is_causal=True).transpose(1, 2).flatten(-2)
        value = value + self.out(mixed)
        hidden: torch.Tensor = value + self.down(F.gelu(self.up(self.between(value))))
        return hidden


def transformer(layers: int, width: int, dtype: torch.dtype, device: torch.device | str) -> nn.Sequential:
    """Return `layers` blocks with the same values at every call."""
    torch.manual_seed(0)
    with torch.device(device):
        return nn.Sequential(*[Block(width, dtype) for _ in range(layers)])


def loss_of(model: nn.Module, value: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = model(value).float().square().mean()
    return result
