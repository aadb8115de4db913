"""Bytes that are easy to tell apart, and what a file should hold."""

from __future__ import annotations

from collections.abc import Callable
from subprocess import CompletedProcess

import torch

MIB = 1 << 20
RunPython = Callable[..., "CompletedProcess[str]"]


def noise(nbytes: int, seed: int = 0) -> torch.Tensor:
    """Bytes in which every run is unlike every other."""
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def raw(tensor: torch.Tensor) -> bytes:
    """The bytes that a file should hold: the elements in row-major order."""
    whole = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach()).view(-1)
    return bytes(whole.view(torch.uint8).numpy()) if whole.numel() else b""
