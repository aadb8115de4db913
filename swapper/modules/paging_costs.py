"""Measures what paging takes of the processors, for predictions: the pager with its windows, and the engine's checksums."""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from contextlib import closing
from pathlib import Path
from statistics import mean

import torch

from swapper import _C
from swapper.errors import IoError
from swapper.io.alignment import SECTOR_BYTES
from swapper.io.engines import Engine, Transfer
from swapper.modules.operations import ColdCaches, has_spare_processor, median_seconds
from swapper.modules.resources import Resources
from swapper.paging.planning.budget import PoolSize
from swapper.paging.planning.layout import SectionPlan
from swapper.paging.planning.schedule import Access, Schedule
from swapper.paging.section import Page, Section
from swapper.paging.virtual_drive import PagingCosts
from swapper.runtime.counters import Counters

ACCESSES, ROUNDS = 8, 4
"""Of a trial: the pages of each access are read, and written, each time. The first round counts for nothing."""
PAGES = 6
"""Of an access, in the trial that separates what an access costs from what each of its pages does."""
MAX_PAGE_BYTES = 8 << 20
"""Larger pages count by their bytes."""
CHECKED_BYTES = 64 << 20
"""More than a processor's cache: the engine finds no page there."""
TRIALS = 5


def measure_paging_costs(page_bytes: int, has_checksums: bool, writes: bool = True) -> PagingCosts:
    """Measure pages as the pager uses them, in memory, and a checksum: some milliseconds.

    Args:
        page_bytes: of a page.
        has_checksums: the engine takes checksums of what moves.
        writes: pages are changed.
    """
    page_bytes = min(page_bytes, MAX_PAGE_BYTES)
    one_s, several_s = (_access_seconds(SECTOR_BYTES, pages, writes) for pages in (1, PAGES))
    page_s = max(several_s - one_s, 0.0) / (PAGES - 1)
    mapped_s = max(_access_seconds(page_bytes, 1, writes) - one_s, 0.0)
    checked_s = 0.0
    if has_checksums:
        with closing(_C.Arena(CHECKED_BYTES)) as arena:
            checked_s = median_seconds(lambda: _C.crc32_address(arena.address, CHECKED_BYTES), TRIALS) / CHECKED_BYTES
    return PagingCosts(max(one_s - page_s, 0.0), page_s, mapped_s / page_bytes, checked_s, not has_spare_processor())


def _access_seconds(page_bytes: int, pages: int, writes: bool) -> float:
    """Return what an access to this many pages takes of the thread that leases them, with the page faults of their first use."""
    section = Section(SectionPlan(0, "state", torch.uint8, (), ACCESSES * pages * page_bytes), 0, page_bytes)
    indices = [tuple(page.index for page in section.pages[n * pages : (n + 1) * pages]) for n in range(ACCESSES)]
    accesses = [Access(("slice", 0, n), of, writes=frozenset(of if writes else ())) for n, of in enumerate(indices)]
    resources: Resources[_MemoryStore] = Resources(Counters())
    size, directory = PoolSize(page_bytes, ACCESSES // 2 * pages), Path(tempfile.gettempdir())
    with closing(resources):
        resources.open(
            [section], size, [directory], "auto", lambda engine: _MemoryStore(engine, page_bytes), Schedule(accesses)
        )

        def touch(access: Access) -> None:
            first = access.pages[0] * page_bytes
            touched = section.memory[first : first + pages * page_bytes : mmap.PAGESIZE]
            touched.add_(1) if writes else touched.sum()

        found, caches = [], ColdCaches()
        for _ in range(ROUNDS):
            for access in accesses:
                caches.make()
                began_s = time.thread_time()
                resources.pager.acquire(access)
                touch(access)
                taken_s = time.thread_time() - began_s
                caches.make()
                began_s = time.thread_time()
                touch(access)  # mapped now: what is left are the misses that its computing has too
                taken_s -= time.thread_time() - began_s
                began_s = time.thread_time()
                resources.pager.release(access, access.writes)
                found.append(taken_s + time.thread_time() - began_s)
            resources.pager.end_step()
    return mean(found[ACCESSES:])


class _MemoryStore:
    """A store in memory: all pages are in the same place of a file, and no one looks at what they have."""

    io_mode = "in memory"

    def __init__(self, engine: Engine, page_bytes: int) -> None:
        self._engine = engine
        memory = os.memfd_create("swapper-trial")
        try:
            os.truncate(memory, page_bytes)
            self._file = _C.File(f"/proc/self/fd/{memory}")
        finally:
            os.close(memory)

    def read(self, page: Page, address: int, after: Transfer | None = None) -> Transfer:
        return self._engine.read(self._file, 0, address, page.nbytes, after=after)

    def write(self, page: Page, address: int) -> Transfer:
        return self._engine.write(self._file, 0, address, page.nbytes)

    def written_to(self, page: Page) -> _C.File:
        return self._file

    def written(self, page: Page, ticket: Transfer) -> None:
        page.location = 0

    def explain(self, page: Page, error: IoError) -> IoError:
        return error

    def file_of(self, page: Page) -> _C.File:
        return self._file

    def close(self) -> None:
        self._file.close()
