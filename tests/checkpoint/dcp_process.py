"""One of several processes that save or load one sharded state together, over gloo: forked by test_dcp.py."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from swapper.checkpoint.dcp import StorageReader, StorageWriter


def whole_state() -> dict[str, torch.Tensor]:
    rows = torch.arange(37 * 5000.0).view(37, 5000)
    return {"rows": rows, "columns": rows.t().contiguous(), "copied": torch.arange(1000), "short": torch.ones(2, 3)}


def sharded(state: dict[str, torch.Tensor], mesh: Any) -> dict[str, DTensor]:
    placements = {"rows": Shard(0), "columns": Shard(1), "copied": Replicate(), "short": Shard(0)}
    return {name: distribute_tensor(tensor, mesh, [placements[name]]) for name, tensor in state.items()}


def run(rank: int, world: int, meeting: Path, directory: Path, action: str, whose: str) -> None:
    """Save, or load and compare; `whose` is "ours" or "stock". The processes find each other by the file `meeting`."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    expected = whole_state()
    if action == "save":
        writer: Any = StorageWriter(directory, thread_count=2) if whose == "ours" else dcp.FileSystemWriter(directory)
        dcp.save({"state": sharded(expected, mesh), "number": 5}, storage_writer=writer)
    else:
        reader: Any = StorageReader(directory) if whose == "ours" else dcp.FileSystemReader(directory)
        empty = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
        target: dict[str, Any] = {"state": sharded(empty, mesh), "number": 0}
        dcp.load(target, storage_reader=reader)
        assert target["number"] == 5
        for name, tensor in expected.items():
            assert torch.equal(target["state"][name].full_tensor(), tensor), name
    dist.destroy_process_group()
