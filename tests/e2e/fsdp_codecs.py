"""One of several ranks under torchrun: a model that FSDP2 has sharded, with encoded state, goes the same way as a whole one.

All ranks have the same batches: the mean of their gradients is that of one, bit for bit, if their number is a power of two.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import swapper
from e2e.fsdp_run import Model, adamw, same
from e2e.twins import named_budget


def train(model: nn.Module, optimizer: Any, steps: range) -> torch.Tensor:
    losses = []
    for step in steps:
        tokens = torch.randint(50, (2, 9), generator=torch.Generator().manual_seed(step))
        loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


def make(sharded: bool) -> tuple[Model, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Model(depth=2)
    for module in (*model.blocks, model) if sharded else ():
        fully_shard(module)
    return model, adamw(model)


def run(directory: Path) -> None:
    options: dict[str, Any] = {"params": "nvme", "optimizer_state": "nvme", "state_codec": "8bit"}
    whole, optimizer = make(sharded=False)
    with swapper.SwapManager(directory / f"whole-{dist.get_rank()}", host_memory="64MiB", ranks="alone") as manager:
        _, optimizer = manager.offload(whole, optimizer, **options)
        expected = train(whole, optimizer, range(4))
        state = {n: {k: v.clone() for k, v in s.items()} for n, s in optimizer.state_dict()["state"].items()}
    model, optimizer = make(sharded=True)
    with swapper.SwapManager(directory / "sharded", host_memory=1) as manager:
        try:
            manager.plan(model, optimizer, update="deferred", **options)
        except swapper.BudgetError as error:
            budget = named_budget(error) + (2 << 20)
    with swapper.SwapManager(directory / "sharded", host_memory=budget, resume="discard") as manager:
        _, optimizer = manager.offload(model, optimizer, **options)
        assert manager.current.run.model.optimizer_state.codecs == {"exp_avg": "moment8", "exp_avg_sq": "variance8"}
        same(train(model, optimizer, range(2)), expected[:2], "losses")
    model, optimizer = make(sharded=True)
    with swapper.SwapManager(directory / "sharded", host_memory=budget, resume="auto") as manager:
        _, optimizer = manager.offload(model, optimizer, update="deferred", **options)
        same(train(model, optimizer, range(2, 4)), expected[2:], "losses after resuming")
        for number, values in optimizer.state_dict()["state"].items():
            for key, value in values.items():
                found = value.full_tensor() if hasattr(value, "full_tensor") else value
                same(found, state[number][key], f"{key} of {number}")
    os.write(1, f"rank {dist.get_rank()}: same\n".encode())


if __name__ == "__main__":
    dist.init_process_group("gloo")
    run(Path(sys.argv[1]))
    dist.destroy_process_group()
