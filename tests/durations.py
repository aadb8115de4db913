"""Writes the time of each test, by the clock and of the processors, to build/test-durations.tsv after a whole run.

`python tests/durations.py` takes over into tests/costs.tsv, which is committed, what a case of each test takes that takes long: a
sample has few of these (sampling.py). Others keep the cost that they have there.
"""

from __future__ import annotations

import os
import resource
from collections import defaultdict
from pathlib import Path
from statistics import mean

import pytest
from sampling import FREE_S

FILE = Path(__file__).parents[1] / "build" / "test-durations.tsv"
COSTS = Path(__file__).with_name("costs.tsv")
CPU = "cpu_s"
LONG_S = FREE_S
"""Of the processors: tests that take less are not in COSTS."""


_of_others_s = [0.0]


def add_cpu_s(seconds: float) -> None:
    """Count what a process used that somebody else has started and waited for."""
    _of_others_s[0] += seconds


def cpu_s() -> float:
    """Return what this process and those that it has waited for have used of the processors, in seconds."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used) + _of_others_s[0]


class Durations:
    """A plugin of pytest's, also in xdist's processes, which measure, and whose reports the first one gets."""

    def __init__(self) -> None:
        self._wall_s: dict[str, float] = defaultdict(float)
        self._cpu_s: dict[str, float] = {}

    def pytest_runtest_logstart(self) -> None:
        self._before = cpu_s()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> None:
        if call.when == "teardown":
            item.user_properties.append((CPU, cpu_s() - self._before))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._wall_s[report.nodeid] += report.duration
        if report.when == "teardown":
            self._cpu_s[report.nodeid] = dict(report.user_properties)[CPU]

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        option = session.config.option
        if hasattr(session.config, "workerinput") or option.file_or_dir or option.keyword or option.collectonly:
            return
        if "COVERAGE_RUN" in os.environ:  # which takes time itself
            return
        slowest = sorted(self._cpu_s.items(), key=lambda each: -each[1])
        lines = [f"{cpu:.2f}\t{self._wall_s[test]:.2f}\t{test}" for test, cpu in slowest]
        FILE.parent.mkdir(exist_ok=True)
        FILE.write_text("\n".join(["CPU s\ts\ttest", *lines, ""]))


def costs_s() -> dict[str, float]:
    """Return of each test that takes long what a case of it takes, in seconds of the processors."""
    rows = (line.split("\t") for line in COSTS.read_text().splitlines())
    return {test: float(cost) for cost, test in rows}


def take_over() -> None:
    """Write to COSTS what the last whole run measured."""
    cases: dict[str, list[float]] = defaultdict(list)
    for line in FILE.read_text().splitlines()[1:]:
        cpu, _, case = line.split("\t")
        cases[case.partition("[")[0]].append(float(cpu))
    costs = costs_s() | {test: mean(measured) for test, measured in cases.items()}
    COSTS.write_text("".join(f"{cost:.2f}\t{test}\n" for test, cost in sorted(costs.items()) if cost >= LONG_S))


if __name__ == "__main__":
    take_over()
