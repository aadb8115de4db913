"""Ranks with encoded optimizer state that go on with another number, as a program: from live directories and from snapshots.

Usage: coded_ranks_run.py DIRECTORY CODEC RANKS ...: a stage for each, with that number of ranks. What the ranks before had in fp32,
the new ones have: in the resharded run, as `StorageReader` reads the snapshot, and as torch's reader does, which has codes.
"""

from __future__ import annotations

import copy
import importlib
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard

import swapper
from e2e.fsdp_run import adamw, same, train
from e2e.killed_ranks import launch
from swapper.checkpoint.dcp import StorageReader
from swapper.checkpoint.encoded_state import MARK
from swapper.codecs import CODECS
from swapper.durability.verify import verify


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 64)
        self.up = nn.Linear(64, 2049)  # no multiple of any number of ranks
        self.wide = nn.Linear(2049, 2048)
        self.narrow = nn.Linear(2048, 3)  # large, and of 4 ranks one has nothing of it
        self.head = nn.Linear(3, 50)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.narrow(torch.tanh(self.wide(self.up(self.embedding(tokens))))))


def make() -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net()
    for layer in (model.up, model.narrow):
        fully_shard(layer)
    return fully_shard(model), adamw(model)


def state_of(model: Any, optimizer: Any) -> dict[str, dict[str, Any]]:
    return get_optimizer_state_dict(model, optimizer)["state"]


def whole(state: dict[str, dict[str, Any]]) -> dict[str, dict[str, torch.Tensor]]:
    return {
        name: {key: getattr(value, "full_tensor", value.clone)() for key, value in of.items()}
        for name, of in state.items()
    }


def same_state(found: dict[str, dict[str, Any]], expected: dict[str, dict[str, Any]], what: str) -> None:
    assert found.keys() == expected.keys()
    for name, of in expected.items():
        for key, value in of.items():
            assert found[name][key].dtype == value.dtype == torch.float32
            same(found[name][key], value, f"{what}: {key} of {name}")


def by_torchs_reader(path: Path, like: dict[str, dict[str, torch.Tensor]]) -> dict[str, dict[str, torch.Tensor]]:
    """Return the whole state. What is no tensor of values in the directory is decoded here."""
    entries = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    wanted: dict[str, dict[str, Any]] = {name: {} for name in like}
    for name, of in like.items():
        for key, value in of.items():
            place = f"optimizer.state.{name}.{key}"
            if place in entries:
                wanted[name][key] = torch.full_like(value, 9)
                continue
            parts = {
                entry.removeprefix(f"{place}."): entries[entry] for entry in entries if entry.startswith(f"{place}.")
            }
            assert MARK[1:] in parts
            sized = {
                suffix: torch.empty(p.size, dtype=p.properties.dtype)
                for suffix, p in parts.items()
                if suffix != MARK[1:]
            }
            wanted[name][key] = {MARK[1:]: "", **sized}
    dcp.load({"optimizer": {"state": wanted}}, storage_reader=dcp.FileSystemReader(path))
    for name, of in wanted.items():
        for key, value in of.items():
            if isinstance(value, dict):
                codec = CODECS[value[MARK[1:]]]
                of[key] = torch.empty_like(like[name][key])
                codec.decode([value[part.suffix].view(-1) for part in codec.layout], of[key].view(-1))
    return wanted


def check_before(directory: Path, before: int, model: Any, optimizer: Any) -> None:
    expected = torch.load(directory / f"expected-{before}", weights_only=True)
    same_state(whole(state_of(model, optimizer)), expected, "resharded")
    snapshot = directory / f"snapshot-{before}"
    target = copy.deepcopy(state_of(model, optimizer))
    for of in target.values():
        for value in of.values():
            getattr(value, "_local_tensor", value).fill_(9)
    dcp.load({"optimizer": {"state": target}}, storage_reader=StorageReader(snapshot))
    same_state(whole(target), expected, "by StorageReader")
    same_state(by_torchs_reader(snapshot, expected), expected, "by torch's reader")


def stage(directory: Path, codec: str, before: int | None) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    model, optimizer = make()
    with swapper.SwapManager(directory / "run", host_memory="64MiB", resume="reshard") as manager:
        _, optimizer = manager.offload(model, optimizer, params="nvme", optimizer_state="nvme", state_codec=codec)
        if before is not None:
            check_before(directory, before, model, optimizer)
        for step in range(2):
            train(model, optimizer, {}, None, 10 * size + step)
        path = directory / f"snapshot-{size}"
        ticket = manager.snapshot(path)
        expected = whole(state_of(model, optimizer))
        if rank == 0:
            torch.save(expected, directory / f"expected-{size}")
        assert ticket.result() == path
        own = path / f"rank-{rank}.pt"
        swap_files = (directory / "run").glob(f"rank-{rank}-of-{size}/*.swap")
        assert own.stat().st_nlink == 1 or any(own.samefile(file) for file in swap_files)  # shares its bytes, or is it
        part = swapper.checkpoint.load(own)["optimizer"]["state"]["up.weight"]["exp_avg"]
        same(part, state_of(model, optimizer)["up.weight"]["exp_avg"], "a rank's own file")
    os.write(1, f"rank {rank} of {size}: same\n".encode())


def look(path: Path, codec: str) -> None:
    assert {(report.kind, *report.faults) for report in verify(path)} == {("snapshot",)}
    seen = swapper.checkpoint.inspect(path)
    assert ("moment8" if codec == "8bit" else "bf16") in seen["metadata"]["state_codec"]
    swapper.checkpoint.export(path, path.with_suffix(".safetensors"), "safetensors")
    try:
        swapper.checkpoint.export(path, path.with_suffix(".all"), "safetensors", what="all")
    except swapper.CheckpointError as error:
        assert codec == "8bit" and "StorageReader" in str(error)
    else:
        assert codec == "bf16"  # which are tensors


def main(directory: Path, codec: str, sizes: list[int]) -> None:
    torch.set_num_threads(1)
    importlib.import_module("swapper.manager")  # here and not in every child
    before = None
    for size in sizes:
        if any(launch(size, directory / f"meeting-{size}", lambda b=before: stage(directory, codec, b))):
            raise SystemExit(1)
        look(directory / f"snapshot-{size}", codec)
        before = size


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], [*map(int, sys.argv[3:])])
