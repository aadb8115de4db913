"""Twins of which one trains on a device of host memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from infer.host_device import HostDevice
from torch import nn

from e2e.models import Net, loss_of, tokens
from e2e.twins import Twins

MakeTwins = Callable[..., Twins]
MIB = 1 << 20
SMALL = 2 * MIB
"""A block has half a MiB in fp32; all of the model about 2.7."""

OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "adamw amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-3, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "asgd": lambda p: torch.optim.ASGD(p, lr=1e-2),
}


@pytest.fixture
def on_device(twins: MakeTwins) -> MakeTwins:
    def make(model: nn.Module | None = None, *args: Any, order: str = "late", **options: Any) -> Twins:
        return twins(
            model or Net(), *args, **{"device": HostDevice(order), "device_memory": SMALL, "room_bytes": MIB, **options}
        )

    return make


def forget_copies(pair: Twins) -> None:
    """After one of them was found to be wrong, what is left would fail too."""
    assert pair.manager is not None
    on_device = pair.manager.current.run.on_device
    for stream in (on_device._uploads._stream, on_device.downloads._stream):
        stream.done = len(stream.operations)


def accumulate(model: nn.Module, optimizer: Any) -> torch.Tensor:
    losses = []
    for _ in range(3):
        losses.append(loss_of(model, tokens()) / 3)
        losses[-1].backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    return torch.stack(losses).detach()


def two_steps(pair: Twins) -> None:
    pair.train(accumulate, steps=2)
    pair.assert_same_parameters()
