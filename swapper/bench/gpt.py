"""Defines a small GPT in plain torch, the model of the demo, the example and the training benchmark.

Does not import swapper, so that the demo can load it in a process of its own that never does. Pre-norm layers in a
ModuleList, learned positions, causal attention, a GELU MLP, an output projection that is not tied.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

HEAD_WIDTH = 64  # as in GPT-2


@dataclass(frozen=True)
class GptConfig:
    """Sizes of a GPT. `width` is a multiple of 64, the width of one attention head."""

    vocabulary: int
    context: int
    layers: int
    width: int

    @property
    def parameters(self) -> int:
        per_layer = 12 * self.width**2 + 13 * self.width
        ends = self.width * (2 * self.vocabulary + self.context + 2)
        return self.layers * per_layer + ends

    @classmethod
    def for_parameters(cls, parameters: int, *, vocabulary: int, context: int) -> GptConfig:
        """Return the sizes whose count is nearest to `parameters`: at least four layers, in usual proportions.

        Args:
            parameters: how many.
            vocabulary: of tokens.
            context: tokens of a sequence.
        """

        def distance(config: GptConfig) -> float:
            count = abs(math.log(config.parameters / parameters))
            shape = abs(math.log(config.width / (HEAD_WIDTH * config.layers)))
            return count + 0.03 * shape

        configs = (
            cls(vocabulary, context, layers, HEAD_WIDTH * heads) for layers in range(4, 129) for heads in range(1, 257)
        )
        return min(configs, key=distance)


class Layer(nn.Module):
    """One transformer layer: attention and MLP, each behind a norm and around a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // HEAD_WIDTH
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, context, width = x.shape
        split = self.qkv(self.norm_attention(x)).view(batch, context, 3, self.heads, HEAD_WIDTH)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).reshape(batch, context, width))
        out: torch.Tensor = x + self.mlp_out(F.gelu(self.mlp_in(self.norm_mlp(x))))
        return out


class Gpt(nn.Module):
    """Token ids (batch, context) to logits (batch, context, vocabulary); with targets, to the mean loss."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(config.vocabulary, config.width)
        self.position_embedding = nn.Embedding(config.context, config.width)
        self.layers = nn.ModuleList(Layer(config.width) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.apply(self.initialise)

    @staticmethod
    @torch.no_grad()
    def initialise(module: nn.Module) -> None:
        """Initialize one module's own parameters."""
        if isinstance(module, nn.LayerNorm):
            module.reset_parameters()
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def make_gpt(config: GptConfig, dtype: torch.dtype) -> Gpt:
    """Make the model in `dtype` directly: converting it later would hold it twice."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return Gpt(config)
    finally:
        torch.set_default_dtype(before)
