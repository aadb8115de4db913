"""What stays in memory, where that is free to choose. Pure: a cycle of accesses -> pages.

[Note: an even share] Of pages that are used once in a cycle which does not fit, any fixed set may stay: as many must be read
whichever it is. But a step's computing hides the transfers beside it only where they are: where all of one layer stays and
nothing of the next, the drive rests first and is waited for then. So an even share of the cycle stays, but of what comes first
more: before it there was a time without transfers (a step's other half, where nothing is paged), and then much is wanted at once.
Where some pages are used several times in a step, which stay is no free choice: what is needed latest leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from swapper.paging.planning.schedule import Access

ONE_USE = 1 / 8
"""Uses of a page that all lie within this part of a cycle count as one: slices of one layer that meet on a page."""
FIRST = 2 / 5
"""At most this part of what stays is what comes first in the cycle."""


def choose_resident_set(
    cycle: Sequence[Access], page_bytes: Callable[[int], int], frame_count: int, window_pages: int
) -> frozenset[int]:
    """Return the pages that shall stay; none where that is no free choice, or where there is no room.

    Args:
        cycle: a step.
        page_bytes: returns the size of a page; of the largest there is one in each frame that stays.
        frame_count: frames of the pool.
        window_pages: how many pages may be brought in early.
    """
    first: dict[int, int] = {}
    for position, access in enumerate(cycle):
        for page in access.pages:
            if position - first.setdefault(page, position) > ONE_USE * len(cycle):
                return frozenset()
    neighbours = zip(cycle, [*cycle[1:], *cycle[:1]], strict=True)
    working = max((len({*one.pages, *other.pages}) for one, other in neighbours), default=0)
    largest = max((page_bytes(page) for page in first), default=0)
    order = [page for page in first if page_bytes(page) == largest]
    streaming = max(window_pages + 2, working + 1)
    count = min(frame_count - streaming, len(order))
    if count <= 0:
        return frozenset()
    lead = min(int(FIRST * count), window_pages)
    rest, count = order[lead:], count - lead
    return frozenset(order[:lead]) | {rest[(2 * n + 1) * len(rest) // (2 * count)] for n in range(count)}
