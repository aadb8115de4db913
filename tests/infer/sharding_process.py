"""One of several processes that save one model's state together, sharded: forked by test_sharded_sources.py."""

from __future__ import annotations

import os
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from swapper.checkpoint.dcp import StorageWriter

WORLD = {"rows": 3, "fsdp": 2, "columns": 2, "mesh": 4}


def save_together(how: str, model: nn.Module, directory: Path, whose: str) -> None:
    """Save `model` in as many processes as `how` takes, which are forked: they have torch imported."""
    meeting = directory.with_name(f"{directory.name}-meeting")  # of the processes: a port could be taken by others
    children = []
    for rank in range(WORLD[how]):
        child = os.fork()
        if child == 0:
            try:
                _save(how, model, directory, whose, rank, meeting)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
            os._exit(1)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * len(children)


def _save(how: str, model: nn.Module, directory: Path, whose: str, rank: int, meeting: Path) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=WORLD[how])
    writer: Any = StorageWriter(directory) if whose == "ours" else dcp.FileSystemWriter(directory)
    dcp.save({"model": _sharded(how, model)}, storage_writer=writer)
    dist.destroy_process_group()


def _sharded(how: str, model: nn.Module) -> dict[str, Any]:
    if how == "fsdp":
        mesh = init_device_mesh("cpu", (2,))
        for module in [*model.layers, model]:
            fully_shard(module, mesh=mesh)
        return model.state_dict()
    mesh = init_device_mesh("cpu", (2, 2) if how == "mesh" else (WORLD[how],))
    placements = {"rows": [Shard(0)], "columns": [Shard(1)], "mesh": [Shard(0), Shard(1)]}[how]
    return {
        name: distribute_tensor(tensor, mesh, placements if tensor.dim() > 1 else [Shard(0)] * mesh.ndim)
        for name, tensor in model.state_dict().items()
    }
