"""A job of several ranks that is killed again and again, as a program: DDP or FSDP2; some are killed, all begin again.

Usage: killed_ranks.py DIRECTORY SEED KILLS [RANKS] [ddp|fsdp]. As killed_run.py, whose model it trains: the parent has torch
imported and forks the ranks, which write a byte to a pipe at each forward and backward of each layer and around each step. After
a random number of them it kills some of the ranks, chosen by chance, and a little later the rest, or lets the others find out and
end; or it lets one write no more, as on a full drive. One layer is used in every second step only, so that not all pages of a step
lie in one file; parameters are changed between steps; snapshots are taken by all ranks, by the first, or by none. Each rank
publishes its commits at once, or late, or only before the next step, so that kills find ranks at different steps: the last line
says how many did. Of FSDP2's buffers some jobs gather all in place, as those of a large model. What a rank resumes from (all
parameters, all state) and whatever is seen later must equal plain torch that nobody killed.
"""

from __future__ import annotations

import importlib
import os
import random
import re
import resource
import shutil
import signal
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import swapper
from e2e.killed_run import BUDGET, LONGEST_DELAY_S, WORDS, batch, fork, make
from swapper.durability import committer
from swapper.durability.commit import read_commit
from swapper.durability.snapshot_directory import local_parts
from swapper.durability.verify import verify
from swapper.paging.pager import Pager
from swapper.train.sharded import buffers

STEPS = 9
CHANGED_STEPS = (2, 5, 6)
"""After which parameters are changed by hand."""
SNAPSHOT_STEPS = (3, 5, 7)
WRONG = "resumes from another state"
LONGEST_WAIT = timedelta(minutes=5)
"""Of torch.distributed. A rank learns at once that another is killed: one that waits for this long hangs."""
HUNG = re.compile("time(d )?out", re.IGNORECASE)
LONGEST_COMMIT_S = 0.1
"""Before and after a commit that is published late: several times LONGEST_DELAY_S, so that kills fall in between."""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.usual = make(dropout=0.1)[0]
        self.sometimes = nn.Linear(WORDS, WORDS)
        self.number = 0

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        logits = self.usual(words)
        return logits + self.sometimes(logits) if self.number % 2 else logits


def prepare(rank: int, engine: str) -> tuple[Model, nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Model()
    wrapped: nn.Module = model
    if engine == "fsdp":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in (*model.usual, model.sometimes):
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    torch.manual_seed(100 + rank)  # dropout is each rank's own
    return model, wrapped, torch.optim.AdamW(model.parameters(), lr=1e-3)


def step(model: Model, wrapped: nn.Module, optimizer: Any, number: int) -> float:
    model.number = number
    words = batch(number * dist.get_world_size() + dist.get_rank())
    loss = cross_entropy(wrapped(words).view(-1, WORDS), words.view(-1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def change(model: Model) -> None:
    with torch.no_grad():
        model.usual[1].weight.mul_(0.5)
        model.sometimes.bias.add_(1)


def digests(model: nn.Module, optimizer: Any) -> list[int]:
    """Return the checksum of each parameter, and of each tensor of the optimizer's state, as this rank has them."""
    states = optimizer.state_dict()["state"]
    state = [states[number][key] for number in sorted(states) for key in sorted(states[number])]
    local = [getattr(tensor, "_local_tensor", tensor) for tensor in (*model.parameters(), *state)]
    with torch.no_grad():
        return [zlib.crc32(tensor.clone().numpy()) for tensor in local]


def delay_commits(how: str) -> None:
    """Let this rank publish its commits "late", or only "before the next step"; or "at once", as it does by itself."""
    publish = committer.publish_commit

    def late(*record: Any) -> None:
        time.sleep(LONGEST_COMMIT_S * random.random())  # chance, not synchronisation
        publish(*record)
        time.sleep(LONGEST_COMMIT_S * random.random())

    if how == "late":
        committer.publish_commit = late
    if how == "before the next step":
        Pager.writes_are_done = lambda pager: False  # type: ignore[method-assign]


def joined(rank: int, size: int, meeting: Path, work: Callable[[], None]) -> None:
    torch.set_num_threads(1)
    place: Any = {"init_method": f"file://{meeting}", "rank": rank, "world_size": size}
    dist.init_process_group("gloo", timeout=LONGEST_WAIT, **place)
    work()
    dist.destroy_process_group()


def launch(size: int, meeting: Path, work: Callable[[], None]) -> list[int]:
    """Do `work` in each of `size` ranks; return their exit statuses, 0 where all went well."""
    ranks = [fork(lambda r=rank: joined(r, size, meeting, work)) for rank in range(size)]
    return [os.waitpid(rank, 0)[1] for rank in ranks]


def plain(directory: Path, engine: str) -> None:
    model, wrapped, optimizer = prepare(dist.get_rank(), engine)
    losses, seen = [], {(0, False): digests(model, optimizer)}
    for number in range(1, STEPS + 1):
        losses.append(step(model, wrapped, optimizer, number - 1))
        seen[number, False] = digests(model, optimizer)
        if number in CHANGED_STEPS:
            change(model)
            seen[number, True] = digests(model, optimizer)
    states = get_state_dict(model, optimizer) if engine == "fsdp" else (model.state_dict(), optimizer.state_dict())
    torch.save((losses, *local_parts([*states]), seen), directory / f"plain-{dist.get_rank()}.pt")


def run(directory: Path, tick: Callable[[], Any], engine: str, update: str, snapshots: str) -> None:
    """Train to the end, from wherever the ranks can."""
    rank = dist.get_rank()
    model, wrapped, optimizer = prepare(rank, engine)

    def passed(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        tick()
        output.register_hook(lambda _: tick() and None)

    for module in model.modules():
        if not list(module.children()):
            module.register_forward_hook(passed)
    with swapper.SwapManager(directory, host_memory=BUDGET, resume="auto", rng=True) as manager:
        _, optimizer = manager.offload(wrapped, optimizer, params="nvme", optimizer_state="nvme", update=update)
        place = manager.step, manager.extra.get("changed") == manager.step
        *_, expected = torch.load(directory.parent / f"plain-{rank}.pt", weights_only=True)
        assert digests(model, optimizer) == expected[place], f"rank {rank} {WRONG} at {place}"
        tick()
        with (directory / f"losses-{rank}").open("a") as log:
            while True:
                if manager.step in CHANGED_STEPS and manager.extra.get("changed") != manager.step:
                    with manager.gather(model, write=True):
                        change(model)
                    manager.extra["changed"] = manager.step
                takes = snapshots == "all" or (snapshots == "first" and rank == 0 and engine == "ddp")
                if takes and manager.step in SNAPSHOT_STEPS:
                    take_snapshot(manager, directory / f"step-{manager.step}.pt")
                tick()
                if manager.step == STEPS:
                    break
                number = manager.step
                log.write(f"{number} {step(model, wrapped, optimizer, number).hex()}\n")
                log.flush()
        take_snapshot(manager, directory / "final.pt")


def take_snapshot(manager: swapper.SwapManager, path: Path) -> None:
    try:
        manager.snapshot(path)
    except (swapper.CheckpointError, swapper.StateError) as error:  # on this rank, or on the first one
        assert "exists already" in str(error)


def check(directory: Path, size: int, engine: str) -> None:
    """Assert that the ranks, which have come to their end, are where plain torch is."""
    prefix = "module." if engine == "ddp" else ""
    for rank in range(size):
        losses, model, optimizer, _ = torch.load(directory.parent / f"plain-{rank}.pt", weights_only=True)
        seen = [line.split() for line in (directory / f"losses-{rank}").read_text().splitlines()]
        for number, loss in seen:
            assert float.fromhex(loss) == losses[int(number)], f"rank {rank}: step {number} differs after a kill"
        assert {int(number) for number, _ in seen} == set(range(STEPS))
        name = "final.pt" if rank == 0 else f"final.rank-{rank}-of-{size}.pt"
        if engine == "fsdp":
            name = f"final.pt/rank-{rank}.pt"
        final = torch.load(directory / name, weights_only=True)
        assert final["swapper"]["step"] == STEPS
        for key, value in model.items():
            assert torch.equal(final["model"][prefix + key], value), f"rank {rank}: {key} differs after kills"
        for index, state in optimizer["state"].items():
            for key, value in state.items():
                assert torch.equal(final["optimizer"]["state"][index][key], value), f"rank {rank}: {key} differs"
    for path in directory.glob("*.pt"):
        assert [report.faults for report in verify(path) if report.faults] == [], path


def run_and_kill(directory: Path, size: int, chance: random.Random, after: int, **options: Any) -> str:
    """Start all ranks and kill some after this number of ticks. Returns whom it killed; "" if all came to their end."""
    reader, writer = os.pipe()
    meeting = directory / f"meeting-{chance.random()}"
    commits = [chance.choice(("at once", "late", "before the next step")) for _ in range(size)]
    ranks = []
    for rank in range(size):

        def work(rank: int = rank) -> None:
            os.close(reader)
            os.dup2(os.open(directory / f"errors-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
            delay_commits(commits[rank])
            joined(rank, size, meeting, lambda: run(directory, lambda: os.write(writer, b"t"), **options))

        ranks.append(fork(work))
    os.close(writer)
    while after > 0 and (seen := os.read(reader, after)):
        after -= len(seen)
    os.close(reader) if after else None
    victims: list[int] = []
    whom = ""
    if not after:
        time.sleep(LONGEST_DELAY_S * chance.random())  # chance, not synchronisation
        is_full = chance.randrange(4) == 0
        victims = chance.sample(ranks, 1 if is_full else chance.randrange(1, size + 1))
        whom = "one by a full drive" if is_full else "all" if len(victims) == size else "some"
        for victim in victims:
            if is_full:  # it cannot write any more: it and the others end by themselves, or come to their end
                resource.prlimit(victim, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
            else:
                os.kill(victim, signal.SIGKILL)
        if not is_full and chance.randrange(2):
            whom = "all" if whom == "all" else "some, then all"
            time.sleep(LONGEST_DELAY_S * chance.random())
            for rank in ranks:
                os.kill(rank, signal.SIGKILL)
        while os.read(reader, 4096):  # the others find out, and end
            pass
        os.close(reader)
    statuses = [os.waitpid(rank, 0)[1] for rank in ranks]
    said = "".join(path.read_text() for path in sorted(directory.glob("errors-*")))
    if (not victims and any(statuses)) or WRONG in said or HUNG.search(said):
        raise SystemExit(f"a rank failed, or waited in vain: {said}")
    return whom if any(statuses) else ""


def are_apart(directory: Path) -> bool:
    """Return True if the ranks' last commits are of different steps."""
    records = [read_commit(path) for path in directory.glob("rank-*-of-*")]
    return len({None if record is None else record.id for record in records}) > 1


def train_plain(directory: Path, size: int, engine: str) -> None:
    """Import what each rank needs, and train plain torch's ranks to their end."""
    torch.set_num_threads(1)
    for module in ("torch._dynamo.distributed", "torch.distributed.nn", "torch._inductor"):
        importlib.import_module(module)  # here and not in every child: DDP does, and FSDP2 the first
    swapper.SwapManager  # noqa: B018  # as well
    assert not any(launch(size, directory / "meeting", lambda: plain(directory, engine)))


def main(directory: Path, seed: int, kills: int, size: int = 2, engine: str = "ddp") -> None:
    train_plain(directory, size, engine)
    chance = random.Random(seed)
    killed = jobs = 0
    kinds: Counter[str] = Counter()
    while killed < kills:
        place = directory / f"job-{jobs}"
        place.mkdir()
        snapshots = chance.choice(("none", "first", "all"))
        buffers.MIN_BROADCAST_BYTES = chance.choice((0, 1 << 20))  # each rank is a child of this process
        while whom := run_and_kill(
            place,
            size,
            chance,
            chance.randrange(1, 250) if killed < kills else 1 << 20,  # then the job comes to its end
            engine=engine,
            update=chance.choice(("step", "deferred")),
            snapshots=snapshots,
        ):
            killed += 1
            kinds += Counter([whom, *["with ranks at different steps"] * are_apart(place)])
        check(place, size, engine)
        shutil.rmtree(place)
        jobs += 1
        print(f"{killed} kills: {dict(kinds)}", file=sys.stderr, flush=True)
    print(f"{killed} kills, {jobs} jobs of {size} ranks, all exact: {dict(kinds)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:5]), *sys.argv[5:])
