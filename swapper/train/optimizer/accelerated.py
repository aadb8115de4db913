"""Looks through accelerate's AcceleratedOptimizer, which `accelerator.prepare` puts around an optimizer, as DDP around a model."""

from __future__ import annotations

from typing import Any


def unwrapped(optimizer: Any) -> Any:
    """Return the optimizer that accelerate's wrapper steps; anything else as it is."""
    return optimizer.optimizer if _is_accelerated(optimizer) else optimizer


def wrapped_as(optimizer: Any, paged: Any) -> Any:
    """Return accelerate's wrapper `optimizer`, which steps `paged` from now on; `paged` if there is no wrapper."""
    if not _is_accelerated(optimizer):
        return paged
    optimizer.__setstate__({"optimizer": paged})  # that of a GradScaler's `step` follows
    return optimizer


def _is_accelerated(optimizer: Any) -> bool:
    kind = type(optimizer)
    return kind.__module__ == "accelerate.optimizer" and kind.__qualname__ == "AcceleratedOptimizer"
