"""Parameters that are not contiguous: they are at their places, said so, and all is as in plain torch with contiguous ones."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from e2e.models import finish_step
from e2e.twins import Twins


class Strided(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(16, 16, 3, padding=1) for _ in range(6))
        self.head = nn.Linear(16, 4096)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            value = layer(value).relu()
        return self.head(value.mean((2, 3)))


def channels_last(p: torch.Tensor) -> torch.Tensor:
    return p.contiguous(memory_format=torch.channels_last) if p.dim() == 4 else p


def turned(p: torch.Tensor) -> torch.Tensor:
    return p.transpose(0, -1).contiguous().transpose(0, -1)


def with_gaps(p: torch.Tensor) -> torch.Tensor:
    return torch.stack([p, p], -1)[..., 0]


def step(model: Any, optimizer: Any) -> torch.Tensor:
    images = torch.randn(4, 16, 8, 8).to(memory_format=torch.channels_last)
    return finish_step(model(images).square().mean(), optimizer)


@pytest.mark.parametrize("params", ["nvme", "host"])
@pytest.mark.parametrize("strides", [channels_last, turned, with_gaps])
def test_other_strides_are_made_contiguous(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, strides: Callable[[torch.Tensor], torch.Tensor], params: str
) -> None:
    pair = Twins(tmp_path, Strided(), params=params, wait=True)
    step(pair.plain, pair.plain_optimizer)
    torch.manual_seed(0)
    pair.swapped.load_state_dict(pair.plain.state_dict())
    pair.original.load_state_dict(pair.plain_optimizer.state_dict())
    for parameter in pair.swapped.parameters():
        parameter.data = strides(parameter.data)
        for key, value in pair.original.state[parameter].items():
            pair.original.state[parameter][key] = strides(value) if value.dim() else value
    with caplog.at_level(logging.WARNING, "swapper"):
        pair.offload()
    assert len([record for record in caplog.records if "not contiguous" in record.getMessage()]) == 1
    assert [p.stride() for p in pair.swapped.parameters()] == [p.stride() for p in pair.plain.parameters()]
    pair.train(step, steps=3)
    pair.finish(paged=False)


def test_an_expanded_parameter_has_memory_of_its_own(tmp_path: Path) -> None:
    pair = Twins(tmp_path, Strided(), wait=True)
    row = torch.randn(16)
    pair.plain.head.weight.data = row.expand(4096, 16).contiguous()
    pair.swapped.head.weight.data = row.expand(4096, 16)
    pair.offload()
    pair.train(step, steps=2)
    pair.finish(paged=False)
