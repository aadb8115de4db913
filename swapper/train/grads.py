"""Gradients in host memory, inside the budget.

When autograd has accumulated a parameter's gradient, it is copied to its place in a resident section and the tensor that
autograd made is let go; `parameter.grad` is a tensor at that place. A later backward accumulates into it. So `grad` is an
ordinary tensor for everything that looks at it: clipping, scalers, hooks. Whoever keeps one beyond `zero_grad` keeps its
values: before the place is used again, that tensor gets memory of its own.
"""

from __future__ import annotations

import weakref
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
            home = _Home(name, place)
            if parameter.grad is not None:
                home.take(parameter)
            handle = parameter.register_post_accumulate_grad_hook(home.take)  # type: ignore[no-untyped-call]
            self._handles.append(handle)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


class _Home:
    """One parameter's place, and the tensor there that was its gradient last."""

    def __init__(self, name: str, place: torch.Tensor) -> None:
        self._name = name
        self._place = place
        self._last: weakref.ref[torch.Tensor] | None = None

    def take(self, parameter: torch.Tensor) -> None:
        """Move the parameter's gradient to the place, if it is not there."""
        gradient = parameter.grad
        last = self._last() if self._last is not None else None
        if gradient is None or gradient is last:
            return
        if gradient.layout is not torch.strided:
            raise UnsupportedError(
                f"parameter {self._name} got a sparse gradient, which swapper cannot page: "
                "build the embedding with sparse=False"
            )
        if last is not None:
            last.data = last.clone()  # somebody keeps it
        self._place.copy_(gradient)
        parameter.grad = here = self._place.view(self._place.shape)
        self._last = weakref.ref(here)
