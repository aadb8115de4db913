"""A job of several ranks whose drives fail again and again, as a program: DDP or FSDP2; each error comes to one rank alone.

Usage: failed_ranks.py DIRECTORY SEED ERRORS [RANKS] [ddp|fsdp]. It trains the model of killed_ranks.py. After a random number of
transfers one rank's next one fails, or the next few, wherever that is: in a forward, a backward, an update, a commit or a snapshot.
Then either all ranks undo the step, and repeat it; or all end, each with the reason, and begin again; or nobody needs to know, as
it was a write that is tried again. None waits for long for one that does not come: the harness gives each job LIMIT_S. At the end
all is as in plain torch.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import random
import re
import shutil
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

import swapper
from e2e.killed_ranks import CHANGED_STEPS, STEPS, change, check, joined, prepare, take_snapshot, train_plain
from e2e.killed_run import BUDGET, WORDS, batch, fork
from swapper import _C
from swapper.modules import resources
from swapper.train.sharded import buffers

LIMIT_S = 300
"""A job takes a few seconds; some minutes in the background of a loaded machine. One that takes this long hangs."""
FIRST_TRANSFERS, NEXT_TRANSFERS = 150, 80
"""After how many transfers an error comes, at most: a step of this model has some sixty."""


class FailingEngine:
    """Passes transfers on to an engine, and at times the next few to one whose transfers all fail.

    Args:
        chance: decides when.
        errors: how many there will be.
        note: called at each.
    """

    def __init__(self, engine: Any, chance: random.Random, errors: int, note: Any) -> None:
        self._engine, self._chance, self._errors, self._note = engine, chance, errors, note
        self._failing = _C.Engine(chaos={"seed": 1, "eio": 1})
        self._wait = chance.randrange(FIRST_TRANSFERS)
        self._burst = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def read(self, *of: Any, after: Any = None, **how: Any) -> Any:
        return self._next("read", of, after, how)

    def write(self, *of: Any, after: Any = None, **how: Any) -> Any:
        return self._next("write", of, after, how)

    def _next(self, call: str, of: Any, after: Any, how: Any) -> Any:
        if self._burst == 0 and self._wait == 0 and self._errors > 0:
            self._burst = self._chance.choice((1, 1, 1, 4))
            self._wait = self._chance.randrange(NEXT_TRANSFERS)
            self._errors -= 1
            self._note(call)
        if self._burst == 0:
            self._wait -= 1
            return getattr(self._engine, call)(*of, after=after, **how)
        self._burst -= 1
        if after is not None:  # the engines know nothing of each other
            with contextlib.suppress(swapper.IoError):
                after.wait()
        return getattr(self._failing, call)(*of, **how)

    def close(self) -> None:
        self._failing.close()
        self._engine.close()


def run(directory: Path, engine: str, say: Any) -> None:
    """Train to the end, from wherever the ranks can. A step that fails is repeated; other errors end this rank."""
    rank = dist.get_rank()
    model, wrapped, optimizer = prepare(rank, engine)
    with swapper.SwapManager(directory, host_memory=BUDGET, resume="auto", rng=True) as manager:
        _, optimizer = manager.offload(wrapped, optimizer, params="nvme", optimizer_state="nvme")
        with (directory / f"losses-{rank}").open("a") as log:
            while manager.step < STEPS:
                if manager.step in CHANGED_STEPS and manager.extra.get("changed") != manager.step:
                    with manager.gather(model, write=True):
                        change(model)
                    manager.extra["changed"] = manager.step
                model.number = number = manager.step
                rng = torch.get_rng_state()
                words = batch(number * dist.get_world_size() + rank)
                loss = cross_entropy(wrapped(words).view(-1, WORDS), words.view(-1))
                loss.backward()
                try:
                    optimizer.step()
                except swapper.SwapperError as error:
                    if "did not arrive" in str(error):
                        raise
                    say(f"undone {number + 1} {type(error).__name__}: {error}")
                    torch.set_rng_state(rng)
                else:
                    log.write(f"{number} {loss.item().hex()}\n")
                    log.flush()
                optimizer.zero_grad()
        say("trained")
        take_snapshot(manager, directory / "final.pt")


class Job:
    """The ranks that train in one directory, begun again until they come to the end.

    Attributes:
        outcomes: how often what happened after errors.
    """

    def __init__(self, directory: Path, size: int, engine: str, chance: random.Random) -> None:
        self._directory, self._size, self._engine, self._chance = directory, size, engine, chance
        self._launches = 0
        self.outcomes: Counter[str] = Counter()

    def launch(self, errors: int) -> tuple[int, bool]:
        """Start all ranks, one of which gets at most this many errors. Return how many it got, and whether all ended well."""
        self._launches += 1
        victim, seed = self._chance.randrange(self._size), self._chance.random()
        meeting = self._directory / f"meeting-{self._launches}"

        def work(rank: int) -> None:
            os.dup2(os.open(self._errors_of(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
            faulthandler.enable()
            if rank == victim:
                opened, chance = resources.open_engine, random.Random(seed)
                resources.open_engine = lambda *of, **how: FailingEngine(  # type: ignore[assignment]
                    opened(*of, **how), chance, errors, lambda call: self._say(rank, f"error in {call}")
                )
            joined(
                rank, self._size, meeting, lambda: run(self._directory, self._engine, lambda it: self._say(rank, it))
            )

        ranks = [fork(lambda rank=rank: work(rank)) for rank in range(self._size)]
        statuses = self._wait(ranks)
        said = [self._said(rank) for rank in range(self._size)]
        count = sum(line.startswith("error in ") for line in said[victim])
        self._judge(victim, count, statuses, said)
        return count, not any(statuses)

    def _wait(self, ranks: list[int]) -> list[int]:
        def hung(*_: Any) -> None:
            raise TimeoutError

        signal.signal(signal.SIGALRM, hung)
        signal.alarm(LIMIT_S)
        left = list(ranks)
        try:
            statuses = []
            for rank in ranks:
                statuses.append(os.waitpid(rank, 0)[1])
                left.remove(rank)
            return statuses
        except TimeoutError:
            for rank in left:
                os.kill(rank, signal.SIGABRT)  # it writes where it is
                os.waitpid(rank, 0)
            self._fail("it hangs")
            raise
        finally:
            signal.alarm(0)

    def _judge(self, victim: int, errors: int, statuses: list[int], said: list[list[str]]) -> None:
        """Check that all ranks went the same way, and that each knows why."""
        undone = [[line.split()[1] for line in lines if line.startswith("undone")] for lines in said]
        if any(steps != undone[victim] for steps in undone):
            self._fail(f"rank {victim} had errors, and ranks undid steps {undone}")
        for rank, lines in enumerate(said):
            of = "IoError" if rank == victim else f"rank {victim}: IoError"
            if not all(of in line for line in lines if line.startswith("undone")):
                self._fail(f"rank {rank} does not know why")
        self.outcomes["undone"] += len(undone[victim])
        self.outcomes["not needed"] += max(0, errors - len(undone[victim]) - (statuses[victim] != 0))
        if not any(statuses):
            return
        self.outcomes["ended"] += 1
        for rank, lines in enumerate(said):
            told = self._errors_of(rank).read_text()
            if statuses[rank] == 0 and "trained" in lines and "trained" in said[victim]:
                continue  # the last commit failed, or the snapshot that each rank of DDP takes alone
            if statuses[rank] == 0 or not re.search(
                "IoError" if rank == victim else f"rank {victim}.*: IoError: ", told
            ):
                self._fail(
                    f"rank {victim} had errors, and rank {rank} ended with {statuses[rank]}, and without the reason"
                )

    def _fail(self, why: str) -> None:
        texts = [f"--- rank {rank}\n{self._errors_of(rank).read_text()}" for rank in range(self._size)]
        said = [f"--- rank {rank} said\n" + "\n".join(self._said(rank)) for rank in range(self._size)]
        raise SystemExit(f"launch {self._launches}: {why}\n" + "\n".join([*said, *texts]))

    def _errors_of(self, rank: int) -> Path:
        return self._directory / f"errors-{self._launches}-{rank}"

    def _say(self, rank: int, what: str) -> None:
        with (self._directory / f"said-{self._launches}-{rank}").open("a") as file:
            file.write(what.replace("\n", " ") + "\n")

    def _said(self, rank: int) -> list[str]:
        path = self._directory / f"said-{self._launches}-{rank}"
        return path.read_text().splitlines() if path.exists() else []


def main(directory: Path, seed: int, errors: int, size: int = 2, engine: str = "ddp") -> None:
    train_plain(directory, size, engine)
    chance = random.Random(seed)
    had = jobs = 0
    outcomes: Counter[str] = Counter()
    while had < errors:
        place = directory / f"job-{jobs}"
        place.mkdir()
        job, is_over = Job(place, size, engine, chance), False
        buffers.MIN_BROADCAST_BYTES = chance.choice((0, 1 << 20))  # as in killed_ranks.py
        while not is_over:
            count, is_over = job.launch(errors - had)
            had += count
        check(place, size, engine)
        shutil.rmtree(place)
        jobs += 1
        outcomes += job.outcomes
        print(f"{had} errors: {dict(outcomes)}", file=sys.stderr, flush=True)
    print(f"{had} errors, {jobs} jobs of {size} ranks, all exact: {dict(outcomes)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:5]), *sys.argv[5:])
