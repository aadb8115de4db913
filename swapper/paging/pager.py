"""The pager: leases pages, reads them before they are needed, writes changed ones back, and evicts others.

It works only when it is called, from hooks and from the optimizer's sweep; in between, the engine carries out what was submitted.
Since a read may wait for a write (`after=`), a frame whose page is still being written can be promised to the next page: the drive
is busy in both directions while Python waits for a kernel.

One mutex guards all page and frame state. It is never held while waiting.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

from swapper import _C
from swapper._C import File
from swapper.errors import InvariantError, IoError
from swapper.io.engines import Transfer
from swapper.paging.frames import Frames, VictimCache
from swapper.paging.host_memory import Pool
from swapper.paging.prefetcher import Prefetcher, WriteBack
from swapper.paging.residency import CLEAN, COLD, DIRTY, READING, WRITING
from swapper.paging.schedule import NEVER, Access, Schedule
from swapper.paging.section import NO_FRAME, Page
from swapper.paging.store.page_files import PageStore
from swapper.runtime.counters import FAMILIES, Counters
from swapper.runtime.interrupts import make_lock

log = logging.getLogger("swapper")


class Pager:
    """Owns the residency of every page and the use of every frame.

    Args:
        pages: all pages of the run, each at its own index; `add_pages` adds more.
        pool: the frames; owned by the pager from now on.
        store: reads and writes pages.
        schedule: the order of use.
        window_pages: pages that may be read early at the cost of others; None: the frame count. [Note: what stays]
        lazy: write a changed page when its frame is needed, or at a flush, and not as soon as it is unleased.
        max_deferred_writes: how many pages may wait for their write in the victim cache. [Note: deferred writes], paging/frames.py
        writes_noted: returns a number that grows with each unannounced write, in any page.
        finished: returns a number that grows with each transfer that finishes; None: not known.
        one_at_a_time: an access of the schedule is released before the next one is leased.

    Attributes:
        end_copies: waits for copies of pages to a device, and ends their leases; set by what copies.
        taken_in: how many pages `take_in_written` has read in.
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
        finished: Callable[[], int] | None = None,
        one_at_a_time: bool = False,
    ) -> None:
        self._pages = pages = list(pages)
        self._pool = pool
        self._store = store
        self._schedule = schedule
        self.counters = counters
        self._lazy = lazy
        self._frames = Frames(pages, pool, store, lazy, counters, finished)
        self._write_back = WriteBack(pages, self._frames, schedule, pool.frame_count, lazy, max_deferred_writes)
        self._prefetcher = Prefetcher(
            pages, pool, self._frames, schedule, self._write_back, window_pages, one_at_a_time
        )
        self.end_copies: Callable[[], None] = lambda: None
        self._lock = make_lock()
        self._writes_noted = writes_noted
        self._noted = writes_noted()  # of these none is to be taken in any more
        self._has_warned = False
        self.taken_in = 0

    @property
    def broken_by(self) -> str:
        """The exception that struck while the states of pages were changed, which are not known then; empty: none did."""
        return self._lock.broken_by

    # --- the two verbs: lease and release -------------------------------------------------------------------------

    def acquire(self, access: Access) -> None:
        """Lease the access's pages and wait until they are in memory.

        Raises:
            IoError: a page could not be read, or an earlier one not written. Nothing is leased then.
        """
        if not self.lease(access):
            self.wait(access)

    @contextmanager
    def leased(self, access: Access) -> Iterator[None]:
        """Lease the access's pages within the context, which changes those that the access writes. Raises as `acquire`."""
        self.acquire(access)
        try:
            yield
        finally:
            self.release(access, access.writes)

    def lease(self, access: Access) -> bool:
        """Keep the access's pages from eviction and submit their reads; `wait` waits for them.

        Returns:
            True if `wait` has nothing to do: all pages are mapped, and none is to be changed.

        Raises:
            IoError: an earlier write failed. Nothing is leased then.
        """
        is_leased = has_frames = False
        try:
            with self._lock:
                if self._frames.in_flight:
                    self._frames.settle()
                if self._frames.failure is not None:
                    self._frames.raise_failure()
                if access.key is not None:
                    self._prefetcher.follow(access)
                has_frames, is_there = self._count_leases(access)
                is_leased = True
                if has_frames and access.key is not None:
                    self._prefetcher.read_ahead()
            if not has_frames:
                self._claim_frames(access)
        except BaseException:
            if is_leased:
                self._drop(access)
            raise
        return is_there

    def wait(self, access: Access) -> None:
        """Wait until the leased pages of `access` are in memory, and those that it writes are not being written."""
        try:
            ready = self._prepare(access)
            if ready == len(access.pages):
                return
            while ready < len(access.pages):
                page = self._pages[access.pages[ready]]
                self._wait_for_content(page, access)
                if self._pool.is_growing:
                    self.read_ahead()
                if page.index in access.writes or self._frames.is_outside(page):
                    self._wait_for_write(page)
                ready = self._prepare(access, ready + 1)
            self._prepare(access)
        except BaseException:
            self._drop(access)
            raise

    def release(self, access: Access, changed: Collection[int] = ()) -> None:
        """End the lease. Pages whose index is in `changed` are written back as soon as they are unleased.

        A page of a lease for reading that was changed while it is being written stays noted: the next flush writes it again.
        """
        with self._lock:
            if self._frames.in_flight:
                self._frames.settle()
            held = self._frames.held.pop(id(access), None)
            if self.counters.trace is not None and held is not None:
                pages_of = {"pages": len(access.pages), "written": len(changed)}
                self.counters.trace.add("leases", str(access.key), held[1], time.monotonic(), **pages_of)
            pages = self._pages
            for index, next_use in zip(access.pages, self._schedule.next_uses(access.pages), strict=True):
                page = pages[index]
                if index in changed and page.residency is not WRITING:
                    page.fresh = False  # it was filled
                    if page.guarded or not page.shown:
                        self._frames.allow_writes(page)  # what was noted of it is announced now
                    if page.residency is CLEAN:
                        page.move(DIRTY)
                self._end_lease(page, next_use, index in access.writes)
            if access.key is not None:
                self._prefetcher.read_ahead()

    @property
    def has_noted_writes(self) -> bool:
        """Whether `written_at` must look: an unannounced write was noted, in any page, since the last look at all found none."""
        return self._writes_noted() != self._noted

    def written_at(self, access: Access) -> list[tuple[Page, int]]:
        """Return the pages of `access` with unannounced writes, and the offset of one in their section, in bytes.

        [Note: unannounced writes], paging/frames.py
        """
        if self._writes_noted() == self._noted:
            return []
        with self._lock:
            found = [(self._pages[index], self._frames.written_at(self._pages[index])) for index in access.pages]
        return [(page, at) for page, at in found if at >= 0]

    def forget_written(self, pages: Iterable[int]) -> None:
        """Forget unannounced writes to these unleased pages of a read-only store: they are read again."""
        with self._lock:
            self._frames.settle()
            for index in pages:
                self._frames.forget_written(self._pages[index])
            self._find_written()

    def write_back(self) -> None:
        """Submit the write of every changed page that is not leased, transient ones excepted.

        Leases for copies to a device end first, after waiting for these.

        Raises:
            IoError: an earlier write failed, and a page with a deferred write needs its frame.
            BudgetError: a write was deferred or unannounced, and all frames are leased.
        """
        self._fault_in_deferred(list(self._frames.deferred_writes))
        self.take_in_written()
        with self._lock:
            self._frames.settle()
            has_leased = self._write_back.write_all()
        if has_leased:
            self.end_copies()
            with self._lock:
                self._write_back.write_all()

    @property
    def leased_pages(self) -> int:
        """How many pages are leased; one that is leased twice counts twice."""
        return sum(map(attrgetter("leases"), self._pages))

    @property
    def frame_bytes(self) -> int:
        return self._pool.frame_bytes

    def flush(self) -> None:
        """Write every changed page that is not leased, and wait until no write is in flight.

        Raises:
            IoError: a write failed; its page is still in memory and will be tried again by the next flush.
        """
        self.write_back()
        self.wait_for_writes()

    def wait_for_writes(self) -> None:
        """Wait until no write is in flight. Failed writes are tried once more.

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
            for error in self._frames.unsaved.values():  # of a leased page: it is written at its release
                raise error

    def writes_are_done(self) -> bool:
        """Return whether all changed pages are written: none is leased, in flight, deferred, failed, or unannounced.

        Raises:
            IoError: a write failed. It is tried again.
        """
        with self._lock:
            self._frames.settle()
            if self._find_written():
                return False  # the next `write_back` takes them in, or their leases report them
            if self._lazy:
                self._write_back.write_what_waits()
            self._write_back.write_what_failed()
            self._frames.raise_failure()
            writing = any(self._is_being_saved(page) for page in self._frames.in_flight.values())
            return not writing and self._write_back.is_done and not self._write_back.has_leased

    def take_in_written(self) -> None:
        """Read in unleased pages with unannounced writes, and write them back. [Note: unannounced writes], paging/frames.py

        Raises:
            IoError, BudgetError: as `write_back`. The writes are not lost.
        """
        with self._lock:
            written = [page for page in self._find_written() if not page.leases]  # leases report the others
        if written and not self._has_warned:
            self._has_warned = True
            log.warning(
                "parameter %s was changed by code that goes past its guard, while nothing had it in use. The change is kept, but "
                "it is slow, and an fp32 master does not follow: change parameters inside `with manager.gather(..., write=True)`",
                written[0].section.owner_at(self._frames.written_at(written[0])),
            )
        self.taken_in += len(written)
        for page in written:
            access = Access(None, (page.index,), writes=frozenset((page.index,)))
            self.acquire(access)
            self.release(access, access.writes)

    def forget(self, pages: Iterable[int]) -> None:
        """Forget the content of these transient pages: it need not be written, nor read."""
        with self._lock:
            self._frames.settle()
            for index in pages:
                if self._pages[index].leases == 0:
                    self._frames.forget(self._pages[index])

    def file_of(self, page: Page) -> File | None:
        """Return the file that has the content of `page` that was written last, at `page.stored_offset`."""
        return self._store.file_of(page)

    def end_failures(self) -> None:
        """Wait for what is in flight, and forget which writes failed: one was reported. Their pages stay in memory."""
        for page in list(self._frames.in_flight.values()):
            _wait_quietly(page.ticket)
        with self._lock, contextlib.suppress(IoError):
            self._frames.settle()
            self._frames.raise_failure()

    def raise_later(self, failure: IoError) -> None:
        """Have the next lease raise the failure of a write, which a lease for later has raised: nobody needs that page yet."""
        with self._lock:
            self._frames.keep_failure(failure)

    def add_pages(self, pages: Iterable[Page]) -> None:
        """Own these pages too: COLD ones, whose indices follow those before."""
        with self._lock:
            self._pages += pages

    def use_victim_cache(self, victim_cache: VictimCache) -> None:
        """From now on keep evicted pages that are read again in `victim_cache`, if it has room."""
        self._frames.victim_cache = victim_cache

    def drop_cached(self, pages: Collection[int]) -> None:
        """Have the victim cache's memory for these pages unused: it is needed for something else.

        Raises:
            IoError, BudgetError: as `write_back`. The memory still has their content.
        """
        if self._frames.deferred_writes:
            self._fault_in_deferred(index for index in pages if index in self._frames.deferred_writes)
        with self._lock:
            for index in pages:
                self._frames.drop_cached(self._pages[index])

    def back_cold_pages(self) -> None:
        """Let pages of a resumed run that were never in memory be read past the guard too. See csrc/memory/fault.h."""
        with self._lock:
            self._frames.back_cold_pages()

    def end_step(self, learn: bool = True) -> None:
        """End the step. The next one is expected to do what it did, or, if not `learn`, what was expected before."""
        with self._lock:
            self._write_back.stop_waiting()
            self._prefetcher.end_step(learn)

    def expected_before(self, key: Hashable) -> list[Any]:
        """Return the keys expected in the rest of this step before `key`; none if `key` is not expected."""
        with self._lock:
            return self._schedule.expected_before(key)

    def read_ahead(self) -> None:
        """Prefetch along the schedule."""
        with self._lock:
            self._prefetcher.read_ahead()

    def expect(self, cycle: Sequence[Access]) -> None:
        """Expect `cycle` from here on, repeatedly, instead of what was expected."""
        with self._lock:
            self._frames.settle()
            self._prefetcher.expect(cycle)

    def drop_leases(self, kept: Iterable[Access] = ()) -> None:
        """End all leases but those of `kept`: what held the others was ended by an exception or Ctrl-C."""
        accesses = list(kept)
        counts = Counter(index for access in accesses for index in access.pages)
        with self._lock:
            held = self._frames.held
            self._frames.held = {id(a): held[id(a)] for a in accesses if id(a) in held}
            for page in self._pages:
                if page.leases > counts[page.index]:
                    page.leases = counts[page.index] + 1
                    self._end_lease(page, self._schedule.next_use(page.index))
            self._write_back.write_what_waits()

    def discard(self, stay: Collection[int] = ()) -> None:
        """Wait for all transfers and forget the content of every frame: only the store's content remains.

        The windows forget the files too, which may be closed now; `back_cold_pages` attaches them again.

        Args:
            stay: pages whose windows remain as they are, since somebody refers to them; the pager is closed then.
        """
        self.discard_pages(set(range(len(self._pages))).difference(stay))
        with self._lock:
            self._frames.held.clear()
            with contextlib.suppress(IoError):
                self._frames.raise_failure()  # of what is thrown away now
            for page in self._pages:
                if page.index not in stay:
                    page.section.window.unmap(page.offset, page.nbytes)

    def settle(self, pages: Iterable[Page]) -> None:
        """Wait for the transfers of these pages, and process them."""
        for ticket in [page.ticket for page in pages if page.ticket is not None]:
            _wait_quietly(ticket)
        with self._lock:
            self._frames.settle()

    def discard_pages(self, pages: Iterable[int]) -> None:
        """Wait for the transfers of these pages, and forget their content in frames and the victim cache, and their leases."""
        given = [self._pages[index] for index in pages]
        for page in given:
            ticket = page.ticket
            if ticket is not None:
                _wait_quietly(ticket)
        with self._lock:
            for page in given:
                self._frames.deferred_writes.pop(page.index, None)  # or it would be written once it is loaded
            self._frames.settle()
            self._prefetcher.start_again()
            for page in given:
                self._write_back.forget(page)
                self._frames.unsaved.pop(page.index, None)
                page.leases = 0
                page.kept = False
                if page.residency in (CLEAN, DIRTY):
                    self._frames.evict(page)
                elif page.residency is READING:
                    self._frames.give_up_claim(page)

    def bytes_by_family(self) -> dict[str, int]:
        """Return the bytes of pages that have a frame, by family. Takes no lock: a page more or less may be on its way."""
        found = dict.fromkeys(FAMILIES, 0)
        for page in self._pages:
            if page.frame is not NO_FRAME:
                found[page.section.plan.family] += page.nbytes
        return found

    def describe(self) -> str:
        """Return a dump of leases, frames and tickets, for a person."""
        return self._frames.describe()

    def check(self) -> None:
        """Raise InvariantError unless frames are conserved and belong to one page each."""
        with self._lock:
            self._frames.check()

    def check_room(self, pages: Iterable[int]) -> None:
        """Raise BudgetError if there are too few frames for `pages` in addition to those that are leased now."""
        self._prefetcher.check_room(pages)

    # --- reading pages --------------------------------------------------------------------------------------------

    def _count_leases(self, access: Access) -> tuple[bool, bool]:
        """Lease the pages. Returns whether all have frames of their own, and whether nothing need be waited for."""
        has_frames, is_there = True, not access.writes
        missed, pages = 0, self._pages  # missed: they must be read, and were not prefetched
        for index in access.pages:
            page = pages[index]
            page.leases += 1
            page.eviction_rank = None
            if page.shown:
                continue
            is_there = False
            if page.residency is COLD:
                has_frames = False
                missed += index not in access.fresh
            elif page.next_owner is not None:
                has_frames = False
        if access.key is not None:
            self.counters.pages_used += len(access.pages)
            self.counters.pages_missed += missed
        self._frames.held[id(access)] = (access, time.monotonic())
        self._frames.ahead.difference_update(access.pages)
        return has_frames, is_there

    def _claim_frames(self, access: Access) -> None:
        """Claim a frame for each leased page that has none, waiting for frames if need be, then read ahead."""
        missing = [self._pages[index] for index in reversed(access.pages)]
        while True:
            with self._lock:
                self._frames.settle()
                blocker = self._prefetcher.claim_leased(missing, access.fresh)
                if not missing:
                    if access.key is not None:  # outside of a step, the next use may be far away
                        self._prefetcher.read_ahead()
                    return
            if blocker is not None:
                with self.counters.waiting("frame", blocker):
                    _wait_quietly(blocker.ticket)
            else:
                with self.counters.waiting("frame", "memory that is being taken"):
                    self._pool.wait_for_growth()

    def _prepare(self, access: Access, begin: int = 0) -> int:
        """Show the pages of `access` from place `begin` on, and prepare frames of those that are overwritten.

        Returns the place of the first one to wait for, where that ends; their number if there is none, as is usual.
        """
        with self._lock:
            if self._frames.in_flight:
                self._frames.settle()
            pages = self._pages
            for place in range(begin, len(access.pages)):
                index = access.pages[place]
                page = pages[index]
                residency = page.residency
                if residency is WRITING:
                    if index in access.writes or self._frames.is_outside(page):
                        return place
                elif residency is not CLEAN and residency is not DIRTY:
                    if not _is_to_be_overwritten(page, access):
                        return place
                    self._frames.fill_fresh(page, index in access.in_frames)
                if not page.shown and (index not in access.in_frames or self._frames.is_outside(page)):
                    self._frames.show(page)
            if access.writes and self._frames.failure is not None:
                self._frames.raise_failure()
            for index in access.writes:
                if pages[index].guarded:
                    self._frames.allow_writes(pages[index])
        return len(access.pages)

    def _wait_for_content(self, page: Page, access: Access) -> None:
        awaited = False
        while True:
            with self._lock:
                self._frames.settle()
                if page.residency is COLD:  # its read failed, or its frame was promised to another page
                    _raise_error_of(page)
                    ticket = None
                elif page.residency is not READING:
                    break
                elif page.fresh and page.previous_owner is None:
                    if page.index in access.fresh:
                        self._frames.fill_fresh(page, page.index in access.in_frames)
                        break
                    self._frames.read_after_all(page)  # the schedule was wrong
                previous_owner = page.previous_owner
                ticket = page.ticket if previous_owner is None else previous_owner.ticket
            if ticket is None:
                self._claim_frames(access)
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

    # --- ending leases and writing --------------------------------------------------------------------------------

    def _find_written(self) -> list[Page]:
        """Return the pages with unannounced writes. Searches only if one was noted since the last search found none."""
        noted = self._writes_noted()
        written = self._frames.find_written() if noted != self._noted else []
        if not written:
            self._noted = noted
        return written

    def _end_lease(self, page: Page, next_use: int, made: bool = False) -> None:
        """End a lease of `page`. `made`: it was one for writing."""
        if page.leases <= 0:
            raise InvariantError(f"{page} is released but was not leased")
        page.leases -= 1
        if page.leases:
            if not page.guarded and not any(page.index in held.writes for held, _ in self._frames.held.values()):
                self._frames.guard(page)  # those that are left only read
            return
        page.next_use = next_use
        if page.residency is CLEAN and page.index in self._schedule.fresh and not self._write_back.is_read_again(page):
            page.next_use = NEVER  # it is overwritten next: evict it first
        self._frames.guard(page)  # before its write is submitted
        if page.residency is DIRTY:
            if page.fresh:
                self._frames.evict(page)  # it was not filled: the store still has its content
            elif not page.section.transient:
                self._write_back.add(page, made)
        self._frames.enqueue_for_eviction(page)

    def _is_being_saved(self, page: Page) -> bool:
        return page.residency is WRITING and not page.section.transient

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
                if page.residency is not WRITING:
                    self._frames.raise_failure()
                    return
                ticket = page.ticket
            with self.counters.waiting("write", page):
                _wait_quietly(ticket)

    def _drop(self, access: Access) -> None:
        """Undo a lease that failed."""
        with self._lock:
            self._frames.held.pop(id(access), None)
            for index in access.pages:
                self._end_lease(self._pages[index], self._schedule.next_use(index))


def _is_to_be_overwritten(page: Page, access: Access) -> bool:
    """Return whether `page` has a frame, free of its previous owner, that `access` overwrites."""
    has_its_frame = page.residency is READING and page.previous_owner is None
    return has_its_frame and page.fresh and page.index in access.fresh


def _raise_error_of(page: Page) -> None:
    if page.error is not None:
        error, page.error = page.error, None
        try:
            raise error from None
        finally:
            del error  # its traceback refers to this frame, and to what the caller's frames hold


def _wait_quietly(ticket: Transfer | None) -> None:
    """Wait for a ticket whose outcome `settle` will check."""
    if ticket is not None:
        with contextlib.suppress(IoError):
            ticket.wait()
