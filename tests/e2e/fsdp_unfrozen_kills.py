"""Ranks of a sharded model that get more to train, and are killed in the middle of it, as a program.

Usage: fsdp_unfrozen_kills.py DIRECTORY [STRIDE [FIRST]]. A job has trained two steps. Each time its ranks begin with a copy,
and add a group to the running optimizer. One of them, in turns, is killed before its call number FIRST, FIRST + STRIDE, ... that
changes a file in there. The other dies right after it has committed the new layout, or right before that, or learns of it and ends.
Then all begin again, must find one layout, the old one or the new one, on all ranks, and go on: losses, parameters and state are
those of plain FSDP2.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import swapper
from e2e.fsdp_run import frozen, make, train, unfreeze
from e2e.killed_ranks import digests, joined, launch
from e2e.killed_run import fork
from e2e.stopped_calls import run_until, stop_from_here
from swapper.durability import committer

SIZE = 2
ADDED_AT, STEPS = 2, 4
PLACES = {"params": "nvme", "optimizer_state": "nvme"}
CASE = {"change": frozen}
FATES = ("dies after its commit", "dies before its commit", "lives")


def plain(directory: Path) -> None:
    model, optimizer = make(CASE)
    losses = []
    for step in range(STEPS):
        if step == ADDED_AT:
            unfreeze(model, optimizer)
        losses.append(train(model, optimizer, CASE, None, step).tolist())
    torch.save((losses, digests(model, optimizer)), directory / f"plain-{dist.get_rank()}.pt")


def begin(directory: Path) -> None:
    model, optimizer = make(CASE)
    with swapper.SwapManager(directory, host_memory="8MiB", resume="auto") as manager:
        _, optimizer = manager.offload(model, optimizer, **PLACES)
        for step in range(ADDED_AT):
            train(model, optimizer, CASE, None, step)


def open_again(directory: Path, manager: Any) -> tuple[Any, Any]:
    """Return the model and the optimizer, which train what the run trained."""
    model, optimizer = make(CASE)
    if "blocks.1.up.weight" in manager.trained:
        unfreeze(model, optimizer)
    return model, manager.offload(model, optimizer, **PLACES)[1]


def die_at_commit(fate: str) -> None:
    """Let this rank die by the commit of the new layout: the second one, after that of the old layout."""
    publish, commits = committer.publish_commit, itertools.count()

    def dying(*record: Any) -> None:
        is_new = next(commits) == 1
        if is_new and fate == "dies before its commit":
            os.kill(os.getpid(), signal.SIGKILL)
        publish(*record)
        if is_new and fate == "dies after its commit":
            os.kill(os.getpid(), signal.SIGKILL)

    committer.publish_commit = dying


def add(directory: Path, fate: str = "") -> None:
    """Add a group. Without a fate this rank is watched."""
    with swapper.SwapManager(directory, host_memory="8MiB", resume="auto", backend="threads") as manager:
        model, optimizer = open_again(directory, manager)
        die_at_commit(fate) if fate else stop_from_here()
        unfreeze(model, optimizer)
        os._exit(0)  # before its end changes more


def go_on(directory: Path) -> None:
    with swapper.SwapManager(directory, host_memory="8MiB", resume="auto") as manager:
        assert manager.step == ADDED_AT
        found: list[Any] = [None] * SIZE
        dist.all_gather_object(found, manager.trained)
        assert found[0] == found[1], "ranks have different layouts"
        model, optimizer = open_again(directory, manager)
        if len(optimizer.param_groups) == 1:
            unfreeze(model, optimizer)
        losses, expected = torch.load(directory.parent / f"plain-{dist.get_rank()}.pt")
        for step in range(ADDED_AT, STEPS):
            assert train(model, optimizer, CASE, None, step).tolist() == losses[step], f"step {step} differs"
        assert digests(model, optimizer) == expected
        files = len([*directory.glob(f"rank-{dist.get_rank()}-of-*/*.swap")])
        assert files == 2, f"{files} swap files: what there was before is left"


def add_and_kill(directory: Path, meeting: Path, victim: int, at: int, fate: str) -> tuple[bool, list[str]]:
    """Start the ranks, and kill one. Return whether its call number `at` came, and its calls until then."""
    peer = fork(lambda: joined(1 - victim, SIZE, meeting, lambda: add(directory, fate)))
    status, calls = run_until(
        lambda: joined(victim, SIZE, meeting, lambda: add(directory)), fork, directory, at, later=True
    )
    with contextlib.suppress(ChildProcessError):  # it was waited for meanwhile
        os.waitpid(peer, 0)
    return os.WIFSIGNALED(status), calls


def main(directory: Path, stride: int = 1, first: int = 0) -> None:
    torch.set_num_threads(1)
    swapper.SwapManager  # noqa: B018  # imported here and not in every rank
    place, begun = directory / "job", directory / "begun"
    begun.mkdir()
    assert not any(launch(SIZE, directory / "meeting", lambda: plain(directory)))
    assert not any(launch(SIZE, directory / "meeting-0", lambda: begin(begun)))
    for number in itertools.count():
        shutil.copytree(begun, place)
        meeting = directory / f"meeting-{number}"
        at, victim, fate = first + number * stride, number % SIZE, FATES[number % len(FATES)]
        killed, calls = add_and_kill(place, Path(f"{meeting}-add"), victim, at, fate)
        if any(launch(SIZE, Path(f"{meeting}-on"), lambda: go_on(place))):
            raise SystemExit(
                f"after the kill of rank {victim} at call {at} ({calls[-1:]}) the job did not go on: its peer {fate}"
            )
        shutil.rmtree(place)
        if not killed:
            break
    print(f"{number} kills at {len(calls)} calls, all exact")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
