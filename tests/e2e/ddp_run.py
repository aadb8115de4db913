"""One of two processes under torchrun: DDP over gloo on a plain and on a swapped model; both must go the same way.

It trains with each of the updates named by its arguments; "device" is training on a device, where gradients stay.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from infer.host_device import HostDevice
from torch.nn.parallel import DistributedDataParallel

import swapper
from e2e.models import Net, train_step


def run(directory: Path, update: str) -> None:
    rank = dist.get_rank()
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Net(depth=3))
    plain, swapped = models
    wrapped = [DistributedDataParallel(model) for model in models]  # before offload: it sends the weights around
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in models]
    options: dict[str, Any] = {"update": update}
    if update == "device":
        there = swapper.Accelerator(update_on="device")
        options = {"device": HostDevice("late"), "device_memory": "16MiB", "gradients": "device", "accelerator": there}
    with swapper.SwapManager(directory, host_memory="12MiB" if update == "device" else "9MiB") as manager:
        _, optimizer = manager.offload(wrapped[1], optimizers[1], params="nvme", optimizer_state="nvme", **options)
        for step in range(3):
            torch.manual_seed(10 * step + rank)  # each rank has batches of its own
            expected = train_step(wrapped[0], optimizers[0])
            torch.manual_seed(10 * step + rank)
            assert torch.equal(train_step(wrapped[1], optimizer), expected)
        for ours, theirs in zip(swapped.parameters(), plain.parameters(), strict=True):
            with manager.gather(ours):
                assert torch.equal(ours, theirs)
        counters = manager.counters
        assert (counters.uploaded_bytes if update == "device" else counters.bytes_read) > 0
    os.write(1, f"rank {rank}, {update}: same\n".encode())  # at once: both ranks write there


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for update in sys.argv[2:]:
        run(Path(sys.argv[1], update), update)
    dist.destroy_process_group()
