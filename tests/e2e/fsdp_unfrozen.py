"""One of two ranks under torchrun: more of a sharded model is to be trained, which fails on one rank. Nothing changes on any.

Usage: fsdp_unfrozen.py DIRECTORY. Then it works, and the run is that of plain FSDP2. So is one that loads the optimizer's state of
parameters that are frozen.
"""

from __future__ import annotations

import contextlib
import copy
import os
import resource
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import swapper
from e2e.fsdp_run import frozen, join, loss_of, make, same, same_state, train, unfreeze
from e2e.ranks_run import no_room

CASE = {"change": frozen}


def adamw(model: Any) -> torch.optim.Optimizer:
    """Return an optimizer that frozen parameters are in too."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


@contextlib.contextmanager
def gradient(model: Any, rank: int) -> Iterator[None]:
    """Within, rank 1 has gradients."""
    loss_of(model, 0).backward()
    if rank == 0:
        model.zero_grad()
    yield
    model.zero_grad()


@contextlib.contextmanager
def other_settings(optimizer: Any, rank: int) -> Iterator[None]:
    """Within, rank 1 has another learning rate."""
    (group,) = optimizer.param_groups
    before = group["lr"]
    group["lr"] = before * (1 + rank)
    yield
    group["lr"] = before


@contextlib.contextmanager
def full_drive(rank: int) -> Iterator[None]:
    """Within, rank 1 can write no file."""
    with no_room() if rank == 1 else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def no_larger_files(directory: Path, rank: int) -> Iterator[None]:
    """Within, rank 1 can write no file that is larger than the largest it has: not those of the new layout."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        largest = max(path.stat().st_size for path in directory.glob("rank-1-*/*.swap"))
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def refused(trouble: Any, add: Callable[[], None]) -> str:
    with trouble:
        try:
            add()
        except swapper.SwapperError as error:
            return f"{type(error).__name__}: {error}"
    raise AssertionError("not refused")


def main(directory: Path) -> None:
    rank = dist.get_rank()
    plain, plain_optimizer = make(CASE, is_plain=True)
    swapped, optimizer = make(CASE)
    with swapper.SwapManager(directory, host_memory="8MiB") as manager:
        _, optimizer = manager.offload(swapped, optimizer, params="nvme", optimizer_state="nvme")
        for step in range(2):
            expected = train(plain, plain_optimizer, CASE, None, step)
            same(train(swapped, optimizer, CASE, None, step), expected, f"losses of step {step}")
        for trouble in (
            gradient(swapped, rank),
            other_settings(optimizer, rank),
            full_drive(rank),
            no_larger_files(directory, rank),
        ):
            said = refused(trouble, lambda: unfreeze(swapped, optimizer))
            os.write(1, f"rank {rank}: {said}\n".encode())
            assert len(optimizer.param_groups) == 1 and manager.step == 2
            same_state(swapped, optimizer, plain, plain_optimizer, "undone")
            for parameter in swapped.blocks[1].parameters():
                parameter.requires_grad_(False)
        for step in range(2, 6):
            if step == 4:
                unfreeze(swapped, optimizer)
                unfreeze(plain, plain_optimizer)
            expected = train(plain, plain_optimizer, CASE, None, step)
            same(train(swapped, optimizer, CASE, None, step), expected, f"losses of step {step}")
        same_state(swapped, optimizer, plain, plain_optimizer, "unfrozen")
    os.write(1, f"rank {rank}: same\n".encode())


def load(directory: Path) -> None:
    """Load state that has been made without swapper, where all was trained."""
    case = {"optimizer": adamw}
    before, before_optimizer = make(case, is_plain=True)
    train(before, before_optimizer, case, None, 0)
    plain, plain_optimizer = make({**CASE, **case}, is_plain=True)
    swapped, optimizer = make({**CASE, **case})
    with swapper.SwapManager(directory, host_memory="12MiB") as manager:
        _, optimizer = manager.offload(swapped, optimizer, params="nvme", optimizer_state="nvme")
        for each in (plain_optimizer, optimizer):
            each.load_state_dict(copy.deepcopy(before_optimizer.state_dict()))
        same_state(swapped, optimizer, plain, plain_optimizer, "loaded")
        for step in range(4):
            if step == 2:
                for parameter in (p for model in (plain, swapped) for p in model.blocks[1].parameters()):
                    parameter.requires_grad_(True)
            expected = train(plain, plain_optimizer, case, None, step)
            same(train(swapped, optimizer, case, None, step), expected, f"losses of step {step}")
        same_state(swapped, optimizer, plain, plain_optimizer, "trained again")
    os.write(1, f"rank {dist.get_rank()}: loaded\n".encode())


if __name__ == "__main__":
    join()
    main(Path(sys.argv[1]) / "unfrozen")
    load(Path(sys.argv[1]) / "loaded")
    dist.destroy_process_group()
