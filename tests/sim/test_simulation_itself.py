"""The simulation can fail: it meets the cases that it is there for, and it notices a pager that breaks a rule."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest
from programs import train, wander
from simulated_engine import SimulationError, assert_noticed
from simulated_run import Run

from swapper.errors import BudgetError
from swapper.paging.frames import Frames
from swapper.paging.pager import Pager
from swapper.paging.prefetcher import Prefetcher
from swapper.paging.residency import Residency
from swapper.paging.schedule import Access
from swapper.paging.section import NO_FRAME, Page

SEEDS = range(40)


def test_the_seeds_meet_every_case():
    seen: Counter[str] = Counter()
    for seed in SEEDS:
        for program in (train, wander):
            for threads in (False, True):
                seen += program(seed, 0.05, threads).engine.seen
    cases = (
        "read", "write", "failed read", "failed write", "read after another", "cancelled read", "told",
        "request during another's wait", "deferred_writes",
        "stray write, COLD", "stray write, CLEAN", "stray write, WRITING",
    )  # fmt: skip
    assert all(seen[case] > (0 if case.startswith("stray") else 20) for case in cases), seen


def test_a_wait_for_what_can_never_finish_is_noticed():
    run = Run(1, [1], 1, [], hurry=0.0)
    orphan = run.engine.write(run.store.file(0), 0, run.arena.address, 1)
    orphan.after = orphan
    with pytest.raises(SimulationError, match="hang"):
        orphan.wait()


# Each of these breaks one rule.


class WritesFresh(Frames):
    """Takes a page for filled that is not."""

    def fill_fresh(self, page: Page, in_frames: bool = False) -> None:
        super().fill_fresh(page, in_frames)
        page.fresh = False


class ChangesDuringWrites(Pager):
    def _wait_for_write(self, page: Page) -> None:
        pass


class DoesNotWaitForContent(Pager):
    def _wait_for_content(self, page: Page, access: Access) -> None:
        pass


class KeepsMappings(Frames):
    def _unmap(self, page: Page) -> None:
        pass


class ShowsPromisedFrames(Frames):
    """Takes the window away when the write is settled, and not before the next page may come into its frame."""

    def _promise(self, page: Page) -> None:
        pass

    def _settle_write(self, page: Page) -> None:
        next_owner = page.next_owner
        super()._settle_write(page)
        if next_owner is not None and page.residency is Residency.COLD:
            self._unmap(page)


class ShowsNothingLater(Frames):
    def show(self, page: Page) -> None:
        pass


class ForgetsWritesToWhatIsNotMapped(Frames):
    def _hide(self, page: Page) -> None:
        page.section.window.unmap(page.offset, page.nbytes)
        super()._hide(page)


class MergesUnderWrites(Frames):
    def is_outside(self, page: Page) -> bool:
        return False


class PromisesTooLate(Frames):
    def claim(self, page: Page, fresh: bool, victim: Page | None, keep: bool = False) -> None:
        self._promise, promise = (lambda victim: None), self._promise  # type: ignore[method-assign]
        super().claim(page, fresh, victim, keep)
        del self._promise
        if victim is not None and victim.next_owner is not None:
            promise(victim)


class ForgetsStrayWrites(Pager):
    def take_in_written(self) -> None:
        pass


class QueuesLeased(Pager):
    """Leaves what it leases in the queue of pages that may be evicted."""

    def _count_leases(self, access: Access) -> tuple[bool, bool]:
        ranks = {index: self._pages[index].eviction_rank for index in access.pages}
        found = super()._count_leases(access)
        for index, rank in ranks.items():
            self._pages[index].eviction_rank = rank
        return found


class TakesLeasedForEvictable(Frames):
    def _is_evictable(self, page: Page) -> bool:
        return page.residency is Residency.CLEAN


class EvictsLeased(QueuesLeased):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._frames.__class__ = TakesLeasedForEvictable


class EvictsDirty(Pager):
    def _end_lease(self, page: Page, next_use: int, made: bool = False) -> None:
        super()._end_lease(page, next_use, made)
        if page.residency is Residency.DIRTY and page.leases == 0:
            self._write_back.forget(page)
            self._frames.evict(page)


class OwesForEver(Pager):
    def _fault_in_deferred(self, deferred_writes: Any) -> None:
        pass


class ForgetsToWriteOwed(Frames):
    def _load(self, page: Page) -> None:
        self.deferred_writes.pop(page.index, None)
        super()._load(page)


class KeepsErrors(Frames):
    def raise_failure(self) -> None:
        self.failure = None


class ForgetsErrorsOfReads(Frames):
    def _settle_read(self, page: Page) -> None:
        page.ticket.failure = None
        super()._settle_read(page)


class LosesFrames(Frames):
    def give_up_claim(self, page: Page) -> None:
        page.frame = NO_FRAME
        super().give_up_claim(page)


class NeverGivesUpClaims(Prefetcher):
    def _make_room(self) -> None:
        raise BudgetError("everything is in use")


class ForgetsChanges(Pager):
    def release(self, access: Access, changed: Any = ()) -> None:
        super().release(access, frozenset(access.fresh))


class WaitsWithMutex(Frames):
    def settle(self) -> None:
        for page in list(self.in_flight.values())[:1]:
            page.ticket.wait()
        super().settle()


class _Store:
    """A store with one rule broken; otherwise the real one."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


class _ForgetsAfter(_Store):
    def read(self, page: Page, address: int, after: Any = None) -> Any:
        return self._store.read(page, address)


class _WritesInPlace(_Store):
    def write(self, page: Page, address: int) -> Any:
        committed, page.committed = page.committed, None
        try:
            return self._store.write(page, address)
        finally:
            page.committed = committed


class _ForgetsWhere(_Store):
    def written(self, page: Page, ticket: Any) -> None:
        location = page.location
        self._store.written(page, ticket)
        page.location = page.location if location is None else location


def over(store_class: type[_Store]) -> type[Pager]:
    class OverAnotherStore(Pager):
        def __init__(self, pages: Any, pool: Any, store: Any, *others: Any, **options: Any) -> None:
            super().__init__(pages, pool, store_class(store), *others, **options)

    OverAnotherStore.__name__ = store_class.__name__.strip("_")
    return OverAnotherStore


def using(broken: type[Frames] | type[Prefetcher]) -> type[Pager]:
    class UsingBroken(Pager):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            part = self._frames if issubclass(broken, Frames) else self._prefetcher
            part.__class__ = broken

    UsingBroken.__name__ = broken.__name__
    return UsingBroken


class TakesTornPagesForWhole(Frames):
    def _settle_write(self, page: Page) -> None:
        super()._settle_write(page)
        page.torn = False


BROKEN = [
    (using(WritesFresh), "in memory is not what was written to it"),
    (ChangesDuringWrites, "is leased for writing and on its way out"),
    (DoesNotWaitForContent, "is leased for the use of its addresses and not mapped"),
    (using(KeepsMappings), "should be mapped to None"),
    (EvictsLeased, "is leased and not in memory"),
    (QueuesLeased, "is enqueued for eviction, and may not be evicted"),
    (EvictsDirty, "is not in memory, and the drive does not have what was written to it"),
    (OwesForEver, "shows other bytes than were written to it"),
    (using(ForgetsToWriteOwed), "is not what the drive has"),
    (using(ShowsNothingLater), "is leased for the use of its addresses and not mapped"),
    (using(ForgetsWritesToWhatIsNotMapped), "shows other bytes than were written to it"),
    (using(MergesUnderWrites), "is leased and has other bytes than were written to it"),
    (using(ShowsPromisedFrames), "should be mapped to None"),
    (using(PromisesTooLate), "starts in memory that a window shows"),
    (using(TakesTornPagesForWhole), "expects another checksum"),
    (ForgetsStrayWrites, "has not taken in what was written past the guard"),
    (using(KeepsErrors), "flush returned and has not written"),
    (using(ForgetsErrorsOfReads), "is leased and has other bytes than were written to it"),
    (using(LosesFrames), "frames were lost"),
    (using(NeverGivesUpClaims), "there are frames enough for what is leased"),
    (ForgetsChanges, "is not what the drive has"),
    (using(WaitsWithMutex), "the pager waits and keeps its mutex"),
    (over(_ForgetsAfter), "starts in memory that .* uses"),
    (over(_WritesInPlace), "is written to the file that the last commit names"),
    (over(_ForgetsWhere), "is not what the drive has"),
]


SELDOM_NOTICED = {"OwesForEver"}
"""By one run of some hundred: half a minute."""


@pytest.mark.parametrize(
    "pager_class, what",
    [
        pytest.param(*of, id=of[0].__name__, marks=[] if of[0].__name__ in SELDOM_NOTICED else pytest.mark.whole)
        for of in BROKEN
    ],
)
def test_a_pager_that_breaks_a_rule_is_noticed_for_that_rule(pager_class, what):
    kinds = [(program, stray_rate) for stray_rate in (None, 0.4) for program in (train, wander)]
    runs = (partial(program, seed, 0.05, stray_rate=rate) for seed in range(300) for program, rate in kinds)
    assert_noticed(what, ((partial(run, pager_class=pager_class), run) for run in runs))
