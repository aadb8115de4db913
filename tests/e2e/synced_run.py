"""A run with fsync=True, as a program: asserts by its system calls that each commit is on the drive before the next begins.

Usage: synced_run.py DIRECTORY. A power loss cannot be had in a test; the order of writes and syncs can. See stopped_calls.py.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

import swapper
from e2e import killed_run
from e2e.stopped_calls import run_until

STEPS = 3


def work(directory: Path) -> None:
    model, optimizer, scheduler = killed_run.make()
    with swapper.SwapManager(
        directory, host_memory=killed_run.BUDGET, commits=swapper.CommitPolicy(fsync=True), backend="threads"
    ) as manager:
        model, optimizer = manager.offload(model, optimizer, params="nvme", optimizer_state="nvme")
        for number in range(STEPS):
            killed_run.train_step(model, optimizer, scheduler, number)


def main(directory: Path) -> None:
    torch.set_num_threads(1)
    status, calls = run_until(lambda: work(directory), killed_run.fork, directory, -1)
    assert status == 0, os.waitstatus_to_exitcode(status)
    renames = [index for index, name in enumerate(calls) if name in ("renameat", "renameat2")]  # the latter exchanges
    assert len(renames) == STEPS + 1
    for before, index in zip([0, *renames], renames, strict=False):
        last_page = max(i for i in range(before, index) if calls[i] == "pwrite64")
        record = [name for name in calls[last_page + 1 : index] if name not in ("openat", "ftruncate")]
        assert record == ["fdatasync", "fdatasync", "write", "fsync"], calls[before:index]
        assert calls[index + 1] == "fsync"  # of the directory
    print(f"{len(renames)} commits, each synced")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
