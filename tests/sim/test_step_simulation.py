"""The executor of updates compared with plain torch: random loops, in each policy, with a fault at each call in turn."""

from __future__ import annotations

import pytest
from sim.simulated_ranks import run_ranks
from sim.simulated_step import SimulatedRun

from swapper.train.groups.group_state import LEGAL_MOVES
from swapper.train.steps.policies import POLICIES

STEPS, RANKS_STEPS = 4, 2


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


@pytest.mark.parametrize("update", POLICIES)
def test_ranks_stay_equal_to_plain_torch(update: str) -> None:
    for seed in range(5):
        run_ranks(seed, update, STEPS)


@pytest.mark.parametrize("update", POLICIES)
def test_a_fault_on_one_rank_is_undone_on_all(update: str) -> None:
    """At each call of each rank."""
    for seed in range(2):
        calls = [one.calls for one in run_ranks(seed, update, RANKS_STEPS)]
        assert min(calls) > 20
        for rank, at in ((rank, at) for rank, count in enumerate(calls) for at in range(1, count + 1)):
            assert run_ranks(seed, update, RANKS_STEPS, fault_at=(rank, at))[rank].calls >= at
