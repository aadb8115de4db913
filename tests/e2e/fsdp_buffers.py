"""One of several ranks under torchrun: measures how much memory a step of FSDP2 takes, and compares it with the plan's figure.

Usage: fsdp_buffers.py DIRECTORY CASE ... Run with MALLOC_MMAP_THRESHOLD_ set, so that memory that is freed is given back at once.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import swapper

BF16 = torch.bfloat16
CASES = {
    "fp32": MixedPrecisionPolicy(),
    "bf16": MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32),
    "a large head": MixedPrecisionPolicy(),
}


class Model(nn.Module):
    def __init__(self, vocabulary: int, width: int = 640) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.Tanh(), nn.Linear(4 * width, width)) for _ in range(3)
        )
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def status_bytes(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def measure(directory: Path, case: str, width: int = 640) -> str:
    """Return how many bytes the plan says and the first step takes, which also touches what the collectives keep."""
    torch.manual_seed(0)
    model = Model(8000 if case == "a large head" else 1000, width)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=CASES[case])
    fully_shard(model, mesh=mesh, mp_policy=CASES[case])
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with swapper.SwapManager(directory, host_memory="1GiB") as manager:
        plan = manager.plan(model, optimizer, params="nvme")
        assert "FSDP2's buffers" in str(plan)
        manager.offload(model, optimizer, plan)
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
        before_bytes, heap_bytes = status_bytes("VmRSS"), status_bytes("RssAnon")
        model(torch.zeros(1, 1, dtype=torch.int64)).float().logsumexp(-1).sum().backward()
        stays_bytes = status_bytes("RssAnon") - heap_bytes  # kernels' own; of FSDP2's buffers only shared memory stays
        measured = status_bytes("VmHWM") - before_bytes - stays_bytes
    return f"planned {plan.buffer_bytes} measured {measured}"


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for number, case in enumerate(sys.argv[2:] or CASES):
        measure(Path(sys.argv[1], f"warm-{number}"), case, width=64)  # the first use of torch's code takes memory too
        found = measure(Path(sys.argv[1], f"case-{number}"), case)
        os.write(1, f"rank {dist.get_rank()}, {case}: {found}\n".encode())
    dist.destroy_process_group()
