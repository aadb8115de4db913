"""The pager: brings pages into frames before they are needed, writes changed ones back, and decides who leaves.

It works only when it is called, from hooks and from the optimizer's sweep; in between, the engine goes on by itself with
what was submitted, and since a read may wait for a write (`after=`), a frame whose page is still on its way out can be
promised to the page that comes next. So the drive is busy in both directions while Python is away in a kernel.

One mutex guards all page and frame state. It is never held while waiting.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import Any

from swapper import _C
from swapper._C import File
from swapper.errors import BudgetError, InvariantError, IoError
from swapper.io.alignment import round_up
from swapper.io.engines import Transfer
from swapper.paging.frames import Frames, VictimCache
from swapper.paging.host_memory import Pool
from swapper.paging.planning.budget import ARENA_ALIGNMENT_BYTES
from swapper.paging.planning.schedule import NEVER, Access, PrefetchDistance, Schedule, choose_resident_set
from swapper.paging.residency import Residency
from swapper.paging.section import Page
from swapper.paging.store.page_store import PageStore
from swapper.paging.writeback import WriteBack
from swapper.runtime.counters import Counters
from swapper.runtime.interrupts import SteadyLock
from swapper.runtime.sizes import format_bytes

log = logging.getLogger("swapper")


class Pager:
    """Owns the residency of every page and the use of every frame.

    Args:
        pages: all pages of the run, each at its own index.
        pool: the frames; owned by the pager from now on.
        store: where pages live (read, write, written).
        schedule: the order of use.
        counters: to keep.
        window_pages: how many pages may be brought in before they are needed at the cost of others' frames. None: as many
            as there are frames. [Note: what stays]
        lazy: write a changed page when its frame is needed, or at a flush, and not as soon as nobody leases it.
        max_deferred_writes: how many pages may wait for their write in spare memory. [Note: deferred writes], paging/frames.py
        writes_noted: returns a number that grows with each write that nobody announced, whoever's page it was in.

    [Note: what stays] A step is a cycle, and of a cycle that does not fit the best is to keep a fixed part and to stream the
    rest through few frames: what was used just now is needed latest, so it makes room for what comes next. If read-ahead took
    every frame, it would take them from pages that are still to be used in this cycle, and all of it would be read each time.
    """

    def __init__(
        self,
        pages: Sequence[Page],
        pool: Pool,
        store: PageStore,
        schedule: Schedule,
        counters: Counters,
        *,
        window_pages: int | None = None,
        lazy: bool = False,
        max_deferred_writes: int = 0,
        writes_noted: Callable[[], int] = _C.writes_noted,
    ) -> None:
        self._pages = pages
        self._frames = Frames(pages, pool, store, lazy, counters)
        self._schedule = schedule
        self.counters = counters
        self._frame_count = pool.frame_count
        self._frame_bytes = pool.frame_bytes
        self._window_pages = pool.frame_count if window_pages is None else max(window_pages, 1)
        self._lazy = lazy
        self._write_back = WriteBack(pages, self._frames, schedule, pool.frame_count, lazy, max_deferred_writes)
        self._lock = SteadyLock()
        self._ahead = 0  # all accesses before this position have been asked for
        self._prefetch_distance = PrefetchDistance()
        self._held: dict[int, tuple[Access, float]] = {}  # by identity: what is leased, and since when; for people
        self._writes_noted = writes_noted
        self._noted = writes_noted()  # of these nothing is to be taken in any more
        self._has_warned = False
        self._choose_resident_set()

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
            self._frames.settle()
            self._frames.raise_failure()
            if access.key is not None:
                self._follow(access)
            missed = self._count_leases(access)
            if access.key is not None:
                self.counters.pages_used += len(access.pages)
                self.counters.pages_missed += missed
            self._held[id(access)] = (access, time.monotonic())
            self._frames.ahead.difference_update(access.pages)
        try:
            self._bring(access)
        except BaseException:
            self._drop(access)
            raise

    def wait(self, access: Access) -> None:
        """Wait until the leased pages of `access` are in memory and those that it writes are not on their way out."""
        try:
            if self._is_there(access):
                return
            for index in access.pages:
                page = self._pages[index]
                self._wait_for_content(page, access)
                if self._frames.is_growing:
                    self.read_ahead()
                if index in access.writes:
                    self._wait_for_write(page)
            self._is_there(access)
        except BaseException:
            self._drop(access)
            raise

    def release(self, access: Access, changed: Collection[int] = ()) -> None:
        """Give the lease back. Pages whose index is in `changed` are written back as soon as nobody leases them."""
        with self._lock:
            self._frames.settle()
            held = self._held.pop(id(access), None)
            if self.counters.trace is not None and held is not None:
                pages_of = {"pages": len(access.pages), "written": len(changed)}
                self.counters.trace.add("leases", str(access.key), held[1], time.monotonic(), **pages_of)
            pages = self._pages
            for index in access.pages:
                page = pages[index]
                if index in changed:
                    page.fresh = False  # it was filled
                    self._frames.allow_writes(page)  # what was noted of it is hereby announced
                    if page.residency is Residency.CLEAN:
                        page.move(Residency.DIRTY)
                self._end_lease(page, index in access.writes)
            if access.key is not None:
                self._read_ahead()

    def written_at(self, access: Access) -> list[tuple[Page, int]]:
        """Return which pages of `access` were written by someone who had not said so, and where in their section, in bytes.

        [Note: writes that nobody announced], paging/frames.py
        """
        if self._writes_noted() == self._noted:
            return []
        with self._lock:
            found = [(self._pages[index], self._frames.written_at(self._pages[index])) for index in access.pages]
        return [(page, at) for page, at in found if at >= 0]

    def forget_written(self, pages: Iterable[int]) -> None:
        """Forget what was written to these pages, which nobody leases: they are read anew from a store that is only read."""
        with self._lock:
            self._frames.settle()
            for index in pages:
                self._frames.forget_written(self._pages[index])
            self._find_written()

    def write_back(self) -> None:
        """Submit the write of every changed page that nobody leases, transient ones excepted.

        Raises:
            IoError: an earlier write failed, and its page keeps a frame from one that is owed.
            BudgetError: something is owed, or was written where nobody leased it, and all frames are leased.
        """
        self._fault_in_deferred(list(self._frames.deferred_writes))
        self.take_in_written()
        with self._lock:
            self._frames.settle()
            self._write_back.write_all()

    def flush(self) -> None:
        """Write every changed page that nobody leases, and wait until no write is in flight.

        Raises:
            IoError: a write failed; its page is still in memory and will be tried again by the next flush.
        """
        self.write_back()
        self.wait_for_writes()

    def wait_for_writes(self) -> None:
        """Wait until no write is in flight. What could not be written before is tried once more.

        Raises:
            IoError: a write failed, now or earlier: the store does not have what memory has.
        """
        with self._lock:
            self._frames.settle()
            self._write_back.write_what_failed()
        for page in [p for p in list(self._frames.in_flight.values()) if self._is_being_saved(p)]:
            self._wait_for_write(page)
        with self._lock:
            self._frames.settle()
            self._frames.raise_failure()
            for error in self._frames.unsaved.values():  # of a page that is leased: it is written when that ends
                raise error

    def writes_are_done(self) -> bool:
        """Return whether all that was released as changed is written: nothing is in flight, put off, or failed.

        Raises:
            IoError: a write failed. It is tried again.
        """
        with self._lock:
            self._frames.settle()
            if self._find_written():
                return False  # the next `write_back` takes it in
            if self._lazy:
                self._write_back.write_what_waits()
            self._write_back.write_what_failed()
            self._frames.raise_failure()
            writing = any(self._is_being_saved(page) for page in self._frames.in_flight.values())
            return not writing and self._write_back.is_done

    def take_in_written(self) -> None:
        """Have what was written where nobody leased it come in, and be written back. [Note: writes that nobody announced]

        Raises:
            IoError, BudgetError: as `write_back`. What was written is still there.
        """
        with self._lock:
            written = self._find_written()
        if written and not self._has_warned:
            self._has_warned = True
            log.warning(
                "parameter %s was changed by code that goes past its guard, while nothing had it in use. The change is kept, but "
                "it is slow, and an fp32 master does not follow: change parameters inside `with manager.gather(..., write=True)`",
                written[0].section.owner_at(self._frames.written_at(written[0])),
            )
        for page in written:
            access = Access(None, (page.index,), writes=frozenset((page.index,)))
            self.acquire(access)
            self.release(access, access.writes)

    def forget(self, pages: Iterable[int]) -> None:
        """Nobody wants the content of these transient pages any more: they need not be written, nor read."""
        with self._lock:
            self._frames.settle()
            for index in pages:
                if self._pages[index].leases == 0:
                    self._frames.forget(self._pages[index])

    def file_of(self, page: Page) -> File | None:
        """Return the file that has what was written of `page` last, at `page.stored_offset`."""
        return self._frames.file_of(page)

    def use_spare(self, victim_cache: VictimCache) -> None:
        """From now on pages that must leave before they are read again may be kept in `victim_cache`."""
        self._frames.victim_cache = victim_cache

    def drop_kept(self, pages: Iterable[int]) -> None:
        """The spare memory that may have the content of these pages is about to be used.

        Raises:
            IoError, BudgetError: as `write_back`. The memory has their content still.
        """
        self._fault_in_deferred(index for index in pages if index in self._frames.deferred_writes)
        with self._lock:
            for index in pages:
                self._frames.drop_kept(self._pages[index])

    def back_cold_pages(self) -> None:
        """Where a run goes on: what was never in memory can be read past the guard too. See csrc/memory/fault.h."""
        with self._lock:
            self._frames.back_cold_pages()

    def end_step(self, learn: bool = True) -> None:
        """The step is over: what it did is what the next one is expected to do.

        Args:
            learn: False where it is known that the next one will do something else: what was expected is expected still.
        """
        with self._lock:
            if not self._lazy:
                self._write_back.write_what_waits()
            if self._schedule.end_step(learn):
                self._choose_resident_set()
                self._lost_the_place()
                self._read_ahead()

    def expected_before(self, key: Hashable) -> list[Any]:
        """Return the keys of what is expected in what is left of this step before `key`; of nothing if that is not."""
        with self._lock:
            return self._schedule.expected_before(key)

    def read_ahead(self) -> None:
        """Begin with the schedule's first accesses before anybody asks for them."""
        with self._lock:
            self._read_ahead()

    def expect(self, cycle: Sequence[Access]) -> None:
        """From here on `cycle` is what is expected, over and over, in place of what was."""
        with self._lock:
            self._frames.settle()
            self._schedule.follow(cycle)
            self._choose_resident_set()
            self._lost_the_place()
            self._read_ahead()

    def drop_leases(self, kept: Iterable[Access] = ()) -> None:
        """Give back every lease but those of `kept`: what held them is gone (an exception or Ctrl-C went through it)."""
        accesses = list(kept)
        counts = Counter(index for access in accesses for index in access.pages)
        with self._lock:
            self._held = {id(a): self._held[id(a)] for a in accesses if id(a) in self._held}
            for page in self._pages:
                if page.leases > counts[page.index]:
                    page.leases = counts[page.index] + 1
                    self._end_lease(page)
            self._write_back.write_what_waits()

    def discard(self, stay: Collection[int] = ()) -> None:
        """Wait for all transfers and forget the content of every frame: what is in the store is what there is.

        The windows forget the files too, which may be closed now; `back_cold_pages` has them read there again.

        Args:
            stay: pages that remain mapped, for whoever still has a tensor of them: the pager is at its end.
        """
        self.discard_pages(set(range(len(self._pages))).difference(stay))
        with self._lock:
            self._held.clear()
            with contextlib.suppress(IoError):
                self._frames.raise_failure()  # of what is thrown away now
            self._frames.forget_files(stay)

    def discard_pages(self, pages: Iterable[int]) -> None:
        """Wait for the transfers of these pages and forget what frames and spare memory have of them, and all leases of them."""
        given = [self._pages[index] for index in pages]
        for page in given:
            ticket = page.ticket
            if ticket is not None:
                _wait_quietly(ticket)
        with self._lock:
            for page in given:
                self._frames.deferred_writes.pop(page.index, None)  # or it would be written as soon as it is there
            self._frames.settle()
            self._ahead = self._schedule.position
            for page in given:
                self._write_back.forget(page)
                self._frames.unsaved.pop(page.index, None)
                page.leases = 0
                page.kept = False
                if page.residency in (Residency.CLEAN, Residency.DIRTY):
                    self._frames.evict(page)
                elif page.residency is Residency.READING:
                    self._frames.give_up_claim(page)

    def describe(self) -> str:
        """Return a dump of leases, frames and tickets, for a person."""
        return self._frames.describe(self._held)

    def check(self) -> None:
        """Raise InvariantError unless frames are conserved and belong to one page each."""
        with self._lock:
            self._frames.check()

    # --- bringing pages in ----------------------------------------------------------------------------------------

    def _count_leases(self, access: Access) -> int:
        """Lease the pages. Returns how many of them nobody has asked the drive for, though they must be read."""
        missed, cold, pages = 0, Residency.COLD, self._pages
        for index in access.pages:
            page = pages[index]
            page.leases += 1
            if page.residency is cold and index not in access.fresh:
                missed += 1
        return missed

    def _bring(self, access: Access) -> None:
        """Claim a frame for each leased page that has none, waiting for frames if need be, then read ahead."""
        wanted = [self._pages[index] for index in reversed(access.pages)]
        while True:
            with self._lock:
                self._frames.settle()
                blocker = self._claim_what_is_wanted(wanted, access.fresh)
                if not wanted:
                    if access.key is not None:  # outside of a step, what comes next may be far away
                        self._read_ahead()
                    return
            if blocker is not None:
                with self.counters.waiting("frame", blocker):
                    _wait_quietly(blocker.ticket)
            else:
                with self.counters.waiting("frame", "memory that is being taken"):
                    self._frames.wait_for_growth()

    def _claim_what_is_wanted(self, wanted: list[Page], fresh: Collection[int]) -> Page | None:
        """Claim frames for `wanted`, last first, taking them off it. Returns the page in flight to wait for, if any.

        If there is none and some are left, it is memory for more frames that is to be waited for.
        """
        while wanted:
            page = wanted[-1]
            if page.residency is Residency.WRITING and page.next_owner is not None:
                return page  # its frame is promised: it must leave before it can come again
            if page.residency is not Residency.COLD or self._claim(page, page.index in fresh, -1):
                wanted.pop()
            elif self._frames.is_growing:
                return None
            elif self._write_back.has_put_off:
                self._write_back.write_put_off()
            elif self._frames.in_flight:
                return next(iter(self._frames.in_flight.values()))  # the oldest
            else:
                self._make_room()
        return None

    def _read_ahead(self) -> None:
        """Claim frames along the schedule for as long as there are pages that are needed later than those wanted."""
        pages, cold, ahead = self._pages, Residency.COLD, self._frames.ahead
        self._ahead = max(self._ahead, self._schedule.position)
        end = self._schedule.position + self._prefetch_distance.accesses(len(self._schedule.cycle))
        while self._ahead < end:
            access = self._schedule.at(self._ahead)
            for index in () if self._schedule.is_over(self._ahead) else access.pages:
                page = pages[index]
                if page.residency is cold and page.leases == 0:
                    fresh = index in access.fresh
                    if not fresh and page.location is None:
                        if page.section.transient:
                            continue  # its content is still to be made
                        return
                    if len(ahead) >= self._window_pages and not self._frames.has_free():
                        return  # [Note: what stays]
                    if not self._claim(page, fresh, self._ahead):
                        return
                    ahead.add(index)
            self._ahead += 1

    def _claim(self, page: Page, fresh: bool, position: int) -> bool:
        """Give `page` a frame, or a promise of one, and submit its read. False if no page with a later use can leave."""
        victim: Page | None = None
        if not self._frames.has_free():
            victim = self._frames.pop_victim(position)
            if victim is None:
                return False
            self._ahead = min(self._ahead, victim.next_use)  # if that was asked for already, it must be again
        page.next_use = position if position >= 0 else page.next_use
        self._frames.claim(page, fresh, victim, keep=victim is not None and self._write_back.is_read_again(victim))
        return True

    def _is_there(self, access: Access) -> bool:
        """Return whether nothing needs to be waited for, as is usual. What is to be made anew is made ready for it."""
        with self._lock:
            self._frames.settle()
            pages = self._pages
            for index in access.pages:
                page = pages[index]
                residency = page.residency
                if residency is Residency.CLEAN or residency is Residency.DIRTY:
                    continue
                if residency is Residency.WRITING:
                    if index in access.writes:
                        return False
                elif _is_to_be_made(page, access):
                    self._frames.fill_fresh(page)
                else:
                    return False
            if access.writes:
                self._frames.raise_failure()
            for index in access.writes:
                if pages[index].guarded:
                    self._frames.allow_writes(pages[index])
        return True

    def _wait_for_content(self, page: Page, access: Access) -> None:
        awaited = False
        while True:
            with self._lock:
                self._frames.settle()
                if page.residency is Residency.COLD:  # its read failed, or its write took the frame along
                    _raise_error_of(page)
                    ticket = None
                elif page.residency is not Residency.READING:
                    break
                elif page.fresh and page.previous_owner is None:
                    if page.index in access.fresh:
                        self._frames.fill_fresh(page)
                        break
                    self._frames.read_after_all(page)  # the schedule was wrong
                previous_owner = page.previous_owner
                ticket = page.ticket if previous_owner is None else previous_owner.ticket
            if ticket is None:
                self._bring(access)
            elif previous_owner is not None:  # [Note: promised frames]
                with self.counters.waiting("frame", previous_owner):
                    self._wait_for_read(page, ticket)
            else:
                awaited = True
                with self.counters.waiting("read", page):
                    self._wait_for_read(page, ticket)
        self.counters.pages_awaited += awaited and access.key is not None

    def _wait_for_read(self, page: Page, ticket: Transfer) -> None:
        try:
            ticket.wait()
        except IoError:
            with self._lock:
                self._frames.settle()
                self._frames.raise_failure()  # the cause, if it was a write that this read waited for
                _raise_error_of(page)
            raise

    # --- letting pages go -----------------------------------------------------------------------------------------

    def _find_written(self) -> list[Page]:
        """Return the pages that were written where nobody leased them. Asks them where a write was noted since there were none."""
        noted = self._writes_noted()
        written = self._frames.find_written() if noted != self._noted else []
        if not written:
            self._noted = noted
        return [page for page in written if page.leases == 0]  # of the others, who leases them will be told

    def _end_lease(self, page: Page, made: bool = False) -> None:
        """One lease of `page` is over. `made`: it was one to change it."""
        if page.leases <= 0:
            raise InvariantError(f"{page} is released but was not leased")
        page.leases -= 1
        if page.leases:
            return
        page.next_use = self._schedule.next_use(page.index)
        if page.residency is Residency.CLEAN and not self._write_back.is_read_again(page):
            page.next_use = NEVER  # what it has will be made anew: nothing is worth less
        self._frames.guard(page)  # before it is on its way to the drive
        if page.residency is Residency.DIRTY:
            if page.fresh:
                self._frames.evict(page)  # it was not filled: the store still has its content
            elif not page.section.transient:
                self._write_back.add(page, made)
        self._frames.enqueue_for_eviction(page)

    def _is_being_saved(self, page: Page) -> bool:
        return page.residency is Residency.WRITING and not page.section.transient

    def _fault_in_deferred(self, deferred_writes: Iterable[int]) -> None:
        """Fault in pages whose write was deferred, which writes them."""
        for index in deferred_writes:
            access = Access(None, (index,))
            self.acquire(access)
            self.release(access)

    def _wait_for_write(self, page: Page) -> None:
        while True:
            with self._lock:
                self._frames.settle()
                if page.residency is not Residency.WRITING:
                    self._frames.raise_failure()
                    return
                ticket = page.ticket
            with self.counters.waiting("write", page):
                _wait_quietly(ticket)

    def _drop(self, access: Access) -> None:
        """Undo a lease that could not be fulfilled."""
        with self._lock:
            self._held.pop(id(access), None)
            for index in access.pages:
                self._end_lease(self._pages[index])

    # --- when things are not as expected --------------------------------------------------------------------------

    def _follow(self, access: Access) -> None:
        """`access` happens now: find the place in the schedule."""
        before = self._schedule.position
        if self._schedule.advance(access):
            self._prefetch_distance.hit()
            return
        if not before <= self._schedule.position <= max(self._ahead, before + 1):
            self._prefetch_distance.miss()
        self._lost_the_place()

    def _choose_resident_set(self) -> None:
        pages = self._pages
        self._frames.resident_set = choose_resident_set(
            self._schedule.cycle, lambda index: pages[index].nbytes, self._frame_count, self._window_pages
        )

    def _lost_the_place(self) -> None:
        """The run departed from the schedule, or the schedule is new: next uses must be found anew."""
        if not self._lazy:
            self._write_back.write_what_waits()
        self._ahead = self._schedule.position
        self._frames.ahead.clear()
        for page in self._pages:
            if page.residency is Residency.READING and page.ticket is None and page.leases == 0:
                self._frames.give_up_claim(page)  # to be made anew, but perhaps not soon
        self._frames.enqueue_all_for_eviction(self._schedule.next_use)

    def _make_room(self) -> None:
        """No page can leave and none is on its way: free the frames that failed writes hold, and claims for fresh data of later.

        Raises:
            IoError: a write failed; that is why its page cannot leave.
            BudgetError: all frames are leased.
        """
        self._frames.raise_failure()
        idle = [page for page in self._pages if page.leases == 0]
        dirty = [page for page in idle if page.residency is Residency.DIRTY]
        claimed = [page for page in idle if page.residency is Residency.READING]
        for page in dirty:
            self._frames.write(page)
        for page in claimed:
            self._frames.give_up_claim(page)
            self._ahead = self._schedule.position
        if not dirty and not claimed:
            raise self._too_few_frames(sum(page.leases > 0 and page.frame is None for page in self._pages))

    def check_room(self, pages: Iterable[int]) -> None:
        """Raise BudgetError if there are too few frames for `pages` beside those that are leased now."""
        leased = {page.index for page in self._pages if page.leases}
        missing = len(leased.union(pages)) - self._frame_count
        if missing > 0:
            raise self._too_few_frames(missing)

    def _too_few_frames(self, missing: int) -> BudgetError:
        nbytes = round_up(max(missing, 1) * self._frame_bytes, ARENA_ALIGNMENT_BYTES)
        return BudgetError(
            f"too much is in use at one time: raise host_memory by at least {format_bytes(nbytes)} ({nbytes} bytes), or use "
            f"or gather fewer modules at once\n{self.describe()}"
        )


def _is_to_be_made(page: Page, access: Access) -> bool:
    """Return whether `page` has a frame that is free of its past, for content that `access` makes anew."""
    return (
        page.residency is Residency.READING
        and page.fresh
        and page.previous_owner is None
        and page.index in access.fresh
    )


def _raise_error_of(page: Page) -> None:
    if page.error is not None:
        error, page.error = page.error, None
        raise error from None


def _wait_quietly(ticket: Transfer | None) -> None:
    """Wait for a ticket whose outcome `_settle` will look at."""
    if ticket is not None:
        with contextlib.suppress(IoError):
            ticket.wait()
