"""The executor of updates compared with plain torch: random loops, in each policy, with a fault at each call in turn."""

from __future__ import annotations

import pytest
from sim.simulated_step import SimulatedRun

from swapper.train.groups.group_state import LEGAL_MOVES
from swapper.train.steps.policies import POLICIES

STEPS = 4


@pytest.mark.parametrize("update", POLICIES)
def test_random_loops_are_as_in_plain_torch(update: str) -> None:
    for seed in range(30):
        assert SimulatedRun(seed, update).run(STEPS)


@pytest.mark.parametrize("can_undo", [True, False])
@pytest.mark.parametrize("update", POLICIES)
def test_a_fault_at_any_call_is_undone_or_ends_the_run(update: str, can_undo: bool) -> None:
    for seed in range(3):
        sound = SimulatedRun(seed, update)
        sound.run(STEPS)
        ends = [SimulatedRun(seed, update, at, can_undo).run(STEPS) for at in range(1, sound.calls + 1)]
        assert len(ends) > 30
        assert all(ends) if can_undo else not all(ends)


def test_the_loops_make_every_legal_move() -> None:
    made = set()
    for update in POLICIES:
        for seed in range(5):
            sound = SimulatedRun(seed, update)
            sound.run(STEPS)
            made |= sound.moves
            for at in range(1, sound.calls, 3):
                (run := SimulatedRun(seed, update, at)).run(STEPS)
                made |= run.moves
    assert made == LEGAL_MOVES
