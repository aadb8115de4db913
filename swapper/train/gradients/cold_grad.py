"""Defines the tensor that `parameter.grad` is while the gradient lies on NVMe.

It has the gradient's shape and dtype. Changes of every element alone, such as clipping and unscaling, are recorded and
applied when the gradient is used: element by element that gives the same bits. Its norms, and whether it is finite, are
known from when it was written, or found by reading it. Every other operation on its data raises an error that names the
remedy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from swapper.errors import ColdParameterError
from swapper.modules.cold_tables import METADATA

ADVICE = "clip with clip_grad_norm_ or clip_grad_value_, or release it with zero_grad"
KEEP = "; with manager.offload(..., gradients='host') it stays in memory"

Change = Callable[[torch.Tensor], torch.Tensor]
"""A pending change of a gradient's elements; returns new ones. It must not depend on an element's position."""


class Gradient(Protocol):
    """The gradient behind a ColdGradient."""

    def norm(self, norm_type: float) -> torch.Tensor:
        """Return its norm, as torch.linalg.vector_norm does."""

    def is_finite(self) -> bool:
        """Return True if all of its elements are finite."""

    def change(self, change: Change) -> None:
        """Record a change of its elements."""

    def zero(self) -> None:
        """Set it to zero."""


class ColdGradient(torch.Tensor):
    """A gradient that lies on NVMe. Never constructed: a tensor's class is set to it.

    Attributes:
        swapper_name: the parameter's.
        swapper_where: its location, in words.
        swapper_gradient: returns the gradient behind it; None if that is gone.
    """

    swapper_name = ""
    swapper_where = "on NVMe"
    swapper_gradient: Callable[[], Gradient | None]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        action = _ACTIONS.get(func)
        done = NotImplemented if action is None else action(*args, **(kwargs or {}))
        if done is NotImplemented:
            one = next((a for a in args if type(a) is ColdGradient), None)
            name, where = ("a parameter", cls.swapper_where) if one is None else (one.swapper_name, one.swapper_where)
            raise ColdParameterError(
                f"the gradient of {name} is {where} and {getattr(func, '__name__', func)} needs its data: "
                f"{ADVICE}{KEEP if where == cls.swapper_where else ''}"
            )
        return done

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        with torch._C.DisableTorchFunctionSubclass():
            return f"ColdGradient({self.swapper_where}, shape={tuple(self.shape)}, dtype={self.dtype})"


def _of(tensor: Any) -> Gradient | None:
    if type(tensor) is not ColdGradient:
        return None
    gradient = tensor.swapper_gradient()
    if gradient is None:
        raise ColdParameterError(
            f"this was the gradient of {tensor.swapper_name}, which has another one or none by now: use parameter.grad"
        )
    return gradient


def _change(tensor: torch.Tensor, gradient: Gradient, change: Change) -> torch.Tensor:
    gradient.change(change)
    torch.autograd.graph.increment_version([tensor])
    return tensor


def _vector_norm(tensor: Any, ord: Any = 2, *others: Any, **named: Any) -> Any:  # as torch has it
    gradient = _of(tensor)
    if gradient is None or others or named or isinstance(ord, torch.Tensor):
        return NotImplemented
    return gradient.norm(float(ord))


def _mul(tensor: Any, other: Any) -> Any:
    gradient = _of(tensor)
    if gradient is None or type(other) is ColdGradient or (isinstance(other, torch.Tensor) and other.dim()):
        return NotImplemented
    factor = other.detach().cpu().clone() if isinstance(other, torch.Tensor) else other  # it is used there
    return _change(tensor, gradient, lambda part: part.mul(factor))


def _clamp(tensor: Any, min: Any = None, max: Any = None) -> Any:
    gradient = _of(tensor)
    if gradient is None or isinstance(min, torch.Tensor) or isinstance(max, torch.Tensor):
        return NotImplemented
    return _change(tensor, gradient, lambda part: part.clamp(min, max))


def _zero(tensor: Any) -> Any:
    gradient = _of(tensor)
    if gradient is None:
        return NotImplemented
    gradient.zero()
    torch.autograd.graph.increment_version([tensor])
    return tensor


def _zero_all(tensors: Sequence[torch.Tensor]) -> None:
    for tensor in tensors:
        tensor.zero_()


def _unscale_all(tensors: Sequence[torch.Tensor], found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
    """Unscale for torch.amp.GradScaler: set `found_inf` if anything is not finite, multiply all by `inv_scale`."""
    plain = [tensor for tensor in tensors if type(tensor) is not ColdGradient]
    if plain:
        torch._amp_foreach_non_finite_check_and_unscale_(plain, found_inf, inv_scale)
    factor = inv_scale.detach().cpu().clone()  # it is used there

    def unscale(part: torch.Tensor) -> torch.Tensor:
        changed = part.clone()
        found = torch.zeros_like(found_inf, device=part.device)
        torch._amp_foreach_non_finite_check_and_unscale_([changed], found, factor.to(part.device))
        return changed

    for tensor in tensors:
        gradient = _of(tensor)
        if gradient is not None:
            if not gradient.is_finite():
                found_inf.fill_(1.0)
            if factor.item() != 1:  # a scaler that only checks passes one
                _change(tensor, gradient, unscale)


_ACTIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.linalg.vector_norm: _vector_norm,
    torch.Tensor.mul_: _mul,
    torch.Tensor.clamp_: _clamp,
    torch.Tensor.zero_: _zero,
    torch._foreach_zero_: _zero_all,
    torch._amp_foreach_non_finite_check_and_unscale_: _unscale_all,
}
