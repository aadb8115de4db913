"""The pager: brings pages into frames before they are needed, writes changed ones back, and decides who leaves.

It works only when it is called, from hooks and from the optimizer's sweep; in between, the engine goes on by itself with
what was submitted, and since a read may wait for a write (`after=`), a frame whose page is still on its way out can be
promised to the page that comes next. So the drive is busy in both directions while Python is away in a kernel.

One mutex guards all page and frame state. It is never held while waiting.

[Note: promised frames] When the frame of a WRITING page is promised, that page's `heir` is the page that will get it, and the
heir is READING already, its read queued behind the write. When the write is done the page goes CLEAN -> COLD and the frame
changes hands. If the write fails the engine cancels the read: the page is DIRTY again in its frame, the heir COLD.
"""

from __future__ import annotations

import contextlib
import heapq
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from swapper.core.pool import Pool
from swapper.core.residency import Residency
from swapper.core.schedule import Access, Schedule
from swapper.core.section import Page
from swapper.errors import BudgetError, InvariantError, IoError
from swapper.stats import Stats

SOON_ACCESSES = 8
"""A changed page that will be changed again within so many accesses is not written in between."""


class Pager:
    """Owns the residency of every page and the use of every frame.

    Args:
        pages: all pages of the run, each at its own index.
        pool: the frames; owned by the pager from now on.
        store: where pages live (read, write, written).
        schedule: the order of use.
        stats: counters to keep.
    """

    def __init__(self, pages: Sequence[Page], pool: Pool, store: Any, schedule: Schedule, stats: Stats) -> None:
        self._pages = pages
        self._pool = pool
        self._store = store
        self._schedule = schedule
        self._stats = stats
        self._lock = threading.Lock()
        self._in_flight: dict[int, Page] = {}  # by index: pages with a ticket
        self._ahead = 0  # all accesses before this position have been asked for
        # Pages that may leave, farthest next use first: (-next use, index). Entries may be stale; see _is_evictable.
        self._leavers: list[tuple[int, int]] = []
        self._put_off: dict[int, Page] = {}  # by index: DIRTY and not leased, about to be changed again
        self._failure: IoError | None = None  # of a write, not yet told to anyone
        self._unsaved: dict[int, IoError] = {}  # by index of a page: why its last write failed, until one succeeds

    # --- the two verbs: lease and release -------------------------------------------------------------------------

    def acquire(self, access: Access) -> None:
        """Lease the access's pages and wait until they are in memory.

        Raises:
            IoError: a page could not be read, or an earlier one not written. Nothing is leased then.
        """
        self.lease(access)
        self.wait(access)

    def lease(self, access: Access) -> None:
        """Forbid the access's pages to leave, and see to it that they come; `wait` waits for them.

        Raises:
            IoError: an earlier write failed. Nothing is leased then.
        """
        with self._lock:
            self._settle()
            self._raise_failure()
            if access.key is not None and not self._schedule.advance(access):
                self._lost_the_place()
            for index in access.pages:
                self._pages[index].leases += 1
        try:
            self._bring(access)
        except BaseException:
            self._drop(access)
            raise

    def wait(self, access: Access) -> None:
        """Wait until the leased pages of `access` are in memory and those that it writes are not on their way out."""
        try:
            for index in access.pages:
                page = self._pages[index]
                self._wait_for_content(page, access)
                if index in access.writes:
                    self._wait_for_write(page)
        except BaseException:
            self._drop(access)
            raise

    def release(self, access: Access, changed: Collection[int] = ()) -> None:
        """Give the lease back. Pages whose index is in `changed` are written back as soon as nobody leases them."""
        with self._lock:
            self._settle()
            for index in access.pages:
                page = self._pages[index]
                if index in changed:
                    page.fresh = False  # it was filled
                    if page.residency is Residency.CLEAN:
                        page.move(Residency.DIRTY)
                self._end_lease(page)
            if access.key is not None:
                self._read_ahead()

    def flush(self) -> None:
        """Write every changed page that nobody leases, and wait until no write is in flight.

        Raises:
            IoError: a write failed; its page is still in memory and will be tried again by the next flush.
        """
        with self._lock:
            self._settle()
            for page in self._pages:
                if page.residency is Residency.DIRTY and page.leases == 0:
                    self._submit_write(page)
        self.wait_for_writes()

    def wait_for_writes(self) -> None:
        """Wait until no write is in flight. What could not be written before is tried once more.

        Raises:
            IoError: a write failed, now or earlier: the store does not have what memory has.
        """
        with self._lock:
            self._settle()
            self._write_what_failed()
        for page in [p for p in list(self._in_flight.values()) if p.residency is Residency.WRITING]:
            self._wait_for_write(page)
        with self._lock:
            self._settle()
            self._raise_failure()
            for error in self._unsaved.values():  # of a page that is leased: it is written when that ends
                raise error

    def writes_are_done(self) -> bool:
        """Return whether all that was released as changed is written: nothing is in flight, put off, or failed.

        Raises:
            IoError: a write failed. It is tried again.
        """
        with self._lock:
            self._settle()
            self._write_what_failed()
            self._raise_failure()
            writing = any(page.residency is Residency.WRITING for page in self._in_flight.values())
            return not writing and not self._put_off and not self._unsaved

    def end_step(self) -> None:
        """The step is over: what it did is what the next one is expected to do."""
        with self._lock:
            self._write_what_was_put_off()
            if self._schedule.end_step():
                self._lost_the_place()
                self._read_ahead()

    def drop_leases(self, kept: Iterable[Access] = ()) -> None:
        """Give back every lease but those of `kept`: what held them is gone (an exception or Ctrl-C went through it)."""
        counts = Counter(index for access in kept for index in access.pages)
        with self._lock:
            for page in self._pages:
                if page.leases > counts[page.index]:
                    page.leases = counts[page.index] + 1
                    self._end_lease(page)
            self._write_what_was_put_off()

    def discard(self) -> None:
        """Wait for all transfers and forget the content of every frame; for closing, when nothing must be kept."""
        for page in list(self._in_flight.values()):
            if page.ticket is not None:
                _wait_quietly(page.ticket)
        with self._lock:
            self._settle()
            self._put_off.clear()
            self._unsaved.clear()
            self._ahead = self._schedule.position
            for page in self._pages:
                page.leases = 0
                if page.residency in (Residency.CLEAN, Residency.DIRTY):
                    self._evict(page)
                elif page.residency is Residency.READING:
                    self._give_up_claim(page)

    def describe(self) -> str:
        """Return a dump of leases, frames and tickets, for a person."""
        counts = {state.name: 0 for state in Residency}
        for page in self._pages:
            counts[page.residency.name] += 1
        leased = [repr(page) for page in self._pages if page.leases][:20]
        return (
            f"{self._pool.free_count} of {self._pool.frame_count} frames free; pages: "
            + ", ".join(f"{count} {name}" for name, count in counts.items())
            + f"; {len(self._in_flight)} in flight; leased: "
            + ("; ".join(leased) or "none")
        )

    def check(self) -> None:
        """Raise InvariantError unless frames are conserved and belong to one page each."""
        with self._lock:
            held = [page for page in self._pages if page.frame is not None]
            frames = [page.frame for page in held]
            if len(set(frames)) != len(frames):
                raise InvariantError(f"a frame belongs to two pages: {self.describe()}")
            if len(frames) + self._pool.free_count != self._pool.frame_count:
                raise InvariantError(f"frames were lost: {self.describe()}")
            for page in self._pages:
                promised = page.predecessor is not None
                if (page.frame is None) != (page.residency is Residency.COLD or promised):
                    raise InvariantError(f"{page} has a frame that its state does not allow, or lacks one")

    # --- bringing pages in ----------------------------------------------------------------------------------------

    def _bring(self, access: Access) -> None:
        """Claim a frame for each leased page that has none, waiting for frames if need be, then read ahead."""
        for index in access.pages:
            page = self._pages[index]
            while True:
                with self._lock:
                    self._settle()
                    if page.residency is Residency.WRITING and page.heir is not None:
                        blocker = page  # its frame is promised: it must leave before it can come again
                    elif page.residency is not Residency.COLD or self._claim(page, index in access.fresh, -1):
                        break
                    elif self._put_off:
                        self._write_what_was_put_off()
                        continue
                    elif self._in_flight:
                        blocker = next(iter(self._in_flight.values()))  # the oldest
                    else:
                        self._make_room()
                        continue
                started = time.monotonic()
                _wait_quietly(blocker.ticket)
                self._stats.frame_wait_s += time.monotonic() - started
        if access.key is not None:  # outside of a step, what comes next may be far away
            with self._lock:
                self._read_ahead()

    def _read_ahead(self) -> None:
        """Claim frames along the schedule for as long as there are pages that are needed later than those wanted."""
        self._ahead = max(self._ahead, self._schedule.position)
        end = self._schedule.position + len(self._schedule.cycle)
        while self._ahead < end:
            access = self._schedule.at(self._ahead)
            for index in access.pages:
                page = self._pages[index]
                if page.residency is Residency.COLD and page.leases == 0:
                    fresh = index in access.fresh
                    if not fresh and page.location is None:
                        return
                    if not self._claim(page, fresh, self._ahead):
                        return
            self._ahead += 1

    def _claim(self, page: Page, fresh: bool, position: int) -> bool:
        """Give `page` a frame, or a promise of one, and submit its read. False if no page with a later use can leave."""
        frame = self._pool.take()
        loser: Page | None = None
        if frame is None:
            loser = self._pop_leaver(position)
            if loser is None:
                return False
            self._ahead = min(self._ahead, loser.next_use)  # if that was asked for already, it must be again
            if loser.residency is Residency.CLEAN:
                self._evict(loser)
                frame, loser = self._pool.take(), None
        after = None if loser is None else loser.ticket
        address = self._pool.address(frame if loser is None else loser.frame)  # type: ignore[arg-type]
        try:
            page.ticket = after if fresh else self._store.read(page, address, after=after)
        except BaseException:
            if loser is None:
                self._pool.give(frame)  # type: ignore[arg-type]
            else:
                self._offer(loser)
            raise
        if loser is None:
            page.frame = frame
        else:  # [Note: promised frames]
            loser.heir, page.predecessor = page, loser
        page.fresh = fresh
        page.error = None
        page.next_use = position if position >= 0 else page.next_use
        page.move(Residency.READING)
        if page.ticket is not None:
            self._in_flight[page.index] = page
        return True

    def _wait_for_content(self, page: Page, access: Access) -> None:
        started = time.monotonic()
        while True:
            with self._lock:
                self._settle()
                if page.residency is Residency.COLD:  # its read failed, or its write took the frame along
                    _raise_error_of(page)
                    ticket = None
                elif page.residency is not Residency.READING:
                    break
                elif page.fresh and page.predecessor is None:
                    if self._fill_fresh(page, page.index in access.fresh):
                        break
                    ticket = page.ticket
                else:
                    ticket = page.ticket
            if ticket is None:
                self._bring(access)
            else:
                self._wait_for_read(page, ticket)
        self._stats.read_wait_s += time.monotonic() - started

    def _wait_for_read(self, page: Page, ticket: Any) -> None:
        try:
            ticket.wait()
        except IoError:
            with self._lock:
                self._settle()
                self._raise_failure()  # the cause, if it was a write that this read waited for
            raise

    def _fill_fresh(self, page: Page, wanted_fresh: bool) -> bool:
        """A claimed frame is free of its past. Returns True if the page may be used now, False if it must be read after all."""
        page.fresh = wanted_fresh
        page.ticket = None
        self._in_flight.pop(page.index, None)
        if not wanted_fresh:  # the schedule was wrong: the old content is wanted
            page.ticket = self._store.read(page, self._pool.address(page.frame))  # type: ignore[arg-type]
            self._in_flight[page.index] = page
            return False
        page.move(Residency.DIRTY)
        self._map(page)
        page.section.memory[page.offset : page.offset + page.nbytes].zero_()  # gaps between tensors are zero on disk
        return True

    # --- letting pages go -----------------------------------------------------------------------------------------

    def _end_lease(self, page: Page) -> None:
        if page.leases <= 0:
            raise InvariantError(f"{page} is released but was not leased")
        page.leases -= 1
        if page.leases:
            return
        page.next_use = self._schedule.next_use(page.index)
        if page.residency is Residency.DIRTY:
            if page.fresh:
                self._evict(page)  # it was not filled: the store still has its content
            elif self._is_changed_again_soon(page):
                self._put_off[page.index] = page
            else:
                self._submit_write(page)
        self._offer(page)

    def _is_changed_again_soon(self, page: Page) -> bool:
        """Two tensors of one parameter that meet on a page bring the sweep back to it a few slices later: one write will do."""
        return (
            page.next_use < self._schedule.position + SOON_ACCESSES
            and page.index in self._schedule.at(page.next_use).writes
        )

    def _write_what_was_put_off(self) -> None:
        for page in list(self._put_off.values()):
            if page.leases == 0 and page.residency is Residency.DIRTY:
                self._submit_write(page)
                self._offer(page)
        self._put_off.clear()

    def _write_what_failed(self) -> None:
        for index in self._unsaved:
            page = self._pages[index]
            if page.leases == 0 and page.residency is Residency.DIRTY:
                self._submit_write(page)
                self._offer(page)

    def _submit_write(self, page: Page) -> None:
        self._put_off.pop(page.index, None)
        page.ticket = self._store.write(page, self._pool.address(page.frame))  # type: ignore[arg-type]
        page.move(Residency.WRITING)
        self._in_flight[page.index] = page

    def _wait_for_write(self, page: Page) -> None:
        while True:
            with self._lock:
                self._settle()
                if page.residency is not Residency.WRITING:
                    self._raise_failure()
                    return
                ticket = page.ticket
            _wait_quietly(ticket)

    def _offer(self, page: Page) -> None:
        if self._is_evictable(page):
            heapq.heappush(self._leavers, (-page.next_use, page.index))
        if len(self._leavers) > 8 * self._pool.frame_count + 64:  # mostly stale entries of near uses
            live = [(-p.next_use, p.index) for p in self._pages if self._is_evictable(p)]
            heapq.heapify(live)
            self._leavers = live

    def _is_evictable(self, page: Page) -> bool:
        return page.leases == 0 and (
            page.residency is Residency.CLEAN or (page.residency is Residency.WRITING and page.heir is None)
        )

    def _pop_leaver(self, position: int) -> Page | None:
        """Take the page with the farthest next use off the list, if that use is later than `position`."""
        while self._leavers:
            negated_use, index = self._leavers[0]
            page = self._pages[index]
            if -negated_use != page.next_use or not self._is_evictable(page):
                heapq.heappop(self._leavers)
                continue
            if page.next_use <= position:
                return None
            heapq.heappop(self._leavers)
            return page
        return None

    def _evict(self, page: Page) -> None:
        page.move(Residency.COLD)
        self._unmap(page)
        self._pool.give(page.frame)  # type: ignore[arg-type]
        page.frame = None

    def _give_up_claim(self, page: Page) -> None:
        page.move(Residency.COLD)
        page.fresh = False
        page.ticket = None
        self._in_flight.pop(page.index, None)
        if page.predecessor is not None:
            page.predecessor.heir = None
            self._offer(page.predecessor)
            page.predecessor = None
        elif page.frame is not None:
            self._pool.give(page.frame)
            page.frame = None

    def _drop(self, access: Access) -> None:
        """Undo a lease that could not be fulfilled."""
        with self._lock:
            for index in access.pages:
                self._end_lease(self._pages[index])

    # --- taking note of what the engine finished ------------------------------------------------------------------

    def _settle(self) -> None:
        """Take note of every transfer that has finished. Writes first: what waited for them comes after."""
        finished = [page for page in self._in_flight.values() if page.ticket.done]
        for page in finished:
            if page.residency is Residency.WRITING:
                self._settle_write(page)
        for page in finished:
            if page.residency is Residency.READING and page.predecessor is None and not page.fresh:
                self._settle_read(page)

    def _settle_write(self, page: Page) -> None:
        del self._in_flight[page.index]
        ticket, page.ticket = page.ticket, None
        if ticket.error is not None:
            self._failure = self._failure or ticket.error
            self._unsaved[page.index] = ticket.error
            page.move(Residency.DIRTY)
            heir, page.heir = page.heir, None
            if heir is not None:
                heir.predecessor = None
                self._give_up_claim(heir)
            return
        self._store.written(page, ticket)
        self._unsaved.pop(page.index, None)
        page.move(Residency.CLEAN)
        if page.heir is None:
            self._offer(page)
            return
        heir, page.heir = page.heir, None
        page.move(Residency.COLD)
        self._unmap(page)
        heir.frame, page.frame = page.frame, None
        heir.predecessor = None
        if heir.fresh:
            heir.ticket = None
            del self._in_flight[heir.index]

    def _settle_read(self, page: Page) -> None:
        if page.ticket.error is not None:
            # Whoever leases the page is told. Of read-ahead nobody is: the page is read again when it is needed.
            page.error = page.ticket.error if page.leases else None
            self._give_up_claim(page)
            return
        del self._in_flight[page.index]
        page.ticket = None
        page.move(Residency.CLEAN)
        self._map(page)
        self._offer(page)

    def _lost_the_place(self) -> None:
        """The run departed from the schedule, or the schedule is new: next uses must be found anew."""
        self._write_what_was_put_off()
        self._ahead = self._schedule.position
        self._leavers.clear()
        for page in self._pages:
            if page.residency is Residency.READING and page.ticket is None and page.leases == 0:
                self._give_up_claim(page)  # to be made anew, but perhaps not soon
            elif page.residency is not Residency.COLD:
                page.next_use = self._schedule.next_use(page.index)
                self._offer(page)

    def _make_room(self) -> None:
        """No page can leave and none is on its way: free the frames that failed writes hold, and claims for fresh data of later.

        Raises:
            IoError: a write failed; that is why its page cannot leave.
            BudgetError: all frames are leased.
        """
        self._raise_failure()
        idle = [page for page in self._pages if page.leases == 0]
        dirty = [page for page in idle if page.residency is Residency.DIRTY]
        claimed = [page for page in idle if page.residency is Residency.READING]
        for page in dirty:
            self._submit_write(page)
            self._offer(page)
        for page in claimed:
            self._give_up_claim(page)
            self._ahead = self._schedule.position
        if not dirty and not claimed:
            raise BudgetError(
                "everything in the pool is in use at one time: raise host_memory, or gather fewer modules at once "
                f"({self.describe()})"
            )

    def _raise_failure(self) -> None:
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def _map(self, page: Page) -> None:
        page.section.window.map(page.offset, self._pool.offset(page.frame), page.nbytes)  # type: ignore[arg-type]

    def _unmap(self, page: Page) -> None:
        page.section.window.unmap(page.offset, page.nbytes)


def _raise_error_of(page: Page) -> None:
    if page.error is not None:
        error, page.error = page.error, None
        raise error


def _wait_quietly(ticket: Any) -> None:
    """Wait for a ticket whose outcome `_settle` will look at."""
    with contextlib.suppress(IoError):
        ticket.wait()
