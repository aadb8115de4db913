"""The user's own optimizer, applied to views.

A *shadow* is an object of the optimizer's class that shares its settings but has parameters and state of its own: those of
one slice, set anew for each call. So the arithmetic is exactly what plain torch would do with this instance, `fused` or
`foreach` as the user chose, and none of it is written down here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Adam, AdamW, Optimizer

from swapper.errors import UnsupportedError

SUPPORTED: tuple[type[Optimizer], ...] = (AdamW, Adam)
"""Optimizers whose state is known to begin as zeros and whose update is element-wise: they may be cut."""


@dataclass(slots=True)
class Work:
    """One tensor to update: elements of a parameter or of its fp32 master, with gradient and state of the same dtype and size.

    `settings` is the index of the parameter's group in `optimizer.param_groups`.
    """

    settings: int
    tensor: torch.Tensor
    gradient: torch.Tensor
    state: dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class StateKey:
    """One entry of an optimizer's state for a parameter: 0-dim ("step") or of the parameter's shape."""

    name: str
    dtype: torch.dtype
    is_scalar: bool


class Shadow:
    """Runs the update of `optimizer` on tensors of ours."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._shadow = object.__new__(type(optimizer))
        own = dict(optimizer.__dict__)
        own.pop("step", None)  # a scheduler's counter around step belongs to the user's instance
        own.pop("state", None)
        for name in [name for name in own if name.endswith("_hooks")]:
            own[name] = OrderedDict()
        self._shadow.__dict__.update(own)

    def update(self, works: Sequence[Work]) -> None:
        """Update the tensors of `works` and their state in place."""
        groups: dict[int, dict[str, Any]] = {}
        state: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        for work in works:
            work.tensor.grad = work.gradient
            state[work.tensor] = work.state
            if work.settings not in groups:
                groups[work.settings] = {**self._optimizer.param_groups[work.settings], "params": []}
            groups[work.settings]["params"].append(work.tensor)
        self._shadow.param_groups = list(groups.values())
        self._shadow.state = state  # type: ignore[assignment]  # a plain dict: nothing may appear in it by itself
        self._shadow.step()
        for work in works:
            work.tensor.grad = None

    def discover_state(self, settings: int, dtype: torch.dtype) -> list[StateKey]:
        """Return what state the optimizer keeps for a parameter of `dtype`, by one real step on a parameter of two elements."""
        dummy = torch.ones(2, dtype=dtype)
        state: dict[str, torch.Tensor] = {}
        self.update([Work(settings, dummy, torch.ones_like(dummy), state)])
        keys = []
        for name, value in state.items():
            if not isinstance(value, torch.Tensor) or value.shape not in (torch.Size([]), dummy.shape):
                raise UnsupportedError(
                    f"{type(self._optimizer).__name__} keeps {name!r} in a form that swapper cannot page yet"
                )
            keys.append(StateKey(name, value.dtype, value.dim() == 0))
        return keys


def check_supported(optimizer: Optimizer) -> None:
    """Raise UnsupportedError unless swapper can apply `optimizer` exactly."""
    if type(optimizer) not in SUPPORTED:
        names = ", ".join(f"torch.optim.{cls.__name__}" for cls in SUPPORTED)
        raise UnsupportedError(
            f"optimizer {type(optimizer).__module__}.{type(optimizer).__qualname__} is not supported yet: use one of {names}"
        )
    for group in optimizer.param_groups:
        for option in ("capturable", "differentiable"):
            if group.get(option):
                raise UnsupportedError(
                    f"{type(optimizer).__name__}({option}=True) cannot be paged: build it with {option}=False"
                )
