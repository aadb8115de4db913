"""Ranks as a program, each a process of its own: a small model trains by DDP, with orders from the command line.

Usage: ranks_run.py DIRECTORY SIZE ORDER ... An order is name=value for all ranks, or name=RANK:value for one of them:
steps (how many more to take), update, resume, ranks, memory, every, snapshot (a path), timeout (of torch.distributed, in seconds),
stall_s. "killed=RANK": that rank is killed right before the commit of its last step gets its name. "skips=RANK:N": it does
not call optimizer.step() after its Nth backward. "fails=RANK:N": its Nth step fails, and it tries again. "breaks=RANK:N": the
update of the first group in its Nth step fails. "plain": without
DDP. "sharded": by FSDP2. "late": torch.distributed is initialized after the manager was made; "later": after offload.
"full=RANK:N": in its Nth update the drive has no room. "taken=RANK:PATH": somebody else makes its file of that snapshot. With
"retries" who gets an error says so, and tries the step again. "torn=RANK:N": its swap files are cut off before the Nth step.
"uncommitted=RANK:N": the drive has no room for the record of the commit before its Nth step. What ranks give to swapper, for bad
input: depth and dtype (of the model), lr, optimizer (its class), update, codec (of the state), masters (a dtype of master
weights), version (of swapper), drive (a directory), policy (a dtype of fully_shard's), sharding (how many blocks are sharded by
themselves). "stays=RANK": blocks stay gathered after a forward.
"absent=RANK": it makes no manager. "gone=RANK": it is killed before its
first snapshot. "network": file systems in memory pass for those of a network. "held=RANK:N": it waits before its Nth
step, or of 0 before offload, until somebody writes to the named pipe gate. "comes": it says to which action it comes with the
others. "rate": it tells the rate of reads that its plan counts on. "meta": the model is on the meta device. init: of offload, a
path, or the name of one of torch.nn.init's functions. external: the path of frozen parameters; "frozen": blocks are frozen.
"snaps=RANK:N" and "adds=RANK:N": before its Nth step it takes a snapshot, or adds a group to the optimizer, alone.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import importlib.metadata
import os
import resource
import signal
import sys
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import swapper
from e2e.keywords import for_manager
from e2e.killed_run import fork
from e2e.models import Net, loss_of, tokens, train_step
from e2e.twins import before_each_update
from swapper.durability import committer
from swapper.durability.ranks import Ranks
from swapper.options import ExternalWeights
from swapper.train.planning.plan import chosen


class Orders:
    def __init__(self, rank: int, given: list[str]) -> None:
        self.rank = rank
        self._given = [order.partition("=")[::2] for order in given]

    def all(self, name: str) -> list[str]:
        values = [value.rpartition(":")[::2] for key, value in self._given if key == name]
        return [value.format(rank=self.rank) for of, value in values if of in ("", str(self.rank))]

    def one(self, name: str, default: Any = None) -> Any:
        return (self.all(name) or [default])[-1]

    def is_said(self, name: str) -> bool:
        return any(key == name and value in ("", str(self.rank)) for key, value in self._given)


def say(rank: int, what: str) -> None:
    os.write(1, f"rank {rank}: {what}\n".replace("\n", " | ", what.count("\n")).encode())


def die_before_commit(rank: int, begun: int, step: int) -> None:
    publish = committer.publish_commit

    def killed(directory: Path, data: bytes, *more: Any) -> None:
        from swapper.durability.commit import read_commit

        last = read_commit(directory)
        if (-1 if last is None else last.step) == step - 1:
            say(rank, f"began at {begun}, killed before commit {step}")
            os.kill(os.getpid(), signal.SIGKILL)
        publish(directory, data, *more)

    committer.publish_commit = killed


@contextlib.contextmanager
def failing(sweep: Any, error: Exception) -> Iterator[None]:
    """Within, an update fails half-way."""

    def fail() -> None:
        raise error

    end = before_each_update(sweep, fail)
    try:
        yield
    finally:
        end()


@contextlib.contextmanager
def full_drive(sweep: Any) -> Iterator[None]:
    """Within, no file can be written from the first group's update on."""
    with contextlib.ExitStack() as stack:
        stack.callback(before_each_update(sweep, lambda: stack.enter_context(no_room())))
        yield


def take_step(rank: int, orders: Orders, number: str, manager: Any, wrapped: Any, optimizer: Any) -> None:
    torch.manual_seed(int(number))
    is_full = orders.one("full") == number
    trouble: Any = full_drive(manager.current.run.model._sweep) if is_full else contextlib.nullcontext()
    if orders.one("uncommitted") == number:
        trouble = no_commit()
    if orders.one("breaks") == number:
        trouble = failing(manager.current.run.model._sweep, swapper.IoError("write", "the drive", 0, 0, errno.EIO))
    try:
        with trouble:
            train_step(wrapped, optimizer)
    except swapper.SwapperError as error:
        if not orders.is_said("retries"):
            raise
        say(rank, f"{type(error).__name__} at {manager.step}: {error}")
        optimizer.zero_grad()
        torch.manual_seed(int(number))
        train_step(wrapped, optimizer)


@contextlib.contextmanager
def no_commit() -> Iterator[None]:
    """Within, no record of a commit can be written."""
    publish = committer.publish_commit

    def without_room(*record: Any) -> None:
        with no_room():
            publish(*record)

    committer.publish_commit = without_room
    try:
        yield
    finally:
        committer.publish_commit = publish


@contextlib.contextmanager
def no_room() -> Iterator[None]:
    """Within, no file can be written."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def take_snapshot(rank: int, orders: Orders, manager: Any, path: Path) -> None:
    try:
        ticket = manager.snapshot(path)
        if orders.one("taken") == str(path):
            (hidden,) = path.parent.glob(f".{path.name}.*partial")
            (hidden / f"rank-{rank}.pt").touch()
        ticket.result()
    except swapper.SwapperError as error:
        if not orders.is_said("retries"):
            raise
        say(rank, f"{type(error).__name__}: {error}")


def fill(name: str, module: torch.nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        getattr(torch.nn.init, name)(parameter)


def initial(orders: Orders) -> Any:
    """Return what `init=` gets."""
    given = orders.one("init")
    if given is None or "/" in given:
        return given

    def filled(module: torch.nn.Module) -> None:
        fill(given, module)

    filled.__qualname__ = given
    return filled


def cut_off_files(directory: Path, rank: int) -> None:
    for path in directory.glob(f"rank-{rank}-of-*/*.swap"):
        os.truncate(path, 0)


def wrapped_by(orders: Orders, model: Net) -> Any:
    if orders.is_said("sharded"):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        policy = MixedPrecisionPolicy(param_dtype=getattr(torch, orders.one("policy", ""), None))
        for block in list(model.blocks)[: int(orders.one("sharding", len(model.blocks)))]:
            fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=not orders.is_said("stays"))
        return fully_shard(model, mesh=mesh)
    return model if orders.is_said("plain") or dist.get_world_size() == 1 else DistributedDataParallel(model)


def work(rank: int, size: int, directory: Path, meeting: Path, given: list[str]) -> None:
    orders = Orders(rank, given)
    join = {
        "init_method": f"file://{meeting}",
        "rank": rank,
        "world_size": size,
        "timeout": timedelta(seconds=float(orders.one("timeout", 60))),
    }
    is_late = orders.is_said("late") or orders.is_said("later")
    if is_late:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(size))
    else:
        dist.init_process_group("gloo", **join)
    options = {"resume": orders.one("resume", "auto"), "ranks": orders.one("ranks", "together")}
    every = orders.one("every", "free")
    memory = orders.one("memory", "32MiB")
    options["stall_s"] = float(orders.one("stall_s", 60))
    options["commit_every"] = every if every == "free" else int(every)
    torch.manual_seed(0)
    with torch.device("meta" if orders.is_said("meta") else "cpu"):
        model = Net(depth=int(orders.one("depth", 1))).to(getattr(torch, orders.one("dtype", "float32")))
    model.blocks.requires_grad_(not orders.is_said("frozen"))
    wrapped = None if is_late else wrapped_by(orders, model)
    kind = orders.one("optimizer", "AdamW")
    trained = [p for p in model.parameters() if p.requires_grad and (kind != "Muon" or p.dim() == 2)]
    optimizer: Any = getattr(torch.optim, kind)(trained, lr=float(orders.one("lr", 1e-3)))
    if orders.is_said("comes"):
        gather = Ranks.gather
        Ranks.gather = lambda self, mine, what, *more: (say(rank, f"comes to {what}"), gather(self, mine, what, *more))[
            1
        ]
    if orders.one("version"):
        importlib.metadata.version = lambda name: orders.one("version")
    if orders.is_said("absent"):
        return
    if orders.is_said("network"):
        from swapper.durability import directory as directories

        directories.OVER_NETWORK = {"tmpfs"}
    try:
        manager = swapper.SwapManager(orders.one("drive", directory), host_memory=memory, **for_manager(options))
        begun = manager.step
        if orders.is_said("late"):
            dist.init_process_group("gloo", **join)
            wrapped = wrapped_by(orders, model)
        steps = int(orders.one("steps", 0))
        if orders.is_said("killed"):
            die_before_commit(rank, begun, begun + steps)
        if orders.one("held") == "0":
            Path(orders.one("gate")).read_bytes()
        with manager:
            places = {
                "params": orders.one("params", "nvme"),
                "optimizer_state": "nvme",
                "update": orders.one("update", "step"),
                "state_codec": orders.one("codec", "exact"),
                "master_weights": getattr(torch, orders.one("masters", "")) if orders.one("masters") else None,
                "external": ExternalWeights(path=orders.one("external")) if orders.one("external") else None,
                "init": initial(orders),
            }
            _, optimizer = manager.offload(wrapped or model, optimizer, **places)
            if orders.is_said("rate"):
                plan = manager.current.run.plan
                say(rank, f"{plan.tuning.read_bytes_per_s / 1e9} GB/s; {dict(chosen(plan, ''))['drive']}")
            if orders.is_said("later"):
                dist.init_process_group("gloo", **join)
                wrapped = wrapped_by(orders, model)
            for number in map(str, range(1, steps + 1)):
                if orders.one("skips") == number:
                    loss_of(wrapped, tokens()).backward()
                    continue
                if orders.one("fails") == number:
                    with (
                        failing(manager.current.run.model._sweep, ZeroDivisionError()),
                        contextlib.suppress(ZeroDivisionError),
                    ):
                        train_step(wrapped, optimizer)
                if orders.one("held") == number:
                    Path(orders.one("gate")).read_bytes()
                if orders.one("snaps") == number:
                    manager.snapshot(directory / "alone")
                if orders.one("adds") == number:
                    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
                if orders.one("torn") == number:
                    cut_off_files(directory, rank)
                take_step(rank, orders, number, manager, wrapped, optimizer)
            if orders.is_said("gone"):
                say(rank, "gone")
                os.kill(os.getpid(), signal.SIGKILL)
            for path in orders.all("snapshot"):
                take_snapshot(rank, orders, manager, Path(path))
        say(rank, f"began at {begun}, ended at {manager.step}")
    except (swapper.SwapperError, RuntimeError) as error:
        say(rank, f"{type(error).__name__}: {error}")
        os._exit(1)
    if dist.is_initialized():
        dist.destroy_process_group()


def main(directory: Path, size: int, given: list[str]) -> None:
    torch.set_num_threads(1)
    swapper.SwapManager  # noqa: B018  # imported here and not in every rank, as what follows
    if "sharded" in given:
        importlib.import_module("torch.distributed.fsdp")
        importlib.import_module("torch.distributed.checkpoint.state_dict")
    with tempfile.TemporaryDirectory() as scratch:
        meeting = Path(scratch) / "meeting"
        ranks = [fork(lambda rank=rank: work(rank, size, directory, meeting, given)) for rank in range(size)]
        statuses = [os.waitpid(rank, 0)[1] for rank in ranks]
    raise SystemExit(any(os.WIFEXITED(status) and os.WEXITSTATUS(status) for status in statuses))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
