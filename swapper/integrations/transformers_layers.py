"""Defines the layers of a KVCache: transformers' own, with their keys and values in pages."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from transformers.cache_utils import DynamicLayer

from swapper.device.model_device import DeviceBudget
from swapper.errors import CheckpointError, ConfigError, StateError, UnsupportedError
from swapper.infer.kv.kv_attention import Blocks, InPages, pieces
from swapper.infer.kv.kv_file import SavedContext
from swapper.infer.kv.kv_pages import KeyValuePages
from swapper.infer.kv.kv_rows import Rows, RowShape, SavedRows
from swapper.infer.kv.kv_size import MAX_PAGE_BYTES
from swapper.integrations.transformers_attention import check_set
from swapper.runtime.counters import Counters

log = logging.getLogger("swapper")

PASSING_LAYERS = 3
"""Layers that a device has room for in addition to those that stay there, by default: one more than it has at once."""


class PagedLayer(DynamicLayer):
    """Keys and values of one layer, in pages.

    Args:
        pages: of the cache.
        index: of the layer.
        options: of the class of transformers that this is one of.

    Raises:
        StateError: keys or values are assigned.
    """

    def __init__(self, pages: LayerPages, index: int, **options: object) -> None:
        self._pages = pages
        self.index = index
        self._rows: Rows | None = None
        initialize: Callable[..., None] = super().__init__
        initialize(**options)

    # --- torch's tensors of it ----------------------------------------------------------------------------------------

    @property
    def keys(self) -> torch.Tensor | None:
        """All keys, of shape (batch, heads, tokens, width), until the next layer is used; None: there are none."""
        return None if self._rows is None else self._pages.owner.read(self._rows)[0]

    @keys.setter
    def keys(self, value: object) -> None:
        self._refuse_value(value)

    @property
    def values(self) -> torch.Tensor | None:
        """All values, as `keys`."""
        return None if self._rows is None else self._pages.owner.read(self._rows)[1]

    @values.setter
    def values(self, value: object) -> None:
        self._refuse_value(value)

    def _refuse_value(self, value: object) -> None:
        if value is not None:
            raise StateError(
                f"keys and values of layer {self.index} of a KVCache are in pages: change them by update, crop and reorder_cache"
            )

    # --- what transformers calls --------------------------------------------------------------------------------------

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Open the rows, and those of the other layers, if they are not open."""
        if self._rows is None:
            self._pages.open_alike(key_states, value_states)

    def open(self, shape: RowShape, capacity: int) -> None:
        """Open the rows, empty, with addresses for `capacity` tokens."""
        self._rows = self._pages.owner.open_rows(self.index, shape, capacity, self.kept)
        self._note_open(shape)

    def _note_open(self, shape: RowShape) -> None:
        self.device, self.dtype = self._pages.device, shape.dtype
        self.is_initialized = True

    def open_saved(self, saved: SavedRows, capacity: int, position: int) -> None:
        """Open the rows with those of a saved context.

        Args:
            saved: the rows of this layer there.
            capacity: tokens that there are addresses for.
            position: tokens that went through the model.

        Raises:
            CheckpointError: these are not the rows that this layer would have.
        """
        if saved.count != (position if self.seen is None else min(position, self.seen)):
            raise CheckpointError(
                f"{saved.place.path}: layer {self.index} has {saved.count} of {position} tokens: it is of another model"
            )
        self._rows = self._pages.owner.open_saved(self.index, saved, capacity, self.kept)
        self._note_open(saved.shape)

    @property
    def rows(self) -> Rows | None:
        return self._rows

    @property
    def kept(self) -> int | None:
        """How many tokens stay after a step; None: all."""
        return None

    @property
    def seen(self) -> int | None:
        """How many tokens before those of a step attention gets; None: all."""
        return None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add tokens; return keys and values of all that attention sees, to be dropped before the next layer's turn.

        Args:
            key_states, value_states: of the new tokens, of shape (batch, heads, tokens, width).
            args, kwargs: are ignored.

        Raises:
            UnsupportedError: they are on another device than the cache's, or autograd records them.
            ConfigError: they have another shape or dtype than those before.
            BudgetError, IoError, StateError: as `KeyValuePages.append`. The cache is as it was before this step.
        """
        pages = self._pages
        pages.check(key_states)
        with torch.inference_mode(False), torch.no_grad(), pages.undone_if_it_fails(self, key_states.shape[2]):
            rows = self._rows_for(key_states, value_states)
            if pages.decoder is not None:
                return pages.add(rows, self.seen, key_states, value_states)
            return pages.owner.append(rows, key_states, value_states, self.seen)

    def undo(self, added: int, before: int) -> None:
        """Take a step back that has added `added` tokens to `before`."""
        rows = self._rows
        if rows is not None:
            rows.cut(rows.end - added)
            rows.begin = rows.end - before

    def _rows_for(self, keys: torch.Tensor, values: torch.Tensor) -> Rows:
        """Return the rows, with room for these tokens."""
        self.lazy_initialization(keys, values)
        shape = RowShape.of(keys, values)
        if self._rows is not None and self._rows.shape != shape and self._rows.end == 0:
            self.reset()
            self.open(shape, self._pages.capacity(keys.shape[2]))
        rows = self._rows
        assert rows is not None
        if rows.shape != shape:
            raise ConfigError(
                f"layer {self.index} of this KVCache has {_describe(rows.shape)}, but gets {_describe(shape)}: a cache is of one "
                "model, dtype and batch; make another one, or call reset()"
            )
        if rows.end + keys.shape[2] > rows.capacity:
            rows = self._with_room(rows, rows.count + keys.shape[2])
        return rows

    def _with_room(self, rows: Rows, count: int) -> Rows:
        """Return rows with the same tokens, and room for `count`."""
        return self._moved(rows, rows.shape, max(count, 2 * rows.capacity), None)

    def _moved(self, rows: Rows, shape: RowShape, capacity: int, pick: torch.Tensor | None) -> Rows:
        self._rows = self._pages.owner.move_rows(rows, shape, capacity, pick)
        return self._rows

    @property
    def count(self) -> int:
        """Tokens that are kept."""
        return 0 if self._rows is None else self._rows.count

    @property
    def seen_count(self) -> int:
        """Tokens that are kept, and that a next one would see."""
        return self.count if self.seen is None else min(self.count, self.seen)

    def get_seq_length(self) -> int:
        return self.count

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens: `-tokens_to_remove` of them; a positive number is how many are left."""
        if self._rows is None or tokens_to_remove == 0:
            return
        count = -tokens_to_remove if tokens_to_remove < 0 else max(self._rows.count - tokens_to_remove, 0)
        self._pages.owner.crop(self._rows, count)

    def reset(self) -> None:
        if self._rows is not None:
            self._pages.owner.close_rows(self._rows)
            self._rows = None
        self.is_initialized = False

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self._pick(beam_idx.to("cpu"))

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self._rows is not None:
            self._pick(torch.arange(self._rows.shape.batch, device="cpu").repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        if self._rows is not None:
            self._pick(torch.arange(self._rows.shape.batch, device="cpu")[indices.to("cpu")])

    def _pick(self, entries: torch.Tensor) -> None:
        """Have the entries of the batch with these numbers, in this order."""
        rows = self._rows
        if rows is None or rows.count == 0:
            return
        if len(entries) == rows.shape.batch:
            self._pages.owner.rewrite(rows, rows, entries)
        else:
            self._moved(rows, rows.shape.with_batch(len(entries)), rows.capacity, entries)

    def offload(self) -> None:
        """Do nothing: the pager decides."""

    prefetch = offload


class LayerPages:
    """Opens the pages of one cache when they are first used, and has all of its layers in common.

    Args:
        host_bytes, directory, backend, counters, budget: see `KeyValuePages`.
        takes_less: of `host_bytes` only what all layers have room for is taken.
        max_tokens: that a layer gets room for at once.
        decoder: config of a model that computes attention by blocks; None: it gets whole layers.

    Raises:
        StateError: on use, they were closed.
    """

    def __init__(
        self,
        host_bytes: int,
        takes_less: bool,
        directory: Path,
        max_tokens: int,
        backend: str,
        counters: Counters,
        budget: DeviceBudget | None,
        decoder: object,
    ) -> None:
        self.decoder = decoder
        self.device = torch.device("cpu") if budget is None else budget.device.device
        self.layers: list[PagedLayer] = []
        self.saved: SavedContext | None = None
        self._host_bytes = host_bytes
        self._takes_less = takes_less
        self._directory = directory
        self._backend = backend
        self._counters = counters
        self._budget = budget
        self._max_tokens = max_tokens
        self._owner: KeyValuePages | None = None
        self._is_closed = False
        self._pid = os.getpid()
        self._step: list[tuple[PagedLayer, int, int]] = []  # layers of this step, tokens added, and tokens before

    @property
    def owner(self) -> KeyValuePages:
        """The pages, opened now if they are not open yet.

        Raises:
            StateError: they were closed, or this is a forked child.
        """
        if self._is_closed:
            raise StateError("this KVCache is closed: make another one")
        if os.getpid() != self._pid:
            raise StateError("a KVCache works only in the process that made it, not in a forked child")
        if self._owner is None:
            saved = None if self.saved is None else (self.saved.path, self.saved.stamp)
            self._owner = KeyValuePages(
                self._host_bytes,
                self._directory,
                saved,
                len(self.layers),
                self._backend,
                self._counters,
                self._budget,
                self.decoder is not None,
            )
        return self._owner

    def open_saved(self, saved: SavedContext) -> None:
        """Give the layers the rows of a saved context, and begin to read them."""
        self.saved = saved
        if saved.layers.keys() != {layer.index for layer in self.layers}:
            raise CheckpointError(
                f"{saved.path} has {len(saved.layers)} layers with keys, and the model {len(self.layers)}: it is of another model"
            )
        capacity = self.capacity(saved.position)
        self._note_needed(sum(capacity * rows.shape.nbytes for rows in saved.layers.values()))
        for layer in self.layers:
            layer.open_saved(saved.layers[layer.index], capacity, saved.position)
        self.owner.read_ahead()

    def open_alike(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Open the rows of all layers that have none, for such keys and values: layers are mostly alike."""
        shape, capacity = RowShape.of(keys, values), self.capacity(keys.shape[2])
        self._note_needed(len(self.layers) * capacity * shape.nbytes)
        for layer in self.layers:
            if not layer.is_initialized:
                layer.open(shape, capacity)

    def _note_needed(self, nbytes: int) -> None:
        """Take no more memory than these bytes of all layers need, a page more for each, and less what stays on a device."""
        if self._takes_less:
            passing = (PASSING_LAYERS * nbytes) // len(self.layers)
            budget = self._budget if self.decoder is None else None  # by blocks none stays
            there = 0 if budget is None else max(min(budget.nbytes, nbytes) - passing, 0)
            self._host_bytes = min(self._host_bytes, nbytes - there + (len(self.layers) + 1) * MAX_PAGE_BYTES)

    def capacity(self, added: int) -> int:
        """Return for how many tokens a layer gets room that begins with `added`."""
        return max(added, self._max_tokens)

    def check(self, keys: torch.Tensor) -> None:
        """Refuse keys that cannot be kept in pages."""
        if keys.device != self.device:
            raise UnsupportedError(
                f"these keys are on {keys.device}, and the KVCache is for {self.device}: say device={str(keys.device)!r}, or give "
                "it the model when that is on its device. A model on several devices takes transformers' DynamicCache"
            )
        if torch.is_grad_enabled() and keys.requires_grad:
            raise UnsupportedError("a KVCache is for inference: call the model under torch.no_grad()")
        if self.decoder is not None:
            check_set(self.decoder)

    def add(
        self, rows: Rows, seen: int | None, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add tokens to a layer. Return what stands for its keys and values.

        Args:
            rows: of the layer, with room for them.
            seen: how many tokens before them attention gets; None: all.
            keys, values: of the new tokens, of shape (batch, heads, tokens, width).

        Raises:
            IoError, BudgetError, StateError: as `KeyValuePages.append`.
        """
        begin, end = rows.begin if seen is None else max(rows.begin, rows.end - seen), rows.end
        self.owner.add(rows, keys, values)
        blocks = partial(self._blocks, rows, begin, end, keys, values)
        count = end - begin + keys.shape[2]
        return InPages.like(keys, count, blocks), InPages.like(values, count, blocks)

    def _blocks(self, rows: Rows, begin: int, end: int, keys: torch.Tensor, values: torch.Tensor) -> Blocks:
        """Yield tokens [begin, end) of a layer from its pages, and then those of this step. A failure takes the step back."""
        try:
            yield from self.owner.blocks(rows, begin, end)
        except GeneratorExit:
            raise
        except BaseException as error:
            self._undo_step(error)
            raise
        yield from pieces(keys, values)

    @contextmanager
    def undone_if_it_fails(self, layer: PagedLayer, added: int) -> Iterator[None]:
        """Add tokens to a layer in the context. If that fails, take back what this step has added to all layers."""
        if any(one is layer for one, _, _ in self._step) or layer is self.layers[0]:
            self._step.clear()
        before = layer.count
        try:
            yield
        except BaseException as error:
            self._undo_step(error)
            raise
        self._step.append((layer, added, before))

    def _undo_step(self, error: BaseException) -> None:
        for one, its_added, its_before in self._step:
            one.undo(its_added, its_before)
        self._step.clear()
        count = self.layers[0].get_seq_length()
        log.warning("%s: the KVCache has the %d tokens from before this forward", type(error).__name__, count)

    def close(self) -> None:
        """Give memory, file and engine back. May be called again."""
        self._is_closed = True
        if self._owner is not None and os.getpid() == self._pid:
            owner, self._owner = self._owner, None
            owner.close()


def _describe(shape: RowShape) -> str:
    return f"{shape.key[0]} heads of width {shape.key[1]}, {shape.dtype}, batch {shape.batch}"
