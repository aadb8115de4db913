"""The fuzzer of runs that go on with other numbers of ranks in a short form. The long form: tools/fuzz resharding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from fuzz import cases, resharding
from fuzz.program_passes import Side
from fuzz.ranks import RankTraining
from fuzz.test_ranks import PROGRAM

pytestmark = pytest.mark.usefixtures("prepared")
LOOP = [["ordinary", 1], ["step", 2], ["zero", 3]]
STAGES = {
    **PROGRAM,
    "loop": [],
    "options": {**PROGRAM["options"], "commit_every": 1},
    "stages": [{"size": size, "alone": [True], "otherwise": None, "loop": [*LOOP, ["read", 4]]} for size in (1, 2)],
}


def test_some_programs_go_on_with_other_numbers_of_ranks_as_plain_torch(
    run_some: Callable[[cases.Kind, int], None],
) -> None:
    run_some(resharding.RESHARDING, 2)


@pytest.mark.parametrize("spread", ["fsdp2", "replicas", "ddp", "by hand"])
def test_each_spread_is_possible(spread: str) -> None:
    assert cases.watched(resharding.RESHARDING, {**STAGES, "spread": spread}) is None


def test_the_fuzzer_notices_what_a_stage_has_not_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last action of a stage with one rank changes a parameter of the plain one alone, after both were compared."""
    finish = RankTraining.finish

    def finish_and_change(training: Any) -> None:
        finish(training)
        if dist.get_world_size() == 1:
            training.plain.model.scale.data.mul_(2)

    monkeypatch.setattr(RankTraining, "finish", finish_and_change)
    problem = cases.watched(resharding.RESHARDING, STAGES)
    assert problem is not None and "AssertionError: scale" in problem, problem


def test_the_fuzzer_notices_other_results(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(side: Side) -> Any:
        if side.manager is not None and dist.get_world_size() == 2:
            side.one.data.mul_(2)
        return side.one.detach().clone()

    monkeypatch.setitem(RankTraining.actions, "read", read)
    problem = cases.watched(resharding.RESHARDING, STAGES)
    assert problem is not None and "AssertionError: " in problem, problem
