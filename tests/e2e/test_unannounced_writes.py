"""Writes to parameters that torch's version counter does not see: kept as in plain torch, or refused, never lost silently."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import devices
import pytest
import torch
from torch import nn

import swapper
from e2e.models import Block, Net, finish_step, train_step
from e2e.twins import Twins, send_away

MakeTwins = Callable[..., Twins]
seen_in_host_memory = devices.without_device("writes past the version counter are seen in pages of host memory alone")


class Clamped(Block):
    """Wasserstein critics clip their weights so; `.data` bumps no version."""

    def forward(self, value: Any) -> Any:
        self.up.weight.data.clamp_(-0.05, 0.05)
        if self.down.bias.dtype is torch.float32:
            torch.from_numpy(self.down.bias.detach().numpy())[3] += 0.01
        return super().forward(value)


@seen_in_host_memory
def test_a_write_through_data_in_a_forward_is_kept(twins: MakeTwins) -> None:
    pair = twins(Net(make_block=Clamped, depth=5))
    pair.train(train_step, steps=3)
    with torch.no_grad():
        pair.train(lambda model, _: model(torch.zeros(1, 4, dtype=torch.long)), steps=2)
    send_away(pair.manager)
    pair.finish()


@seen_in_host_memory
def test_a_write_through_data_is_refused_where_a_master_would_not_follow(twins: MakeTwins) -> None:
    pair = twins(Net(make_block=Clamped, depth=8).bfloat16(), master=True)
    with pytest.raises(
        swapper.StateError, match=r"blocks\.0\.(up\.weight|down\.bias) was changed in a forward.*master"
    ):
        train_step(pair.swapped, pair.optimizer)
    pair.close()


@seen_in_host_memory
def test_a_write_through_data_in_a_gather_for_reading_is_refused(twins: MakeTwins) -> None:
    pair = twins(Net())
    weight = pair.swapped.blocks[2].up.weight
    with pytest.raises(swapper.StateError, match=r"blocks\.2\.up\.weight was changed inside gather\(write=False\)"):
        with pair.manager.gather(weight):
            weight.data[7, 9] = 5.0
    with pair.manager.gather(weight):  # once told, it is over
        assert weight[7, 9] == 5.0
    with pair.manager.gather(weight, write=True):
        weight.data[7, 9] = 6.0
    send_away(pair.manager)
    with pair.manager.gather(weight):
        assert weight[7, 9] == 6.0
    pair.close()


@devices.without_device("it reads by arrays, which memory of a device has none of")
def test_reading_in_every_way_is_no_write(twins: MakeTwins) -> None:
    pair = twins(Net())
    with pair.manager.gather(pair.swapped.blocks[1]) as blocks:
        for parameter in blocks.parameters():
            parameter.detach().numpy().sum()
            parameter.data.clone()
            bytes(parameter.detach().numpy().tobytes())
    pair.train(train_step, steps=2)
    pair.finish()


@seen_in_host_memory
def test_a_write_after_an_update_is_noted_too(twins: MakeTwins) -> None:
    """Pages that the optimizer has just changed stay in the pool; they too are for reading only by then."""
    pair = twins(nn.Sequential(*(nn.Linear(256, 256) for _ in range(6))), room_bytes=64 << 20)

    def step(model: Any, optimizer: Any) -> torch.Tensor:
        loss = model(torch.randn(4, 256)).square().mean()
        return finish_step(loss, optimizer)

    pair.train(step, steps=2)
    with pytest.raises(swapper.StateError, match=r"3\.weight was changed inside"):
        with pair.manager.gather(pair.swapped[3]) as layer:
            layer.weight.data.zero_()
    pair.close()
