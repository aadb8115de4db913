"""Write-back: decides when a changed page is written, and submits the write.

That is as soon as the page is not leased. It waits if the page is changed again soon, if its write may be deferred ([Note: deferred
writes], paging/frames.py), and, in a run whose commits are rare, until its frame is needed.
"""

from __future__ import annotations

from collections.abc import Sequence

from swapper.paging.frames import Frames
from swapper.paging.residency import DIRTY
from swapper.paging.schedule import NEVER, Schedule
from swapper.paging.section import Page

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
        return page.next_use < NEVER and page.index not in self._schedule.at(page.next_use).fresh

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
