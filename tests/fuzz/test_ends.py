"""The fuzzer of runs that end early in a short form. The long form: tools/fuzz ends."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from e2e import stopped_calls

from fuzz import cases, ends, programs, ranks
from fuzz.program_actions import ACTIONS
from fuzz.program_passes import Side

WHY_NOT = stopped_calls.why_not()
pytestmark = [pytest.mark.usefixtures("prepared"), pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)]
PROGRAM = {
    **programs.draw("1 0"),
    **programs.PLAIN,
    "layers": ["linear"],
    "rule": "sgd",
    "options": dict(programs.PLAIN_OPTIONS, commit_every=1),
    "loop": [["ordinary", 1], ["step", 2], ["read", 3], ["ordinary", 4], ["step", 5], ["ordinary", 6], ["step", 7]],
    "ends": [["kill", 0.99]],
}


def test_some_runs_that_end_early_go_on_as_plain_torch(run_some: Callable[[cases.Kind, int], None]) -> None:
    run_some(ends.ENDS, 2)


def test_the_fuzzer_notices_other_values(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(side: Side) -> None:
        if side.manager is not None and side.directory.name.startswith("resumed"):
            side.one.data.mul_(2)

    monkeypatch.setitem(ACTIONS, "read", read)
    problem = cases.watched(ends.ENDS, {**PROGRAM, "ends": [["kill", 0.4]]})
    assert problem is not None and "result differs" in problem, problem


def test_the_fuzzer_notices_a_commit_that_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    resume = ends.EndedTraining.resume

    def resume_nothing(training: Any, *arguments: Any) -> None:
        shutil.rmtree(training.pair.directory)
        training.pair.directory.mkdir()
        resume(training, *arguments)

    assert cases.watched(ends.ENDS, PROGRAM) is None
    monkeypatch.setattr(ends.EndedTraining, "resume", resume_nothing)
    problem = cases.watched(ends.ENDS, PROGRAM)
    assert problem is not None and "step 0 of" in problem, problem


OF_RANKS = {
    **ranks.draw("1 0"),
    **ranks.PLAIN,
    **{name: PROGRAM[name] for name in ("layers", "rule", "options", "loop")},
    "spread": "fsdp2",
    "alone": [True],
}


@pytest.mark.parametrize("how", ["kill", "go on"])
def test_ranks_of_which_one_ends_early_go_on_as_plain_torch(how: str) -> None:
    assert cases.watched(ends.ENDS, {**OF_RANKS, "ends": [[how, 0.6, 1, True]]}) is None


def test_the_fuzzer_notices_a_rank_with_other_values(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(side: Side) -> None:
        if side.manager is not None and side.directory.name.startswith("resumed") and dist.get_rank() == 1:
            with torch.no_grad():
                side.one.mul_(2)

    monkeypatch.setitem(ends.EndedRankTraining.actions, "read", read)
    problem = cases.watched(ends.ENDS, {**OF_RANKS, "spread": "by hand", "ends": [["kill", 0.4, 0, False]]})
    assert problem is not None and "differs" in problem, problem


ASSIGNED: dict[str, dict[str, Any]] = {
    "one": {
        "seed": 317374758,
        "layers": ["partly frozen", "by name"],
        "options": {"gradients": "host", "room_bytes": 0},
        "loop": [["step", 0], ["write", 923], ["retained", 128], ["step", 0]],
        "ends": [["fail", 0.5702369276717209]],
    },
    "several": {
        "seed": 478818005,
        "layers": ["functional", "in double"],
        "options": {"params": "host"},
        "loop": [["step", 0], ["from vector", 608], ["ordinary", 777], ["step", 0]],
        "ends": [["fail", 0.7952693485306949]],
    },
}


@pytest.mark.parametrize("kind", ASSIGNED)
def test_what_was_assigned_to_parameters_is_in_the_commit_of_the_step_before(kind: str) -> None:
    """`parameter.data = x`, after a step: the next forward takes it in before it commits that step."""
    program = {**PROGRAM, "rule": "adamw", **ASSIGNED[kind]}
    program["options"] = {**programs.PLAIN_OPTIONS, "commit_every": 1, **ASSIGNED[kind]["options"]}
    assert cases.watched(ends.ENDS, program) is None
