"""All ranks learn what one of them does: which went another way, and why."""

from __future__ import annotations

from pathlib import Path

from e2e import talking_ranks
from e2e.processes import run_python

FAILED = (
    "StateError: step 4 failed on another rank, so no rank takes it (rank 1: ValueError: half-way). Catch this error on all "
    "ranks and repeat the step, or end all and restart with resume='auto'"
)
DIFFERENT = (
    "StateError: ranks have come to different things: | - rank 0: step 3 | - rank 1: take a snapshot | Call the same on all of "
    "them, in the same order"
)


def test_all_ranks_learn_of_what_one_does() -> None:
    """In one job: each case has a group of its own, as each manager has."""
    done = run_python(Path(talking_ranks.__file__), *talking_ranks.CASES)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(done.stdout.splitlines()) == sorted(
        [
            f"other_things 0: {DIFFERENT}",
            f"other_things 1: {DIFFERENT}",
            "one_cannot 0: StateError: another rank could not open its directory, so this one does not either: rank 1: OSError: "
            "no such drive",
            "one_cannot 1: OSError: no such drive",
            "all_can 0: ((7, ['7', '8']), [0, 1])",
            "all_can 1: ((8, ['7', '8']), None)",
            f"one_fails_half_way 0: {FAILED}",
            "one_fails_half_way 1: None",
            "all_have_one_version 0: ('a', True)",
            "all_have_one_version 1: ('b', True)",
            "one_check_fails 0: ValueError: no budget",
            "one_check_fails 1: StateError: another rank could not make a SwapManager, so this one does not either: rank 0: "
            "ValueError: no budget",
            "rank 0 logs: rank 1 ended first: OSError: the drive is gone",
            "one_ends_first 0: True",
            "one_ends_first 1: True",
            "names 0: ['out/trace.json', 'trace-rank0.json']",
            "names 1: ['out/trace.rank-1-of-2.json', 'trace-rank1.json']",
        ]
    )
