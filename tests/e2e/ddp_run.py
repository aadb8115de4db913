"""One of two processes under torchrun: DDP over gloo on a plain and on a swapped model; both must go the same way.

It trains with each of the updates named by its arguments; "device" is training on a device, where gradients stay, "cuda step" and
"cuda deferred" on a CUDA device of the process's own.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from infer.host_device import HostDevice
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import swapper
from e2e import fsdp_run
from e2e.models import Net, finish_step, loss_of, tokens


def train_step(model: nn.Module, optimizer: Any, device: torch.device) -> torch.Tensor:
    return finish_step(loss_of(model, tokens().to(device)), optimizer)


def run(directory: Path, update: str) -> None:
    rank = dist.get_rank()
    device = torch.device("cuda", rank) if update.startswith("cuda") else torch.device("cpu")
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Net(depth=3).to(device))
    plain, swapped = models
    wrapped = [DistributedDataParallel(model) for model in models]  # before offload: it sends the weights around
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in models]
    options: dict[str, Any] = {"update": "step" if update == "device" else update.removeprefix("cuda ")}
    if on_device := update not in ("step", "deferred"):
        there = swapper.Accelerator(update_on="device")
        where = HostDevice("late") if device.type == "cpu" else device
        options |= {"device": where, "device_memory": "16MiB", "gradients": "device", "accelerator": there}
    with swapper.SwapManager(directory, host_memory="12MiB" if on_device else "9MiB") as manager:
        _, optimizer = manager.offload(wrapped[1], optimizers[1], params="nvme", optimizer_state="nvme", **options)
        for step in range(3):
            torch.manual_seed(10 * step + rank)  # each rank has batches of its own
            expected = train_step(wrapped[0], optimizers[0], device)
            torch.manual_seed(10 * step + rank)
            assert torch.equal(train_step(wrapped[1], optimizer, device), expected)
        for ours, theirs in zip(swapped.parameters(), plain.parameters(), strict=True):
            with manager.gather(ours):
                assert torch.equal(ours, theirs)
        counters = manager.counters
        assert (counters.uploaded_bytes if on_device else counters.bytes_read) > 0
    os.write(1, f"rank {rank}, {update}: same\n".encode())  # at once: both ranks write there


if __name__ == "__main__":
    fsdp_run.join()
    for update in sys.argv[2:]:
        run(Path(sys.argv[1], update), update)
    dist.destroy_process_group()
