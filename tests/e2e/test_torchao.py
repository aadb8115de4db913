"""torchao's float8 layers train bit-equal; its weights and optimizers in few bits are refused by name, with what to use instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import swapper

pytest.importorskip("torchao", reason="torchao is not installed: pip install torchao")


def make_model(dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)).to(dtype)


def float8_model() -> nn.Module:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    return convert_to_float8_training(make_model(), config=Float8LinearConfig(emulate=True))


def train(model: nn.Module, optimizer: Any, steps: int = 3) -> list[float]:
    losses = []
    for step in range(steps):
        inputs = torch.randn(16, 256, generator=torch.Generator().manual_seed(step)).to(torch.bfloat16)
        loss = model(inputs).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("update", ["step", "deferred", "backward"])
def test_float8_layers_train_as_in_plain_torch(update: str, tmp_path: Path) -> None:
    model = float8_model()
    expected = train(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    model = float8_model()
    with swapper.SwapManager(tmp_path, host_memory="64MiB") as manager:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer = manager.offload(
            model, optimizer, params="nvme", optimizer_state="nvme", gradients="nvme", update=update
        )
        assert train(model, optimizer) == expected


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_an_optimizer_in_few_bits_is_refused_with_the_codec_that_does_it(name: str, tmp_path: Path) -> None:
    from torchao import optim

    model = make_model(torch.float32)
    with (
        swapper.SwapManager(tmp_path, host_memory="64MiB") as manager,
        pytest.raises(swapper.UnsupportedError, match=rf"{name} cannot be paged.*state_codec='8bit'"),
    ):
        manager.offload(model, getattr(optim, name)(model.parameters()))


def test_quantized_weights_are_refused_with_what_reads_weights_in_few_bits(tmp_path: Path) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = make_model()
    quantize_(model, Int8WeightOnlyConfig())
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    refusal = pytest.raises(swapper.UnsupportedError, match=r"0\.weight is a Int8Tensor.*--quantize int8")
    with refusal, swapper.SwapManager(tmp_path / "run", host_memory="64MiB") as manager:
        manager.offload(model, None)
    with refusal:
        swapper.load(model, tmp_path / "weights.pt", host_memory="64MiB")
