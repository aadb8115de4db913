"""Deferred writes: pages that wait for their write in the victim cache. [Note: deferred writes], paging/frames.py"""

from __future__ import annotations

from scripted import EAGER, IDLE, change, error_of, fail, make, pass_over, use, write
from simulated_run import Run

from swapper.paging.residency import Residency

PARAMS = (0, 1, 2, 3)
MAKE = [change(("slice", page), page, page + 4, fresh=(page,)) for page in PARAMS]  # a parameter, and its state
FORWARD = [use(("param", page), page) for page in PARAMS]
STEP = [*(access for pair in zip(MAKE, FORWARD, strict=True) for access in pair), *reversed(FORWARD)]


def deferred(hurry: float = IDLE, frames: int = 4, max_deferred_writes: int = 2, seed: int = 1) -> Run:
    """A run whose updates are made as the forward goes, two steps later."""
    run = make(8, frames, tuple(STEP), hurry, seed, victim_cache=True, max_deferred_writes=max_deferred_writes)
    run.victim_cache.generosity = 1.0
    for _ in range(2):
        pass_over(run, STEP)
        run.pager.end_step()
    return run


def deferred_writes(run: Run) -> set[int]:
    return set(run.pager._frames.deferred_writes)


def owing() -> Run:
    """A run in the middle of a step, with a deferred write: which transfer the drive does while one is waited for is chance."""
    for seed in range(100):
        run = deferred(seed=seed)
        pass_over(run, STEP[:4])
        if 0 in deferred_writes(run):
            break
    assert 0 in deferred_writes(run)
    assert all(run.pages[index].residency is Residency.COLD for index in deferred_writes(run))
    return run


def test_a_dump_counts_deferred_writes():
    run = owing()
    assert f"{len(deferred_writes(run))} to be written once they are back" in run.pager.describe()
    pass_over(run, STEP[4:])
    assert "to be written" not in run.pager.describe()
    run.finish()


def test_a_deferred_write_is_submitted_when_backward_loads_the_page_and_nothing_is_read():
    run = owing()
    pass_over(run, STEP[4:])
    assert not deferred_writes(run)
    assert (
        run.pager.counters.read_bytes["state"] <= run.pages[0].nbytes * len(PARAMS) * 4
    )  # of state, in three steps and ahead
    run.finish()


def test_no_write_is_deferred_while_the_drive_has_nothing_else_to_write():
    run = deferred(EAGER)
    for access in STEP:
        pass_over(run, [access])
        assert not deferred_writes(run)
    run.finish()


def test_no_more_writes_are_deferred_than_may_be():
    for most in range(4):
        run = deferred(max_deferred_writes=most)
        pass_over(run, STEP[:8])
        assert len(deferred_writes(run)) <= most
        run.finish()


def test_writes_are_not_done_while_any_is_deferred_and_a_flush_does_them():
    run = owing()
    assert run.attempt(run.pager.wait_for_writes)
    assert not run.commit(flush=False)
    assert run.commit()
    assert not deferred_writes(run)
    run.finish()


def test_what_was_made_for_a_use_that_does_not_come_is_written_at_the_end_of_the_step():
    for seed in range(100):  # which transfers the drive has done by then is chance
        run = deferred(seed=seed)
        pass_over(run, MAKE[:2])
        assert run.attempt(run.pager.wait_for_writes)
        if not run.commit(flush=False):
            break
        run.finish()
    assert not run.commit(flush=False)
    run.pager.end_step()
    assert run.attempt(run.pager.wait_for_writes)
    assert run.commit(flush=False)
    run.finish()


def test_cache_memory_is_used_otherwise_only_after_its_deferred_writes():
    run = owing()
    assert run.attempt(run.pager.drop_cached, [0])
    run.victim_cache.take_back([0])
    assert 0 not in deferred_writes(run)
    run.check()
    run.finish()


def test_a_deferred_write_that_fails_when_cache_memory_is_needed_raises_and_the_content_stays():
    run = owing()
    fail(run, "write", 0)
    run.attempt(run.pager.drop_cached, [0])
    error_of(run, "flush")
    run.check()
    assert run.look(0) == run.content[0]
    run.faults.repair()
    assert run.flush()
    run.finish()


def test_a_deferred_page_that_was_to_be_overwritten_and_was_not_keeps_its_content():
    run = owing()
    access = change(None, 0, fresh=(0,))
    run.pager.acquire(access)
    run.pager.release(access)
    run.check()
    pass_over(run, [use(None, 0)])
    assert run.commit()
    run.finish()


def test_discarded_pages_have_no_deferred_write_and_are_not_awaited():
    run = owing()
    pass_over(run, MAKE[2:3])
    run.discard()
    assert not deferred_writes(run) and run.pager.writes_are_done()
    write(run, 0)
    run.finish()
