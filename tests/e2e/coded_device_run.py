"""A small run with encoded state that is updated on a device of host memory, as a program: for Triton's interpreter.

Usage: coded_device_run.py DIRECTORY CODEC: prints the checksums of its parameters and decoded state, as JSON.
"""

from __future__ import annotations

import json
import sys
import zlib
from pathlib import Path
from typing import Any

import torch
from infer.host_device import HostDevice
from torch import nn

import swapper


def digests(directory: Path, codec: str, update_on: str | None, device: Any = "cpu") -> dict[str, int]:
    """Train two steps and return the checksums.

    Args:
        update_on: "cpu" or "device"; None to train without a device.
        device: of forwards and backwards.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(96, 64), nn.Tanh(), nn.Linear(64, 96)).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    options = {"params": "nvme", "optimizer_state": "nvme", "master_weights": torch.float32, "state_codec": codec}
    if update_on is not None:
        accelerator = swapper.Accelerator(update_on=update_on)
        options |= {"device": device, "device_memory": "16MiB", "accelerator": accelerator}
    where = device if isinstance(device, str) else device.device
    with swapper.SwapManager(directory, host_memory="16MiB") as manager:
        _, paged = manager.offload(model, optimizer, **options)
        torch.manual_seed(1)
        for _ in range(2):
            model(torch.randn(4, 96).bfloat16().to(where)).float().square().mean().backward()
            paged.step()
            paged.zero_grad()
        state = paged.state_dict()["state"]
        found = {f"{n} {key}": checksum(value) for n, of in state.items() for key, value in of.items()}
        with manager.gather(model):
            return found | {name: checksum(parameter) for name, parameter in model.named_parameters()}


def checksum(tensor: torch.Tensor) -> int:
    return zlib.crc32(bytes(tensor.detach().cpu().clone().reshape(-1).view(torch.uint8).tolist()))


if __name__ == "__main__":
    print(json.dumps(digests(Path(sys.argv[1]), sys.argv[2], "device", HostDevice("late"))))
