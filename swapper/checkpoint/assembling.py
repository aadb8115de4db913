"""Putting the chunks of a tensor side by side on its way into another file: box by box, in bounded memory."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from swapper.checkpoint.writers import PIECES_AHEAD, ExportTensor, Payloads, arrived
from swapper.formats.chunks import Box, ChunkedTensor
from swapper.formats.stored import StoredTensor

BOX_BYTES = 4 << 20


@dataclass(frozen=True, eq=False)
class AssembledTensor(ExportTensor):
    """A tensor that is cut along other dimensions than the first. `parts` are its chunks, which follow no order."""

    chunked: ChunkedTensor | None = None

    @classmethod
    def of(cls, chunked: ChunkedTensor, name: str) -> AssembledTensor:
        parts = tuple(chunk.stored for chunk in chunked.chunks)
        return cls(name, chunked.dtype, chunked.shape, parts, chunked)

    def pieces(self, payloads: Payloads) -> Iterator[torch.Tensor]:
        """Yield its elements in their order. The next ones are read meanwhile."""
        if self.chunked is None:
            raise AssertionError("a tensor is to be assembled from no chunks")
        turned = {part: payloads.strided(part) for part in self.parts if part.stride is not None}  # whole, and seldom
        waiting: deque[_Reading] = deque()
        for box in self.chunked.boxes(BOX_BYTES):
            waiting.append(_Reading(box))
            waiting[-1].begin(payloads, turned)
            if len(waiting) > PIECES_AHEAD:
                yield waiting.popleft().assembled(self.dtype)
        for reading in waiting:
            yield reading.assembled(self.dtype)


class _Reading:
    """A box whose pieces are on their way."""

    def __init__(self, box: Box) -> None:
        self._box = box
        self._parts: list[tuple[torch.Tensor, list[Any]]] = []

    def begin(self, payloads: Payloads, turned: dict[StoredTensor, torch.Tensor]) -> None:
        for piece in self._box.pieces:
            if piece.stored in turned:
                self._parts.append((turned[piece.stored][piece.inside], []))
            else:
                end = piece.first + math.prod(piece.shape)
                self._parts.append(payloads.read_elements((piece.stored,), piece.first, end))

    def assembled(self, dtype: torch.dtype) -> torch.Tensor:
        """Return its elements, flat, when they are read."""
        whole = torch.empty(self._box.shape, dtype=dtype)
        for piece, (memory, tickets) in zip(self._box.pieces, self._parts, strict=True):
            whole[piece.at] = arrived(memory, tickets).reshape(piece.shape)
        return whole.view(-1)
