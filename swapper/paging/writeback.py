"""When a changed page is written: at once, as soon as nobody leases it, but for the few whose write can wait with profit.

It can where the page is changed again at once, where it may be owed ([Note: deferred writes], paging/frames.py), and in a run whose
commits are rare, until its frame is needed. Decides, and submits; the pager waits.
"""

from __future__ import annotations

from collections.abc import Sequence

from swapper.paging.frames import Frames
from swapper.paging.planning.schedule import NEVER, Schedule
from swapper.paging.residency import Residency
from swapper.paging.section import Page

SOON_ACCESSES = 8
"""A changed page that will be changed again within so many accesses is not written in between."""


class WriteBack:
    """Knows which changed pages that nobody leases are not on their way yet. All methods are called with the pager's lock held.

    Args:
        pages: all pages of the run, each at its own index.
        frames: that have them.
        schedule: the order of use.
        frame_count: how many frames there are.
        lazy: write a changed page when its frame is needed, or at a flush, and not as soon as nobody leases it.
        max_deferred_writes: how many pages may be owed at one time.

    [Note: what is owed] A write is worth waiting with where the drive has others to do: a quarter of the frames under way. So what
    a forward begins with is written at once, and the drive has its work early.
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
        self._enough = frame_count // 4  # writes under way. [Note: what is owed]
        self._max_deferred_writes = 0 if lazy else max_deferred_writes
        self._put_off: dict[int, Page] = {}  # by index, as all here
        self._just_made: dict[int, Page] = {}  # for a use that comes at once: then they may be owed

    @property
    def has_put_off(self) -> bool:
        return bool(self._put_off)

    @property
    def is_done(self) -> bool:
        """Whether all that was changed and is not leased is on its way to the store, or there."""
        return not (self._put_off or self._just_made or self._frames.deferred_writes or self._frames.unsaved)

    def add(self, page: Page, made: bool) -> None:
        """`page` is DIRTY and nobody leases it any more; its next use is known. `made`: who did was the one that changed it."""
        if self._lazy or self._is_changed_again_soon(page):
            self._put_off[page.index] = page
        elif made and self._may_defer_write(page):
            self._just_made[page.index] = page
        else:
            self.forget(page)
            if made or not self._may_defer_write(page) or not self._frames.defer_write_back(page):
                self._frames.write(page)

    def forget(self, page: Page) -> None:
        """`page` is written, or thrown away."""
        self._put_off.pop(page.index, None)
        self._just_made.pop(page.index, None)

    def write_put_off(self) -> None:
        """Frames are short: write what keeps one without need."""
        self._write_and_clear(self._put_off)

    def write_what_waits(self) -> None:
        """What was expected to come is not to be waited for any longer. What is owed still is."""
        self._write_and_clear(self._put_off)
        self._write_and_clear(self._just_made)

    def write_all(self) -> None:
        """Write whatever is DIRTY and not leased, transient pages excepted."""
        for page in self._pages:
            if page.residency is Residency.DIRTY and page.leases == 0 and not page.section.transient:
                self._frames.write(page)
        self._put_off.clear()
        self._just_made.clear()

    def write_what_failed(self) -> None:
        """Try once more what could not be written."""
        for index in self._frames.unsaved:
            page = self._pages[index]
            if page.leases == 0 and page.residency is Residency.DIRTY:
                self._frames.write(page)

    def is_read_again(self, page: Page) -> bool:
        """Whether the content that `page` has now is needed at its next use."""
        return page.next_use < NEVER and page.index not in self._schedule.at(page.next_use).fresh

    # --------------------------------------------------------------------------------------------------------------

    def _is_changed_again_soon(self, page: Page) -> bool:
        """Two tensors of one parameter that meet on a page bring the sweep back to it a few slices later: one write will do."""
        soon = page.next_use < self._schedule.position + SOON_ACCESSES
        return soon and page.index in self._schedule.at(page.next_use).writes

    def _may_defer_write(self, page: Page) -> bool:
        """Whether it is used next as it is, and the drive has enough to do meanwhile. [Note: what is owed]"""
        if (
            len(self._frames.deferred_writes) + len(self._just_made) >= self._max_deferred_writes
            or page.index in self._frames.unsaved
        ):
            return False
        if not self.is_read_again(page) or page.index in self._schedule.at(page.next_use).writes:
            return False
        return self._frames.writes_under_way >= self._enough

    def _write_and_clear(self, waiting: dict[int, Page]) -> None:
        for page in waiting.values():
            if page.leases == 0 and page.residency is Residency.DIRTY:
                self._frames.write(page)
        waiting.clear()
