"""What a device raises, as an error of swapper's own: one place for handles, checkpoints and `swapper.device.device.Device`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from swapper.errors import DeviceError, SwapperError


@contextmanager
def device_errors(device: torch.device, what: str) -> Iterator[None]:
    """Within it, what `device` raises comes out as a DeviceError that says where; being out of memory stays what it is."""
    try:
        yield
    except (SwapperError, torch.OutOfMemoryError):
        raise
    except RuntimeError as error:
        raise DeviceError.at(device, what, error) from error
