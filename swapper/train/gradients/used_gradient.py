"""Makes gradients that an update in backward has used read-only until `step()`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from swapper.errors import StateError
from swapper.tensors.guarded_tensor import Function, TensorWatch, unwatch, watch_of

ADVICE = (
    "to clip or scale gradients, offload with update='step' or update='deferred'; what needs one gradient alone (clipping its "
    "values) can be done in a hook, parameter.register_post_accumulate_grad_hook, which runs before the update"
)


class UsedGradient(TensorWatch):
    """Watches the gradient of parameter `name`, which an update has used while the user may still try to change it.

    Until `step()` it can be read, and an operation that would write to it, or to a view of it, raises an error; arrays
    are read-only. `step()` detects other writes by the gradient's version.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.is_over = False

    def use(self, tensor: torch.Tensor) -> None:
        if self.is_over:  # a view that somebody has kept
            unwatch(tensor)

    def changes_nothing(self, func: Function, args: Sequence[Any]) -> bool:
        factor = args[1] if func is torch.Tensor.mul_ else None  # torch's clip_grad_norm_, if it clips nothing
        is_number = isinstance(factor, int | float) or (type(factor) is torch.Tensor and factor.dim() == 0)
        return is_number and bool(factor == 1)

    def write(self, how: str) -> None:
        raise StateError(
            f"{how} would change the gradient of {self._name}, which was used in backward already: with update='backward' "
            f"gradients cannot be changed before optimizer.step(); {ADVICE}"
        )


def protect(gradient: torch.Tensor, name: str) -> None:
    """Make `gradient`, that of the parameter `name`, read-only from now on."""
    if type(gradient) is torch.Tensor:
        UsedGradient(name).watch(gradient)


def release(gradient: torch.Tensor) -> None:
    """Make `gradient` an ordinary tensor again."""
    watch = watch_of(gradient)
    if isinstance(watch, UsedGradient):
        watch.is_over = True
        unwatch(gradient)
