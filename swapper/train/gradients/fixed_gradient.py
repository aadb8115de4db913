"""Guards gradients that an update will still use: an operation on one that needs or changes its data waits for that first."""

from __future__ import annotations

from collections.abc import Callable

import torch

from swapper.tensors.guarded_tensor import TensorWatch, unwatch, watch_of


class FixedGradient(TensorWatch):
    """Watches a gradient that a step will still use.

    Args:
        finish: has the step use it, and calls `unfix`.
    """

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish = finish

    def use(self, tensor: torch.Tensor) -> None:
        self._finish()


def fix(gradient: torch.Tensor, finish: Callable[[], None]) -> None:
    """Have operations on `gradient`, if it is an ordinary tensor, call `finish` first."""
    if type(gradient) is torch.Tensor:
        FixedGradient(finish).watch(gradient)


def unfix(gradient: torch.Tensor) -> None:
    """Make `gradient` an ordinary tensor again, if it was fixed."""
    if isinstance(watch_of(gradient), FixedGradient):
        unwatch(gradient)
