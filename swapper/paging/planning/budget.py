"""Dividing the host budget. Pure: from section sizes to what is resident, how large a page is, and how many frames there are."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from swapper.errors import BudgetError
from swapper.io.alignment import SECTOR_BYTES, round_up
from swapper.paging.planning.layout import choose_page_bytes
from swapper.runtime.sizes import format_bytes

ARENA_ALIGNMENT_BYTES = 2 << 20
"""Frames begin at a huge page, and an arena consists of whole ones."""

READ_AHEAD_BYTES = 128 << 20
"""Reads and the writes that they wait for keep a drive busy in both directions with this much under way."""

RESIDENT_SLICE_BYTES = 32 << 20
"""Where there are no pages at all, updates are cut as if they were so large."""

SMALL_SECTION_BYTES = 64 << 10
"""A section this small (step counters) always stays in memory: a page of its own would waste a frame."""


@dataclass(frozen=True, slots=True)
class Budget:
    """How a host budget is used: what stays in memory, and the pool. Together at most the budget."""

    resident_bytes: int
    page_bytes: int
    frame_count: int

    @property
    def pool_bytes(self) -> int:
        return self.page_bytes * self.frame_count


def divide(
    host_bytes: int,
    kept_bytes: int,
    paged: Sequence[int],
    frames_needed: Callable[[int], int],
    explain: str,
    page_bytes: int | None = None,
) -> Budget:
    """Return how `host_bytes` are used.

    Args:
        host_bytes: the budget.
        kept_bytes: what stays in memory, gradients included.
        paged: sizes of the sections that do not.
        frames_needed: for a page size, how many frames one step needs at one time so that it can never deadlock.
        explain: what takes the room, for the error message.
        page_bytes: the size of a page if it is given, as where a run goes on.

    Raises:
        BudgetError: with the smallest budget that works.
    """
    if not paged:
        if kept_bytes > host_bytes:
            raise _too_small(host_bytes, kept_bytes, kept_bytes, explain)
        return Budget(kept_bytes, page_bytes or RESIDENT_SLICE_BYTES, 0)
    pool_bytes = (
        (host_bytes - kept_bytes) // ARENA_ALIGNMENT_BYTES * ARENA_ALIGNMENT_BYTES
    )  # the arena takes whole ones
    frames_needed = functools.cache(frames_needed)  # which goes through all slices; the search below asks for few sizes
    fitted = _fit(pool_bytes, paged, frames_needed, page_bytes)
    if fitted is None:
        smallest = kept_bytes + _smallest_pool(paged, frames_needed, page_bytes)
        raise _too_small(host_bytes, smallest, kept_bytes, explain)
    return Budget(kept_bytes, *fitted)


def read_ahead_pages(budget: Budget) -> int:
    """Return how many pages a training may bring in early at the cost of others ([Note: what stays], paging/pager.py).

    An eighth of the pool, for where phases that compute and phases that move data take turns, and what keeps a drive busy.
    """
    return max(budget.frame_count // 8, -(-READ_AHEAD_BYTES // budget.page_bytes))


def resident_bytes(sections: Sequence[int]) -> int:
    """Return what resident sections of these sizes take in an arena, up to where frames begin."""
    return round_up(sum(round_up(nbytes, SECTOR_BYTES) for nbytes in sections), ARENA_ALIGNMENT_BYTES)


def _fit(
    pool_bytes: int, paged: Sequence[int], frames_needed: Callable[[int], int], page_bytes: int | None
) -> tuple[int, int] | None:
    """Return (page size, frames) for a pool of `pool_bytes`, or None if it is too small. No more frames than pages."""
    if pool_bytes < SECTOR_BYTES:
        return None
    size = page_bytes or choose_page_bytes(paged, pool_bytes)
    while pool_bytes // size < frames_needed(size):
        size = max(round_up(size // 2, SECTOR_BYTES), SECTOR_BYTES)
        if page_bytes is not None or size < SMALL_SECTION_BYTES:
            return None
    pages = sum(-(-nbytes // size) for nbytes in paged)
    return size, max(min(pool_bytes // size, pages), frames_needed(size))


def _smallest_pool(paged: Sequence[int], frames_needed: Callable[[int], int], page_bytes: int | None) -> int:
    low, high = 0, round_up(2 * sum(paged) + (64 << 20), ARENA_ALIGNMENT_BYTES)
    while _fit(high, paged, frames_needed, page_bytes) is None:
        high *= 2
    while high - low > ARENA_ALIGNMENT_BYTES:
        middle = (low + high) // 2 // ARENA_ALIGNMENT_BYTES * ARENA_ALIGNMENT_BYTES
        fits = _fit(middle, paged, frames_needed, page_bytes) is not None
        low, high = (low, middle) if fits else (middle, high)
    return high


def _too_small(host_bytes: int, smallest: int, kept: int, explain: str) -> BudgetError:
    return BudgetError(
        f"host_memory={format_bytes(host_bytes)} is too small: this model and optimizer need at least "
        f"{format_bytes(smallest)} ({smallest} bytes), of which {format_bytes(kept)} stay in memory ({explain}); "
        "raise host_memory, or place more on NVMe"
    )
