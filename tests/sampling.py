"""Chooses the tests to run, and the cases of each: few, others with each commit, with each value of each parameter if they can.

A case is what it has: pairs of a parameter's name and its value.
"""

from __future__ import annotations

import math
import os
import subprocess
import zlib
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from random import Random
from typing import Any

Case = frozenset[tuple[str, Any]]

FREE_S, SELDOM = 0.08, 1 / 20


def runs_a_sample() -> bool:
    return "SWAPPER_TEST_SAMPLE" in os.environ and "SWAPPER_TEST_ALL" not in os.environ


def examples(count: int) -> int:
    """Return how many examples of a property are tried: a quarter of them in a sample."""
    return count // 4 if runs_a_sample() else count


def seed_of_commit() -> str:
    """Return SWAPPER_TEST_SEED, or the commit's first letters; "0" where there is no repository."""
    if given := os.environ.get("SWAPPER_TEST_SEED"):
        return given
    command = ["git", "rev-parse", "--short=10", "HEAD"]
    try:
        return subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "0"


def share_of_seeds(cost_s: float) -> float:
    """Return with which share of the seeds a test runs whose case takes `cost_s`: that with which it takes FREE_S on average, or
    SELDOM, if that is more."""
    return max(FREE_S / max(cost_s, FREE_S), SELDOM)


def choose_tests(costs_s: Mapping[str, float], counts: Mapping[str, int], seed: str) -> set[str]:
    """Choose tests, each with its share of the seeds. All samples take about as long: each has as many of those that take alike.

    That is systematic sampling: tests that take alike lie next to each other, in an order of the seed's, each as long as its share;
    those on which a mark falls run, of marks that are 1 apart.

    Args:
        costs_s: of each test the seconds of the processors that a case of it takes.
        counts: of each test how many of its cases run.
    """

    def place(test: str) -> tuple[int, int]:
        takes_s = max(costs_s[test], FREE_S) * counts[test]
        return round(math.log2(takes_s)), zlib.crc32(f"{seed} {test}".encode())

    chosen, at = set(), zlib.crc32(seed.encode()) / 2**32
    for test in sorted(costs_s, key=place):
        end = at + share_of_seeds(costs_s[test])
        if int(end) > int(at):
            chosen.add(test)
        at = end
    return chosen


def choose(cases: Mapping[str, Case], count: int, seed: str) -> set[str]:
    """Choose `count` of a test's cases, by their names: always the one next that has most of what none before it has."""
    left = sorted(cases, key=lambda name: zlib.crc32(f"{seed} {name}".encode()))
    seen: set[tuple[str, Any]] = set()
    chosen: set[str] = set()
    for _ in range(min(count, len(left))):
        best = max(left, key=lambda name: len(cases[name] - seen))  # of equals the first
        left.remove(best)
        chosen.add(best)
        seen |= cases[best]
    return chosen


def pairwise(
    choices: Mapping[str, Sequence[Any]], is_possible: Callable[[Mapping[str, Any]], bool], seed: str
) -> list[dict[str, Any]]:
    """Return combinations of choices in which each pair of them occurs that occurs in a possible combination.

    "Each" is of those that some thousand combinations drawn by chance have: all but what is very rarely possible.
    """
    chance = Random(seed)
    drawn = ({name: chance.choice(values) for name, values in choices.items()} for _ in range(6000))
    possible = [row for row in drawn if is_possible(row)]
    pairs = [list(combinations(row.items(), 2)) for row in possible]  # in an order that is every process's
    having: dict[Any, list[int]] = {}
    for number, of_row in enumerate(pairs):
        for pair in of_row:
            having.setdefault(pair, []).append(number)
    found = []
    while having:
        candidates = min(having.values(), key=len)[:20]  # of the rarest pair that is left
        best = max(candidates, key=lambda number: sum(pair in having for pair in pairs[number]))
        found.append(possible[best])
        for pair in pairs[best]:
            having.pop(pair, None)
    return found
