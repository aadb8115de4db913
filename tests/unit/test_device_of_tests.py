"""SWAPPER_TEST_DEVICE: the device of the tests is one of host memory, the named one, or refused with what to say."""

from __future__ import annotations

import devices
import pytest
import torch
from infer.host_device import ORDERS, HostDevice


@pytest.mark.parametrize("order", ORDERS)
def test_a_device_of_host_memory_has_the_order_of_the_test(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "IS_REAL", False)
    made = devices.device_of_tests(order)
    assert isinstance(made, HostDevice) and made.is_immediate == (order == "at once")
    devices.check_named()
    devices.need_update_there({"update_on": "cpu"})


def test_a_real_device_is_given_by_its_name_and_compares_updates_there_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "IS_REAL", True)
    monkeypatch.setattr(devices, "NAME", "cuda:1")
    assert devices.device_of_tests("late") == "cuda:1"
    devices.need_update_there({"update_on": "device"})
    with pytest.raises(pytest.skip.Exception, match="other last bits"):
        devices.need_update_there({"update_on": "cpu"})


@pytest.mark.parametrize("name", ["cuda", "nowhere"])
def test_a_device_that_is_not_there_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    monkeypatch.setattr(devices, "IS_REAL", True)
    monkeypatch.setattr(devices, "NAME", name)
    with pytest.raises(
        pytest.UsageError, match=rf"SWAPPER_TEST_DEVICE={name}: .*Say cuda where torch finds such a device"
    ):
        devices.check_named()
