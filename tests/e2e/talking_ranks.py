"""Ranks as a program that only talk to each other, by swapper's own group: what each gets where one goes another way.

Usage: talking_ranks.py CASE ... Prints, for each case and rank, what it got: a value, or an error.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from e2e.killed_ranks import launch
from swapper.durability.ranks import Ranks

SIZE = 2


def other_things(ranks: Ranks) -> Any:
    return ranks.gather(ranks.rank, ["step 3", "take a snapshot"][ranks.rank])


def one_cannot(ranks: Ranks) -> Any:
    def find() -> int:
        if ranks.rank == 1:
            raise OSError("no such drive")
        return 7

    return ranks.settle("open its directory", find, str)


def all_can(ranks: Ranks) -> Any:
    return ranks.settle("open its directory", lambda: ranks.rank + 7, str), ranks.gather_at_first(ranks.rank, "the end")


def one_fails_half_way(ranks: Ranks) -> Any:
    ranks.agree(None, "step 3")
    ranks.agree(ValueError("half-way") if ranks.rank == 1 else None, "step 4")


def all_have_one_version(ranks: Ranks) -> Any:
    return ranks.begin(lambda _: ["a", "b"][ranks.rank]), ranks.are_together


def one_check_fails(ranks: Ranks) -> Any:
    def check(_: int | None) -> None:
        if ranks.rank == 0:
            raise ValueError("no budget")

    return ranks.begin(check)


def one_ends_first(ranks: Ranks) -> Any:
    """With an error that the other one is told of, which says nothing itself."""
    ranks.start = "the same on all"
    if ranks.rank == 1:
        ranks.explain(OSError("the drive is gone"))
    dist.barrier()
    if ranks.rank == 0:
        ranks.explain(ValueError("of the other's end"))
    dist.barrier()
    return ranks.has_failed


def names(ranks: Ranks) -> Any:
    return [str(ranks.own_name(Path(name))) for name in ("out/trace.json", f"trace-rank{ranks.rank}.json")]


CASES: dict[str, Callable[[Ranks], Any]] = {
    case.__name__: case
    for case in (
        other_things,
        one_cannot,
        all_can,
        one_fails_half_way,
        all_have_one_version,
        one_check_fails,
        one_ends_first,
        names,
    )
}


def say(what: str) -> None:
    os.write(1, f"{what}\n".replace("\n", " | ", what.count("\n")).encode())


class Told(logging.Handler):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank

    def emit(self, record: logging.LogRecord) -> None:
        say(f"rank {self._rank} logs: {record.getMessage()}")


def work(chosen: list[str]) -> None:
    logging.getLogger("swapper").addHandler(Told(dist.get_rank()))
    for name in chosen:
        ranks = Ranks.find()
        try:
            say(f"{name} {ranks.rank}: {CASES[name](ranks)}")
        except Exception as error:
            say(f"{name} {ranks.rank}: {type(error).__name__}: {error}")
        dist.barrier()
        ranks.close()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        statuses = launch(SIZE, Path(scratch) / "meeting", lambda: work(sys.argv[1:]))
    raise SystemExit(any(statuses))
