"""Computes attention by blocks of keys, with an online softmax in fp32: memory is a few blocks', however many keys there are.

Results differ in the last bits from those of kernels that have all keys at once: what is summed has another order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from swapper.errors import UnsupportedError
from swapper.tensors.guarded_tensor import METADATA
from swapper.tensors.torch_private import without_torch_functions

MAX_BLOCK_TOKENS = 2048
"""Of a block: a choice."""
SCORES_BYTES = 32 << 20
"""Of the scores of some queries and one block, at most: a choice."""
LOWEST = torch.finfo(torch.float32).min
"""The score of a key that a query does not see. With -inf, a query that sees none would get NaN."""

Mask = Callable[[int, int, int, int], torch.Tensor]
"""Returns for queries [first, last) and keys [begin, end) whether a query sees a key, bool, or what is added to its score; of shape
(batch or 1, heads or 1, last - first, end - begin)."""
Blocks = Iterator[tuple[torch.Tensor, torch.Tensor]]


class InPages(torch.Tensor):
    """Stands for the keys, or the values, of a layer, with their shape and dtype, on the meta device.

    Attributes:
        blocks: returns keys and values, block by block.

    Raises:
        UnsupportedError: they are used otherwise.
    """

    blocks: Callable[[], Blocks]

    @classmethod
    def like(cls, new: torch.Tensor, tokens: int, blocks: Callable[[], Blocks]) -> InPages:
        """Return what stands for `tokens` tokens like the new ones, of shape (batch, heads, tokens, width)."""
        shape = (*new.shape[:2], tokens, new.shape[3])
        made: InPages = torch.empty(shape, dtype=new.dtype, device="meta").as_subclass(cls)
        made.blocks = blocks
        return made

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> Any:
        if func in METADATA:
            with without_torch_functions():
                return func(*args, **(kwargs or {}))
        raise UnsupportedError(
            f'{getattr(func, "__name__", func)} is not done with keys and values of KVCache(..., attention="blocks"): this model '
            "computes attention by code of its own. Take KVCache without attention="
        )


def attend(
    query: torch.Tensor,
    heads_and_width: tuple[int, int],
    blocks: Iterable[tuple[torch.Tensor, torch.Tensor]],
    mask: Mask | None,
    scaling: float,
    softcap: float | None = None,
) -> torch.Tensor:
    """Return softmax(scaling · query · keysᵀ) · values, of shape (batch, heads, queries, width of a value), in the query's dtype.

    Args:
        query: of shape (batch, heads, queries, width of a key).
        heads_and_width: how many heads of keys there are, each for as many heads of queries, and the width of a value.
        blocks: keys and values of shape (batch, heads of keys, tokens, width), at most MAX_BLOCK_TOKENS each.
        mask: None: each query sees each key.
        scaling: of scores.
        softcap: scores are softcap · tanh(score / softcap) then.
    """
    count = max(SCORES_BYTES // (4 * query.shape[0] * query.shape[1] * MAX_BLOCK_TOKENS), 1)
    tiles = [
        _Tile(query[:, :, first : first + count].float() * scaling, first, *heads_and_width)
        for first in range(0, query.shape[2], count)
    ]
    begin = 0
    for keys, values in blocks:
        end = begin + keys.shape[2]
        keys, values = keys.float().transpose(2, 3), values.float()
        for tile in tiles:
            seen = None if mask is None else mask(tile.first, tile.last, begin, end)
            if seen is None or seen.dtype is not torch.bool or seen.any():
                tile.add(keys, values, seen, softcap)
        begin = end
    return torch.cat([tile.result() for tile in tiles], 2).to(query.dtype)


def pieces(keys: torch.Tensor, values: torch.Tensor) -> Blocks:
    """Yield keys and values of shape (batch, heads, tokens, width) as blocks."""
    yield from zip(keys.split(MAX_BLOCK_TOKENS, 2), values.split(MAX_BLOCK_TOKENS, 2), strict=True)


class _Tile:
    """Sums of queries [first, last) over the blocks so far.

    The queries of all heads that share a head of keys are rows of one matrix, so that keys are not repeated.

    Args:
        query: of shape (batch, heads, last - first, width), scaled, fp32.
        first: of the queries.
        key_heads: heads of keys.
        width: of a value.
    """

    def __init__(self, query: torch.Tensor, first: int, key_heads: int, width: int) -> None:
        batch, heads, count, _ = query.shape
        self.first, self.last = first, first + count
        self._grouped = batch, key_heads, heads // key_heads, count
        self._query = query.reshape(batch, key_heads, -1, query.shape[3])
        self._highest = self._query.new_full((*self._query.shape[:3], 1), LOWEST)
        self._total = torch.zeros_like(self._highest)  # of weights
        self._values = self._query.new_zeros(*self._query.shape[:3], width)

    def add(self, keys: torch.Tensor, values: torch.Tensor, seen: torch.Tensor | None, softcap: float | None) -> None:
        """Add a block: keys of shape (batch, heads, width, tokens), values of shape (batch, heads, tokens, width)."""
        scores = self._query @ keys
        if softcap is not None:
            scores.div_(softcap).tanh_().mul_(softcap)
        if seen is not None:
            self._mask(scores, seen)
        highest = torch.maximum(self._highest, scores.amax(-1, keepdim=True))
        weights, left = scores.sub_(highest).exp_(), self._highest.sub_(highest).exp_()
        self._total.mul_(left).add_(weights.sum(-1, keepdim=True))
        self._values.mul_(left).add_(weights @ values)
        self._highest = highest

    def _mask(self, scores: torch.Tensor, seen: torch.Tensor) -> None:
        grouped = scores.view(*self._grouped, -1)
        seen = seen[:, :, None] if seen.shape[1] == 1 else seen.unflatten(1, self._grouped[1:3])
        if seen.dtype is torch.bool:
            grouped.masked_fill_(~seen, LOWEST)
        else:
            grouped.add_(seen).clamp_(min=LOWEST)

    def result(self) -> torch.Tensor:
        """Return what the queries get, of shape (batch, heads, last - first, width), fp32."""
        batch, key_heads, groups, count = self._grouped
        found = self._values / self._total.clamp_min(torch.finfo(torch.float32).tiny)
        return found.reshape(batch, key_heads * groups, count, -1)
