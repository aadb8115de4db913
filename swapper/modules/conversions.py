"""Conversions of a tensor that change nothing: `.to("cpu")` of what is on the CPU, `.float()` of what is fp32, as training loops
and pipelines do by habit. They need no data: parameters that are away answer them with themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

CONVERSIONS: frozenset[Callable[..., Any]] = frozenset(
    getattr(torch.Tensor, name)
    for name in ("to", "cpu", "cuda", "float", "double", "half", "bfloat16", "type", "contiguous")
)


def changes_nothing(convert: Callable[[torch.Tensor], Any], tensor: torch.Tensor) -> bool:
    """Return whether `convert(tensor)` would be `tensor` itself, by asking it of a small one that is like it.

    Args:
        convert: does not change the tensor that it is given, or changes it visibly (`share_memory_`).
        tensor: contiguous; its data is not looked at.
    """
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        like = torch.empty((2,) * tensor.dim(), dtype=tensor.dtype, device=tensor.device)
        try:
            return convert(like) is like and not (like.device.type == "cpu" and like.is_shared())
        except Exception:
            return False  # whoever really does it gets the error
