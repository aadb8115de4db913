"""Divides the host memory of a KVCache into frames, of which the last page of each layer takes one from step to step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from swapper.errors import BudgetError
from swapper.io.tensor_bytes import round_up
from swapper.paging.layout import ARENA_ALIGNMENT_BYTES, PoolSize
from swapper.runtime.sizes import format_bytes

MIN_PAGE_BYTES, MAX_PAGE_BYTES = 64 << 10, 4 << 20
LAST_PAGES_SHARE = 1 / 32
"""Of the frames: the last pages of all layers, which stay, take about this part of them, and half of that is empty."""


@dataclass(frozen=True, slots=True)
class CacheSize(PoolSize):
    """Pages small enough for the last one of each layer to stay, and large enough for the drive.

    Attributes:
        host_bytes: the budget.
        layer_count: of the model.
    """

    host_bytes: int
    layer_count: int

    @classmethod
    def of(cls, host_bytes: int, layer_count: int) -> CacheSize:
        share = int(host_bytes * LAST_PAGES_SHARE) // max(layer_count, 1)
        page_bytes = max(min(share, MAX_PAGE_BYTES) // MIN_PAGE_BYTES * MIN_PAGE_BYTES, MIN_PAGE_BYTES)
        pool_bytes = host_bytes // ARENA_ALIGNMENT_BYTES * ARENA_ALIGNMENT_BYTES
        return cls(page_bytes, pool_bytes // page_bytes, host_bytes, layer_count)

    def has(self, frames: Callable[[int], int]) -> bool:
        """Return whether the pool has frames for the last page of each layer, and those that `frames` returns for pages of a
        size in bytes."""
        return self._lacking(frames) <= 0

    def too_small(self, frames: Callable[[int], int], use: str, otherwise: str = "") -> BudgetError:
        """Return the error that names the smallest budget that has such frames.

        Args:
            frames: as of `has`, which says that there are too few.
            use: of them, in words.
            otherwise: what else can be done, after "are needed".
        """
        smallest = self
        while (lacking := smallest._lacking(frames)) > 0:  # larger pools have larger pages
            more_bytes = round_up(lacking * smallest.page_bytes, ARENA_ALIGNMENT_BYTES)
            pool_bytes = round_up(smallest.pool_bytes, ARENA_ALIGNMENT_BYTES)
            smallest = CacheSize.of(pool_bytes + more_bytes, self.layer_count)
        return BudgetError(
            f"host_memory={format_bytes(self.host_bytes)} of a KVCache is too small for {use}, and the last page of each of "
            f"{self.layer_count} layers: at least {format_bytes(smallest.host_bytes)} ({smallest.host_bytes} bytes) are "
            f"needed{otherwise}",
            smallest_bytes=smallest.host_bytes,
        )

    def _lacking(self, frames: Callable[[int], int]) -> int:
        return self.layer_count + frames(self.page_bytes) - self.frame_count
