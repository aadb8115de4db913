"""A backward of a backward on a device: it uses parameters unannounced, and a device answers no reads of memory that is away."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import swapper
from e2e.device_twins import MIB, MakeTwins, on_device
from e2e.models import loss_of, tokens

__all__ = ["on_device"]


def step_with_penalty(
    model: nn.Module, optimizer: Any, around: Callable[[], AbstractContextManager[Any]]
) -> torch.Tensor:
    with around():
        loss = loss_of(model, tokens())
        (gradient,) = torch.autograd.grad(loss, model.blocks[1].up.bias, create_graph=True)
        loss = loss + gradient.square().sum()
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def test_a_graph_of_a_backward_is_refused(on_device: MakeTwins) -> None:
    pair = on_device()
    with pytest.raises(swapper.UnsupportedError, match=r"create_graph=True uses norm, .*inside `with manager\.gather"):
        step_with_penalty(pair.swapped, pair.optimizer, nullcontext)


@pytest.mark.parametrize("update", ["step", "deferred", "backward"])
def test_where_parameters_are_gathered_it_is_bit_equal(on_device: MakeTwins, update: str) -> None:
    pair = on_device(update=update, device_memory=16 * MIB)

    def step(model: nn.Module, optimizer: Any) -> torch.Tensor:
        around = nullcontext if model is pair.plain else lambda: pair.manager.gather(model)
        return step_with_penalty(model, optimizer, around)

    pair.train(step, steps=3)
    pair.finish(paged=False)
