"""Gradients in host memory, inside the budget.

When autograd has accumulated a parameter's gradient, it is copied to its place in a resident section and the tensor that
autograd made is let go; `parameter.grad` is the tensor at that place. A later backward accumulates into it. So `grad` is an
ordinary tensor for everything that looks at it: clipping, scalers, hooks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from swapper.errors import UnsupportedError


class HostGradients:
    """Owns the gradients' places.

    Args:
        places: for each trainable parameter its qualified name and the tensor that shall hold its gradient.
    """

    def __init__(self, places: list[tuple[str, nn.Parameter, torch.Tensor]]) -> None:
        self._handles: list[Any] = []
        for name, parameter, place in places:
            if parameter.grad is not None:
                place.copy_(parameter.grad)
                parameter.grad = place
            handle = parameter.register_post_accumulate_grad_hook(_mover(name, place))  # type: ignore[no-untyped-call]
            self._handles.append(handle)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _mover(name: str, place: torch.Tensor) -> Any:
    def move(parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        if gradient is place or gradient is None:
            return
        if gradient.layout is not torch.strided:
            raise UnsupportedError(
                f"parameter {name} got a sparse gradient, which swapper cannot page: "
                "build the embedding with sparse=False"
            )
        place.copy_(gradient)
        parameter.grad = place

    return move
