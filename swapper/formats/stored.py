"""A tensor as bytes of a file: what every reader of a format gives, and what everything is made of that goes on from there."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a checkpoint, as bytes of a file.

    Attributes:
        name: its key. Nested dicts are flattened: {"model": {"a.weight": t}} gives "model.a.weight".
        path: the file.
        offset: where in it the tensor's first element is, in bytes. Of no particular alignment.
        nbytes: from the first element to the end of the last, in memory order: numel * itemsize if contiguous.
        dtype, shape: of the tensor.
        stride: in elements, not negative; None if contiguous (the last dimension runs fastest).
    """

    name: str
    path: Path
    offset: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def row(self, index: int) -> StoredTensor | None:
        """Return what `tensor[index]` would be; None if that is not one run of bytes."""
        if self.stride is not None or not self.shape or not 0 <= index < self.shape[0]:
            return None
        found = self.rows(index, index + 1)
        return found and replace(found, shape=self.shape[1:])

    def rows(self, begin: int, end: int) -> StoredTensor | None:
        """Return what `tensor[begin:end]` would be; None if that is not one run of bytes."""
        if self.stride is not None or not self.shape or not 0 <= begin < end <= self.shape[0]:
            return None
        row_bytes = self.nbytes // self.shape[0]
        offset, nbytes = self.offset + begin * row_bytes, (end - begin) * row_bytes
        return replace(self, offset=offset, nbytes=nbytes, shape=(end - begin, *self.shape[1:]))
