"""Defines the layers of a KVCache that see a sliding window of tokens."""

from __future__ import annotations

import torch
from transformers.cache_utils import DynamicSlidingWindowLayer

from swapper.errors import StateError
from swapper.infer.kv.kv_rows import Rows, RowShape, SavedRows
from swapper.integrations.transformers_layers import PagedLayer


class PagedSlidingLayer(PagedLayer, DynamicSlidingWindowLayer):
    """Keeps keys and values in pages, as PagedLayer does, of a layer that sees the last `sliding_window` tokens.

    Args: as of `PagedLayer`.

    Raises:
        StateError: as there.
    """

    @property
    def kept(self) -> int | None:
        return None if self.record_past else self.seen

    @property
    def seen(self) -> int:
        return self.sliding_window - 1

    def open(self, shape: RowShape, capacity: int) -> None:
        """As of a layer without a window, but for addresses."""
        super().open(shape, min(capacity, 2 * self.sliding_window))

    def open_saved(self, saved: SavedRows, capacity: int, position: int) -> None:
        """As of a layer without a window.

        Args: as of `open_saved`.

        Raises:
            CheckpointError: as there.
        """
        super().open_saved(saved, max(min(capacity, 2 * self.sliding_window), saved.count), position)
        self.cumulative_length = position

    def activate_past_recording(self) -> None:
        self.record_past = True
        if self._rows is not None:
            self._rows.kept = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As of a layer without a window; of the last tokens alone.

        Args: as of `update`.

        Raises:
            UnsupportedError, ConfigError, BudgetError, IoError, StateError: as there.
        """
        found = super().update(key_states, value_states)
        self.cumulative_length += key_states.shape[-2]
        return found

    def undo(self, added: int, before: int) -> None:
        super().undo(added, before)
        self.cumulative_length -= added

    def _with_room(self, rows: Rows, count: int) -> Rows:
        if count > rows.capacity:
            return super()._with_room(rows, count)
        self._pages.owner.rewrite(rows, rows)  # from the beginning on again
        return rows

    def get_seq_length(self) -> int:
        return self.cumulative_length

    def reset(self) -> None:
        super().reset()
        self.cumulative_length = 0

    def crop(self, tokens_to_remove: int) -> None:
        if self.cumulative_length < self.sliding_window:
            super().crop(tokens_to_remove)
            self.cumulative_length = 0 if self._rows is None else self._rows.count
            return
        if not self.record_past or tokens_to_remove > 0:
            raise StateError(
                "a layer with a sliding window has forgotten what crop would need: call activate_past_recording() before, and crop "
                "by a negative number"
            )
        rows = self._rows
        assert rows is not None
        self._pages.owner.crop(rows, -tokens_to_remove)
        rows.begin = max(rows.begin, rows.end - self.sliding_window + 1)
        self.cumulative_length += tokens_to_remove
