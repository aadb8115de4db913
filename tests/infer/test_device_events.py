"""A model on a device: nothing is used before its event, and the double notices where it would be."""

from __future__ import annotations

import pytest
import torch

import swapper
from infer.device_models import MIB, check, load, run
from infer.host_device import HostDevice
from infer.small import make
from swapper.device.copies import Uploads
from swapper.device.device_memory import DeviceStorage


def late_model(saved, opened, budget=4 * MIB):
    device = HostDevice("late")
    return load(saved(make()), device, opened, budget=budget), device


def test_a_frame_that_is_given_back_too_early_is_noticed(saved, opened, monkeypatch):
    def give_back(self):
        while self._in_flight:
            self._pager.release(self._in_flight.popleft()[1])

    monkeypatch.setattr(Uploads, "give_back", give_back)
    model, _ = late_model(saved, [])  # its unloading notices it too
    with pytest.raises(AssertionError, match="a frame was used again before its copy was over"):
        for _ in range(3):
            run(model)


def test_a_kernel_that_does_not_wait_for_its_weights_is_noticed(saved, opened, monkeypatch):
    monkeypatch.setattr(DeviceStorage, "wait_on_current_stream", lambda self: None)
    model, _ = late_model(saved, opened)
    assert not torch.equal(run(model), run(make()))


def test_memory_that_is_filled_while_it_may_be_in_use_is_noticed(saved, opened, monkeypatch):
    fill = DeviceStorage.fill

    def without_waiting(self, pieces, stream):
        before, self._device.let_wait = self._device.let_wait, lambda *_: None
        try:
            return fill(self, pieces, stream)
        finally:
            self._device.let_wait = before

    monkeypatch.setattr(DeviceStorage, "fill", without_waiting)
    model, _ = late_model(saved, opened)
    with pytest.raises(AssertionError, match="earlier kernels may still use"):
        run(model)


def test_memory_that_is_given_back_while_it_is_filled_is_noticed():
    device = HostDevice("late")
    storage = DeviceStorage(device, 512)
    storage.free()
    storage.allocate()
    storage.fill([(0, torch.ones(512, dtype=torch.uint8))], device.new_stream())
    storage._filler = None
    with pytest.raises(AssertionError, match="given back while a copy into it may still run"):
        storage.free()


def test_few_frames_are_enough(saved, opened):
    """Copies that never end by themselves have to be waited for: nothing stands still."""
    model, _ = late_model(saved, opened)
    swapper.loaded(model)._on_device._uploads.max_in_flight = 1
    for _ in range(3):
        assert torch.equal(run(model), run(make()))
    check(model)
