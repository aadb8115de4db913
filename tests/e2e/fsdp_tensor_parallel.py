"""One of 4 ranks under torchrun: FSDP2 over tensor parallelism, on a plain and on a swapped model; both must go the same way.

Usage: fsdp_tensor_parallel.py DIRECTORY UPDATE, the time of updates, as for `offload`; with "reshard" one of 2 ranks, after that.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import swapper
from e2e.fsdp_run import dist_objects, same, same_state
from e2e.twins import named_budget

WIDTH = 256


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(4)))
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("shards", "tensors"))
    for block in model:
        parallelize_module(block, mesh["tensors"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["shards"])
    fully_shard(model, mesh=mesh["shards"])
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model: nn.Module, optimizer: Any, step: int, clip: bool) -> torch.Tensor:
    """Ranks 0 and 1 hold parts of the same tensors, and so have the same batch."""
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank() // 2)
    loss = model(torch.randn(4, WIDTH, generator=generator)).square().mean()
    loss.backward()
    norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 0.1).full_tensor() if clip else loss
    optimizer.step()
    optimizer.zero_grad()
    return torch.stack([loss.detach(), norm.detach()])


def run(directory: Path, update: str) -> None:
    plain, plain_optimizer = make()
    model, original = make()
    options: dict[str, Any] = {"params": "nvme", "optimizer_state": "nvme", "update": update}
    with swapper.SwapManager(directory, host_memory=1) as manager:
        try:
            manager.plan(model, original, **options)
        except swapper.BudgetError as error:
            budget = max(dist_objects(named_budget(error)))
    with swapper.SwapManager(directory, host_memory=budget, resume="discard") as manager:
        for refused in ({"init": nn.Module.eval}, {"state_codec": "8bit"}):
            try:
                manager.offload(model, original, **options, **refused)
            except swapper.UnsupportedError as error:
                assert "tensor parallelism" in str(error), error
            else:
                raise AssertionError(f"{refused} was not refused")
        _, optimizer = manager.offload(model, original, **options)
        for step in range(3):
            expected = train(plain, plain_optimizer, step, update != "backward")
            same(train(model, optimizer, step, update != "backward"), expected, f"losses of step {step}")
        same_state(model, optimizer, plain, plain_optimizer, update)
        assert manager.counters.bytes_read > 0
        snapshot = directory.with_name("snapshot")
        manager.snapshot(snapshot).result()
        loaded: dict[str, Any] = {"model": get_model_state_dict(make()[0])}
        dcp.load(loaded, storage_reader=dcp.FileSystemReader(snapshot))
        for name, parameter in plain.named_parameters():
            same(loaded["model"][name], parameter, f"{name} in the snapshot")
    model, original = make()
    with swapper.SwapManager(directory, host_memory=budget, resume="auto") as manager:
        _, optimizer = manager.offload(model, original, **options)
        expected = train(plain, plain_optimizer, 3, update != "backward")
        same(train(model, optimizer, 3, update != "backward"), expected, "after the resume")
    os.write(1, f"rank {dist.get_rank()}: same\n".encode())


def reshard(directory: Path) -> None:
    with swapper.SwapManager(directory, host_memory="64MiB", resume="reshard") as manager:
        try:
            manager.offload(*make(), params="nvme", optimizer_state="nvme")
        except swapper.UnsupportedError as error:
            os.write(1, f"rank {dist.get_rank()}: {error}\n".encode())


if __name__ == "__main__":
    dist.init_process_group("gloo")
    here = Path(sys.argv[1], "run")
    reshard(here) if sys.argv[2] == "reshard" else run(here, sys.argv[2])
    dist.destroy_process_group()
