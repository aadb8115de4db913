"""Twins of which one trains on a device of host memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from devices import device_of_tests
from infer.host_device import HostDevice
from torch import nn

import swapper
from e2e.models import Net, loss_of, tokens
from e2e.twins import Twins
from swapper.train.updates.device_slots import StateAhead

MakeTwins = Callable[..., Twins]
MIB = 1 << 20
SMALL = 2 * MIB
"""A block has half a MiB in fp32; all of the model about 2.7."""


@pytest.fixture
def on_device(twins: MakeTwins) -> MakeTwins:
    def make(model: nn.Module | None = None, *args: Any, order: str = "late", **options: Any) -> Twins:
        return twins(
            model or Net(),
            *args,
            **{"device": device_of_tests(order), "device_memory": SMALL, "room_bytes": MIB, **options},
        )

    return make


def forget_copies(pair: Twins) -> None:
    """After one of them was found to be wrong, what is left would fail too."""
    assert pair.manager is not None
    on_device = pair.manager.current.run.placed.processor
    for stream in (on_device._uploads._stream, on_device._slices, on_device.downloads._stream):
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


def step_again(pair: Twins, batch: torch.Tensor) -> None:
    """After a step of the swapped one has failed: it is taken once more, and the plain one follows."""
    pair.optimizer.step()
    pair.optimizer.zero_grad()
    loss_of(pair.plain, batch).backward()
    pair.plain_optimizer.step()
    pair.plain_optimizer.zero_grad()


@contextlib.contextmanager
def short_of_memory(device: HostDevice, nbytes: int) -> Iterator[None]:
    """Within it the device has so many bytes of memory, and what asks for more is told."""
    capacity, device.module.capacity_bytes = device.module.capacity_bytes, nbytes
    try:
        yield
    finally:
        device.module.capacity_bytes = capacity


def lose(device: HostDevice) -> None:
    """From now on every call of the device fails, as after an error of a kernel's."""
    device.module.is_lost = True


def assert_can_be_closed(pair: Twins, device: HostDevice) -> None:
    """The device was lost: closing may say so, if something was still to be done, and lets all go."""
    with contextlib.suppress(swapper.DeviceError):
        pair.manager.close()
    assert pair.manager.current.is_over
    device.module.is_lost = False


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each slice of an update: True if its state was there."""
    found: list[bool] = []
    take = StateAhead.take

    def note(self: StateAhead, *of: Any) -> Any:
        slot = take(self, *of)
        found.append(slot is not None)
        return slot

    monkeypatch.setattr(StateAhead, "take", note)
    return found
