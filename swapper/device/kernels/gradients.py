"""The 2-norm of gradients, and whether one of them has overflown, in one pass that leaves both on the device.

`partials` is taken tensor by tensor as gradients come; `total` puts them together; `factor` is what `adamw.update_` multiplies by.
Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from swapper.device.kernels.compiler import kernel, uses_kernel
from swapper.errors import ConfigError

PART_ELEMENTS = 1 << 14
"""A part of the sum is of as many, whatever the device, and parts are added in fp64."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def bytes_moved(gradient: torch.Tensor) -> int:
    return gradient.numel() * gradient.element_size()


def partials(gradient: torch.Tensor) -> torch.Tensor:
    """Return fp32 of shape (parts, 2): sums of squares, and how many elements are not finite.

    Plain torch makes one part.

    Raises:
        ConfigError: the gradient is not contiguous, or not of bf16, fp16 or fp32.
    """
    if gradient.dtype not in DTYPES or not gradient.is_contiguous():
        raise ConfigError(f"a gradient is contiguous and of bf16, fp16 or fp32, not {gradient.dtype}")
    if gradient.numel() == 0:
        return torch.zeros(0, 2, device=gradient.device)
    if uses_kernel(gradient.device):
        found: torch.Tensor = kernel("gradients").partials(gradient.view(-1))
        return found
    return reference(gradient)


def reference(gradient: torch.Tensor) -> torch.Tensor:
    """What `partials` means, in one part."""
    values = gradient.float()
    overflown = (~values.isfinite()).sum().float()
    return torch.stack([values.square().sum(), overflown])[None]


def total(parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (norm, overflown) of all gradients together, one fp32 element each; `overflown` is 0 where all are finite."""
    together = torch.cat(list(parts)).double().sum(dim=0)
    return together[0].sqrt().float(), together[1].float()


def factor(norm: torch.Tensor, max_norm: float | None, scale: float = 1.0) -> torch.Tensor:
    """Return what gradients are to be multiplied by, one fp32 element: 1 / scale, and what clips the norm to `max_norm`.

    Args:
        norm: of the gradients as they are, times `scale`.
        max_norm: as torch.nn.utils.clip_grad_norm_ has it; None does not clip.
        scale: of the loss.
    """
    unscaled = norm / scale
    clip = torch.ones_like(norm) if max_norm is None else (max_norm / (unscaled + 1e-6)).clamp(max=1.0)
    return clip / scale
