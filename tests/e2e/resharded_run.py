"""A job that goes on with another number of ranks, again and again, from the directories of the ranks before, as a program.

Usage: resharded_run.py DIRECTORY RANKS ...: a stage for each, with that number of ranks. At each a plain FSDP2 model has what
torch.distributed.checkpoint saved of the stage before, and a swapped one is resharded. Both train on, and must go the same way.
With "killed" as the last argument the ranks of each stage are killed as they commit, some before and some after, and begin again.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

import swapper
from e2e.fsdp_run import adamw, make, same, same_state, tied, train
from e2e.fsdp_snapshot import Counter, load
from e2e.killed_ranks import launch
from swapper.durability import committer

CASE = {"optimizer": lambda model: adamw(model, weight_decay=0.1), "mesh": "replicated", "change": tied}
"""Of 4 ranks, 2 have the same shards."""
STEPS = 2


def die_at_commit(rank: int) -> None:
    """Die instead of the first commit (odd ranks), or right after it (even ones)."""
    publish = committer.publish_commit

    def killed(*given: Any) -> None:
        if rank % 2 == 0:
            publish(*given)
        os.kill(os.getpid(), signal.SIGKILL)

    committer.publish_commit = killed


def stage(directory: Path, number: int, before: int | None, dies: bool) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    plain, plain_optimizer = make(CASE)
    swapped, optimizer = make(CASE)
    for parameter in swapped.parameters() if before is not None else ():
        parameter.data.zero_()  # what the script has made does not count
    counter = Counter()
    if dies:
        die_at_commit(rank)
    with swapper.SwapManager(directory / "run", host_memory="16MiB", resume="reshard") as manager:
        assert manager.step == STEPS * number
        _, optimizer = manager.offload(swapped, optimizer, params="nvme", optimizer_state="nvme")
        manager.register(counter=counter)
        assert manager.extra == ({} if before is None else {"rank": 0, "ranks": before})
        manager.extra.update(rank=rank, ranks=size)
        if before is not None:
            load(plain, plain_optimizer, directory / f"plain-{number - 1}", dcp.FileSystemReader)
            same_state(swapped, optimizer, plain, plain_optimizer, "resharded")
        for step in range(STEPS):
            expected = train(plain, plain_optimizer, CASE, None, 10 * number + step)
            same(train(swapped, optimizer, CASE, None, 10 * number + step), expected, f"losses of step {step}")
        same_state(swapped, optimizer, plain, plain_optimizer, "trained")
        model_state, optimizer_state = get_state_dict(plain, plain_optimizer)
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=directory / f"plain-{number}")
    os.write(1, f"stage {number}, rank {rank} of {size}: same\n".encode())


def main(directory: Path, sizes: list[int], is_killed: bool) -> None:
    torch.set_num_threads(1)
    importlib.import_module("swapper.manager")  # here and not in every child
    before = None
    for number, size in enumerate(sizes):
        for dies in (True, False) if is_killed and before is not None else (False,):
            meeting = directory / f"meeting-{number}{'-dies' * dies}"
            statuses = launch(size, meeting, lambda n=number, b=before, d=dies: stage(directory, n, b, d))
            if any(statuses) != dies:
                raise SystemExit(1)
        before = size
    names = {f"rank-{rank}-of-{size}" for size in sizes for rank in range(size)}
    assert {path.name for path in (directory / "run").iterdir()} == names  # nothing was removed


if __name__ == "__main__":
    main(Path(sys.argv[1]), [int(size) for size in sys.argv[2:] if size != "killed"], "killed" in sys.argv)
