"""Tensors that are mapped from a file of the user's, which somebody may truncate: torch.save onto that very file does.

An access beyond a file's end would end the process (SIGBUS). So every operation first compares the file's size.
"""

from __future__ import annotations

import mmap
from typing import Any

import torch

from swapper.errors import CheckpointError
from swapper.formats.stored import StoredTensor
from swapper.modules.torch_functions import METADATA, Function, as_plain, tensors_among


class FileTensor(torch.Tensor):
    """A tensor mapped from a file, or a view of one. Never constructed: a tensor's class is set to it."""

    file_mapping: mmap.mmap
    file_stored: StoredTensor

    @classmethod
    def __torch_function__(cls, func: Function, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        shown = [tensor for tensor in tensors_among((args, kwargs)) if isinstance(tensor, FileTensor)]
        if func not in METADATA:
            for tensor in shown:
                tensor._check()
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
            for tensor in shown:
                _watch_views(tensor, result)
        return result

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self._plain())

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return self._plain().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain().__reduce_ex__(protocol)

    def _plain(self) -> torch.Tensor:
        self._check()
        return as_plain(self)

    def _check(self) -> None:
        stored, nbytes = self.file_stored, self.file_mapping.size()
        if nbytes < stored.offset + stored.nbytes:
            raise CheckpointError(
                f"{stored.path} was truncated to {nbytes} bytes while {stored.name} was mapped from it: state_dict() of a model of "
                "swapper.load shows its files. To write onto one of them use swapper.checkpoint.save(..., "
                "overwrite=True), or write another file and rename it"
            )


def shown_from(mapping: mmap.mmap, stored: StoredTensor, tensor: torch.Tensor) -> torch.Tensor:
    """Make `tensor`, which shows `stored` in `mapping`, compare the file's size before each use; return it."""
    tensor.__class__ = FileTensor
    tensor.file_mapping, tensor.file_stored = mapping, stored  # type: ignore[attr-defined]
    return tensor


def _watch_views(tensor: FileTensor, result: Any) -> None:
    storage = tensor.untyped_storage().data_ptr()
    for view in tensors_among(result):
        is_plain = type(view) is torch.Tensor and view.device.type == "cpu" and view.layout is torch.strided
        if is_plain and view.numel() and view.untyped_storage().data_ptr() == storage:
            shown_from(tensor.file_mapping, tensor.file_stored, view)
