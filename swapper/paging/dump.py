"""A dump of the pager's state for people: leases, frames, and transfers in flight, with ages and names.

It reads without the lock, which a stalled thread may hold: numbers may be of two moments.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from swapper.paging.host_memory import Pool
from swapper.paging.residency import CLEAN, DIRTY, Residency
from swapper.paging.schedule import Access
from swapper.paging.section import Page

MAX_LINES = 12
"""The oldest leases and transfers that are listed, of each."""


def describe(
    pages: Sequence[Page],
    pool: Pool,
    in_flight: Mapping[int, Page],
    held: Mapping[int, tuple[Access, float]],
    deferred_writes: Collection[int],
) -> str:
    """Return the dump, several lines.

    Args:
        pages, pool: of the run.
        in_flight, held, deferred_writes: see `Frames`.
    """
    now_s = time.monotonic()
    counts = Counter(page.residency for page in pages)
    leased = sum(page.leases > 0 for page in pages)
    lines = [
        f"frames: {pool.free_count} of {pool.frame_count} free, {pool.frame_bytes} bytes each",
        "pages: " + ", ".join(f"{counts[state]} {state.name}" for state in Residency) + f"; {leased} leased"
        f"{f', {len(deferred_writes)} to be written once they are back from spare memory' * bool(deferred_writes)}",
    ]
    leases = sorted(held.values(), key=lambda entry: entry[1])
    lines += _listed("leases", [f"{now_s - since_s:.1f} s: {_of(pages, access)}" for access, since_s in leases])
    return "\n".join([*lines, *_listed("in flight", _transfers(list(in_flight.values()), now_s))])


def _listed(title: str, entries: list[str]) -> list[str]:
    more = len(entries) - MAX_LINES
    shown = [f"  {entry}" for entry in entries[:MAX_LINES]] + [f"  and {more} more"] * (more > 0)
    return [f"{title}: {len(entries) or 'none'}", *shown]


def _of(pages: Sequence[Page], access: Access) -> str:
    key = "outside of a step" if access.key is None else str(access.key)
    if not access.pages:
        return f"{key}, no pages"
    there = sum(pages[index].residency in (CLEAN, DIRTY) for index in access.pages)
    return f"{key}, {pages[access.pages[0]].section.plan.where}: {there} of {len(access.pages)} pages in memory"


def _transfers(pages: list[Page], now_s: float) -> list[str]:
    found = []
    for page in pages:
        ticket = page.ticket  # another thread may take it away
        if ticket is not None:
            state = "done, not yet noticed" if ticket.done else page.residency.name
            behind = "" if page.previous_owner is None else f", for the frame of page {page.previous_owner.index}"
            what = f"{page.section.plan.where}, page {page.index}, {page.nbytes} bytes: {state}{behind}"
            found.append((ticket.submitted_s, what))
    return [f"{now_s - since_s:.1f} s: {text}" for since_s, text in sorted(found)]
