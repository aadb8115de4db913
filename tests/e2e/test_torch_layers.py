"""torch's own layers: attention, recurrence, convolutions, parametrizations, lists of parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from e2e.models import (
    LENGTH,
    VOCABULARY,
    WIDTH,
    Block,
    Convolutions,
    Net,
    image_step,
    tokens,
    train_step,
)
from e2e.twins import Twins

MakeTwins = Callable[..., Twins]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, batch_first=True), 3, norm=nn.LayerNorm(WIDTH)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, batch: torch.Tensor, padding: torch.Tensor | None = None) -> torch.Tensor:
        hidden = self.embedding(batch)
        hidden = hidden + self.attention(hidden, hidden, hidden)[0]
        return self.head(self.encoder(hidden, src_key_padding_mask=padding))


def test_torchs_transformer_layers_are_bit_equal(twins: MakeTwins) -> None:
    pair = twins(Attention())
    pair.train(train_step, steps=3)
    pair.finish()


PADDING = {
    "none": None,
    "at the end": torch.arange(LENGTH).expand(2, -1) >= torch.tensor([[10], [LENGTH]]),
    "anywhere": torch.arange(2 * LENGTH).view(2, -1) % 5 == 2,
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("padding", PADDING)
def test_torchs_transformer_layers_are_bit_equal_in_evaluation(
    twins: MakeTwins, mode: Callable[[], Any], padding: str
) -> None:
    """torch's layers use another kernel where no hook is attached to them: the plain ones get hooks too."""
    model = Attention()
    pair = twins(model)
    for layer in model.encoder.layers:
        layer.register_forward_hook(lambda *_: None)

    def evaluate(model: Any, _: Any) -> torch.Tensor:
        model.eval()
        with mode():
            logits = model(tokens(), PADDING[padding])
        model.train()
        return logits.clone()

    pair.train(evaluate, steps=2)
    pair.train(train_step, steps=2)
    pair.train(evaluate, steps=2)
    pair.finish()


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.recurrent = kind(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.head = nn.Linear(WIDTH, 4 * VOCABULARY)
        self.last = nn.Linear(4 * VOCABULARY, VOCABULARY)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.last(self.head(self.recurrent(self.embedding(batch))[0]))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_layers_are_bit_equal(twins: MakeTwins, kind: type[nn.RNNBase]) -> None:
    pair = twins(Recurrent(kind))
    pair.train(train_step, steps=3)
    pair.finish()


def test_convolutions_and_batch_norm_are_bit_equal(twins: MakeTwins) -> None:
    pair = twins(Convolutions())
    pair.train(image_step, steps=3)
    pair.finish()


def test_parametrized_and_weight_normed_layers_are_bit_equal(twins: MakeTwins) -> None:
    model = Net()
    for block in model.blocks:
        nn.utils.parametrizations.weight_norm(block.up)
        nn.utils.parametrizations.spectral_norm(block.down)
    pair = twins(model)
    pair.train(train_step, steps=3)
    pair.finish()


def test_parameter_lists_and_dictionaries_are_bit_equal(twins: MakeTwins) -> None:
    class Lists(Net):
        def __init__(self) -> None:
            super().__init__()
            self.ups = nn.ParameterList(nn.Parameter(torch.randn(WIDTH, 4 * WIDTH) * 0.02) for _ in range(4))
            self.downs = nn.ParameterDict({"down": nn.Parameter(torch.randn(4 * WIDTH, WIDTH) * 0.02)})

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            hidden = self.embedding(batch) + self.position(batch.shape[1])
            for up in self.ups:
                hidden = hidden + torch.relu(hidden @ up) @ self.downs["down"]
            return self.head(self.norm(hidden))

    pair = twins(Lists())
    pair.train(train_step, steps=3)
    pair.finish()


def test_a_sequential_and_a_tiny_model_are_bit_equal(twins: MakeTwins) -> None:
    pair = twins(
        nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *(Block() for _ in range(4)), nn.Linear(WIDTH, VOCABULARY))
    )
    pair.train(train_step, steps=3)
    pair.finish()
    tiny = twins(nn.Sequential(nn.Embedding(VOCABULARY, 2), nn.Linear(2, VOCABULARY)))
    tiny.train(train_step, steps=3)
    tiny.finish(paged=False)
