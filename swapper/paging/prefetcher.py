"""Follows the schedule: claims frames ahead of it, chooses the pages to evict, and decides when a changed page is written.

A changed page is written as soon as it is not leased. It waits if the page is changed again soon, if its write may be
deferred ([Note: deferred writes], paging/frames.py), and, in a run whose commits are rare, until its frame is needed.

[Note: what stays] A step is a cycle. Of a cycle that does not fit, the best is to keep a fixed part in memory and to stream the
rest through few frames: what was used just now is needed latest, so it makes room for what comes next. If read-ahead took every
frame, it would take them from pages that are still to be used in this cycle, and all of it would be read each time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from swapper.errors import BudgetError
from swapper.io.tensor_bytes import round_up
from swapper.paging.frames import Frames
from swapper.paging.host_memory import Pool
from swapper.paging.layout import ARENA_ALIGNMENT_BYTES
from swapper.paging.residency import COLD, DIRTY, READING, WRITING
from swapper.paging.schedule import NEVER, Access, PrefetchDistance, Schedule, choose_resident_set
from swapper.paging.section import NO_FRAME, Page
from swapper.runtime.sizes import format_bytes

SOON_ACCESSES = 8
"""A changed page that is changed again within this many accesses is not written in between."""


class WriteBack:
    """Owns the changed, unleased pages whose write is not submitted yet. All methods are called with the pager's lock held.

    Deferring a write pays only while the drive has others to do: a quarter of the frames being written. So the first pages of a
    forward are written at once, and the drive has work early.

    Args: as of `Pager`.
    """

    def __init__(
        self,
        pages: Sequence[Page],
        frames: Frames,
        schedule: Schedule,
        frame_count: int,
        lazy: bool,
        max_deferred_writes: int,
    ) -> None:
        self._pages = pages
        self._frames = frames
        self._schedule = schedule
        self._lazy = lazy
        self._enough = frame_count // 4  # writes in flight
        self._max_deferred_writes = 0 if lazy else max_deferred_writes
        self._deferred: dict[int, Page] = {}  # by index, as all here
        self._just_made: dict[
            int, Page
        ] = {}  # by the sweep, and used next: at the release of that use their writes may be deferred

    @property
    def has_deferred(self) -> bool:
        return bool(self._deferred)

    @property
    def is_done(self) -> bool:
        """Whether the writes of all changed pages that are not leased are submitted."""
        return not (self._deferred or self._just_made or self._frames.deferred_writes or self._frames.unsaved)

    @property
    def has_leased(self) -> bool:
        """Whether changed pages are leased, transient ones excepted: they are written after that."""
        return any(p.leases and p.residency is DIRTY and not p.section.transient for p in self._pages)

    def add(self, page: Page, made: bool) -> None:
        """Note that `page` is DIRTY and not leased any more; its next use is known. `made`: the last lease was one for writing."""
        if self._lazy or self._is_changed_again_soon(page):
            self._deferred[page.index] = page
        elif made and self._may_defer_write(page):
            self._just_made[page.index] = page
        else:
            self.forget(page)
            if made or not self._may_defer_write(page) or not self._frames.defer_write_back(page):
                self._frames.write(page)

    def forget(self, page: Page) -> None:
        """Note that `page` is written, or discarded."""
        self._deferred.pop(page.index, None)
        self._just_made.pop(page.index, None)

    def write_deferred(self) -> None:
        """Write the pages that keep a frame only for another change."""
        self._write_and_clear(self._deferred)

    def write_what_waits(self) -> None:
        """Write all that waits, but for deferred writes."""
        self._write_and_clear(self._deferred)
        self._write_and_clear(self._just_made)

    def stop_waiting(self) -> None:
        """Write what waits, unless the run is lazy: what was expected did not come."""
        if not self._lazy:
            self.write_what_waits()

    def write_all(self) -> bool:
        """Write whatever is DIRTY and not leased, transient pages excepted. Return whether some are leased."""
        for page in self._pages:
            if page.residency is DIRTY and page.leases == 0 and not page.section.transient:
                self._frames.write(page)
        self._deferred.clear()
        self._just_made.clear()
        return self.has_leased

    def write_what_failed(self) -> None:
        """Try failed writes once more."""
        for index in self._frames.unsaved:
            page = self._pages[index]
            if page.leases == 0 and page.residency is DIRTY:
                self._frames.write(page)

    def is_read_again(self, page: Page) -> bool:
        """Return whether the present content of `page` is needed at its next use."""
        if page.next_use == NEVER or page.index not in self._schedule.fresh:
            return page.next_use < NEVER
        return page.index not in self._schedule.at(page.next_use).fresh

    # --------------------------------------------------------------------------------------------------------------

    def _is_changed_again_soon(self, page: Page) -> bool:
        """Return whether a few slices later the sweep changes the page again, for another tensor on it: one write will do."""
        soon = page.next_use < self._schedule.position + SOON_ACCESSES
        return soon and page.index in self._schedule.at(page.next_use).writes

    def _may_defer_write(self, page: Page) -> bool:
        """Return whether it is used next as it is, and the drive has enough to do meanwhile."""
        count = len(self._frames.deferred_writes) + len(self._just_made)
        if count >= self._max_deferred_writes or page.index in self._frames.unsaved:
            return False
        if not self.is_read_again(page) or page.index in self._schedule.at(page.next_use).writes:
            return False
        return self._frames.writes_under_way >= self._enough

    def _write_and_clear(self, waiting: dict[int, Page]) -> None:
        for page in waiting.values():
            if page.leases == 0 and page.residency is DIRTY:
                self._frames.write(page)
        waiting.clear()


class Prefetcher:
    """Follows the schedule and claims frames. All methods are called with the pager's lock held. Args: as of `Pager`."""

    def __init__(
        self,
        pages: Sequence[Page],
        pool: Pool,
        frames: Frames,
        schedule: Schedule,
        write_back: WriteBack,
        window_pages: int | None,
        one_at_a_time: bool = False,
    ) -> None:
        self._pages = pages
        self._pool = pool
        self._frames = frames
        self._schedule = schedule
        self._write_back = write_back
        self._window_pages = pool.frame_count if window_pages is None else max(window_pages, 1)
        self._one_at_a_time = one_at_a_time
        # What is over makes room for what comes next, all of it: the resident set stays.
        self._max_ahead = pool.frame_count if one_at_a_time else self._window_pages
        self._next = 0  # all accesses before this position are prefetched
        self._distance = PrefetchDistance()
        self._reach = len(schedule.cycle)  # accesses to read ahead, the present one included
        self._choose_resident_set()

    # --- the place in the schedule --------------------------------------------------------------------------------

    def follow(self, access: Access) -> None:
        """Note that `access` happens now, and find its place in the schedule."""
        before = self._schedule.position
        if self._schedule.advance(access):
            self._distance.hit()
            self._reach = self._distance.accesses(len(self._schedule.cycle))
            return
        if not before <= self._schedule.position <= max(self._next, before + 1):
            self._distance.miss()
            self._reach = self._distance.accesses(len(self._schedule.cycle))
        self._find_next_uses()

    def end_step(self, learn: bool) -> None:
        """Expect in the next step what this one did, if `learn`."""
        if self._schedule.end_step(learn):
            self._begin_cycle()

    def expect(self, cycle: Sequence[Access]) -> None:
        """Expect `cycle` from here on, repeatedly."""
        self._schedule.follow(cycle)
        self._begin_cycle()

    def start_again(self) -> None:
        """Read ahead from the present position on: what was read may be gone."""
        self._next = self._schedule.position

    def _begin_cycle(self) -> None:
        self._reach = self._distance.accesses(len(self._schedule.cycle))
        self._choose_resident_set()
        self._find_next_uses()
        self.read_ahead()

    def _choose_resident_set(self) -> None:
        pages, held = self._pages, self._frames.held.values()
        leased = {index for access, _ in held if access.key is None for index in access.pages}
        self._frames.resident_set = choose_resident_set(
            self._schedule.cycle,
            lambda index: pages[index].nbytes,
            self._pool.frame_count,
            self._window_pages,
            leased,
            self._one_at_a_time,
        )

    def _find_next_uses(self) -> None:
        """Update all next uses: the run departed from the schedule, or the schedule is new."""
        self._write_back.stop_waiting()
        self.start_again()
        self._frames.ahead.clear()
        for page in self._pages:
            if page.residency is READING and page.ticket is None and page.leases == 0:
                self._frames.give_up_claim(page)  # to be overwritten, but perhaps not soon
        self._frames.enqueue_all_for_eviction(self._schedule.next_use)

    # --- claiming frames ------------------------------------------------------------------------------------------

    def claim_leased(self, missing: list[Page], fresh: Collection[int]) -> Page | None:
        """Claim frames for leased pages, last first, taking them off `missing`. Returns the page in flight to wait for, if any.

        If there is none and some pages are left, wait for the pool to grow.

        Args:
            fresh: indices of pages that are overwritten.

        Raises:
            IoError: a write failed, and its page keeps a frame.
            BudgetError: all frames are leased.
        """
        while missing:
            page = missing[-1]
            if page.residency is WRITING and page.next_owner is not None:
                return page  # its frame is promised: it must be evicted before it can be read again
            if page.residency is not COLD or self._claim(page, page.index in fresh, -1):
                missing.pop()
            elif self._pool.is_growing:
                return None
            elif self._write_back.has_deferred:
                self._write_back.write_deferred()
            elif self._frames.in_flight:
                return next(iter(self._frames.in_flight.values()))  # the oldest
            else:
                self._make_room()
        return None

    def read_ahead(self) -> None:
        """Claim frames along the schedule, as long as other pages are needed later than those wanted."""
        pages, ahead = self._pages, self._frames.ahead
        self._next = max(self._next, self._schedule.position)
        end = self._schedule.position + self._reach
        while self._next < end:
            access = self._schedule.pending(self._next)
            if access is None:
                self._next += 1
                continue
            for index in access.pages:
                page = pages[index]
                if page.residency is COLD and page.leases == 0:
                    fresh = index in access.fresh
                    if not fresh and page.location is None:
                        if page.section.transient:
                            continue  # its content does not exist yet
                        return
                    if len(ahead) >= self._max_ahead and not self._pool.has_free():
                        return  # [Note: what stays]
                    if not self._claim(page, fresh, self._next):
                        return
                    ahead.add(index)
            self._next += 1

    def _claim(self, page: Page, fresh: bool, position: int) -> bool:
        """Give `page` a frame, or a promise of one, and submit its read. False if no page with a later use can be evicted."""
        victim: Page | None = None
        if not self._pool.has_free():
            victim = self._frames.pop_victim(position)
            if victim is None:
                return False
            self._next = min(self._next, victim.next_use)  # if that was prefetched already, it must be again
        page.next_use = position if position >= 0 else page.next_use
        keep = victim is not None and self._frames.victim_cache is not None and self._write_back.is_read_again(victim)
        self._frames.claim(page, fresh, victim, keep)
        return True

    def _make_room(self) -> None:
        """Free the frames of failed writes and early claims for fresh data: no page can be evicted, and none is in flight.

        Raises:
            IoError: a write failed; that is why its page keeps a frame.
            BudgetError: all frames are leased.
        """
        self._frames.raise_failure()
        idle = [page for page in self._pages if page.leases == 0]
        dirty = [page for page in idle if page.residency is DIRTY]
        claimed = [page for page in idle if page.residency is READING]
        for page in dirty:
            self._frames.write(page)
        for page in claimed:
            self._frames.give_up_claim(page)
            self.start_again()
        if not dirty and not claimed:
            raise self._too_few_frames(sum(page.leases > 0 and page.frame is NO_FRAME for page in self._pages))

    def check_room(self, pages: Iterable[int]) -> None:
        """Raise BudgetError if there are too few frames for `pages` in addition to those that are leased now."""
        leased = {page.index for page in self._pages if page.leases}
        missing = len(leased.union(pages)) - self._pool.frame_count
        if missing > 0:
            raise self._too_few_frames(missing)

    def _too_few_frames(self, missing: int) -> BudgetError:
        nbytes = round_up(max(missing, 1) * self._pool.frame_bytes, ARENA_ALIGNMENT_BYTES)
        return BudgetError(
            f"too much is in use at once: raise host_memory by at least {format_bytes(nbytes)} ({nbytes} bytes), or use "
            f"or gather fewer modules at once\n{self._frames.describe()}",
            missing_bytes=nbytes,
        )
