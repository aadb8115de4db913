"""Each wait of training on a device is needed: without it, the device of the tests notices."""

from __future__ import annotations

import dataclasses
import signal
from typing import Any

import pytest
import torch
from infer.host_device import HostDevice

from e2e.device_twins import MIB, MakeTwins, forget_copies, on_device, two_steps
from e2e.models import loss_of, tokens, train_step
from swapper.device.copies import Downloads
from swapper.device.device_memory import DeviceStorage
from swapper.device.tier import DeviceTier
from swapper.errors import DeviceError, InvariantError
from swapper.runtime.counters import Counters
from swapper.train.gradients.device_grads import DeviceGradients
from swapper.train.updates.device_results import Results
from swapper.train.updates.device_sweep import DeviceSweep

__all__ = ["on_device"]

UPDATES = ("step", "deferred", "backward")


def test_a_kernel_that_does_not_wait_for_its_parameters_is_noticed(on_device: MakeTwins, monkeypatch: Any) -> None:
    monkeypatch.setattr(DeviceStorage, "wait_on_current_stream", lambda self: None)
    with pytest.raises(AssertionError):
        two_steps(on_device(update_on="cpu"))


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("update_on", ["cpu", "device"])
def test_gradients_that_are_used_before_they_have_arrived_are_noticed(
    on_device: MakeTwins, monkeypatch: Any, update: str, update_on: str
) -> None:
    pair = on_device(update=update, update_on=update_on, gradients="host", device_memory=8 * MIB)
    monkeypatch.setattr(DeviceGradients, "settle", lambda self, parameters=None: None)
    with pytest.raises(AssertionError):
        pair.both(train_step), pair.both(train_step)  # nothing in between waits for copies
        pair.assert_same_parameters()


def downloads(device: HostDevice) -> tuple[Downloads, torch.Tensor, torch.Tensor]:
    host, source = torch.zeros(64, dtype=torch.uint8), torch.ones(64, dtype=torch.uint8)
    return Downloads(device, Counters()), host, source


def test_memory_that_is_let_go_before_its_copy_is_over_is_noticed() -> None:
    down, host, source = downloads(HostDevice("late"))
    down.send([(host, source)])
    del source
    down.finish()
    assert host.eq(1).all()
    down.send([(host, torch.ones(64, dtype=torch.uint8))])
    kept = down._in_flight.popleft()
    down._in_flight.append(dataclasses.replace(kept, sources=()))
    del kept
    with pytest.raises(AssertionError, match="released before its copy was over"):
        down.finish()


def test_no_more_is_kept_for_copies_than_is_set_aside() -> None:
    down = Downloads(HostDevice("late"), Counters(), max_bytes=128)
    arrived: list[int] = []
    for number in range(4):
        host, source = torch.zeros(64, dtype=torch.uint8), torch.full((64,), number, dtype=torch.uint8)
        down.send([(host, source)], lambda number=number: arrived.append(number))
    assert arrived == [0, 1]
    down.finish()
    assert arrived == [0, 1, 2, 3]


def test_a_copy_is_waited_for_where_ctrl_c_comes_in_between_and_where_only_a_part_of_it_was_queued(
    monkeypatch: Any,
) -> None:
    down, host, source = downloads(device := HostDevice("late"))
    told: list[Any] = []
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        down.send([(host, source)], lambda: told.append(host.sum().item()), told.append)
        patch.setattr(device, "wait_for", lambda event: signal.raise_signal(signal.SIGINT))
        down.wait_for_oldest()
    assert told == []  # it is on its way still
    down.finish()
    assert told == [64]

    copied = device.copy

    def fail(*arguments: Any) -> None:
        copied(*arguments)
        raise DeviceError("as asked for")

    monkeypatch.setattr(device, "copy", fail)
    with pytest.raises(DeviceError):
        down.send([(host.zero_(), source)], lost=lambda error: told.append(host.sum().item()))
    assert told == [64, 64]  # nothing comes any more when its memory is given back


def test_a_copy_that_does_not_wait_for_the_kernels_before_it_is_noticed(monkeypatch: Any) -> None:
    down, host, source = downloads(device := HostDevice("late"))
    monkeypatch.setattr(device, "let_wait", lambda stream, event: None)
    with pytest.raises(AssertionError, match="does not wait for the kernels before it"):
        down.send([(host, source)])


def test_a_place_that_is_updated_while_it_is_copied_is_noticed(on_device: MakeTwins, monkeypatch: Any) -> None:
    pair = on_device(params="host", optimizer_state="host", device_memory=64 * MIB, update_on="cpu")
    loss_of(pair.swapped, tokens()).backward()
    pair.optimizer.step()  # and brings what comes next
    with monkeypatch.context() as patch, pytest.raises(AssertionError, match="used again before its copy was over"):
        patch.setattr(DeviceStorage, "wait_for_copies", lambda self: None)
        pair.optimizer.step()
        loss_of(pair.swapped, tokens())
    forget_copies(pair)


@pytest.mark.parametrize("update", UPDATES)
def test_parameters_that_are_not_brought_anew_after_an_update_are_noticed(
    on_device: MakeTwins, monkeypatch: Any, update: str
) -> None:
    monkeypatch.setattr(DeviceTier, "invalidate", lambda self, image: None)
    with pytest.raises(AssertionError):
        pair = on_device(device_memory=64 * MIB, update=update, update_on="cpu")
        pair.train(train_step, steps=2)
        pair.assert_same_parameters()


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("update", ["deferred", "backward"])
def test_places_that_an_update_on_the_device_has_not_reached_yet_are_noticed(
    on_device: MakeTwins, monkeypatch: Any, update: str
) -> None:
    pair = on_device(update=update, update_on="device", device_memory=8 * MIB)
    pair.both(train_step)
    with monkeypatch.context() as patch, pytest.raises((AssertionError, InvariantError)):
        patch.setattr(DeviceSweep, "settle", lambda self: None)
        patch.setattr(Results, "wait_for", lambda self, group: None)
        pair.both(train_step), pair.both(train_step)
        pair.check_pager()
    pair.manager.current.run.model.updates.remove()  # closing finishes no step
    forget_copies(pair)


def test_an_image_that_is_filled_anew_while_kernels_use_it_is_noticed(on_device: MakeTwins, monkeypatch: Any) -> None:
    """The device of the tests does not know when kernels run: here it is told that they use a storage from a lease on."""
    use = DeviceStorage.wait_on_current_stream
    pair = on_device(device_memory=64 * MIB, device=(device := HostDevice("late")), update_on="cpu")

    def used(self: DeviceStorage) -> None:
        use(self)
        device.taken[self.identity] = device.module.compute.tick()

    monkeypatch.setattr(DeviceStorage, "wait_on_current_stream", used)
    pair.train(train_step, steps=2)

    def invalidate(self: DeviceStorage) -> None:
        self.filled_at = self._filler = None  # and no event of those kernels

    monkeypatch.setattr(DeviceStorage, "invalidate", invalidate)
    with pytest.raises(AssertionError, match="earlier kernels may still use"):
        pair.train(train_step, steps=2)
