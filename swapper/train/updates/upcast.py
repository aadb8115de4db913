"""Gradients in the dtype of what they update: those of one run of the optimizer after the other in the same memory.

So that memory stays in the processor's cache, and the heap neither gives nor takes a tensor with each run.
"""

from __future__ import annotations

import torch

ALIGNMENT_ELEMENTS = 16
"""Where a gradient begins: on a line of the cache, as memory of its own would."""


class UpcastBuffer:
    """Owns memory for `numel` elements of the dtype that was asked for last. It is taken when it is first used."""

    def __init__(self, numel: int) -> None:
        self._numel = numel
        self._memory: torch.Tensor | None = None
        self._used = 0

    def begin_run(self) -> None:
        """What was returned before is not used any more."""
        self._used = 0

    def widen(self, gradient: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the gradient in `dtype`: itself, a copy until the next `begin_run`, or, if it is too large, one of its own."""
        if gradient.dtype == dtype:
            return gradient
        begin, end = self._used, self._used + gradient.numel()
        if end > self._numel or (begin > 0 and (self._memory is None or self._memory.dtype != dtype)):
            return gradient.to(dtype)
        if self._memory is None or self._memory.dtype != dtype:
            self._memory = torch.empty(self._numel, dtype=dtype)
        self._used = -(-end // ALIGNMENT_ELEMENTS) * ALIGNMENT_ELEMENTS
        room = self._memory[begin:end]
        return (room if gradient.dim() == 1 else room.view(gradient.shape)).copy_(gradient)
