"""Samples of large tables: each value, another choice with each seed, the same one with the same; and where."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import combinations, product
from pathlib import Path

import pytest
from durations import LONG_S, costs_s
from sampling import FREE_S, SELDOM, choose, choose_tests, pairwise

ROOT = Path(__file__).parents[2]

CASES = {f"{a}-{b}": frozenset({("a", a), ("b", b)}) for a, b in product(range(3), range(5))}
CHOICES = {"a": [0, 1, 2, 3], "b": ["x", "y", "z"], "c": [True, False], "d": [4, 5]}


def test_a_few_cases_have_each_value_of_each_parameter():
    for seed in map(str, range(20)):
        chosen = choose(CASES, 5, seed)
        assert len(chosen) == 5
        assert frozenset().union(*(CASES[name] for name in chosen)) == frozenset().union(*CASES.values())


def test_with_one_seed_it_is_one_choice_and_with_many_it_is_all():
    assert choose(CASES, 4, "seed") == choose(dict(reversed(CASES.items())), 4, "seed")
    assert set().union(*(choose(CASES, 4, str(seed)) for seed in range(40))) == set(CASES)


def test_a_test_takes_on_average_what_is_free_and_each_runs_with_some_seed():
    costs = {"nothing": 0.0, "free": FREE_S, "a second": 1.0, "minutes": 300.0}
    chosen = [choose_tests(costs, dict.fromkeys(costs, 1), str(number)) for number in range(2000)]
    shares = {test: sum(test in tests for tests in chosen) / len(chosen) for test in costs}
    assert shares["nothing"] == shares["free"] == 1
    assert shares["a second"] == pytest.approx(FREE_S, rel=0.3)
    assert shares["minutes"] == pytest.approx(SELDOM, rel=0.3)


def test_each_sample_has_as_many_of_the_tests_that_take_alike():
    costs = {f"test {number}": [0.02, 1.0, 10.0][number % 3] for number in range(600)}
    samples = [choose_tests(costs, dict.fromkeys(costs, 1), str(number)) for number in range(40)]
    for cost, expected in ((0.02, 200), (1.0, 200 * FREE_S), (10.0, 200 * SELDOM)):
        assert all(abs(sum(costs[test] == cost for test in sample) - expected) <= 1 for sample in samples)
    assert len({frozenset(sample) for sample in samples}) == len(samples)


def test_what_is_known_to_take_long_is_a_test():
    for test, cost_s in costs_s().items():
        file, _, name = test.partition("::")
        assert f"def {name.rpartition('::')[2]}(" in (ROOT / file).read_text(), (
            f"{test}: take it out of tests/costs.tsv"
        )
        assert cost_s >= LONG_S


def test_a_table_that_is_smaller_than_its_sample_is_run_whole():
    assert choose(CASES, 99, "seed") == set(CASES)
    assert choose({"alone": frozenset()}, 1, "seed") == {"alone"}


def is_possible(row):
    return not (row["a"] == 0 and row["b"] != "x") and not (row["c"] and row["d"] == 5)


def test_each_pair_that_is_possible_occurs_and_no_combination_that_is_not():
    possible = [
        row for values in product(*CHOICES.values()) if is_possible(row := dict(zip(CHOICES, values, strict=True)))
    ]
    expected = {pair for row in possible for pair in combinations(row.items(), 2)}
    for seed in ("a", "b"):
        found = pairwise(CHOICES, is_possible, seed)
        assert all(map(is_possible, found))
        assert {pair for row in found for pair in combinations(row.items(), 2)} == expected
        assert len(found) < len(possible) / 1.2
        assert found == pairwise(CHOICES, is_possible, seed)
    assert pairwise(CHOICES, is_possible, "a") != pairwise(CHOICES, is_possible, "b")


def test_every_process_draws_the_same():
    """Whatever its hashes of strings: xdist's processes must all collect the same tests."""
    script = "from sampling import pairwise; print(pairwise({name: range(30) for name in 'xyz'}, bool, 'seed'))"
    drawn = {
        subprocess.run(
            [sys.executable, "-c", script], cwd=ROOT / "tests", env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True, text=True, check=True,
        ).stdout
        for seed in "123"
    }  # fmt: skip
    assert len(drawn) == 1


def test_a_drive_without_room_for_all_of_it_is_named_before_anything_runs(small_tmpfs):
    command = [sys.executable, "-m", "pytest", "-n", "2", "-k", "nothing has this name"]
    environment = {**os.environ, "TMPDIR": str(small_tmpfs)}
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert ran.returncode == pytest.ExitCode.USAGE_ERROR, ran.stdout + ran.stderr
    assert "set TMPDIR" in ran.stderr and str(small_tmpfs) in ran.stderr
    assert "Traceback" not in ran.stderr
