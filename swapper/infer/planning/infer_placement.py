"""Dividing the budget of inference. Pure: which pages stay in memory for good, how large a page is, how many frames there are.

A pass uses every group once, in the same order each time. On such a cycle the best that memory can do is to keep a fixed set and
to stream the rest through the frames that are left. [Note: the kept set] What streams needs frames for the largest unit's streamed
pages and for some read-ahead; so the groups that would stream most keep most: every group streams at most `streamed` pages, and
that number is as small as the budget allows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from swapper.io.alignment import SECTOR_BYTES, round_up
from swapper.paging.planning.budget import PoolSize, divide_host_memory
from swapper.runtime.sizes import format_bytes

AHEAD_BYTES = 64 << 20
"""Read-ahead that keeps the drive busy while a unit computes and holds its pages."""
HUGE_PAGE_BYTES = 2 << 20
LEAST_PAGE_BYTES = 64 << 10
MOST_PAGE_BYTES = 16 << 20
LEAST_FRAMES = 20
MOST_SIZES = 64
PAGE_COST_BYTES = 64 << 10
"""What a page costs beside its bytes, in Python and in shorter runs: about 30 us at 2 GB/s."""


@dataclass(frozen=True, slots=True)
class Placement(PoolSize):
    """What the budget gives: a pool that fits it.

    Attributes:
        streamed: of each group, how many pages are streamed at most; the others stay once they were read.
    """

    streamed: int

    def read_bytes(self, groups: Sequence[Sequence[int]]) -> int:
        """What a pass over `groups` (as for `place`) reads, whole pages."""
        return sum(min(pages, self.streamed) for pages in _pages(groups, self.page_bytes)) * self.page_bytes


@dataclass(frozen=True, slots=True)
class Demand:
    """What memory is divided for.

    Attributes:
        groups: for each group, the sizes of its runs in bytes, multiples of SECTOR_BYTES.
        units: for each unit, the groups that are leased while it runs: its own and those of the units around it.
        unplanned: sizes in bytes of what is read by parts, and may be used as a whole all the same.
        held: so many pages are leased at one time whatever runs, and pages of others come by: they go on to a device one by one.
    """

    groups: Sequence[Sequence[int]]
    units: Sequence[Sequence[int]]
    unplanned: Sequence[int] = ()
    held: int | None = None


def place(host_bytes: int, fixed_bytes: int, demand: Demand, where: Sequence[str]) -> Placement:
    """Return the placement that reads the fewest bytes a pass.

    Args:
        host_bytes: the budget.
        fixed_bytes: what is taken already: small tensors, buffers, conversions, slots.
        demand: what it is for.
        where: the units' names.

    Raises:
        BudgetError: with the smallest budget that works.
    """
    return divide_host_memory(
        host_bytes,
        fixed_bytes,
        lambda pool_bytes: _best(pool_bytes, demand),
        "this model needs",
        lambda: f"are small tensors, buffers and conversions, and {_largest(demand, where)}; raise host_memory",
    )


def _best(pool_bytes: int, demand: Demand) -> Placement | None:
    groups = demand.groups
    if not any(groups):
        return _for_unplanned(pool_bytes, demand) if pool_bytes >= 0 else None
    huge = _cheapest(_huge_sizes(pool_bytes), pool_bytes, demand)
    if huge is not None and (not huge.streamed or sum(map(sum, groups)) > pool_bytes):
        return huge
    fitting = _cheapest(_fitting_sizes(pool_bytes, groups), pool_bytes, demand)
    if huge is not None:  # all fits but for what whole huge pages waste: nothing is mapped again where nothing streams
        return fitting if fitting is not None and not fitting.streamed else huge
    return fitting or _cheapest([LEAST_PAGE_BYTES], pool_bytes, demand)


def _for_unplanned(pool_bytes: int, demand: Demand) -> Placement:
    """Nothing is used as a whole, as far as is known."""
    target = pool_bytes // LEAST_FRAMES // SECTOR_BYTES * SECTOR_BYTES
    page_bytes = min(max(target, SECTOR_BYTES), LEAST_PAGE_BYTES)
    frames = _unplanned_frames(demand, page_bytes, pool_bytes // page_bytes)
    return Placement(page_bytes, frames, frames)


def _unplanned_frames(demand: Demand, page_bytes: int, most: int) -> int:
    """Frames for the largest thing that `most` can hold of what is used by parts, as far as is known."""
    pages = [-(-nbytes // page_bytes) for nbytes in demand.unplanned]
    return max((count for count in pages if count <= most), default=0)


def _cheapest(sizes: Iterable[int], pool_bytes: int, demand: Demand) -> Placement | None:
    best, best_cost = None, 0
    for page_bytes in sizes:
        placement = _place_with(page_bytes, pool_bytes, demand)
        if placement is None:
            continue
        read = [min(pages, placement.streamed) for pages in _pages(demand.groups, page_bytes)]
        cost = sum(read) * (page_bytes + PAGE_COST_BYTES)
        if demand.held is not None:
            cost += sum(_pages(demand.groups, page_bytes)) * PAGE_COST_BYTES  # what stays is copied in each pass too
        if best is None or cost < best_cost:
            best, best_cost = placement, cost
    return best


def _huge_sizes(pool_bytes: int) -> Iterable[int]:
    """Whole huge pages: frames and windows lie so that one entry maps 2 MiB. Others cost 0.09 CPU s a GB in mapping."""
    most = min(pool_bytes // LEAST_FRAMES, MOST_PAGE_BYTES)
    return range(HUGE_PAGE_BYTES, most + 1, HUGE_PAGE_BYTES)


def _fitting_sizes(pool_bytes: int, groups: Sequence[Sequence[int]]) -> Iterable[int]:
    """Sizes that cut the runs with little waste: whole fractions of those that take most room."""
    weights: dict[int, int] = {}
    for nbytes in (nbytes for runs in groups for nbytes in runs):
        weights[nbytes] = weights.get(nbytes, 0) + nbytes
    common = sorted(weights, key=lambda nbytes: -weights[nbytes])[:8]
    target = min(max(pool_bytes // LEAST_FRAMES, LEAST_PAGE_BYTES), MOST_PAGE_BYTES)
    sizes = {
        round_up(-(-nbytes // parts), SECTOR_BYTES)
        for nbytes in common
        for parts in range(-(-nbytes // target), -(-nbytes // target) + 12)
    }
    return sorted((size for size in sizes if LEAST_PAGE_BYTES < size <= target), reverse=True)[:MOST_SIZES]


def _pages(groups: Sequence[Sequence[int]], page_bytes: int) -> list[int]:
    return [sum(-(-nbytes // page_bytes) for nbytes in runs) for runs in groups]


def _place_with(page_bytes: int, pool_bytes: int, demand: Demand) -> Placement | None:
    """[Note: the kept set]"""
    pages = _pages(demand.groups, page_bytes)
    frames = pool_bytes // page_bytes
    passing = 0 if demand.held is None else demand.held + 2
    if frames >= sum(pages) + passing:
        more = _unplanned_frames(demand, page_bytes, frames)
        return Placement(page_bytes, min(sum(pages) + passing + more, frames), 0)
    sizes = Counter(pages)  # many groups have one size, and many units are alike
    working_sets = {tuple(sorted(pages[g] for g in unit if pages[g])) for unit in demand.units}

    def fits(streamed: int, ahead: int) -> bool:
        kept = sum(max(count - streamed, 0) * number for count, number in sizes.items())
        if demand.held is not None:
            return kept + demand.held + max(min(sum(pages), ahead), 2) <= frames
        working = max(sum(min(count, streamed) for count in counts) for counts in working_sets)
        return kept + working + max(min(working, ahead), 2) <= frames

    most = max(pages)
    if not fits(most, 2):
        return None
    ahead = -(-AHEAD_BYTES // page_bytes)
    low, high = 0, most  # nothing streamed does not fit; `high` does
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle, ahead) else (middle, high)
    return Placement(page_bytes, frames, high)


def _largest(demand: Demand, where: Sequence[str]) -> str:
    """Say what is used at one time."""
    if demand.held is not None:
        return f"the rest {demand.held} pages on their way to the device, and the next ones"
    sizes = [sum(sum(demand.groups[g]) for g in unit) for unit in demand.units]
    largest = max(range(len(sizes)), key=sizes.__getitem__)
    return f"{format_bytes(sizes[largest])} what is used at one time in {where[largest]!r}"
