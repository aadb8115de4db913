"""Frames: which page has which frame, and every move of a page between its frame and the store.

The pager and the prefetcher decide what moves, under the pager's lock, and call this, which waits for nothing. `settle` processes
what the engine has finished; everything that looks at residency calls it first.

[Note: promised frames] When the frame of a WRITING page is promised, that page's `next_owner` is the page that will get it, which
is READING already, its read queued behind the write. When the write is done the page goes CLEAN -> COLD and the frame changes
hands. If the write fails the engine cancels the read: the page is DIRTY again in its frame, the next owner COLD. The read begins
without Python, at any time after it was submitted. So the page's window is unmapped from the frame before that; its addresses then
give the frame's bytes until the write is over, and the file's after it ([Note: bytes on their way out], csrc/memory/fault.h). A
window shows its own page's bytes at every instant.

[Note: unannounced writes] Leased parameters can be changed in ways that torch's version counter does not see
(`weight.data.clamp_()`, `weight.numpy()`). Their pages are mapped read-only unless the lease is one for writing: the first write
faults, is let through and noted (csrc/memory/fault.h), and the lease's owner asks for it before the release (`written_at`). Code
that goes past the guard of cold parameters can also write to pages that are not leased, in memory or not. That is noted too, and
kept outside of the frames until the page is mapped next. `find_written` finds such pages, and the pager writes them. If a write of
the page was under way, the drive may have got a mix, and its checksum is of another: the page is `torn` until it is written again.
All of its bytes are kept, whatever is read from the drive then, and no commit names them meanwhile.

[Note: lazy windows] Filling the page table for a window takes 0.09 CPU seconds a GB, for nothing if a device copies
from the frame and to it. So pages of sections that a device uses (`Section.in_frames`) are mapped only for a lease that
uses their addresses. Until then their addresses give the frame's bytes, copied at a fault, as those of an evicted page
give the file's. What such code writes is kept, and merged into the frame before a lease has it, not under a write.

[Note: deferred writes] A step whose updates are spread over the forward makes the drive write all through the forward and leaves it
nothing to write in backward. So some of the parameters that the forward has updated, and that backward needs again, go to the
victim cache unwritten, and are written when backward loads them. A flush, a commit, or another use of the cache's memory loads
them first.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from swapper._C import File, View
from swapper.errors import InvariantError, IoError
from swapper.paging.dump import describe
from swapper.paging.host_memory import Pool
from swapper.paging.residency import CLEAN, COLD, DIRTY, READING, WRITING
from swapper.paging.schedule import Access
from swapper.paging.section import NO_FRAME, Frame, Page
from swapper.paging.store.page_files import PageStore
from swapper.runtime.counters import Counters, Trace

log = logging.getLogger("swapper")


class VictimCache(Protocol):
    """Idle memory that keeps evicted pages until their next use.

    It may be needed for something else at any time. Its content is in the store too, or is being written, or its write is deferred.
    """

    def keep(self, page: Page, address: int) -> bool:
        """Copy the content of `page` from its frame at `address`, if there is room now. Returns whether there was."""

    def load(self, page: Page, address: int) -> None:
        """Copy the content of `page`, which was kept, to its frame at `address`."""

    def place_of(self, page: Page) -> tuple[View | None, int]:
        """Return the memory that has the content of `page`, which was kept, and the offset in it."""


class Frames:
    """Owns the frames and the residency of every page. All methods are called with the pager's lock held.

    Args: as of `Pager`.

    Attributes:
        held: the leases by identity, and since when (time.monotonic(), in seconds); for dumps.
        in_flight: pages with a ticket, by index, oldest first.
        ahead: indices of pages that were read ahead of their use and not leased since.
        failure: of a write, not raised yet.
        unsaved: by index of a page, why its last write failed, until one succeeds.
        deferred_writes: COLD or READING pages, by index, whose newest content only the victim cache has. [Note: deferred writes]
        resident_set: indices of pages that stay in memory. [Note: a resident set], paging/schedule.py
    """

    def __init__(
        self,
        pages: Sequence[Page],
        pool: Pool,
        store: PageStore,
        lazy: bool,
        counters: Counters,
        finished: Callable[[], int] | None = None,
    ) -> None:
        self._pages = pages
        self._pool = pool
        self._store = store
        self._lazy = lazy
        self._counters = counters
        self._finished = finished
        self._settled = -1  # of `finished`
        self.in_flight: dict[int, Page] = {}
        self.ahead: set[int] = set()
        self.unsaved: dict[int, IoError] = {}
        self.resident_set: frozenset[int] = frozenset()
        # A heap of pages that may be evicted, farthest next use first: (-rank, index). Only the entry with a page's `eviction_rank`
        # is valid; a page that may not be evicted any more has none, and its entries are stale.
        self._victims: list[tuple[int, int]] = []
        self.failure: IoError | None = None
        self.held: dict[int, tuple[Access, float]] = {}
        self.deferred_writes: dict[int, Page] = {}
        self.victim_cache: VictimCache | None = None

    @property
    def writes_under_way(self) -> int:
        return sum(page.residency is WRITING for page in self.in_flight.values())

    # --- in and out -----------------------------------------------------------------------------------------------

    def claim(self, page: Page, fresh: bool, victim: Page | None, keep: bool = False) -> None:
        """Give `page` a frame and submit its read, unless it is overwritten or the victim cache has its content.

        Args:
            page: COLD.
            fresh: it is overwritten. That does not count for a page with a deferred or an unannounced write.
            victim: whose frame it gets, as `pop_victim` returned it; None if a frame is free.
            keep: the victim will be read again: keep its content in the victim cache, if there is room.
        """
        fresh = fresh and page.index not in self.deferred_writes and self.written_at(page) < 0
        if victim is not None:
            victim.kept = keep and self._keep(victim)
        page.kept = page.kept and not fresh
        needs_read = not fresh and not page.kept
        if victim is None:
            self._claim_free(page, self._pool.take(), needs_read)
        elif victim.residency is CLEAN:
            self._claim_free(page, self._leave_frame(victim), needs_read)
        else:
            self._claim_promise(page, victim, needs_read)
        if needs_read:
            self._counters.read_bytes[page.section.plan.family] += page.nbytes
        page.fresh = fresh
        page.error = None
        page.move(READING)
        if page.ticket is not None:
            self.in_flight[page.index] = page
        elif page.kept:
            self._load(page)

    def _claim_free(self, page: Page, frame: Frame, needs_read: bool) -> None:
        """Give `page` a frame that nobody has."""
        try:
            page.ticket = self._store.read(page, frame.address) if needs_read else None
        except BaseException:
            self._pool.give(frame)
            raise
        page.frame = frame

    def _claim_promise(self, page: Page, victim: Page, needs_read: bool) -> None:
        """Promise the victim's frame to `page`. [Note: promised frames]"""
        if victim.residency is DIRTY:
            self.write(victim)
        after = victim.ticket
        try:
            self._promise(victim)
            page.ticket = self._store.read(page, victim.frame.address, after=after) if needs_read else after
        except BaseException:
            self._take_back(victim)
            raise
        victim.next_owner, page.previous_owner = page, victim
        victim.eviction_rank = None
        self.ahead.discard(victim.index)

    def _load(self, page: Page) -> None:
        """Load a page from the victim cache into its frame."""
        if self.victim_cache is None:
            raise InvariantError(f"{page} was kept nowhere")
        self.victim_cache.load(page, page.frame.address)
        page.kept = False
        self._end_transfer(page)
        page.move(CLEAN)
        self._came(page)
        if self.deferred_writes.pop(page.index, None) is not None:
            page.move(DIRTY)
            self.write(page)
        self.enqueue_for_eviction(page)

    def defer_write_back(self, page: Page) -> bool:
        """Evict a DIRTY page to the victim cache, to be written when it is loaded. False if there is no room for it."""
        if not self._keep(page):
            return False
        page.kept = True
        self.deferred_writes[page.index] = page
        self.evict(page)
        return True

    def _keep(self, page: Page) -> bool:
        """Copy a page's content to the victim cache, if there is room for it."""
        return self.victim_cache is not None and self.victim_cache.keep(page, page.frame.address)

    def drop_cached(self, page: Page) -> None:
        """Forget that the victim cache has the content of `page`."""
        if page.kept and page.residency is READING:
            self.give_up_claim(page)
        page.kept = False

    def give_up_claim(self, page: Page) -> None:
        """Take the frame, or the promise of one, from a READING page whose read failed or is not needed."""
        page.move(COLD)
        page.fresh = False
        page.ticket = None
        self.in_flight.pop(page.index, None)
        self.ahead.discard(page.index)
        if page.previous_owner is not None:
            self._take_back(page.previous_owner)
            page.previous_owner = None
        elif page.frame is not NO_FRAME:
            self._pool.give(page.frame)
            page.frame = NO_FRAME

    def fill_fresh(self, page: Page, in_frames: bool = False) -> None:
        """Zero a frame that was claimed for a page that is overwritten, and that is free of its previous owner.

        Gaps between tensors are zero on disk.

        Args:
            in_frames: it is overwritten in its frame.
        """
        self._end_transfer(page)
        page.move(DIRTY)
        if in_frames:
            self._hide(page)
            self._pool.zero(page.frame, page.nbytes)
        else:
            self._map_to_write(page)
            page.section.memory[page.offset : page.offset + page.nbytes].zero_()

    def read_after_all(self, page: Page) -> None:
        """Read a page after all whose frame was claimed to overwrite it."""
        self._end_transfer(page)
        page.fresh = False
        page.ticket = self._store.read(page, page.frame.address)
        self._counters.read_bytes[page.section.plan.family] += page.nbytes
        self.in_flight[page.index] = page

    def write(self, page: Page) -> None:
        """Submit the write of a DIRTY page; its frame may be promised then."""
        page.ticket = self._store.write(page, page.frame.address)
        self._counters.written_bytes[page.section.plan.family] += page.nbytes
        page.move(WRITING)
        self.in_flight[page.index] = page
        self.enqueue_for_eviction(page)

    def evict(self, page: Page) -> None:
        """Evict a CLEAN page, or discard a DIRTY one."""
        self._pool.give(self._leave_frame(page))

    def _leave_frame(self, page: Page) -> Frame:
        """Make such a page COLD. Returns its frame, which nobody has then."""
        page.move(COLD)
        page.eviction_rank = None
        self._unmap(page)
        self.ahead.discard(page.index)
        frame, page.frame = page.frame, NO_FRAME
        return frame

    def forget(self, page: Page) -> None:
        """Forget the content of a transient page that is not leased."""
        self.unsaved.pop(page.index, None)
        page.location = None
        page.kept = False
        if page.residency in (CLEAN, DIRTY):
            self.evict(page)

    # --- who writes -----------------------------------------------------------------------------------------------

    def guard(self, page: Page) -> None:
        """Note writes to the page from now on: no lease for writing has it. [Note: unannounced writes]"""
        if page.section.guards_writes and page.shown and not page.guarded:
            page.section.window.guard(page.offset, page.nbytes)
            page.guarded = True

    def is_outside(self, page: Page) -> bool:
        """Return whether an unannounced write to the page is not in its frame: it is not mapped."""
        return not page.shown and self.written_at(page) >= 0

    def show(self, page: Page) -> None:
        """Map a leased page that is in a frame and not mapped yet. [Note: lazy windows]"""
        self._map(page)

    def allow_writes(self, page: Page) -> None:
        """Allow writes, or note that some were made: a lease for writing has the page."""
        if page.section.in_frames and not page.shown:
            self._hide(page)  # its addresses gave what the frame had before
        elif page.guarded:
            was_written = self.written_at(page) >= 0
            self._map_to_write(page)
            if was_written and page.residency is CLEAN:
                page.move(DIRTY)

    def written_at(self, page: Page) -> int:
        """Return where, in bytes from the start of its section, the page was written since `guard`; -1 if nowhere."""
        return page.section.window.written_at(page.offset) if page.section.guards_writes else -1

    def forget_written(self, page: Page) -> None:
        """Forget what an unleased page has in memory, and unannounced writes to it."""
        page.section.window.unmap(page.offset, page.nbytes)  # without a file behind it nothing stays
        if page.residency is CLEAN:
            self.evict(page)
        else:
            self._unmap(page)

    def find_written(self) -> list[Page]:
        """Return the pages with unannounced writes. [Note: unannounced writes]"""
        return [page for page in self._pages if self.written_at(page) >= 0]

    def back_cold_pages(self) -> None:
        """Let COLD pages be read past the guard, as after an eviction: those of a resumed run were never in memory."""
        for page in self._pages:
            if page.residency is COLD:
                self._unmap(page)

    # --- eviction -------------------------------------------------------------------------------------------------

    def enqueue_for_eviction(self, page: Page) -> None:
        """Enqueue `page` for eviction, if it may be evicted.

        Larger ranks are evicted first: the rank is the next use; 0 for the resident set, evicted only for leased pages.
        """
        if page.leases:
            return
        rank = 0 if page.index in self.resident_set else page.next_use
        if page.eviction_rank == rank or not self._is_evictable(page):
            return
        page.eviction_rank = rank
        heapq.heappush(self._victims, (-rank, page.index))
        if len(self._victims) > 4 * self._pool.frame_count + 64:  # mostly stale entries of near uses
            pages = self._pages
            self._victims = list({entry for entry in self._victims if pages[entry[1]].eviction_rank == -entry[0]})
            heapq.heapify(self._victims)

    def enqueue_all_for_eviction(self, next_use: Callable[[int], int]) -> None:
        """Find all next uses again, and enqueue by them."""
        self._victims.clear()
        for page in self._pages:
            if page.residency is not COLD:
                page.eviction_rank = None
                page.next_use = next_use(page.index)
                self.enqueue_for_eviction(page)

    def pop_victim(self, position: int) -> Page | None:
        """Take the page with the farthest next use off the queue, if that use is later than `position`."""
        while self._victims:
            rank, page = -self._victims[0][0], self._pages[self._victims[0][1]]
            is_valid = page.eviction_rank == rank
            if is_valid and rank <= position:
                return None
            heapq.heappop(self._victims)
            if is_valid:
                page.eviction_rank = None
                return page
        return None

    def _is_evictable(self, page: Page) -> bool:
        if page.leases:
            return False
        residency = page.residency
        if residency is DIRTY:
            is_late = self._lazy or page.section.transient
            return is_late and page.index not in self.unsaved and not page.fresh
        return residency is CLEAN or (residency is WRITING and page.next_owner is None)

    # --- finished transfers ---------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Process every transfer that has finished: writes first, then the reads that waited for them."""
        if self._finished is not None:
            count = self._finished()
            if count == self._settled:
                return
            self._settled = count
        finished = [p for p in self.in_flight.values() if p.ticket.done]  # type: ignore[union-attr]  # all have one
        if not finished:
            return
        for page in [page for page in finished if page.residency is WRITING]:
            self._settle_write(page)  # which may begin with the write of another
        for page in finished:
            if page.residency is READING and page.previous_owner is None and not page.fresh:
                self._settle_read(page)

    def raise_failure(self) -> None:
        """Raise the first failure of a write that was not raised yet."""
        if self.failure is not None:
            failure, self.failure = self.failure, None
            try:
                raise failure
            finally:
                del failure  # its traceback refers to this frame, and to what the caller's frames hold

    def keep_failure(self, failure: IoError) -> None:
        """Have `raise_failure` raise this one, if it has none to raise."""
        self.failure = self.failure or failure

    def _settle_write(self, page: Page) -> None:
        if self._counters.trace is not None:
            _note_transfer(self._counters.trace, "writes", page)
        del self.in_flight[page.index]
        ticket, page.ticket = page.ticket, None
        assert ticket is not None
        if ticket.error is not None:
            self.keep_failure(ticket.error)
            self.unsaved[page.index] = ticket.error
            page.eviction_rank = None
            page.move(DIRTY)
            if page.next_owner is not None:
                self.give_up_claim(page.next_owner)
            return
        self._store.written(page, ticket)
        page.torn = self.written_at(page) >= 0
        self.unsaved.pop(page.index, None)
        page.move(CLEAN)
        if page.next_owner is None:
            self.enqueue_for_eviction(page)
            return
        next_owner, page.next_owner = page.next_owner, None
        page.move(COLD)
        page.eviction_rank = None
        next_owner.frame, page.frame = page.frame, NO_FRAME
        next_owner.previous_owner = None
        if next_owner.fresh:
            next_owner.ticket = None
            del self.in_flight[next_owner.index]
        elif next_owner.kept:
            self._load(next_owner)

    def _settle_read(self, page: Page) -> None:
        if self._counters.trace is not None:
            _note_transfer(self._counters.trace, "reads", page)
        assert page.ticket is not None
        if page.ticket.error is not None:
            # A lease gets the error. After a failed read-ahead the page is read again when it is needed.
            error = self._store.explain(page, page.ticket.error)
            page.error = error if page.leases else None
            self.give_up_claim(page)
            return
        del self.in_flight[page.index]
        page.ticket = None
        page.move(CLEAN)
        self._came(page)
        self.enqueue_for_eviction(page)

    def _end_transfer(self, page: Page) -> None:
        page.ticket = None
        self.in_flight.pop(page.index, None)

    def _came(self, page: Page) -> None:
        """Show the page, which is in its frame now, in its window; or later: [Note: lazy windows]."""
        if page.section.in_frames:
            self._hide(page)
        else:
            self._map(page)

    def _hide(self, page: Page) -> None:
        """Have the page's addresses give its frame's bytes, without a mapping, but for what was written there."""
        page.section.window.unmap(page.offset, page.nbytes, self._pool.view, page.frame.offset)
        page.shown = page.guarded = False

    def _map(self, page: Page) -> None:
        """Show the page in its window; unannounced writes to it while it was not mapped count as made now."""
        window, guards = page.section.window, page.section.guards_writes
        has_more = window.map(page.offset, page.frame.offset, page.nbytes, guards)
        page.guarded = guards or has_more
        page.shown = True

    def _map_to_write(self, page: Page) -> None:
        window, offset = page.section.window, page.frame.offset
        if window.map(page.offset, offset, page.nbytes):
            # Unannounced writes while it was not mapped are there, and known.
            window.map(page.offset, offset, page.nbytes)
        page.guarded = False
        page.shown = True

    def _promise(self, page: Page) -> None:
        """Unmap the window of a WRITING page whose frame is promised. [Note: promised frames]"""
        window, offset = page.section.window, page.frame.offset
        window.promise(page.offset, page.nbytes, offset, page.ticket, self._store.written_to(page), page.file_offset)
        page.shown = page.guarded = False

    def _take_back(self, page: Page) -> None:
        """Cancel the promise of the frame of a WRITING or DIRTY page."""
        page.next_owner = None
        self._came(page)
        self.enqueue_for_eviction(page)

    def _unmap(self, page: Page) -> None:
        """Unmap the page. Reads of its addresses past the guard of cold parameters still get its bytes, from the store."""
        page.shown = page.guarded = False
        if page.index in self.deferred_writes and self.victim_cache is not None:
            source: File | View | None
            source, offset = self.victim_cache.place_of(page)
        else:
            source, offset = self._store.file_of(page), page.stored_offset
        page.section.window.unmap(page.offset, page.nbytes, source, offset)

    # --- for people and tests -------------------------------------------------------------------------------------

    def describe(self) -> str:
        """Return a dump. See paging/dump.py."""
        return describe(self._pages, self._pool, self.in_flight, self.held, self.deferred_writes)

    def check(self) -> None:
        """Raise InvariantError unless frames are conserved and belong to one page each."""
        held = [page for page in self._pages if page.frame is not NO_FRAME]
        frames = [page.frame.number for page in held]
        if len(set(frames)) != len(frames):
            raise InvariantError(f"a frame belongs to two pages: {self.describe()}")
        if len(frames) + self._pool.free_count != self._pool.frame_count:
            raise InvariantError(f"frames were lost: {self.describe()}")
        for page in self._pages:
            promised = page.previous_owner is not None
            if (page.frame is NO_FRAME) != (page.residency is COLD or promised):
                raise InvariantError(f"{page} has a frame that its state does not allow, or lacks one")
            if page.eviction_rank is not None and not self._is_evictable(page):
                raise InvariantError(f"{page} is enqueued for eviction, and may not be evicted")


def _note_transfer(trace: Trace, track: str, page: Page) -> None:
    """Trace a transfer, from its submission until the engine completed it."""
    ticket, where = page.ticket, page.section.plan.where
    assert ticket is not None
    failed = {} if ticket.error is None else {"error": str(ticket.error)}
    trace.add(track, where, ticket.submitted_s, ticket.completed_s, page=page.index, nbytes=page.nbytes, **failed)
