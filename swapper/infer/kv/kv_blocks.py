"""Leases a layer's keys and values block by block of its tokens, so that one layer may be larger than memory.

[Note: blocks] New tokens are written to their pages part by part, and attention gets them from the model's own tensors. Those
before them are read from their pages, each block until the next one is wanted. The blocks of all layers are what the pager
expects: it reads the next ones, and the first ones of the next layer, while one is computed on. Blocks begin at multiples of
their length, so that most have the same pages in each step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from swapper.infer.kv.kv_attention import MAX_BLOCK_TOKENS
from swapper.infer.kv.kv_home import HostRows, read_ahead_pages
from swapper.infer.kv.kv_rows import Rows
from swapper.paging.schedule import Access
from swapper.runtime.sizes import format_bytes

MAX_BLOCK_BYTES = 16 << 20
"""Of the pages of a block: few enough for the drive and the processor to alternate often. A choice."""
BLOCKS_AHEAD = 2
"""They are read while one is computed on, if memory allows."""


class BlockRows(HostRows):
    """Leases one block of the layer that has its turn. Args: as of `HostRows`."""

    def accesses(self, rows: Rows, added: int, before: int = 0) -> Sequence[Access]:
        begin, end, tokens = rows.begin, rows.end + before, self._block_tokens(rows)
        if before and rows.kept is not None:
            begin = max(begin, end - rows.kept)
        made, found = rows.access(rows.begin, rows.end, before).fresh, []
        for access in (_writing(rows, *span) for span in spans(end, end + added, tokens)):
            if not access.fresh <= made:
                found.append(replace(access, fresh=access.fresh - made))
                made |= access.fresh
        return found + [_reading(rows, *span) for span in spans(begin, end, tokens)]

    def room(self, rows: Rows, added: int) -> Iterator[tuple[int, int, torch.Tensor]]:
        self.leased, self._access = rows, Access(None, ())
        for first, last in spans(rows.end, rows.end + added, self._block_tokens(rows)):
            with self._leased(_writing(rows, first, last)):
                yield first, last, rows.section.memory

    def blocks(self, rows: Rows, begin: int, end: int) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Yield begin and end of each block of tokens [begin, end), and their memory, which is there until the next one.

        Raises:
            IoError: a page could not be read.
            ChecksumError: a saved context was damaged.
        """
        for first, last in spans(begin, end, self._block_tokens(rows)):
            with self._leased(_reading(rows, first, last)):
                yield first, last, rows.section.memory
        self._check_saved(rows)

    def has_all(self, rows: Rows) -> bool:
        return super().has_all(rows) and bool(self._access.pages)

    @contextmanager
    def _leased(self, access: Access) -> Iterator[None]:
        self._acquire(access)
        try:
            yield
        finally:
            self._pager.release(access, access.writes)

    def _block_tokens(self, rows: Rows) -> int:
        """Return how many tokens a block has.

        Raises:
            BudgetError: there are not even frames for one token, in addition to the last page of each layer.
        """
        page_bytes, row = self._size.page_bytes, rows.shape.nbytes

        def frames(page_bytes: int) -> int:
            return _pages_of_one(row, page_bytes) + 1

        if not self._size.has(frames):
            raise self._size.too_small(frames, f"a block of one token, of {format_bytes(row)}")
        is_aligned, free = page_bytes % row == 0, self._size.frame_count - self._size.layer_count - 1
        ahead = read_ahead_pages(self._size.frame_count)
        pages = min(MAX_BLOCK_BYTES // page_bytes, ahead // BLOCKS_AHEAD, free // (1 + BLOCKS_AHEAD))
        return min(max((pages - (not is_aligned)) * page_bytes // row, 1), MAX_BLOCK_TOKENS)


def _pages_of_one(row_bytes: int, page_bytes: int) -> int:
    """Return on how many pages a row is, at most."""
    return -(-row_bytes // page_bytes) + (page_bytes % row_bytes != 0)


def spans(begin: int, end: int, tokens: int) -> Iterator[tuple[int, int]]:
    """Yield [begin, end) in parts that end at multiples of `tokens`, but the last."""
    while begin < end:
        last = min(begin - begin % tokens + tokens, end)
        yield begin, last
        begin = last


def _reading(rows: Rows, first: int, last: int) -> Access:
    return rows.access(first, last, 0, ("kv", rows.index, first))


def _writing(rows: Rows, first: int, last: int) -> Access:
    """Return the access of new tokens; outside of the order if it only needs the last page, which is leased."""
    access = rows.access(first, first, last - first, ("kv", rows.index, first, "new"))
    return access if access.fresh else replace(access, key=None)
