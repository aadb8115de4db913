"""The storages of tensors: whose they are, how many refer to them, and tensors without one's memory."""

from __future__ import annotations

import torch

from swapper.tensors.torch_private import uses_of_storage, without_torch_functions


def storage_of(tensor: torch.Tensor) -> int | None:
    """Return the identity of a tensor's storage, on any device; None if it has none."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except NotImplementedError:  # sparse and opaque tensors, and those that functorch has wrapped
        return None


def count_uses(tensor: torch.Tensor) -> int:
    """Return how many tensors and arrays hold the storage of `tensor`, itself included; 0 if it has no memory of its own."""
    try:
        storage = tensor.untyped_storage()
    except NotImplementedError:  # a sparse tensor, or one that functorch has wrapped
        return 0
    return uses_of_storage(storage._cdata) - _OF_COUNTING


_OF_COUNTING = 0
_OF_COUNTING = count_uses(torch.empty(1, device="cpu")) - 1


def without_data(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor of this form whose storage is empty: code past its guard finds no memory."""
    with without_torch_functions(), torch.inference_mode(False):
        empty = torch.empty_like(tensor.detach(), memory_format=torch.contiguous_format)
    empty.untyped_storage().resize_(0)
    return empty
