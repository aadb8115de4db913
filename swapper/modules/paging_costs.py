"""Measures what paging takes of the processors, for predictions: the pager with its windows, the engine and its checksums."""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from statistics import mean

import torch

from swapper import _C
from swapper.errors import IoError
from swapper.io.engines import Engine, Transfer
from swapper.io.tensor_bytes import SECTOR_BYTES
from swapper.modules.operations import ColdCaches, has_spare_processor, median_seconds
from swapper.modules.resources import Resources
from swapper.paging.layout import PoolSize, SectionPlan
from swapper.paging.pager import Pager
from swapper.paging.schedule import Access, Schedule
from swapper.paging.section import Page, Section
from swapper.paging.virtual_drive import PagingCosts
from swapper.runtime.counters import Counters

ACCESSES, ROUNDS = 8, 4
"""Of a trial: the pages of each access are read, and written, each time. The first round counts for nothing."""
PAGES = 6
"""Of an access, in the trials that separate what an access costs from what each of its pages and of their bytes does."""
MAX_PAGE_BYTES = 2 << 20
"""Larger pages count by their bytes."""
ENGINE_THREADS = ("swapper-io", "swapper-rw")
"""Names of the engine's threads."""
THREAD_CLOCK = 6
"""Bits of a clock's number that mean the processor time of one thread; its inverted number has the others (CPUCLOCK_PERTHREAD_MASK
and CPUCLOCK_SCHED of Linux, include/linux/posix-timers.h)."""
CHECKED_BYTES = 64 << 20
"""More than a processor's cache: the engine finds no page there."""
TRIALS = 5

Act = Callable[[], None]
"""What is done with leased pages."""
Use = Callable[[Access, Act], None]
"""Does something while the pages of an access are leased."""
Users = Callable[[Pager, Section, Sequence[Access]], Use]
"""Returns what leases these accesses."""


def lease_only(pager: Pager, section: Section, accesses: Sequence[Access]) -> Use:
    """Lease as an optimizer's update does: without hooks."""

    def use(access: Access, act: Act) -> None:
        with pager.leased(access):
            act()

    return use


def measure_paging_costs(
    page_bytes: int, has_checksums: bool, writes: bool = True, users: Users = lease_only
) -> PagingCosts:
    """Measure pages as the pager uses them, in memory, and a checksum: a second or so.

    Args:
        page_bytes: of a page.
        has_checksums: the engine takes checksums of what moves.
        writes: pages are changed.
        users: what leases them.
    """
    page_bytes = min(page_bytes, MAX_PAGE_BYTES)
    one_s, _ = _trial(page_bytes, 1, writes, users)
    several_s, _ = _trial(page_bytes, PAGES, writes, users)
    small_s, transfer_s = _trial(SECTOR_BYTES, PAGES, writes, users)
    page_s = max(several_s - one_s, 0.0) / (PAGES - 1)
    mapped_s = min(max(several_s - small_s, 0.0) / PAGES, page_s)
    checked_s = 0.0
    if has_checksums:
        with closing(_C.Arena(CHECKED_BYTES)) as arena:
            checked_s = median_seconds(lambda: _C.crc32_address(arena.address, CHECKED_BYTES), TRIALS) / CHECKED_BYTES
    return PagingCosts(
        access_s=max(one_s - page_s, 0.0),
        page_s=page_s - mapped_s,
        mapped_byte_s=mapped_s / page_bytes,
        transfer_s=transfer_s,
        checked_byte_s=checked_s,
        takes_turns=not has_spare_processor(),
    )


def _trial(page_bytes: int, pages: int, writes: bool, users: Users) -> tuple[float, float]:
    """Return what an access to this many pages takes of the thread that leases them, with the page faults of their first use; and
    what a transfer takes of the engine's thread."""
    section = Section(SectionPlan(0, "state", torch.uint8, (), ACCESSES * pages * page_bytes), 0, page_bytes)
    indices = [tuple(page.index for page in section.pages[n * pages : (n + 1) * pages]) for n in range(ACCESSES)]
    accesses = [Access(("param", n), of, writes=frozenset(of if writes else ())) for n, of in enumerate(indices)]
    section.guards_writes = not writes
    resources: Resources[_MemoryStore] = Resources(Counters())
    size, directory = PoolSize(page_bytes, ACCESSES // 2 * pages), Path(tempfile.gettempdir())
    others = _engine_clocks()
    with closing(resources):
        resources.open(
            [section], size, [directory], "auto", lambda engine: _MemoryStore(engine, page_bytes), Schedule(accesses)
        )
        engine, clocks = resources.engine, _engine_clocks() - others
        assert engine is not None
        use, caches = users(resources.pager, section, accesses), ColdCaches()
        found: list[float] = []
        before = 0.0, 0
        for number in range(ROUNDS):
            if number == 1:
                found, before = [], _passed(engine, clocks)
            for access in accesses:
                first = access.pages[0] * page_bytes
                touched = section.memory[first : first + pages * page_bytes : mmap.PAGESIZE]
                touch = partial(touched.add_, 1) if writes else touched.sum
                found.append(_taken_s(partial(use, access), touch, caches))
            resources.pager.end_step()
        engine.drain()
        now = _passed(engine, clocks)
    return mean(found), (now[0] - before[0]) / max(now[1] - before[1], 1) * page_bytes


def _taken_s(use: Callable[[Act], None], touch: Callable[[], object], caches: ColdCaches) -> float:
    """Return the thread's seconds of `use`, which leases pages around their first touch, with cold caches before and within.

    A second touch does not count, nor what it takes of the first: its misses are the computing's own.
    """
    apart_s = 0.0

    def act() -> None:
        nonlocal apart_s
        touch()
        mapped_s = time.thread_time()
        caches.make()
        again_s = time.thread_time()
        touch()
        ended_s = time.thread_time()
        apart_s = ended_s - mapped_s + ended_s - again_s
        caches.make()
        apart_s += time.thread_time() - ended_s

    caches.make()
    began_s = time.thread_time()
    use(act)
    return time.thread_time() - began_s - apart_s


def _passed(engine: Engine, clocks: Iterable[int]) -> tuple[float, int]:
    """Return the processor time that the engine's threads have taken, and the bytes that it has moved."""
    return sum(map(time.clock_gettime, clocks)), engine.bytes_read + engine.bytes_written


def _engine_clocks() -> set[int]:
    """Return clocks of the processor time of all threads of engines in this process."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            if (task / "comm").read_text().strip() in ENGINE_THREADS:
                found.add(~int(task.name) << 3 | THREAD_CLOCK)
    return found


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
