"""A checkpoint's tensors as its files are mapped: nothing is read before it is looked at."""

from __future__ import annotations

import mmap
from dataclasses import replace
from pathlib import Path

import torch

from swapper.formats.sources import Source
from swapper.formats.stored import StoredTensor
from swapper.infer.mapping.matching import Recipe


class MappedSource:
    """Owns the mappings. What is written to their tensors stays in memory.

    Args:
        source: the checkpoint.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._mappings: dict[Path, mmap.mmap] = {}

    def made(self, recipe: Recipe) -> torch.Tensor:
        """Return what `recipe` makes of the mapped tensors."""
        return recipe.from_parts([self.tensor(part) for part in recipe.parts])

    def tensor(self, stored: StoredTensor) -> torch.Tensor:
        if stored.path in self._source.joined:  # a mapping cannot put its stretches side by side
            extents = [e for _, e in self._source.extents(stored.path, stored.offset, stored.nbytes)]
            parts = [replace(stored, path=e.path, offset=e.offset, nbytes=e.nbytes, shape=(-1,)) for e in extents]
            return torch.cat([self.tensor(part) for part in parts]).view(stored.shape)
        if stored.path not in self._mappings:
            with stored.path.open("rb") as file:
                self._mappings[stored.path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        number = stored.nbytes // stored.dtype.itemsize
        flat = torch.frombuffer(self._mappings[stored.path], dtype=stored.dtype, count=number, offset=stored.offset)
        return flat.view(stored.shape) if stored.stride is None else flat.as_strided(stored.shape, stored.stride)

    def forget(self) -> None:
        """Tensors that are in use keep their file mapped."""
        self._mappings.clear()
