"""Measures what paging takes of the processors, for predictions: the pages' windows, and the engine's checksums."""

from __future__ import annotations

import os

import torch

from swapper import _C
from swapper.modules.operations import least_seconds
from swapper.paging.virtual_drive import PagingCosts

PAGES, MAX_PAGE_BYTES = 8, 8 << 20
"""Of a trial; they share half as many frames, so that each is mapped each time. Larger pages count by their bytes."""
CHECKED_BYTES = 16 << 20
TRIALS = 5


def measure_paging_costs(page_bytes: int, has_checksums: bool) -> PagingCosts:
    """Measure windows of an arena, as the pager uses them, and a checksum: some milliseconds.

    Args:
        page_bytes: of a page.
        has_checksums: the engine takes checksums of what moves. They are taken from the computing if torch has a thread for each
            processor.
    """
    page_bytes = min(page_bytes, MAX_PAGE_BYTES)
    arena = _C.Arena(max(page_bytes * PAGES // 2, CHECKED_BYTES))
    windows = [arena.window(page_bytes) for _ in range(PAGES)]

    def show_all() -> None:
        for number, window in enumerate(windows):
            window.map(0, number % (PAGES // 2) * page_bytes, page_bytes)
            window.unmap(0, page_bytes)

    try:
        mapped_s = least_seconds(show_all, TRIALS) / (PAGES * page_bytes)
        shares = torch.get_num_threads() >= len(os.sched_getaffinity(0))
        checked_s = 0.0
        if has_checksums and shares:
            checked_s = least_seconds(lambda: _C.crc32_address(arena.address, CHECKED_BYTES), TRIALS) / CHECKED_BYTES
        return PagingCosts(mapped_s, checked_s)
    finally:
        windows.clear()
        arena.close()
