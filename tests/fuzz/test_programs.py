"""The fuzzer of training programs in a short form. The long form: tools/fuzz programs."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import pytest

from fuzz import cases, programs
from fuzz.program_actions import ACTIONS
from fuzz.program_passes import Side

pytestmark = pytest.mark.usefixtures("prepared")
PROGRAM = {
    **programs.draw("1 0"),
    **programs.PLAIN,
    "layers": ["dropout", "hooks+lstm"],
    "rule": "sgd",
    "groups": "reversed",
    "options": dict(programs.PLAIN_OPTIONS, update="deferred"),
    "loop": [["ordinary", 1], ["step", 2], ["read", 3], ["zero", 4]],
}


def test_some_programs_train_as_plain_torch(run_some: Callable[[cases.Kind, int], None]) -> None:
    run_some(programs.PROGRAMS, 4)


def end(side: Side) -> None:
    if side.manager is not None:
        os.abort()


BAD: dict[str, tuple[str, Callable[[Side], Any]]] = {
    "other results": ("result", lambda side: side.manager is None),
    "an error of Python's": ("KeyError", lambda side: side.manager is None or {}["key"]),
    "other parameters": (
        "layers.0.0.weight",
        lambda side: side.manager and side.model.layers[0][0].weight.data.mul_(2),
    ),
    "a crash": ("SIGABRT", end),
    "a hang": ("did not end", lambda side: side.manager and os.read(os.pipe()[0], 1)),
}


@pytest.mark.parametrize("kind", BAD)
def test_the_fuzzer_notices_and_makes_it_smaller(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said, act = BAD[kind]
    name = "look" if kind != "other parameters" else "write"
    monkeypatch.setitem(
        ACTIONS, name, lambda side: None if kind == "other parameters" and act(side) is None else act(side)
    )
    if kind == "a hang":
        monkeypatch.setattr(cases, "MAX_CASE_S", 3)
    program = {**PROGRAM, "loop": [*PROGRAM["loop"], [name, 5]]}
    problem = cases.watched(programs.PROGRAMS, program)
    assert problem is not None and said in problem, problem
    if kind == "other results":
        smaller, _ = cases.reduced(programs.PROGRAMS, program, problem)
        assert (smaller["layers"], smaller["loop"], smaller["rule"]) == ([], [[name, 5]], "adamw")


def test_a_case_that_does_not_run_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    """Where output is captured, as in `run_some`, `sys.stderr` is no file."""
    bad = dataclasses.replace(programs.PROGRAMS, run_case=lambda program, directory: [][0])
    problem = cases.watched(bad, PROGRAM)
    assert problem is not None and problem.startswith("the fuzzer itself failed") and "IndexError" in problem, problem
    failing = {**PROGRAM, "loop": [["no such action", 0]]}
    problem = cases.watched(programs.PROGRAMS, failing)
    assert problem is not None and "KeyError" in problem, problem


def test_what_swapper_or_torch_refuses_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    with_graph = {**PROGRAM, "layers": ["reentrant+linear"], "loop": [["by grad", 0]]}
    refused = {**PROGRAM, "layers": ["max norm"], "loop": [["together", 0]]}
    for program, said in ((with_graph, "impossible"), (refused, "UnsupportedError"), (PROGRAM, None)):
        problem = cases.watched(programs.PROGRAMS, program)
        assert problem is said or (problem is not None and problem.startswith(f"{cases.REFUSED}{said}")), problem


@pytest.mark.parametrize("device", [None, "late"])
@pytest.mark.parametrize("update", ["step", "backward"])
def test_gradients_that_were_zeroed_and_do_not_come_again_are_zeros(update: str, device: str | None) -> None:
    """Of experts that no token goes to, on pages with others; and -0 that is added to them makes 0."""
    options = {**programs.PLAIN_OPTIONS, "update": update, "optimizer_state": "host", "gradients": "nvme"}
    program = {
        **programs.PLAIN,
        "seed": 880113987,
        "layers": ["bf16+channels last", "spectral norm", "experts"],
        "options": options if device is None else {**options, "device": device, "update_on": "cpu"},
        "loop": [["ordinary", 0], ["zero in place", 776], ["two graphs", 402]],
    }
    assert cases.watched(programs.PROGRAMS, program) is None
