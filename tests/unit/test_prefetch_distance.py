"""The prefetch distance: unlimited until a step misses; then as far as hits are expected."""

from __future__ import annotations

from swapper.paging.schedule import PrefetchDistance

CYCLE = 1000


def after(*runs: int) -> PrefetchDistance:
    """A step that jumped after each of `runs` accesses that came as expected, but for the last."""
    distance = PrefetchDistance()
    for number, run in enumerate(runs):
        if number:
            distance.miss()
        for _ in range(run):
            distance.hit()
    return distance


def test_without_a_jump_and_after_one_of_its_kind_a_whole_step_is_read_ahead():
    assert after(0).accesses(CYCLE) == CYCLE
    assert after(5 * CYCLE).accesses(CYCLE) == CYCLE
    assert after(5 * CYCLE, 2 * CYCLE, 0).accesses(CYCLE) == CYCLE


def test_where_a_step_jumps_again_and_again_only_what_is_likely_to_come_is_read():
    assert [after(7, 7, 7, run).accesses(CYCLE) for run in (0, 1, 6, 7)] == [7, 6, 1, 0]
    assert after(9, 0, 9, 0).accesses(CYCLE) == 0  # the shorter one of two


def test_a_step_that_goes_on_is_trusted_again():
    assert [after(7, 7, run).accesses(CYCLE) for run in (8, 20, 507, 1007, 9000)] == [1, 13, 500, CYCLE, CYCLE]
