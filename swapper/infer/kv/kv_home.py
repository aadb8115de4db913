"""Has a layer's keys and values where kernels use them while it has its turn: in the windows of its pages, on a CPU.

[Note: order of layers] A step leases the layers one after the other, each until nobody has its keys and values: attention is over
then. What a step will use is known when it begins, and what the next will: the pager expects that. Pages that a step makes are
in its accesses as fresh, in those of the next one as read.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from swapper import _C
from swapper.device.tier import DeviceCopy
from swapper.errors import ChecksumError, IoError
from swapper.infer.kv.kv_rows import KeyValueFile, Rows, SavedRows
from swapper.infer.kv.kv_size import CacheSize
from swapper.paging.pager import Pager
from swapper.paging.schedule import Access
from swapper.runtime.sizes import format_bytes

READ_AHEAD_SHARE, MIN_READ_AHEAD_PAGES = 1 / 128, 8
"""Of the frames, and at least: what is read of the next layer while attention has one. Then it takes that one's frames."""


def read_ahead_pages(frame_count: int) -> int:
    return max(int(frame_count * READ_AHEAD_SHARE), MIN_READ_AHEAD_PAGES)


class HostRows:
    """Leases the pages of the layer that has its turn, and the last page of each layer for good ([Note: rows], kv_rows.py).

    Args:
        pager, store, size: of the pages.
        layers: the rows of each, by number; they change.

    Attributes:
        leased: the rows that have their turn.
    """

    def __init__(self, pager: Pager, store: KeyValueFile, size: CacheSize, layers: Mapping[int, Rows]) -> None:
        self.leased: Rows | None = None
        self._pager = pager
        self._store = store
        self._size = size
        self._layers = layers
        self._access = Access(None, ())
        self._cycle: list[Access] = []

    # --- a turn -------------------------------------------------------------------------------------------------------

    def expect(self, added: int) -> None:
        """Expect a step that adds `added` tokens, and then steps of one. [Note: order of layers]"""
        layers = [self._layers[index] for index in sorted(self._layers)]
        cycle = [access for rows in layers for access in self.accesses(rows, added)]
        if any(access.fresh for access in cycle):
            cycle += [access for rows in layers for access in self.accesses(rows, min(added, 1), before=added)]
        if cycle != self._cycle:
            self._cycle = cycle
            self._pager.expect(cycle)

    def accesses(self, rows: Rows, added: int, before: int = 0) -> Sequence[Access]:
        """Return what a layer's turn will lease. Args: as of `Rows.next_access`."""
        return (rows.next_access(added, before),)

    def room(self, rows: Rows, added: int) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Begin a layer's turn, in which `added` tokens are added. Yield begin and end of a part of them, and its memory.

        Raises: as `lease`.
        """
        yield rows.end, rows.end + added, self.lease(rows, added)

    def lease(self, rows: Rows, added: int) -> torch.Tensor:
        """Begin a layer's turn. Return the memory of its rows, uint8, with room for `added` more.

        Raises:
            IoError: a page could not be read, or an earlier one not written.
            BudgetError: a budget is too small for the layer.
            ChecksumError: a saved context was damaged.
        """
        self._check_room(rows, added)
        access = rows.next_access(added)
        self._acquire(access)
        self.leased, self._access = rows, access
        self._check_saved(rows)
        return rows.section.memory

    def has_all(self, rows: Rows) -> bool:
        """Return whether a layer has its turn, and all of its rows are in memory."""
        return self.leased is rows

    def memory(self, rows: Rows) -> torch.Tensor:
        """Return the memory of the layer that has its turn."""
        return rows.section.memory

    def keep(self, rows: Rows, end: int) -> None:
        """Keep tokens [rows.end, end) of the layer that has its turn, which were written to its memory. Raises as `lease`."""
        row = rows.shape.nbytes
        last = tuple(rows.section.indices_of(end * row - 1, end * row))
        before = rows.last
        if before is not None and before.pages == last:
            return
        access = Access(None, last, writes=frozenset(last))
        self._acquire(access)
        rows.last = access
        if before is not None:
            self._pager.release(before, before.writes)

    def release(self) -> Rows | None:
        """End the turn. Return whose it was."""
        rows, self.leased = self.leased, None
        if rows is not None:
            self._pager.release(self._access, self._access.writes)
        return rows

    # --- between turns ------------------------------------------------------------------------------------------------

    @contextmanager
    def using(self, rows: Rows, begin: int, end: int, added: int = 0) -> Iterator[torch.Tensor]:
        """Return the memory that has tokens [begin, end), and takes `added` more behind them, within the context."""
        with self._pager.leased(rows.access(begin, end, added)):
            yield rows.section.memory

    def settle(self, rows: Rows) -> None:
        """Have nothing under way that uses the pages of a layer without a turn. Its last page is not leased any more."""
        if rows.last is not None:
            access, rows.last = rows.last, None
            self._pager.release(access, access.writes)

    def add(self, rows: Rows) -> None:
        """Know a layer's rows, which have no tokens, or those of a saved context in pages."""

    def renew(self, rows: Rows) -> None:
        """Note that the tokens of a layer without a turn are others now."""

    def remove(self, rows: Rows) -> None:
        """Forget a layer's rows."""

    def close(self) -> None:
        """End all use."""
        self.leased = None

    # ------------------------------------------------------------------------------------------------------------------

    @contextmanager
    def _one_error(self) -> Iterator[None]:
        """Drop failures of other writes where one is raised: one error is enough."""
        try:
            yield
        except IoError:
            self._pager.end_failures()
            raise

    def _acquire(self, access: Access) -> None:
        with self._one_error():
            self._pager.acquire(access)

    def _expect_copies(self, images: Sequence[DeviceCopy]) -> None:
        """Expect the pages of images in this order, again and again, from the first page on that is not copied yet."""
        cycle = [copy.access for image in images for copy in image.copies]
        if cycle != self._cycle:
            self._cycle = cycle
            to_come = [copy.access for image in images for copy in image.copies[image.sent :]]
            self._pager.expect(to_come + [copy.access for image in images for copy in image.copies[: image.sent]])

    def _check_saved(self, rows: Rows) -> None:
        """Raise ChecksumError if the layer's bytes of the saved context were all read, and are not those that were saved."""
        saved = rows.unchecked
        pages = [] if saved is None else rows.section.pages_of(0, saved.place.nbytes)
        first_reads = self._store.first_reads
        if saved is None or not all(page in first_reads for page in pages):
            return  # it was cropped
        crc32 = 0
        for page in pages:
            crc32 = _C.crc32_combine(crc32, first_reads[page].crc32, page.stored_bytes)
        if saved.crc32 and crc32 != saved.crc32:
            raise _checksum_error(rows.index, saved)
        rows.unchecked = None

    def _check_room(self, rows: Rows, added: int) -> None:
        """Raise BudgetError unless the pool has frames for the pages of a layer with `added` more tokens."""
        first, last = rows.begin * rows.shape.nbytes, (rows.end + added) * rows.shape.nbytes

        def frames(page_bytes: int) -> int:
            return -(-last // page_bytes) - first // page_bytes

        if not self._size.has(frames):
            raise self._size.too_small(
                frames,
                f"the keys and values of one layer, {format_bytes(last - first)}, which must be there together",
                ' now, and twice as much to read the next layer meanwhile; KVCache(..., attention="blocks") needs a block of a '
                "layer, and is approximate to the last bits",
            )


def _checksum_error(layer: int, saved: SavedRows) -> ChecksumError:
    return ChecksumError(
        "read",
        str(saved.place.path),
        saved.place.offset,
        saved.place.nbytes,
        errno.EBADMSG,
        f"the keys and values of layer {layer} are not those that were saved: take another copy of the file",
    )
