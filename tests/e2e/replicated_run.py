"""One of several ranks under torchrun: torch's composable `replicate`, of DDP, on a plain and on a swapped model.

Usage: replicated_run.py DIRECTORY. It is exact, in either order, and refused with update="backward". FSDP2's: fsdp_run.py.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate

import swapper
from e2e.fsdp_run import same

OPTIONS: dict[str, Any] = {"params": "nvme", "optimizer_state": "nvme"}


def make(over: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(24)))
    over(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model: nn.Module, optimizer: Any, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    loss = model(torch.randn(4, 256, generator=generator)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def refused(directory: Path, model: nn.Module, optimizer: Any, text: str, **options: Any) -> None:
    with swapper.SwapManager(directory, host_memory="20MiB", resume="discard") as manager:
        try:
            manager.offload(model, optimizer, **OPTIONS, **options)
        except swapper.UnsupportedError as error:
            assert text in str(error), error
            return
    raise AssertionError("not refused")


def run(directory: Path) -> None:
    plain, plain_optimizer = make(replicate)
    model, optimizer = make(replicate)
    refused(directory, model, optimizer, "update='backward'", update="backward")
    same(train(model, optimizer, 0), train(plain, plain_optimizer, 0), "before offload")
    refused(directory, model, optimizer, "update='backward'", update="backward")
    with swapper.SwapManager(directory, host_memory="20MiB", resume="discard") as manager:
        late, late_optimizer = make(replicate)
        late_plain, late_plain_optimizer = make(replicate)
        _, late_optimizer = manager.offload(late, late_optimizer, **OPTIONS)
        for step in range(3):
            expected = train(late_plain, late_plain_optimizer, step)
            same(train(late, late_optimizer, step), expected, f"step {step}")
        assert manager.counters.bytes_read > 0
    with swapper.SwapManager(directory, host_memory="20MiB", resume="discard") as manager:
        _, optimizer = manager.offload(model, optimizer, **OPTIONS)
        for step in range(1, 3):
            same(train(model, optimizer, step), train(plain, plain_optimizer, step), f"trained before, step {step}")
    os.write(1, f"rank {dist.get_rank()}: same\n".encode())


if __name__ == "__main__":
    dist.init_process_group("gloo")
    run(Path(sys.argv[1], "run"))
    dist.destroy_process_group()
