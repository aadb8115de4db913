"""The real pager, pool, schedule, sections and store on the simulated engine, and what must hold after every request.

A `Run` keeps a model: for each page the bytes that were last written to it, and (kept_contents.py) the bytes that the last commit
names. All that the pager promises is compared with it, byte for byte, whatever order and whatever faults the seed brings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from kept_contents import KeptContents
from simulated_engine import Arena, ArenaView, Engine, Faults, Growth, SimulationError, Window
from simulated_store import PAGE_BYTES, SimulatedStore, VictimCache, make_sections

from swapper.errors import BudgetError, IoError
from swapper.paging.host_memory import Pool
from swapper.paging.pager import Pager
from swapper.paging.residency import Residency
from swapper.paging.schedule import Access, Schedule
from swapper.paging.section import NO_FRAME, Frame, Page
from swapper.runtime.counters import Counters

REQUESTS_INSIDE = 3
"""Other threads ask for something so often, at most, while one waits."""
IN_MEMORY = (Residency.CLEAN, Residency.DIRTY, Residency.WRITING)


@dataclass(eq=False)
class Lease:
    """A lease as its holder sees it.

    `granted`: its pages are in memory. `changed`: it changed them and has not said so yet. `other`: another thread has it.
    """

    access: Access
    other: bool = False
    granted: bool = False
    changed: bool = False


class SimulatedPool(Pool):
    """A pool of frames in simulated memory."""

    def __init__(self, arena: Arena, arena_offset: int, frame_count: int, growth: Growth) -> None:
        view: Any = ArenaView(arena)
        super().__init__(arena.address, arena_offset, PAGE_BYTES, frame_count, growth, view)
        self._arena = arena

    def zero(self, frame: Frame, nbytes: int) -> None:
        self._arena.at(frame.address, nbytes)[:] = bytes(nbytes)


class Run:
    """One pager and all around it.

    Args:
        seed: decides everything that happens.
        section_pages: for each section, how many pages it has.
        frame_count: how many frames there are.
        cycle: what the schedule expects at first.
        pager_class: the pager.
        fault_rate: chance that an operation fails.
        threads: other threads may ask the pager for something while one waits.
        hurry: chance that the engine makes a move whenever somebody looks; None lets the seed say.
        window_pages, lazy: the pager's; None lets the seed say.
        transient: numbers of the sections whose content need not be kept.
        victim_cache: there is one, with room by chance.
        tolerance: the schedule's.
        max_deferred_writes: see `Pager`.
        stray_rate: chance that somebody changes a page past the guard, whenever they may; if not 0, there must be a frame more
            than what is leased needs.
        in_frames: a device uses pages in their frames, by chance: [Note: lazy windows], paging/frames.py. None lets the seed say.
    """

    def __init__(
        self,
        seed: int,
        section_pages: list[int],
        frame_count: int,
        cycle: list[Access],
        pager_class: type[Pager] = Pager,
        fault_rate: float = 0.0,
        threads: bool = False,
        hurry: float | None = None,
        window_pages: int | None = None,
        lazy: bool | None = None,
        transient: frozenset[int] = frozenset(),
        victim_cache: bool = False,
        tolerance: int | None = None,
        max_deferred_writes: int = 0,
        stray_rate: float = 0.0,
        in_frames: bool | None = None,
    ) -> None:
        self.random = Random(seed)
        self._in_frames = Random(f"in frames {seed}")
        is_used_there = self._in_frames.random() < 0.5 if in_frames is None else in_frames
        self.stray_rate = stray_rate
        self.stray_writes = 0
        self.frame_count = frame_count
        self.threads = threads
        self.others_run = threads
        arena_offset = self.random.randrange(5) * PAGE_BYTES
        self.arena = Arena(1 << 40, arena_offset + frame_count * PAGE_BYTES)
        self.faults = Faults(self.random, fault_rate)
        eagerness = self.random.choice([0.0, 0.05, 0.3, 0.7, 0.97]) if hurry is None else hurry
        slowness = self.random.choice([0.0, 0.1, 0.4])
        self.engine = Engine(self.arena, self.random, self.faults, eagerness, slowness)
        self.sections, nbytes = make_sections(section_pages, self.random, transient)
        for section in self.sections:
            window = Window(self.arena, section.plan.nbytes)
            section.attach(window, window)  # type: ignore[arg-type]
            section.guards_writes = not section.transient
            section.in_frames = is_used_there and self._in_frames.random() < 0.7
        self.pages: list[Page] = [page for section in self.sections for page in section.pages]
        self.store = SimulatedStore(self.engine, nbytes, self.pages)
        self.schedule = Schedule(cycle, tolerance)
        growth = Growth(arena_offset + frame_count * PAGE_BYTES, Random(f"growth {seed}"))
        pool = SimulatedPool(self.arena, arena_offset, frame_count, growth)
        self.pool = pool
        if lazy is None:
            lazy = self.random.random() < 0.3
        if window_pages is None:
            window_pages = self.random.choice([1, 2, frame_count // 2, frame_count])
        # A deferred or unannounced write needs a frame.
        self._most_leased = frame_count - 1 if max_deferred_writes or stray_rate else frame_count
        self.pager = pager_class(
            self.pages,
            pool,
            self.store,
            self.schedule,
            Counters(),
            window_pages=window_pages,
            lazy=lazy,
            max_deferred_writes=max_deferred_writes,
            writes_noted=lambda: self.stray_writes,
        )
        self.victim_cache = VictimCache(self.arena, Random(f"spare {seed}"), self.engine.count_call)
        if victim_cache:
            self.pager.use_victim_cache(self.victim_cache)
        self.leases: list[Lease] = []
        self.content: list[bytes | None] = [None] * len(self.pages)  # as last written; None: never
        self.kept = KeptContents(self.pages, self.store)
        self.unfilled: set[int] = set()  # leased as fresh, and not written yet
        self._requests_inside = 0  # by other threads, during the present one
        self.last_error: IoError | None = None
        self._was_alone = True  # during the last request
        self.engine.before_write = self.kept.check_target
        self.engine.during_wait = self._let_others_run
        self.engine.after_tick = self._look_past_the_guard
        self._may_forget = False  # what is in memory may be thrown away

    # --- requests to the pager ------------------------------------------------------------------------------------

    def attempt(self, request: Callable[..., None], *arguments: Any) -> bool:
        """Make a request. False if it raised IoError, which is checked to be one that the drive really made."""
        self.engine.begin_request()
        inside = self._requests_inside
        try:
            request(*arguments)
        except IoError as error:
            self.engine.seen["told"] += 1
            self.last_error = error
            if all(error is not real for real in self.engine.errors):
                raise SimulationError(f"an error that the drive never made: {error}") from error
            if error.errno == 0 and not self.threads:
                raise SimulationError(f"the consequence of an error is told instead of the error: {error}") from error
            if error.op == "write":
                self.engine.write_failed = False
            return False
        except BudgetError as error:
            raise SimulationError(f"there are frames enough for what is leased, but: {error}") from error
        finally:
            if not inside:
                self._was_alone = self._requests_inside == 0
                self._requests_inside = 0
        return True

    def lease(self, access: Access, other: bool = False) -> Lease | None:
        if self.random.random() < 0.1 and not other:
            dropped = self.victim_cache.choose()
            if self.attempt(self.pager.drop_cached, dropped):
                self.victim_cache.take_back(dropped)
        there = [i for i in access.pages if self.pages[i].section.in_frames and self._in_frames.random() < 0.7]
        access = replace(access, in_frames=frozenset(there))
        lease = Lease(access, other)
        self.leases.append(lease)
        if not self.attempt(self.pager.lease, access):
            self.leases.remove(lease)
            return None
        return lease

    def wait(self, lease: Lease) -> bool:
        before = {index: self.pages[index].residency for index in lease.access.fresh}
        if not self.attempt(self.pager.wait, lease.access):
            self.leases.remove(lease)
            return False
        lease.granted = True
        self.unfilled.update(index for index in before if self.seems_unfilled(index))
        for index in lease.access.pages:
            if index not in lease.access.in_frames and not self.pages[index].shown:
                raise SimulationError(f"{self.pages[index]} is leased for the use of its addresses and not mapped")
            if index not in self.unfilled and self.look(index) != self.content[index]:
                raise SimulationError(f"{self.pages[index]} is leased and has other bytes than were written to it")
            if index in lease.access.writes and self.pages[index].residency is Residency.WRITING:
                raise SimulationError(f"{self.pages[index]} is leased for writing and on its way out")
        return True

    def go_past_the_guard(self) -> None:
        """Perhaps change a page by way of an alias, though nobody leases it for that."""
        if self.random.random() >= self.stray_rate:
            return
        open_to_all = [page for page in self.pages if self._may_be_changed(page)]
        if open_to_all:
            self.write_past_the_guard(self.random.choice(open_to_all))

    def _may_be_changed(self, page: Page) -> bool:
        """Whether the guard notes who changes the page: it has content, and each lease of it is for reading at its addresses."""
        if self.content[page.index] is None or page.section.transient or page.fresh or page.index in self.unfilled:
            return False
        leases = [lease for lease in self.leases if page.index in lease.access.pages]
        return not leases or (
            page.shown and all(lease.granted and page.index not in lease.access.writes for lease in leases)
        )

    def write_past_the_guard(self, page: Page) -> None:
        """Change a page by way of an alias. [Note: unannounced writes], paging/frames.py"""
        content = self.content[page.index] = self.random.randbytes(page.nbytes)
        page.section.window.write(page.offset, content)  # type: ignore[attr-defined]
        self.stray_writes += 1
        self.engine.seen[f"stray write, {page.residency.name}{', leased' if page.leases else ''}"] += 1

    def acquire(self, access: Access, other: bool = False) -> Lease | None:
        lease = self.lease(access, other)
        return lease if lease is not None and self.wait(lease) else None

    def change(self, lease: Lease) -> None:
        """Do what a holder does who leased pages in order to write them: parts of them, or everything."""
        for index in lease.access.writes:
            memory = self._memory(index)
            begin, end = 0, len(memory)
            if self.random.random() < 0.5:
                begin, end = sorted([self.random.randrange(end), end])
            memory[begin:end] = self.random.randbytes(end - begin)
            self.content[index] = bytes(memory)
            self.unfilled.discard(index)
        lease.changed = True

    def release(self, lease: Lease) -> None:
        if lease.access.fresh & self.unfilled:
            self.change(lease)
        changed = lease.access.writes
        if not lease.changed and self.random.random() < 0.5:
            changed = frozenset(i for i in changed if self.random.random() < 0.5)
        lease.other = False  # nobody else releases it while this waits
        written = frozenset(page.index for page, _ in self.pager.written_at(lease.access))
        again = Access(None, tuple(written), writes=written)
        may_write = bool(written) and self.attempt(self.pager.acquire, again)  # as train/groups/parameter_group.py does
        self.leases.remove(lease)
        if not self.attempt(self.pager.release, lease.access, changed if may_write else changed | written):
            raise SimulationError("release raised: nobody could release then")
        if may_write and not self.attempt(self.pager.release, again, written):
            raise SimulationError("release raised: nobody could release then")

    def flush(self) -> bool:
        before = self.stray_writes
        if not self.attempt(self.pager.flush):
            return False
        if self._was_alone and self.stray_writes == before:
            written = [p for p in self.pages if p.leases == 0 and self._is_written(p)]
            if written:
                raise SimulationError(f"flush returned and has not taken in what was written past the guard: {written}")
            idle = [p for p in self.pages if p.residency is Residency.DIRTY and p.leases == 0]
            left = [p for p in idle if not p.section.transient] + list(self.pager._frames.deferred_writes.values())
            if left or self.engine.write_failed:
                raise SimulationError(f"flush returned and has not written {left}")
        return True

    def commit(self, flush: bool = True) -> bool:
        """Commit what is written, if all that nobody leases is. False if it is not, or a write failed."""
        done: list[bool] = []
        if flush and not self.flush():
            return False
        if not self.attempt(lambda: done.append(self.pager.writes_are_done())) or not done[0]:
            return False
        changed = self._pages_being_changed()
        for page in self.pages:
            if page.residency is Residency.WRITING:
                raise SimulationError(f"writes are said to be done, but {page}")
            if page.index not in changed and self.store.content(page) != self.content[page.index]:
                raise SimulationError(f"writes are said to be done, but the drive has an old content of {page}")
        self.kept.commit()
        return True

    def publish(self) -> bool:
        """Commit, and begin to make a swap file a snapshot, as durability/snapshot.py does. False if the drive fails."""
        if not self.commit():
            return False
        self.kept.publish()
        return True

    def drop_leases(self, kept: Sequence[Lease] = ()) -> None:
        self.pager.drop_leases([lease.access for lease in kept])
        self.leases = list(kept)
        self.unfilled &= {index for lease in kept for index in lease.access.pages}

    def discard(self) -> None:
        """Return to the last commit, as TrainingSession.roll_back does after a step that failed half-way."""
        self.engine.begin_request()
        self._requests_inside = REQUESTS_INSIDE  # no more from other threads
        self._may_forget = True
        self.pager.discard()
        self.engine.write_failed = False  # of what is thrown away nobody needs to be told
        self._requests_inside = 0
        self.leases.clear()
        self.unfilled.clear()
        self.store.roll_back(self.pages)
        self.pager.back_cold_pages()
        for page in self.pages:
            self.content[page.index] = self.store.content(page)
        self._may_forget = False
        self.check()
        if any(not t.is_doomed for t in self.engine.open) or any(p.residency is not Residency.COLD for p in self.pages):
            raise SimulationError("discard left something behind")
        if self.pool.free_count != self.frame_count:
            raise SimulationError("discard did not give all frames back")

    # --- what may be asked for ------------------------------------------------------------------------------------

    def is_allowed(self, access: Access) -> bool:
        """Whether a program that keeps the pager's rules may lease `access` now: it fits, and nobody is half-way through it."""
        leased = {index for lease in self.leases for index in lease.access.pages}
        waiting = [lease.access for lease in self.leases if not lease.granted]
        return (
            len(leased.union(access.pages)) <= self._most_leased
            and all(self.content[i] is not None or i in access.fresh for i in access.pages)
            and self.unfilled.isdisjoint(access.pages)
            and all(access.fresh.isdisjoint(other.pages) for other in waiting)
            and all(other.fresh.isdisjoint(access.pages) for other in waiting)
        )

    def seems_unfilled(self, index: int) -> bool:
        """A fresh page was given as zeros, or was in memory already with all that was in it."""
        memory = self.look(index)
        if memory == self.content[index]:
            return False
        if any(memory):
            raise SimulationError(f"{self.pages[index]} was leased as fresh and has neither zeros nor its old content")
        return True

    def look(self, index: int) -> bytes:
        return bytes(self._memory(index))

    # --- what must hold -------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise unless everything is as the model says. Between requests only."""
        self.check_frames()
        self.kept.check()
        changed = self._pages_being_changed()
        counts = [0] * len(self.pages)
        for lease in self.leases:
            for index in lease.access.pages:
                counts[index] += 1
                if lease.granted and self.pages[index].residency not in IN_MEMORY:
                    raise SimulationError(f"{self.pages[index]} is leased and not in memory")
        for page, count in zip(self.pages, counts, strict=True):
            if page.leases != count:
                raise SimulationError(f"{page} should have {count} leases")
            self._check_content(page, page.index in changed)

    def _pages_being_changed(self) -> set[int]:
        """Pages that a lease has changed, or makes, and has not said so yet."""
        return {i for lease in self.leases if lease.changed for i in lease.access.writes} | self.unfilled

    def check_frames(self) -> None:
        """Raise unless frames and mappings are whole. At any time when the pager's mutex is free."""
        self.pager.check()
        for page in self.pages:
            window = page.section.window
            in_memory = (
                page.residency in IN_MEMORY and page.next_owner is None
            )  # [Note: promised frames], paging/frames.py
            is_shown = in_memory and page.frame is not NO_FRAME and (page.shown or not page.section.in_frames)
            expected = (page.frame.offset, page.nbytes) if is_shown else None
            if window.mapped.get(page.offset) != expected:  # type: ignore[attr-defined]
                raise SimulationError(f"{page} should be mapped to {expected}")

    def _check_content(self, page: Page, is_being_changed: bool) -> None:
        content = self.content[page.index]
        stored = self.store.content(page)
        if self._is_written(page):
            if page.index not in self.unfilled and self._shown(page) != content:
                raise SimulationError(f"what was written past the guard of {page} is lost")
        elif page.residency is Residency.WRITING and page.next_owner is not None:
            if self._shown(page) != content:
                raise SimulationError(f"{page} is neither in memory nor on the drive")
        elif page.residency in IN_MEMORY:
            if page.index not in self.unfilled and self.look(page.index) != content:
                raise SimulationError(f"{page} in memory is not what was written to it")
        elif page.index in self.pager._frames.deferred_writes:
            self.engine.seen["deferred_writes"] += 1
            if self.victim_cache.content(page) != content:
                raise SimulationError(f"{page} has a deferred write, and the victim cache does not have its content")
        elif content != stored:
            raise SimulationError(f"{page} is not in memory, and the drive does not have what was written to it")
        is_clean = page.residency is Residency.CLEAN and not self._is_written(page)
        if is_clean and not is_being_changed and self.look(page.index) != stored:
            raise SimulationError(f"{page} is not what the drive has")

    def finish(self) -> None:
        """The drive works again: all that was ever written is there, on the drive and for everybody who asks."""
        self.kept.end_copy()
        self.faults.repair()
        self.faults.rate = 0.0
        self.others_run = False
        while self.leases:
            lease = self.leases[-1]
            if lease.granted or self.wait(lease):
                self.release(lease)
            self.check()
        for _ in range(self.frame_count + len(self.engine.errors)):  # each failed write may still have to be told
            if self.flush():
                break
        else:
            raise SimulationError("flush goes on failing after the drive was repaired")
        self.check()
        for page in self.pages:
            if self.content[page.index] is not None:
                if self.store.content(page) != self.content[page.index]:
                    raise SimulationError(f"flush returned, and the drive does not have {page}")
                lease = self.acquire(Access(None, (page.index,)))
                if lease is None:
                    raise SimulationError(f"{page} cannot be had after the drive was repaired")
                self.release(lease)
        self.check()
        self.pager.describe()
        self.discard()

    # --------------------------------------------------------------------------------------------------------------

    def _look_past_the_guard(self) -> None:
        """The engine has moved on, wherever Python is: whoever reads a page's addresses gets its bytes, or a fault."""
        for page in self.pages if not self._may_forget else ():
            content, shown = self.content[page.index], self._shown(page)
            is_being_made = page.fresh or page.index in self.unfilled
            if shown is not None and content is not None and not is_being_made and shown != content:
                raise SimulationError(f"{page} shows other bytes than were written to it")

    def _shown(self, page: Page) -> bytes | None:
        """What code reads that goes past the guard; None where that is a fault."""
        return page.section.window.look(page.offset, page.nbytes)  # type: ignore[attr-defined]

    def _is_written(self, page: Page) -> bool:
        return page.section.window.written_at(page.offset) >= 0

    def _memory(self, index: int) -> memoryview:
        page = self.pages[index]
        if not page.shown:
            return self.arena.at(page.frame.address, page.nbytes)
        return page.section.window.touch(page.offset, page.nbytes)  # type: ignore[attr-defined]

    def _let_others_run(self) -> None:
        """Somebody waits: with luck another thread asks for something meanwhile, and perhaps keeps its lease."""
        if self.pager._lock.locked():
            raise SimulationError("the pager waits and keeps its mutex")
        self.check_frames()
        if self.others_run and self.random.random() < 0.4:
            self.go_past_the_guard()
        if not self.others_run or self._requests_inside >= REQUESTS_INSIDE or self.random.random() > 0.2:
            return
        self._requests_inside += 1
        self.engine.seen["request during another's wait"] += 1
        ready = [lease for lease in self.leases if lease.granted and lease.other]
        if ready and self.random.random() < 0.4:
            self.release(self.random.choice(ready))
            return
        access = self.random_access()
        if self.is_allowed(access):
            lease = self.acquire(access, other=True)
            if lease is not None and self.random.random() < 0.5:
                self.release(lease)

    def end_other_leases(self) -> None:
        for lease in [lease for lease in self.leases if lease.other]:
            self.release(lease)

    def make_way_for(self, access: Access) -> None:
        """Other threads give back what does not go together with `access`."""
        while not self.is_allowed(access):
            self.release(next(lease for lease in self.leases if lease.other))

    def random_access(self) -> Access:
        """An access outside of the order of a step."""
        most = self.random.choice([1, 2, 3, self.frame_count])
        pages = self.random.sample(range(len(self.pages)), min(most, len(self.pages)))
        writes = frozenset(i for i in pages if self.random.random() < 0.4)
        fresh = frozenset(i for i in writes if self.random.random() < 0.4)
        return Access(None, tuple(pages), fresh, writes)
