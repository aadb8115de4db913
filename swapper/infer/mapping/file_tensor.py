"""Tensors that are mapped from a checkpoint's files: of state_dict() of a loaded model, and reads of its weights."""

from __future__ import annotations

import torch

from swapper.checkpoint.mapping.mapped_files import FileMapping, FilePart, check_parts
from swapper.checkpoint.mapping.shown_tensor import Shown, ShownTensor
from swapper.formats.stored import StoredTensor


class FileTensor(ShownTensor):
    """A tensor mapped from a file, or a view of one. Writes to it stay in memory."""


class ShownFile(Shown):
    """What a tensor shows of a file, from where `stored` is."""

    def __init__(self, mapping: FileMapping, stored: StoredTensor) -> None:
        self._name = stored.name
        self._part = FilePart(mapping, mapping, stored.offset + stored.nbytes, is_fixed=True)

    def check(self, tensor: ShownTensor) -> None:
        check_parts([self._part], self._name)

    def check_whole(self, tensor: ShownTensor) -> None:
        self.check(tensor)

    def watch(self, view: torch.Tensor, of: ShownTensor) -> None:
        self.show(view)

    def show(self, tensor: torch.Tensor) -> torch.Tensor:
        """Make `tensor`, in the mapping, a FileTensor; return it."""
        tensor.__class__ = FileTensor
        tensor.shown_by = self  # type: ignore[attr-defined]
        return tensor
