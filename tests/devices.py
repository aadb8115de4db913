"""The device on which tests train: one of host memory, or with SWAPPER_TEST_DEVICE=cuda in the environment a real one.

A test that looks into the device of host memory (its streams, its capacity) makes a HostDevice, and is skipped on a real one.
SWAPPER_TEST_DEVICE=late, or another order of tests/infer/host_device.py, has twins that ask for no device on one of host memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from infer.host_device import ORDERS, HostDevice

NAME = os.environ.get("SWAPPER_TEST_DEVICE", "")
IS_REAL = bool(NAME) and NAME not in ORDERS
STAND_IN_ONLY = "it looks into the device of host memory, which SWAPPER_TEST_DEVICE replaces"


def without_device(why: str) -> pytest.MarkDecorator:
    """Mark a test of what there is only without a device. `why` is a sentence about it, for who reads what was skipped."""
    return pytest.mark.skipif(bool(NAME), reason=f"without a device only: {why}")


def skip_on_device(why: str) -> None:
    """Skip the rest of a test, or a case, that there is only without a device."""
    if NAME:
        pytest.skip(f"without a device only: {why}")


def check_named() -> None:
    """Raise UsageError if SWAPPER_TEST_DEVICE names a device that cannot be used."""
    if IS_REAL:
        try:
            torch.empty(1, device=NAME)
        except (RuntimeError, AssertionError) as error:
            raise pytest.UsageError(
                f"SWAPPER_TEST_DEVICE={NAME}: {str(error).splitlines()[0].rstrip('.')}. Say cuda where torch finds such a device, "
                f"one of {', '.join(ORDERS)}, or nothing"
            ) from None


def device_of_tests(order: str = "late") -> Any:
    """Return the real device by its name, or one of host memory whose copies run in this order."""
    return NAME if IS_REAL else HostDevice(order)


PLACES: dict[str, Callable[[], dict[str, Any]]] = {
    "in host memory": dict,
    "on a device": lambda: {"device": device_of_tests(), "device_memory": 2 << 20},
}
"""Where a model of about a MiB trains: options of `offload`."""


def need_update_there(options: dict[str, Any]) -> None:
    """Skip a test on a real device that compares an update on the CPU with plain torch's on the device."""
    if IS_REAL and options.get("update_on", "device") != "device":
        pytest.skip("an update on the CPU has other last bits than plain torch on a device")
