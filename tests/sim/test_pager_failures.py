"""Commits, and a drive that fails: what the pager promises then, one thing at a time. See scripted.py for the drives."""

from __future__ import annotations

import errno

import pytest
from scripted import EAGER, IDLE, SLOW, change, error_of, fail, make, pass_over, use, write

from swapper.paging.residency import Residency

# --- commits ----------------------------------------------------------------------------------------------------------


def test_a_page_goes_to_the_file_that_the_last_commit_does_not_name():
    run = make(1, 1)
    named = []
    for _ in range(4):
        named.append(run.pages[0].committed)
        for _ in range(3):  # however often it is written before the next commit
            write(run, 0)
            assert run.flush()
            assert run.pages[0].location != named[-1]
        assert run.commit()
    assert named == [0, 1, 0, 1]


def test_a_snapshot_is_never_written_again_and_the_run_goes_on_beside_it():
    run = make(3, 3)
    for _ in range(4):
        assert run.publish()
        write(run, 0)
        assert run.commit()
        write(run, 1)
        assert run.commit()
    assert len(run.kept.published) == 4
    run.finish()


def test_a_snapshot_of_a_step_that_cannot_be_written_leaves_the_run_as_it_was():
    run = make(20, 20, hurry=SLOW)
    assert run.publish()
    for _ in range(2):
        write(run, 0)
        assert run.commit()
    for index in range(20):
        write(run, index)
    fail(run, "write", 10)
    assert not run.publish()
    run.finish()
    assert len(run.kept.published) == 1


# --- a drive that fails -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hurry", [IDLE, EAGER])
def test_a_read_that_fails_is_told_and_nothing_is_leased(hurry):
    run = make(3, 3, hurry=hurry)
    fail(run, "read", 1)
    for _ in range(2):
        told = error_of(run, "acquire", use(None, 0, 1, 2))
        assert (told.op, told.path, told.errno) == ("read", "turn-0.swap", errno.EIO)
    run.faults.repair()
    pass_over(run, [use(None, 0, 1, 2)])


def test_a_failed_read_ahead_is_told_to_nobody_unless_it_fails_when_the_page_is_needed():
    cycle = [use("a", 0), use("b", 1)]
    run = make(2, 2, tuple(cycle), EAGER)
    fail(run, "read", 1)
    pass_over(run, cycle[:1])
    assert run.engine.seen["failed read"] >= 1
    run.faults.repair()
    pass_over(run, cycle[1:])


def test_a_write_that_fails_is_told_and_its_page_kept_until_it_succeeds():
    run = make(3, 3)
    fail(run, "write", 1)
    write(run, 0, 1, 2)
    for _ in range(3):
        assert error_of(run, "flush").op == "write"
        assert run.pages[1].residency is Residency.DIRTY
    run.faults.repair()
    assert run.flush()
    run.finish()


def test_a_write_that_failed_is_told_by_whatever_is_asked_next():
    for ask in ("acquire", "lease", "flush", "wait_for_writes"):
        run = make(2, 2, hurry=EAGER)
        fail(run, "write", 0)
        write(run, 0)
        arguments = [use(None, 1)] if ask in ("acquire", "lease") else []
        assert error_of(run, ask, *arguments).op == "write"
        run.finish()


def test_writes_are_not_done_before_all_that_was_changed_is_on_the_drive():
    """Or a commit would name an old content: also of a page whose write failed, when that was told long ago."""
    run = make(2, 2)
    fail(run, "write", 0)
    write(run, 0)
    assert not run.pager.writes_are_done(), "it is in flight"
    assert error_of(run, "flush").op == "write"
    assert not run.pager.writes_are_done(), "it is in flight again"
    assert error_of(run, "wait_for_writes").op == "write"
    reader = run.acquire(use(None, 0))
    run.faults.repair()
    assert not run.pager.writes_are_done(), "it cannot be written while it is leased"
    assert error_of(run, "wait_for_writes").op == "write"
    run.release(reader)
    run.pager.wait_for_writes()
    assert run.pager.writes_are_done()
    assert run.commit()
    run.finish()


@pytest.mark.parametrize("hurry", [IDLE, EAGER])
def test_pages_that_cannot_be_written_fill_the_pool_and_it_is_the_drive_that_is_named(hurry):
    run = make(6, 2, hurry=hurry)
    fail(run, "write", *range(6))
    write(run, 0)
    for _ in range(6):
        assert error_of(run, "acquire", use(None, 4, 5)).op == "write"
    run.faults.repair()
    for _ in range(2):  # one failure may still have to be told
        lease = run.acquire(use(None, 4, 5))
    assert lease is not None
    run.finish()


def test_a_lease_that_fails_does_not_throw_away_what_an_earlier_write_failed_to_save():
    run = make(3, 3)
    fail(run, "write", 0)
    write(run, 0)
    assert not run.flush()
    run.faults.repair()
    fail(run, "read", 1)
    assert error_of(run, "acquire", change(None, 0, 1, fresh=(0,))).op == "read"
    run.finish()


def test_what_was_queued_behind_a_failed_write_is_told_as_that_failure():
    cycle = [change("a", 0), use("b", 1)]
    run = make(2, 1, tuple(cycle))
    fail(run, "write", 0)
    lease = run.acquire(cycle[0])
    run.change(lease)
    run.release(lease)
    assert error_of(run, "acquire", cycle[1]).op == "write"
    assert run.pages[0].residency is Residency.DIRTY
    run.finish()


# --- what is written past the guard, under a write: [Note: unannounced writes], paging/frames.py ----------------------


def test_a_page_that_was_changed_under_its_write_is_read_back_whatever_the_drive_has():
    run = make(3, 1)
    write(run, 0)
    run.write_past_the_guard(run.pages[0])
    pass_over(run, [use(None, 1)])
    assert run.pages[0].torn and run.store.content(run.pages[0]) != run.content[0]
    pass_over(run, [use(None, 0)])
    assert run.commit()
    assert not run.pages[0].torn
    run.finish()


def test_no_commit_names_what_a_write_made_of_a_page_that_its_reader_changed():
    run = make(2, 2)
    write(run, 0)
    reader = run.acquire(use(None, 0))
    run.write_past_the_guard(run.pages[0])
    run.pager.wait_for_writes()
    assert run.pages[0].torn and not run.commit(flush=False)
    run.release(reader)
    assert run.commit()
    run.finish()


def test_a_page_that_its_reader_changed_under_its_write_is_written_again_also_after_the_failure_of_another():
    run = make(3, 3)
    fail(run, "write", 1)
    write(run, 1)
    run.engine.tick()
    write(run, 0)
    run.pages[0].ticket.slow = True
    reader = run.acquire(use(None, 0))
    run.write_past_the_guard(run.pages[0])
    while not run.engine.seen["failed write"]:
        run.engine.tick()
    run.release(reader)  # asks for a lease to write, and is told of the failure
    assert run.pages[0].residency is Residency.WRITING
    run.faults.repair()
    assert run.commit()
    run.finish()


def test_readers_that_stay_when_a_writer_ends_are_guarded_again():
    run = make(2, 2)
    reader, writer = run.acquire(use(None, 0)), run.acquire(change(None, 0))
    run.leases.remove(writer)
    run.pager.release(writer.access)  # it has changed nothing
    run.write_past_the_guard(run.pages[0])
    run.release(reader)
    assert run.commit()
    run.finish()
