"""The dry run: the real pager, on a store that moves nothing, predicts what a step moves before anything is written.

With a drive whose transfers take time (virtual_drive.py) it also predicts how long a step takes.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from swapper.errors import IoError
from swapper.io.engines import Transfer
from swapper.io.tensor_bytes import SECTOR_BYTES
from swapper.paging.host_memory import Pool
from swapper.paging.pager import Pager
from swapper.paging.schedule import Access, Schedule
from swapper.paging.section import Page, Section
from swapper.paging.virtual_drive import DryTransfer, VirtualDrive
from swapper.runtime.interrupts import defer_signals
from swapper.runtime.stats import StepClock, StepStats

FIRST_STEPS = 2
"""Steps until the resident pages have settled."""

MAX_STEPS, SETTLED = 12, 0.002
"""Steps until one is like the one before, with the same bytes, and times that differ by no more than this part. If after this many
none is, the steps wander: with few frames, other pages stay in each. Then the mean counts. Runs of a model wander too."""


@dataclass(frozen=True, slots=True)
class Task:
    """A part of a step: the pages that it uses, one access after the other, and what is computed with them.

    Attributes:
        phase: "forward", "backward", or "step".
        group: of parameters.
        accesses: see above; of a task without pages there are none.
        updated: how many elements the optimizer updates in it.
        parts: bytes of parts of a matrix that are read while those before them are multiplied, into slots of their own.
    """

    phase: str
    group: int
    accesses: Sequence[Access]
    updated: int = 0
    parts: Sequence[int] = ()


class DryStore:
    """A store that moves nothing. Transfers take the time of `drive`."""

    def __init__(self, drive: VirtualDrive) -> None:
        self._drive = drive

    def read(self, page: Page, address: int, after: Transfer | None = None) -> DryTransfer:
        return self._drive.read(page.nbytes, after)

    def write(self, page: Page, address: int) -> DryTransfer:
        return self._drive.write(page.nbytes)

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


class DryDevice(Protocol):
    """An accelerator, on which computing is queued. See forecast/accelerator.py."""

    def run(self, task: Task) -> None:
        """Queue what a task computes, whose pages are in memory."""

    def end_step(self) -> None:
        """Note that all tasks of a step are queued."""


class DryRun:
    """A pager on a store that only counts.

    Args:
        sections: without memory, their pages numbered consecutively.
        frame_count: frames of the pool; 0 if nothing is paged.
        tasks: of a step, in order.
        window_pages, lazy, max_deferred_writes: see `Pager`.
        slot_groups: by index of a page of parameters, the group whose gradient slots may cache it.
        drive: moves the pages; default: one that takes no time.
        seconds: returns how long a task computes for one of its accesses; default: 0.
        is_committed: each step is committed, so that its writes are over before the next one changes anything.
        parts_ahead: parts of matrices that are read or in use at once. See Task.

    Attributes:
        clock: divides the time of `drive` into steps and phases.
        device: computes instead of the processors, if there is one.
    """

    device: DryDevice | None = None

    def __init__(
        self,
        sections: Sequence[Section],
        frame_count: int,
        tasks: Sequence[Task],
        window_pages: int | None,
        lazy: bool,
        max_deferred_writes: int,
        slot_groups: Mapping[int, int],
        drive: VirtualDrive | None = None,
        seconds: Callable[[Task], float] = lambda task: 0.0,
        is_committed: bool = False,
        parts_ahead: int = 1,
    ) -> None:
        self._drive = drive or VirtualDrive()
        self._frame_count = frame_count
        self._tasks = tasks
        self._seconds = seconds
        self._is_committed = is_committed
        self._part_sizes = itertools.cycle([nbytes for task in tasks for nbytes in task.parts])
        self._parts_ahead = parts_ahead
        self._parts: deque[DryTransfer] = deque()  # that are read, or in use
        pages = [page for section in sections for page in section.pages]
        self._transient = [page.index for page in pages if page.section.transient]
        for section in sections:
            section.attach(torch.empty(0, dtype=torch.uint8, device="cpu"), self._drive.window())
        for page in pages:
            page.location = None if page.section.transient else 0
        pool = Pool(0, 0, SECTOR_BYTES, frame_count)
        cycle = [access for task in tasks for access in task.accesses]
        self._counters = self._drive.counters
        self.clock = StepClock(self._counters, lambda: self._drive.clock_s)
        if drive is not None:
            self.clock.start(drive.rates.seconds_for)
        self._pager = Pager(
            pages, pool, DryStore(self._drive), Schedule(cycle), self._counters,
            window_pages=window_pages, lazy=lazy, max_deferred_writes=max_deferred_writes,
            finished=lambda: self._drive.finished,
        )  # fmt: skip
        self._victim_cache = DryRunVictimCache(slot_groups)
        self._pager.use_victim_cache(self._victim_cache)

    def flush(self) -> None:
        """Write changed pages, as a commit does."""
        with defer_signals:
            self._pager.flush()

    def step(self) -> None:
        """Take one step: lease, compute and release each access; the optimizer's leases overlap."""
        self._held: Access | None = None
        with defer_signals:
            last_is_written = not self._is_committed
            for task in self._tasks:
                self.clock.enter(task.phase)
                if task.updated and not last_is_written:  # as durability/committer.py, `before_step`
                    self._pager.flush()
                    last_is_written = True
                self._do(task)
            self._release_held()
            if self.device is not None:
                self.clock.enter("step")
                self.device.end_step()
            self._pager.end_step()
            self._pager.forget(self._transient)
            self.clock.enter("between")
            self._counters.step += 1
            self.clock.end_step()

    def _do(self, task: Task) -> None:
        """What a task computes is spread over its parts, or else over its accesses."""
        total_s = self._seconds(task)
        for _ in task.parts:
            self._read_parts()
            part = self._parts.popleft()
            with self._counters.waiting("read", part):
                self._drive.wait(part)
            self._drive.compute(total_s / len(task.parts))
        if task.parts:
            self._read_parts()
            total_s = 0.0
        seconds = total_s / max(len(task.accesses), 1)
        if not task.accesses:
            self._drive.compute(total_s)
        for access in task.accesses:
            self._drive.lease()
            self._pager.lease(access)
            self._release_held()
            self._pager.wait(access)
            self._drive.compute(seconds)
            self._counters.update_s += seconds if task.updated else 0
            self._pager.drop_cached(self._victim_cache.note(access))
            if access.writes:
                self._held = access
            else:
                self._pager.release(access)
        if self.device is not None:
            self.device.run(task)

    def _read_parts(self) -> None:
        """Read parts of matrices in the order of a pass, again and again, some of them ahead: as infer/weight_rows.py."""
        while len(self._parts) < self._parts_ahead:
            self._parts.append(self._drive.read(next(self._part_sizes), None))

    def _release_held(self) -> None:
        if self._held is not None:
            self._pager.release(self._held, self._held.writes)
            self._held = None

    def traffic(self) -> tuple[dict[str, int], dict[str, int], int]:
        """Return the bytes that one step of many (reads, writes), by family, and those that a commit after it adds."""
        if not self._frame_count:
            return {}, {}, 0
        step = self.time(FIRST_STEPS + 1)
        self.flush()
        self.step()  # what the commit has written need not be written at eviction
        more = self.clock.stats().written_bytes - step.written_bytes
        return dict(step.total.read_bytes), dict(step.total.written_bytes), max(more, 0)

    def time(self, min_steps: int = 2) -> StepStats:
        """Return the statistics of a step once one moves nothing or is like the one before, or the mean of several: MAX_STEPS."""
        steps: list[StepStats] = []
        while len(steps) < MAX_STEPS:
            self.step()
            steps.append(self.clock.stats())
            moves_nothing = self.device is None and not steps[-1].read_bytes + steps[-1].written_bytes
            if moves_nothing or (len(steps) >= min_steps and _alike(*steps[-2:])):
                return steps[-1]
        return StepStats.mean(steps[FIRST_STEPS:])


def _alike(one: StepStats, other: StepStats) -> bool:
    same_bytes = (one.total.read_bytes, one.total.written_bytes) == (other.total.read_bytes, other.total.written_bytes)
    return same_bytes and abs(one.wall_s - other.wall_s) <= SETTLED * other.wall_s
