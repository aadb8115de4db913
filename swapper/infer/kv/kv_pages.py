"""Keeps the rows of keys and values in pages: in host memory as far as a budget goes, the rest in a scratch file (kv_rows.py).

Where kernels use them is their home: those pages (kv_home.py), block by block (kv_blocks.py), or memory of a device
(kv_device.py), or that block by block (kv_device_blocks.py).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from swapper.device.model_device import DeviceBudget
from swapper.errors import StateError
from swapper.formats.sources import FileStamp
from swapper.infer.kv.kv_blocks import BlockRows
from swapper.infer.kv.kv_device import DeviceRows
from swapper.infer.kv.kv_device_blocks import DeviceBlockRows
from swapper.infer.kv.kv_home import HostRows, read_ahead_pages
from swapper.infer.kv.kv_rows import KeyValueFile, Rows, RowShape, SavedRows
from swapper.infer.kv.kv_size import CacheSize
from swapper.io.tensor_bytes import SECTOR_BYTES, round_up
from swapper.modules.resources import Resources
from swapper.paging.layout import ExternalBytes, SectionPlan
from swapper.paging.schedule import Schedule
from swapper.paging.section import EXTERNAL, Section
from swapper.runtime.counters import Counters
from swapper.tensors.torch_private import count_uses

HEAD_BYTES = 32 << 20
"""Bytes of the frames that are populated before the first use; the rest is while it goes on: a choice."""


class KeyValuePages(Resources[KeyValueFile]):
    """Owns memory, file and pager of the keys and values of one cache, and the rows of each of its layers.

    Args:
        host_bytes: of the pool.
        directory: of the scratch file, which has no name.
        saved: see `KeyValueFile`.
        layer_count: of the model.
        backend: of the engine.
        counters: to update.
        budget: of the device that has the keys; None: they are on the CPU.
        by_blocks: layers are read block by block.

    Raises:
        IoError: the directory refuses.
    """

    def __init__(
        self,
        host_bytes: int,
        directory: Path,
        saved: tuple[Path, FileStamp] | None,
        layer_count: int,
        backend: str,
        counters: Counters,
        budget: DeviceBudget | None = None,
        by_blocks: bool = False,
    ) -> None:
        device = None if budget is None else budget.device
        super().__init__(counters, near=device)
        self._ends_early = device is None and not by_blocks
        self._size = CacheSize.of(host_bytes, layer_count)
        self._layers: dict[int, Rows] = {}
        self._file_bytes = 0
        self._page_count = 0
        self._unused: dict[int, list[Section]] = {}  # by size, sections of rows that were given up
        self._last_layer = -1
        self._thread: int | None = None
        self._shown: tuple[weakref.ref[torch.Tensor], ...] = ()  # keys and values whose end ends the turn
        self._late: BaseException | None = None  # raised there
        self._broken_by = ""  # what struck while rows were rewritten in place
        counters.pool_bytes, counters.frame_bytes = self._size.pool_bytes, self._size.page_bytes
        try:
            self.open(
                [],
                self._size,
                [directory],
                backend,
                lambda engine: KeyValueFile(engine, directory, saved),
                Schedule([]),
                device,
                head_bytes=HEAD_BYTES,
                window_pages=read_ahead_pages(self._size.frame_count),
                one_at_a_time=device is None,
            )
            own = self.pager, self.store, self._size, self._layers
            if budget is None or self.host_side is None:
                self._home = BlockRows(*own) if by_blocks else HostRows(*own)
            else:
                self._home = (DeviceBlockRows if by_blocks else DeviceRows)(budget, self.host_side, counters, *own)
        except BaseException:
            self.close()
            raise

    # --- a step -------------------------------------------------------------------------------------------------------

    def append(
        self, rows: Rows, keys: torch.Tensor, values: torch.Tensor, seen: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add tokens to a layer. Return the keys and values of all that attention sees: views, or if these are the first,
        contiguous tensors with what was given. The turn ends when nobody has them, or with the next layer's.

        Args:
            rows: of the layer, of `open_rows`, with room for them.
            keys, values: of the new tokens, of shape (batch, heads, tokens, width).
            seen: how many tokens before them attention gets; None: all.

        Raises:
            IoError: a page could not be read or written. The layer is as it was before.
            BudgetError: the pool is too small for the layer's pages.
            StateError: two threads use the cache at once.
        """
        begin, is_first = rows.begin if seen is None else max(rows.begin, rows.end - seen), rows.count == 0
        self.add(rows, keys, values)
        if is_first:
            if self._ends_early:
                self.end_turn()
            return keys.contiguous(), values.contiguous()  # attention takes a tenth less time than with rows
        memory = self._home.memory(rows)
        others = count_uses(memory)
        shown = rows.shape.views(memory, begin, rows.end)
        if self._ends_early:
            gone = partial(self._one_is_gone, memory, others, count_uses(memory))
            self._shown = tuple(weakref.ref(one, gone) for one in shown)
        return shown

    def add(self, rows: Rows, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Add tokens to a layer, which has its turn now. Args: as of `append`. Raises as it does."""
        added = keys.shape[2]
        self._begin_turn(rows, added)
        begin, end = rows.begin, rows.end
        for first, last, memory in self._home.room(rows, added):
            rows.over = begin  # an error in this step takes its tokens back, and no others
            rows.shape.write(memory, first, *(new[:, :, first - end : last - end] for new in (keys, values)))
            self._home.keep(rows, last)
        rows.end = end + added
        if rows.kept is not None:
            rows.begin = max(begin, rows.end - rows.kept)

    def blocks(self, rows: Rows, begin: int, end: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield keys and values of tokens [begin, end) of the layer that has its turn, block by block; each is whole until the
        next.

        Raises:
            StateError: another layer has its turn.
            IoError: a page could not be read.
            ChecksumError: a saved context was damaged.
        """
        assert isinstance(self._home, BlockRows)
        if self._home.leased is not rows:
            raise StateError("keys of a KVCache are read until the next layer is used")
        for first, last, memory in self._home.blocks(rows, begin, end):
            yield rows.shape.views(memory, first, last)

    def read(self, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values of a layer, whole until the next layer's turn."""
        self._shown = ()
        if not self._home.has_all(rows):
            self._begin_turn(rows, 0)
            self._home.lease(rows, 0)
        return rows.shape.views(self._home.memory(rows), rows.begin, rows.end)

    def end_turn(self, going: int = 0) -> None:
        """End the lease of the layer that had its turn, and forget what its window has left behind, unless somebody has views.

        Args:
            going: how many uses of the layer's memory are ending just now.
        """
        self._shown = ()
        rows = self._home.release()
        if rows is not None and rows.kept is not None and not rows.section.referenced_pages(going):
            self.pager.forget(rows.section.indices_of(0, rows.over * rows.shape.nbytes)[:-1])

    def _one_is_gone(self, memory: torch.Tensor, others: int, uses: int, gone: object) -> None:
        """End the turn if keys and values are gone, and all views of them: attention is over. Python calls this, wherever it is.

        Args:
            others: uses of the layer's memory before its keys and values were there.
            uses: of it when both were. The one that goes still counts.
        """
        going = count_uses(memory)
        if threading.get_ident() != self._thread or going >= uses:
            return
        try:
            self.end_turn(going - others)
        except BaseException as error:  # which Python would only print
            self._late = error

    def _begin_turn(self, rows: Rows, added: int) -> None:
        self.end_turn()
        late, self._late = self._late, None
        if late is not None:
            raise late
        if self._broken_by:
            raise StateError(
                f"{self._broken_by} was raised while a KVCache was reordered: call reset(), and prefill again"
            )
        me, is_first = threading.get_ident(), rows.index <= self._last_layer or self._thread is None
        if me != self._thread and not (is_first and self._is_between_steps):
            raise StateError(
                "two threads generate with one KVCache at once, or one has ended within a forward: give each thread its own, or "
                "call reset()"
            )
        if is_first:
            self.store.check_unchanged()
            self._thread = me
            self._home.expect(added)
        self._last_layer = rows.index

    @property
    def _is_between_steps(self) -> bool:
        """Whether the last layer has had its turn, or none."""
        return self._thread is None or self._last_layer >= max(self._layers)

    # --- layers -------------------------------------------------------------------------------------------------------

    def open_rows(self, index: int, shape: RowShape, capacity: int, kept: int | None) -> Rows:
        """Return a layer's rows, empty.

        Args:
            index: of the layer.
            shape: of a row.
            capacity: tokens that there is room for.
            kept: see `Rows`.
        """
        rows = Rows(index, shape, self._take_section(index, capacity * shape.nbytes), kept)
        self._layers[index] = rows
        self._home.add(rows)
        return rows

    def open_saved(self, index: int, saved: SavedRows, capacity: int, kept: int | None) -> Rows:
        """Return a layer's rows, with those of a saved context. Args: as of `open_rows`."""
        section = self._new_section(index, round_up(capacity * saved.shape.nbytes, SECTOR_BYTES), saved.place)
        rows = Rows(index, saved.shape, section, kept)
        rows.end, rows.unchecked = saved.count, saved
        for page in section.pages_of(0, saved.place.nbytes):
            page.location = EXTERNAL
        self._layers[index] = rows
        self._home.add(rows)
        return rows

    def read_ahead(self) -> None:
        """Begin to read what the first step will use."""
        self._shown = ()
        self._home.expect(1)

    def close_rows(self, rows: Rows) -> None:
        """Forget the tokens of a layer; its part of the file is used again, unless somebody has views of them, which stay."""
        self.end_turn()
        self._home.settle(rows)
        self._home.remove(rows)
        if not rows.section.referenced_pages():
            self.pager.discard_pages(page.index for page in rows.section.pages)
            self.pager.forget(page.index for page in rows.section.pages)
            self._unused.setdefault(rows.section.plan.nbytes, []).append(rows.section)
        if self._layers.get(rows.index) is rows:
            del self._layers[rows.index]
        if not self._layers:
            self._thread, self._last_layer, self._broken_by = None, -1, ""

    def move_rows(self, rows: Rows, shape: RowShape, capacity: int, pick: torch.Tensor | None) -> Rows:
        """Return new rows of a layer with the tokens of `rows`, which are closed then. After an error they are as before.

        Args:
            rows: of the layer.
            shape, capacity: see `open_rows`.
            pick: see `rewrite`.
        """
        target = self.open_rows(rows.index, shape, capacity, rows.kept)
        try:
            self.rewrite(rows, target, pick)
        except BaseException:
            self.close_rows(target)
            self._layers[rows.index] = rows
            raise
        self.close_rows(rows)
        return target

    def crop(self, rows: Rows, count: int) -> None:
        """Forget the last `count` tokens of a layer."""
        self.end_turn()
        rows.cut(max(rows.end - count, rows.begin))

    def rewrite(self, rows: Rows, target: Rows, pick: torch.Tensor | None = None) -> None:
        """Write the tokens of one layer's rows to the beginning of `target`, which may be the same rows.

        Args:
            rows: where they are.
            target: with room for them.
            pick: of the batch, which entry each entry of the target is; int64, of shape (target's batch,). None: the same.
        """
        self.end_turn()
        self._home.settle(rows)
        self._home.settle(target)
        begin, end = rows.begin, rows.end
        try:
            for first, last in self._chunks(begin, end, max(rows.shape.nbytes, target.shape.nbytes)):
                self._rewrite(rows, first, last, target, first - begin, pick)
        except BaseException as error:
            if target is rows:
                self._broken_by = type(error).__name__
            raise
        target.begin = target.over = 0
        target.end = end - begin
        self._home.renew(target)

    def _rewrite(self, rows: Rows, first: int, last: int, target: Rows, to: int, pick: torch.Tensor | None) -> None:
        """Write tokens [first, last) of `rows` to `target`, from token `to` on."""
        with self._home.using(rows, first, last) as memory:
            parts = [part.clone() for part in rows.shape.views(memory, first, last)]
        if pick is not None:
            parts = [part.index_select(0, pick.to(part.device)) for part in parts]
        count = last - first
        with self._home.using(target, to, to, count) as memory:
            target.shape.write(memory, to, *parts)

    def pieces(self, rows: Rows, count: int) -> Iterator[torch.Tensor]:
        """Yield the bytes of a layer's last `count` rows, uint8, piece by piece; each is whole until the next."""
        self.end_turn()
        row = rows.shape.nbytes
        for first, last in self._chunks(rows.end - count, rows.end, row):
            with self._home.using(rows, first, last) as memory:
                yield memory[first * row : last * row].cpu()

    def _chunks(self, begin: int, end: int, row_bytes: int) -> Iterator[tuple[int, int]]:
        step = max(self._size.page_bytes // row_bytes, 1)
        for first in range(begin, end, step):
            yield first, min(first + step, end)

    def _take_section(self, index: int, nbytes: int) -> Section:
        nbytes = round_up(nbytes, SECTOR_BYTES)
        unused = self._unused.get(nbytes)
        if unused:
            return unused.pop()
        return self._new_section(index, nbytes, None)

    def _new_section(self, index: int, nbytes: int, external: ExternalBytes | None) -> Section:
        self._shown = ()
        plan = SectionPlan(index, "kv", torch.uint8, (), nbytes, external)
        section = Section(plan, self._file_bytes, self._size.page_bytes, self._page_count)
        self._file_bytes += nbytes
        self._page_count += section.page_count
        section.in_frames = self.host_side is not None
        self.store.add_pages(section.pages)
        self.add_pages([section])
        return section

    def close(self) -> None:
        """Close memory, file and engine. Views of keys and values that somebody still has keep what they show."""
        self._shown = ()
        if "_home" in vars(self):
            self._home.close()
        self._layers.clear()
        self._unused.clear()
        super().close()
