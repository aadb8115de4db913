"""Snapshots of a sharded model, loaded on another number of ranks, as a program.

Usage: fsdp_snapshot.py DIRECTORY RANKS ...: a stage for each, with that number of ranks, all different. At each a plain model has
what torch.distributed.checkpoint saved of the plain model of the stage before, and a swapped one has the snapshot of the swapped
one. Both train on, and must go the same way.
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
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import swapper
from e2e.fsdp_run import adamw, flat, make, same, same_state, tied, train
from e2e.killed_ranks import launch
from swapper.checkpoint.dcp import StorageReader
from swapper.durability.verify import verify

CASE = {"optimizer": lambda model: adamw(model, fused=True), "mesh": "replicated", "change": tied}
"""Of 4 ranks, 2 have the same shards."""


def load(model: Any, optimizer: Any, path: Path, reader: type[dcp.FileSystemReader]) -> dict[str, Any]:
    state = dict(zip(("model", "optimizer"), copy.deepcopy(get_state_dict(model, optimizer)), strict=True))
    dcp.load(state, storage_reader=reader(path))
    loaded = copy.deepcopy(state)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return loaded


def same_content(ours: Path, theirs: Path, step: int) -> None:
    """The snapshot has what torch saves, under the same names, in the same parts; and what only a snapshot has."""
    found, expected = (dcp.FileSystemReader(path).read_metadata() for path in (ours, theirs))
    extra = {
        "extra.place",
        "extra.rank",
        "registered.counter.count",
        "registered.counter.seen",
        "swapper.format",
        "swapper.step",
    }
    assert found.state_dict_metadata.keys() == expected.state_dict_metadata.keys() | extra
    for name, entry in expected.state_dict_metadata.items():
        one, other = (getattr(each, "chunks", None) for each in (found.state_dict_metadata[name], entry))
        assert one == other, name
    assert {name: found.planner_data[name] for name in expected.planner_data} == expected.planner_data
    more: dict[str, Any] = {
        "swapper": {"step": 0},
        "extra": {"place": "", "rank": -1},
        "registered": {"counter": {"seen": torch.zeros(3)}},
    }
    dcp.load(more, storage_reader=dcp.FileSystemReader(ours))
    assert more["swapper"]["step"] == step and more["extra"] == {"place": "here", "rank": 0}
    assert more["registered"]["counter"]["seen"].tolist() == [1, 2, 3]
    own = torch.load(ours / f"rank-{dist.get_rank()}.pt", weights_only=True)
    assert own["extra"]["rank"] == dist.get_rank()


class Counter:
    def state_dict(self) -> dict[str, Any]:
        return {"count": 5, "seen": torch.tensor([1.0, 2.0, 3.0])}

    def load_state_dict(self, state: Any) -> None: ...


def stage(directory: Path, before: int | None) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    plain, plain_optimizer = make(CASE)
    swapped, optimizer = make(CASE)
    ours, theirs = directory / f"ours-{size}", directory / f"theirs-{size}"
    with swapper.SwapManager(directory / f"run-{size}", host_memory="16MiB") as manager:
        _, optimizer = manager.offload(swapped, optimizer, params="nvme", optimizer_state="nvme")
        manager.register(counter=Counter())
        if before is not None:
            expected = load(plain, plain_optimizer, directory / f"theirs-{before}", dcp.FileSystemReader)
            for reader in (dcp.FileSystemReader, StorageReader):
                loaded = load(swapped, optimizer, directory / f"ours-{before}", reader)
                for key, value in flat(expected).items():
                    if isinstance(value, torch.Tensor):
                        same(flat(loaded)[key], value, f"loaded by {reader.__name__}: {key}")
            same_state(swapped, optimizer, plain, plain_optimizer, "loaded")
        for step in range(2):
            expected_losses = train(plain, plain_optimizer, CASE, None, 10 * size + step)
            same(train(swapped, optimizer, CASE, None, 10 * size + step), expected_losses, f"losses of step {step}")
        manager.extra["place"] = "here"
        ticket = manager.snapshot(ours, extra={"rank": rank})
        assert ticket.path == ours
        assert ticket.result() == ours
        assert not [*directory.glob("*.partial")]
        own = ours / f"rank-{rank}.pt"
        swap_files = (directory / f"run-{size}").glob("rank-*/*.swap")
        assert own.stat().st_nlink == 1 or any(own.samefile(file) for file in swap_files)  # shares its bytes, or is it
        model_state, optimizer_state = get_state_dict(plain, plain_optimizer)
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=theirs)
        same_content(ours, theirs, manager.step)
        same_state(swapped, optimizer, plain, plain_optimizer, "trained")
        fail_in_between(manager, directory / f"more-{size}")
    os.write(1, f"rank {rank} of {size}: same\n".encode())


def look(ours: Path, theirs: Path, size: int) -> None:
    """Inspect, export and verify know a snapshot."""
    seen, expected = swapper.checkpoint.inspect(ours), swapper.checkpoint.inspect(theirs)
    names, others = ({tensor["name"] for tensor in each["tensors"]} for each in (seen, expected))
    assert names == others | {"registered.counter.seen"}
    assert seen["step"] >= 2
    for path in (ours, theirs):
        swapper.checkpoint.export(path, path.with_suffix(".safetensors"), "safetensors")
    assert ours.with_suffix(".safetensors").read_bytes() == theirs.with_suffix(".safetensors").read_bytes()
    assert [(report.kind, report.faults) for report in verify(ours)] == [("snapshot", [])] * (1 + size)
    try:
        verify(theirs)
    except swapper.CheckpointError as error:
        assert "no checksum" in str(error)
    else:
        raise AssertionError("what has no checksums is called whole")


def damage(directory: Path) -> None:
    """Verify finds a changed byte in each file, and a missing file. Nothing of the snapshot is needed any more."""
    for path in (directory / ".metadata", directory / "rank-0.pt"):
        path.chmod(0o644)
        whole = path.read_bytes()
        at = len(whole) // 2
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert [fault.path for report in verify(directory) for fault in report.faults] == [str(path)]
        path.write_bytes(whole)
    (directory / "rank-0.pt").unlink()
    faults = [fault for report in verify(directory) for fault in report.faults]
    assert "rank-0.pt" in faults[0].what


def fail_in_between(manager: swapper.SwapManager, directory: Path) -> None:
    """Of three snapshots in flight the second fails on the last rank before the first is begun. None takes another's name."""
    is_last = dist.get_rank() == dist.get_world_size() - 1
    if dist.get_rank() == 0:
        directory.mkdir()
    dist.barrier()
    first, second = manager.snapshot(directory / "first"), None
    try:
        manager.snapshot(directory / "first")
    except swapper.CheckpointError as error:
        assert "exists already" in str(error)
    else:
        raise AssertionError("two snapshots of one name are in flight")
    try:
        second = manager.snapshot(directory / "second", extra={"bad": object()} if is_last else {})
    except swapper.CheckpointError as error:
        assert is_last and "cannot be in a container" in str(error)
    third = manager.snapshot(directory / "third")
    assert first.result() and third.result()
    if second is not None:
        assert not is_last and "cannot be in a container" in str(second.exception())
    dist.barrier()
    assert {path.name for path in directory.iterdir()} == {"first", "third"}


def main(directory: Path, sizes: list[int]) -> None:
    torch.set_num_threads(1)
    importlib.import_module("swapper.manager")  # here and not in every child
    before = None
    for size in sizes:
        if any(launch(size, directory / f"meeting-{size}", lambda b=before: stage(directory, b))):
            raise SystemExit(1)
        before = size
    for size in set(sizes):
        look(directory / f"ours-{size}", directory / f"theirs-{size}", size)
    damage(directory / f"ours-{sizes[-1]}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), [*map(int, sys.argv[2:])])
