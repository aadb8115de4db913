"""The dry run: the real pager, on a store that only counts, predicts what a step moves before anything is written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence

import torch

from swapper.errors import IoError
from swapper.io.alignment import SECTOR_BYTES
from swapper.io.engines import Transfer
from swapper.paging.host_memory import Pool
from swapper.paging.pager import Pager
from swapper.paging.planning.schedule import Access, Schedule
from swapper.paging.section import NoWindow, Page, Section
from swapper.runtime.counters import Counters
from swapper.runtime.interrupts import defer_sigint

FIRST_STEPS = 2
"""Steps until the resident pages have settled."""


class DoneTicket:
    """A transfer that is done."""

    done = True
    error = None
    nbytes = crc32 = 0
    submitted_s = completed_s = 0.0

    def exception(self) -> None: ...
    def wait(self) -> None: ...


class CountingStore:
    """A store that moves nothing, and counts bytes by family of section."""

    def __init__(self) -> None:
        self.read_bytes: Counter[str] = Counter()
        self.written_bytes: Counter[str] = Counter()

    def read(self, page: Page, address: int, after: Transfer | None = None) -> DoneTicket:
        self.read_bytes[page.section.plan.family] += page.nbytes
        return DoneTicket()

    def write(self, page: Page, address: int) -> DoneTicket:
        self.written_bytes[page.section.plan.family] += page.nbytes
        return DoneTicket()

    def written_to(self, page: Page) -> None:
        return None

    def written(self, page: Page, ticket: Transfer) -> None:
        page.location = 0

    def explain(self, page: Page, error: IoError) -> IoError:
        return error

    def file_of(self, page: Page) -> None:
        return None


class DryRunVictimCache:
    """A victim cache in gradient slots, which are idle from a group's update to its backward.

    Args:
        groups: by index of a page of parameters, the group whose gradient slots may cache it.
    """

    def __init__(self, groups: Mapping[int, int]) -> None:
        self._groups = groups
        self._pages: dict[int, list[int]] = {}
        for page, group in groups.items():
            self._pages.setdefault(group, []).append(page)
        self._uses: Counter[Hashable] = Counter()  # of each group's parameters since its update
        self._taken: set[int] = set()

    def keep(self, page: Page, address: int) -> bool:
        return page.index in self._groups and self._groups[page.index] not in self._taken

    def load(self, page: Page, address: int) -> None:
        pass

    def place_of(self, page: Page) -> tuple[None, int]:
        return None, 0

    def note(self, access: Access) -> list[int]:
        """Note an access. Returns the pages that cannot be cached any longer: a gradient needs their slots."""
        if not isinstance(access.key, tuple):
            return []
        use, group = access.key[:2]
        if use == "slice":
            self._uses[group] = 0
        elif use == "param":
            self._uses[group] += 1
            if self._uses[group] == 1:  # the forward's: gradients were zeroed before
                self._taken.discard(group)
            else:
                self._taken.add(group)
                return self._pages.get(group, [])
        return []


class DryRun:
    """A pager on a store that only counts.

    Args:
        sections: without memory, their pages numbered consecutively.
        frame_count: frames of the pool; 0 if nothing is paged.
        cycle: the accesses of a step.
        window_pages, lazy: see `Pager`.
        slot_groups: by index of a page of parameters, the group whose gradient slots may cache it.
    """

    def __init__(
        self,
        sections: Sequence[Section],
        frame_count: int,
        cycle: Sequence[Access],
        window_pages: int,
        lazy: bool,
        slot_groups: Mapping[int, int],
    ) -> None:
        self.store = CountingStore()
        self._frame_count = frame_count
        self._cycle = cycle
        pages = [page for section in sections for page in section.pages]
        self._transient = [page.index for page in pages if page.section.transient]
        for section in sections:
            section.attach(torch.empty(0, dtype=torch.uint8), NoWindow())
        for page in pages:
            page.location = None if page.section.transient else 0
        pool = Pool(0, 0, SECTOR_BYTES, frame_count)
        self._pager = Pager(pages, pool, self.store, Schedule(cycle), Counters(), window_pages=window_pages, lazy=lazy)
        self._victim_cache = DryRunVictimCache(slot_groups)
        self._pager.use_victim_cache(self._victim_cache)

    def count(self, action: Callable[[], None]) -> tuple[dict[str, int], dict[str, int]]:
        """Return the bytes that `action` (reads, writes), by family."""
        self.store.read_bytes.clear()
        self.store.written_bytes.clear()
        action()
        return dict(self.store.read_bytes), dict(self.store.written_bytes)

    def flush(self) -> None:
        """Write changed pages, as a commit does."""
        with defer_sigint:
            self._pager.flush()

    def step(self) -> None:
        """Take one step: lease and release each access; the optimizer's leases overlap."""
        held: Access | None = None
        with defer_sigint:
            for access in self._cycle:
                self._pager.lease(access)
                if held is not None:
                    self._pager.release(held, held.writes)
                self._pager.wait(access)
                held = access if access.writes else None
                self._pager.drop_cached(self._victim_cache.note(access))
                if held is None:
                    self._pager.release(access)
            if held is not None:
                self._pager.release(held, held.writes)
            self._pager.end_step()
            self._pager.forget(self._transient)

    def traffic(self) -> tuple[dict[str, int], dict[str, int], int]:
        """Return the bytes that one step of many (reads, writes), by family, and those that a commit after it adds."""
        if not self._frame_count:
            return {}, {}, 0
        for _ in range(FIRST_STEPS):
            self.step()
        read, written = self.count(self.step)
        _, for_commit = self.count(self.flush)
        _, after_commit = self.count(self.step)  # what the commit has written need not be written at eviction
        more = sum(for_commit.values()) + sum(after_commit.values()) - sum(written.values())
        return read, written, max(more, 0)
