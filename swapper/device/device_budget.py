"""What the user gives of an accelerator: which one, and how many bytes of its memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from swapper.device.device import Device, open_device
from swapper.errors import ConfigError
from swapper.runtime.sizes import parse_bytes


@dataclass(frozen=True, slots=True)
class DeviceBudget:
    """An accelerator, and how many bytes of its memory may be used."""

    device: Device
    nbytes: int

    @classmethod
    def parse(cls, device: str | torch.device | Device, device_memory: int | str) -> DeviceBudget | None:
        """Return what the user asked for; None for the CPU, whose memory is host memory. "auto" is half of what is free.

        Raises:
            ConfigError: an option is not known, or they do not go together.
            DeviceError: there is no such device.
        """
        opened = open_device(device)
        if opened is not None:
            auto = device_memory == "auto"
            return cls(opened, opened.free_bytes() // 2 if auto else parse_bytes(device_memory, "device_memory"))
        if device_memory != "auto":
            raise ConfigError(f"device_memory={device_memory!r} goes with a device; on the CPU say host_memory")
        return None
