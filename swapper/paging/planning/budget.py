"""Divides the host budget: from section sizes to resident bytes, the page size and the number of frames. Pure."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from swapper.errors import BudgetError
from swapper.io.tensor_bytes import SECTOR_BYTES, round_up
from swapper.paging.planning.layout import choose_page_bytes
from swapper.runtime.sizes import format_bytes

OR_PLACE_MORE = ', or place more on NVMe (params, optimizer_state, gradients="nvme")'
"""Of errors of a budget that is too small: what else helps."""
ARENA_ALIGNMENT_BYTES = 2 << 20
"""Frames begin at a huge page, and an arena consists of whole huge pages."""

READ_AHEAD_BYTES = 128 << 20
"""Reads and the writes that they wait for, in flight, that keep a drive busy in both directions."""

RESIDENT_SLICE_BYTES = 32 << 20
"""The page size by which updates are cut if nothing is paged."""

SMALL_SECTION_BYTES = 64 << 10
"""A section this small (step counters) always stays in memory: a page of its own would waste a frame."""


@dataclass(frozen=True, slots=True)
class PoolSize:
    """The size of a page in bytes, and the number of frames."""

    page_bytes: int
    frame_count: int

    @property
    def pool_bytes(self) -> int:
        return self.page_bytes * self.frame_count


SizeT = TypeVar("SizeT", bound=PoolSize)


@dataclass(frozen=True, slots=True)
class Budget(PoolSize):
    """The division of a host budget: resident bytes and the pool, together at most the budget.

    Attributes:
        spare_frames: of the pool, beyond what a step needs at once.
    """

    resident_bytes: int
    spare_frames: int = 0


def divide(
    host_bytes: int,
    kept_bytes: int,
    paged: Sequence[int],
    frames_needed: Callable[[int], int],
    explain: str,
    page_bytes: int | None = None,
    min_frames: Callable[[int], int] = lambda page_bytes: 0,
) -> Budget:
    """Return how `host_bytes` are used.

    Args:
        host_bytes: the budget.
        kept_bytes: of what stays in memory, gradients included.
        paged: sizes of the other sections.
        frames_needed: for a page size, how many frames a step needs at once so that it can never deadlock.
        explain: of `kept_bytes`, for the error message.
        page_bytes: the size of a page if it is given, as in a resumed run.
        min_frames: at most as many as `frames_needed`, found sooner.

    Raises:
        BudgetError: with the smallest budget that works.
    """
    rest = f"stay in memory ({explain}); raise host_memory{OR_PLACE_MORE}"
    frames_needed = functools.cache(frames_needed)  # which goes through slices; the search asks for few sizes
    min_frames = functools.cache(min_frames)

    def is_enough(frames: int, size: int) -> bool:
        return frames >= min_frames(size) and frames >= frames_needed(size)

    def fit(pool_bytes: int) -> PoolSize | None:
        if paged:
            return _fit(pool_bytes, paged, frames_needed, is_enough, page_bytes)
        return PoolSize(page_bytes or RESIDENT_SLICE_BYTES, 0) if pool_bytes >= 0 else None

    size = divide_host_memory(host_bytes, kept_bytes, fit, "this model and optimizer need", lambda: rest)
    spare_frames = size.frame_count - frames_needed(size.page_bytes) if paged else 0
    return Budget(size.page_bytes, size.frame_count, kept_bytes, spare_frames)


def divide_host_memory(
    host_bytes: int, fixed_bytes: int, fit: Callable[[int], SizeT | None], who: str, rest: Callable[[], str]
) -> SizeT:
    """Return how `fit` divides the memory that a budget leaves for a pool.

    Args:
        host_bytes: the budget.
        fixed_bytes: of the budget, not for the pool.
        fit: divides a pool of a multiple of ARENA_ALIGNMENT_BYTES; None if it is too small.
        who: "this model needs", for the message.
        rest: returns what the fixed bytes are and what the user can do, for the message.

    Raises:
        BudgetError: with the smallest budget that works.
    """
    # An arena takes whole ones.
    pool_bytes = (host_bytes - fixed_bytes) // ARENA_ALIGNMENT_BYTES * ARENA_ALIGNMENT_BYTES
    found = fit(pool_bytes)
    if found is None:
        smallest = fixed_bytes + _smallest_pool(fit)
        raise BudgetError(
            f"host_memory={format_bytes(host_bytes)} is too small: {who} at least {format_bytes(smallest)} "
            f"({smallest} bytes), of which {format_bytes(fixed_bytes)} {rest()}",
            smallest_bytes=smallest,
        )
    return found


def _smallest_pool(fit: Callable[[int], object]) -> int:
    if fit(0) is not None:
        return 0
    low, high = 0, ARENA_ALIGNMENT_BYTES
    while fit(high) is None:
        low, high = high, 2 * high
    while high - low > ARENA_ALIGNMENT_BYTES:
        middle = (low + high) // 2 // ARENA_ALIGNMENT_BYTES * ARENA_ALIGNMENT_BYTES
        low, high = (low, middle) if fit(middle) is not None else (middle, high)
    return high


def read_ahead_pages(budget: Budget) -> int:
    """Return how many pages a training may read early at the cost of others ([Note: what stays], paging/prefetcher.py).

    That is an eighth of the pool, for phases of computing that alternate with phases of transfers, and at least READ_AHEAD_BYTES.
    """
    return max(budget.frame_count // 8, -(-READ_AHEAD_BYTES // budget.page_bytes))


def resident_bytes(sections: Sequence[int]) -> int:
    """Return the bytes that resident sections of these sizes take in an arena, up to the first frame."""
    return round_up(sum(round_up(nbytes, SECTOR_BYTES) for nbytes in sections), ARENA_ALIGNMENT_BYTES)


def _fit(
    pool_bytes: int,
    paged: Sequence[int],
    frames_needed: Callable[[int], int],
    is_enough: Callable[[int, int], bool],
    page_bytes: int | None,
) -> PoolSize | None:
    """Return what a pool of `pool_bytes` consists of, or None if it is too small. No more frames than pages."""
    if pool_bytes < SECTOR_BYTES:
        return None
    size = page_bytes or choose_page_bytes(paged, pool_bytes)
    while not is_enough(pool_bytes // size, size):
        size = max(round_up(size // 2, SECTOR_BYTES), SECTOR_BYTES)
        if page_bytes is not None or size < SMALL_SECTION_BYTES:
            return None
    pages = sum(-(-nbytes // size) for nbytes in paged)
    return PoolSize(size, max(min(pool_bytes // size, pages), frames_needed(size)))
