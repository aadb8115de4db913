"""The pager's promises, one at a time. See scripted.py for the drives."""

from __future__ import annotations

import pytest
from scripted import EAGER, IDLE, change, fail, in_memory, make, pass_over, use, write
from simulated_run import Run

from swapper.errors import BudgetError, InvariantError
from swapper.paging.residency import Residency

# --- the schedule is followed -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("pages, frames", [(12, 6), (20, 3), (20, 10), (20, 19)])
@pytest.mark.parametrize("hurry", [IDLE, 0.3, EAGER])
@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("makes", [use, change])
def test_a_cycle_that_does_not_fit_moves_only_what_does_not_fit(pages, frames, hurry, lazy, makes):
    """A fixed part stays and the rest streams, so that half the memory halves the traffic. LRU would move everything."""
    window = 1
    cycle = [makes(index, index) for index in range(pages)]
    run = make(pages, frames, tuple(cycle), hurry, window_pages=window, lazy=lazy)
    pass_over(run, cycle * 3)
    run.engine.seen.clear()
    pass_over(run, cycle * 10)
    best = 10 * (pages - frames)  # what is in memory when a cycle begins is not read in it
    most = 10 * min(pages - frames + window + 1, pages)  # and what is in use has a frame
    assert best <= run.engine.seen["read"] <= most
    if makes is change and lazy:
        assert run.engine.seen["write"] <= most + frames
    elif makes is change:
        assert run.engine.seen["write"] == 10 * pages


@pytest.mark.parametrize("disturbance", [[], [9], [9, 8], [5, 6, 7]])
def test_pages_are_asked_for_before_they_are_needed(disturbance):
    """Also soon after something was wanted that is not in the schedule: what left for it is asked for again."""
    cycle = [use(index, index) for index in range(10)]
    run = make(10, 4, tuple(cycle))
    pass_over(run, cycle[:2])
    pass_over(run, [use(None, *disturbance)] if disturbance else [])
    pass_over(run, cycle[2:])
    for access in cycle * 2:
        assert set(access.pages) <= in_memory(run)
        pass_over(run, [access])


def test_nothing_is_read_for_pages_that_are_made_anew():
    cycle = [change(index, index, fresh=(index,)) for index in range(6)]
    run = make(6, 2, tuple(cycle))
    for access in cycle * 3:
        lease = run.acquire(access)
        run.change(lease)
        run.release(lease)
        run.check()
    assert run.engine.seen["read"] == 0


def test_reads_are_queued_behind_the_writes_that_free_their_frames():
    """The drive has work in both directions while nobody calls."""
    cycle = [change(index, index) for index in range(12)]
    run = make(12, 3, tuple(cycle))
    leases = [run.acquire(access) for access in cycle[:3]]
    assert not run.engine.open
    for lease in leases:
        run.change(lease)
        run.release(lease)
    assert [t.op for t in run.engine.open] == ["write", "read"] * 3
    assert [t.after for t in run.engine.open[1::2]] == run.engine.open[0::2]
    run.finish()


def test_a_page_that_is_changed_again_soon_is_written_once():
    cycle = [change("a", 0, 1), change("b", 2), change("c", 1, 3), *(use(index, index) for index in range(4, 16))]
    run = make(16, 16, tuple(cycle))
    for access in cycle:
        lease = run.acquire(access)
        run.change(lease)
        run.release(lease)
        run.check()
    run.pager.end_step()
    assert run.commit()
    assert run.engine.seen["write"] == 4


def test_what_was_put_off_is_written_at_the_end_of_the_step():
    cycle = [change("a", 0), change("b", 0)]
    run = make(2, 2, tuple(cycle))
    lease = run.acquire(cycle[0])
    run.change(lease)
    run.release(lease)
    assert run.pages[0].residency is Residency.DIRTY
    run.pager.end_step()
    assert run.pages[0].residency is Residency.WRITING


def test_what_was_put_off_is_written_when_the_run_takes_another_way():
    cycle = [change("a", 0), change("b", 0), use("c", 1), use("d", 2)]
    run = make(3, 3, tuple(cycle))
    lease = run.acquire(cycle[0])
    run.change(lease)
    run.release(lease)
    assert run.pages[0].residency is Residency.DIRTY
    pass_over(run, cycle[3:])
    assert run.pages[0].residency is not Residency.DIRTY


def test_pages_of_a_new_order_are_asked_for_as_soon_as_it_is_known():
    cycle = [use(index, index) for index in range(8)]
    run = make(8, 4, tuple(cycle), EAGER)
    for _ in range(2):  # once it may be chance that the others did not come
        assert not {4, 5, 6} <= in_memory(run)
        pass_over(run, cycle[4:])
        run.pager.end_step()
    assert {4, 5, 6} <= in_memory(run)


def test_a_long_run_remembers_no_more_than_it_needs():
    cycle = [use("a", 0), use("b", 1), use("c", 2)]
    run = make(3, 3, tuple(cycle))
    for _ in range(100):
        pass_over(run, cycle)
        assert len(run.pager._frames._victims) <= 8 * 3 + 65
    run.finish()


def test_where_the_run_departs_from_the_schedule_the_new_order_is_followed():
    old = [use(index, index) for index in range(6)]
    new = [old[index] for index in (3, 0, 5, 2, 1, 4)]
    run = make(6, 2, tuple(old))
    pass_over(run, new)
    run.pager.end_step()
    assert run.schedule.cycle == tuple(new)
    pass_over(run, new)  # it is trusted again: see Reach
    run.pager.end_step()
    for access in new * 2:
        assert set(access.pages) <= in_memory(run)
        pass_over(run, [access])


# --- transient pages --------------------------------------------------------------------------------------------------


def make_transient(frames: int) -> Run:
    """Two sections of four pages; the second is transient."""
    return Run(1, [4, 4], frames, [], hurry=EAGER, window_pages=frames, lazy=False, transient=frozenset({1}))


def test_transient_pages_are_written_only_when_their_frames_are_needed():
    run = make_transient(4)
    write(run, 4, 5, 6, 7)
    assert run.flush()
    assert run.pager.writes_are_done()
    run.pager.end_step()
    assert run.engine.seen["write"] == 0
    write(run, 0, 1)
    assert run.engine.seen["write"] == 2 + 2
    for index in (4, 5, 6, 7):
        lease = run.acquire(use(None, index))
        assert run.look(index) == run.content[index]
        run.release(lease)


def test_what_nobody_wants_any_more_is_neither_written_nor_read():
    run = make_transient(4)
    write(run, 4, 5, 6, 7)
    run.pager.forget([4, 5, 6, 7])
    assert run.pool.free_count == 4
    write(run, 0, 1, 2, 3)
    assert run.flush()
    assert (run.engine.seen["write"], run.engine.seen["read"]) == (4, 0)


def test_a_leased_page_is_not_forgotten():
    run = make_transient(4)
    write(run, 4)
    lease = run.acquire(use(None, 4))
    run.pager.forget([4])
    assert run.look(4) == run.content[4]
    run.release(lease)


# --- leases -----------------------------------------------------------------------------------------------------------


def test_leased_pages_stay_while_everything_else_comes_and_goes():
    run = make(10, 3)
    kept = run.acquire(use(None, 4, 7))
    pass_over(run, [use(None, index) for index in range(10)] * 2)
    assert {4, 7} <= in_memory(run)
    run.release(kept)
    run.finish()


def test_a_page_on_its_way_out_can_be_read_at_once_and_changed_only_when_it_is_out():
    run = make(2, 2)
    run.release(_changed(run, 0))
    assert run.pages[0].residency is Residency.WRITING
    reader = run.acquire(use(None, 0))
    assert run.pages[0].residency is Residency.WRITING
    writer = run.acquire(change(None, 0))
    assert run.pages[0].residency is Residency.CLEAN
    run.change(writer)
    run.release(reader)
    run.release(writer)
    run.finish()


def _changed(run: Run, *pages: int):
    lease = run.acquire(change(None, *pages))
    run.change(lease)
    return lease


def test_more_pages_than_frames_are_refused_and_leave_nothing_behind():
    run = make(5, 3)
    kept = run.acquire(use(None, 0, 1))
    with pytest.raises(BudgetError, match="raise host_memory"):
        run.pager.lease(use(None, 2, 3))
    run.check()
    pass_over(run, [use(None, 2), use(None, 3)])
    run.release(kept)
    pass_over(run, [use(None, 2, 3, 4)])


def test_frames_kept_for_pages_to_be_made_anew_give_way_to_what_is_needed_now():
    cycle = [use("a", 0), change("b", 1, 2, 3, fresh=(1, 2, 3))]
    run = make(8, 4, tuple(cycle))
    pass_over(run, cycle[:1])
    pass_over(run, [use(None, 4, 5, 6, 7)])
    pass_over(run, cycle[1:])
    run.finish()


def test_frames_kept_for_pages_to_be_made_anew_are_free_again_when_the_run_takes_another_way():
    cycle = [use("a", 0), change("b", 1, 2, fresh=(1, 2)), use("c", 3), use("d", 4), use("e", 5)]
    run = make(6, 3, tuple(cycle))
    pass_over(run, cycle[:1])
    assert {1, 2} <= in_memory(run)
    pass_over(run, cycle[2:3])
    assert {4, 5} <= in_memory(run)


def test_a_page_kept_to_be_made_anew_is_read_after_all_if_its_content_is_asked_for():
    cycle = [use("a", 0), change("b", 1, fresh=(1,))]
    run = make(2, 2, tuple(cycle))
    pass_over(run, cycle[:1])
    assert run.engine.seen["read"] == 1
    pass_over(run, [use(None, 1)])
    assert run.engine.seen["read"] == 2


def test_a_fresh_page_is_zero_so_that_gaps_between_tensors_are():
    run = make(1, 1)
    lease = run.acquire(change(None, 0, fresh=(0,)))
    assert run.look(0) == bytes(run.pages[0].nbytes)
    run.release(lease)


def test_a_fresh_page_that_nobody_filled_keeps_its_old_content():
    run = make(3, 3)
    assert run.acquire(change(None, 0, 1, fresh=(0, 1))) is not None
    run.drop_leases()
    run.check()
    pass_over(run, [use(None, 0, 1)])
    run.finish()


def test_dropped_leases_are_gone_wherever_their_pages_are():
    run = make(4, 4)
    write(run, 3)
    run.acquire(use(None, 0))
    run.lease(use(None, 1))
    run.lease(change(None, 2, fresh=(2,)))
    run.drop_leases()
    run.check()
    pass_over(run, [use(None, 0, 1, 2, 3)])
    run.finish()


def test_leases_that_are_kept_stay_when_the_others_are_dropped():
    run = make(3, 3)
    reader, same = run.acquire(use(None, 0, 1)), run.acquire(use(None, 1, 2))
    run.drop_leases(kept=[same])
    run.check()
    pass_over(run, [use(None, 0)])
    run.release(same)
    with pytest.raises(InvariantError, match="not leased"):
        run.pager.release(reader.access)


def test_discard_forgets_leases_also_of_pages_that_are_not_in_memory():
    run = make(2, 2, hurry=EAGER)
    fail(run, "read", 0)
    run.lease(use(None, 0, 1))
    run.discard()
    run.check()


def test_releasing_what_is_not_leased_is_a_bug_and_says_so():
    run = make(2, 2)
    with pytest.raises(InvariantError, match="not leased"):
        run.pager.release(use(None, 0))


def test_reading_what_was_never_written_is_a_bug_and_costs_no_frame():
    run = Run(1, [3], 1, [])
    for _ in range(3):
        with pytest.raises(InvariantError, match="never written"):
            run.pager.acquire(use(None, 0))
        run.check()
    write(run, 1)
    run.finish()
