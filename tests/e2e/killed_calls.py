"""A run that is killed at every system call by which it changes a file, as a program. See stopped_calls.py.

Usage: killed_calls.py DIRECTORY [STRIDE [FIRST]]. Each run begins anew, is killed before its call number FIRST, FIRST + STRIDE,
..., every second time half-way through it where it is a write, and goes on unkilled: losses, final state and whatever has a
snapshot's name are compared with a run that nobody killed.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections import Counter
from pathlib import Path

import torch

import swapper
from e2e import killed_run
from e2e.stopped_calls import run_until

STEPS = 4


def main(directory: Path, stride: int, first: int) -> None:
    torch.set_num_threads(1)
    swapper.SwapManager  # noqa: B018  # imported here and not in every child
    expected = killed_run.Expected(STEPS)
    place = directory / "run"
    place.mkdir()
    options = {"steps": STEPS, "backend": "threads"}

    def work() -> None:
        killed_run.run(place, directory / "losses", lambda what: None, **options)

    killed: Counter[str] = Counter()
    at, torn = first, False
    while True:
        status, calls = run_until(work, killed_run.fork, place, at, torn)
        if not os.WIFSIGNALED(status):
            break
        killed[calls[-1]] += 1
        expected.check_snapshots(place)
        child = killed_run.fork(work)
        _, status = os.waitpid(child, 0)
        if status != 0:
            raise SystemExit(f"the run that was killed at call {at} ({calls[-1]}, torn: {torn}) did not go on")
        expected.check(place, directory / "losses")
        (directory / "losses").unlink()
        shutil.rmtree(place)
        place.mkdir()
        at, torn = at + stride, not torn
        if sum(killed.values()) % 50 == 0:
            print(f"{at} of the calls", file=sys.stderr, flush=True)
    if status != 0:
        raise SystemExit("a run failed")
    kinds = ", ".join(f"{count} {name}" for name, count in sorted(killed.items()))
    print(f"{sum(killed.values())} kills at {len(calls)} calls, all exact: {kinds}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *[int(argument) for argument in (*sys.argv[2:4], *("1", "0")[len(sys.argv) - 2 :])])
