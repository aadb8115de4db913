"""Makes gradients that an update in backward has used read-only until `step()`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch

from swapper.errors import StateError
from swapper.modules.torch_functions import METADATA, leaves, share_memory, tensors_among, written_among

ADVICE = (
    "to clip or scale gradients, offload with update='step' or update='deferred'; what needs one gradient alone (clipping its "
    "values) can be done in a hook, parameter.register_post_accumulate_grad_hook, which runs before the update"
)


class UsedGradient(torch.Tensor):
    """A gradient that an update has used while the user may still try to change it.

    Until `step()` it can be read, and an operation that would write to it, or to a view of it, raises an error; arrays
    are read-only. `step()` detects other writes by the gradient's version. Never constructed: `protect` and `release`
    set a tensor's class to it and back.
    """

    swapper_use: _Use

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        used: list[Any] = [tensor for tensor in tensors_among((args, kwargs)) if is_used(tensor)]
        if used and func is torch.Tensor.mul_ and _is_one(args[1]):
            return args[0]  # torch's clip_grad_norm_, if it clips nothing
        if func not in METADATA:
            written: list[Any] = written_among(func, args, kwargs)
            for tensor in written:
                if is_used(tensor):
                    raise StateError(
                        f"{getattr(func, '__name__', func)} would change the gradient of {tensor.swapper_use.name}, which was used "
                        f"in backward already: with update='backward' gradients cannot be changed before optimizer.step(); {ADVICE}"
                    )
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        if func not in METADATA:
            _protect_among(result, used)
        return result

    def __deepcopy__(self, memo: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return self.detach().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__deepcopy__({}).__reduce_ex__(protocol)


def _is_one(factor: Any) -> bool:
    is_number = isinstance(factor, int | float) or (type(factor) is torch.Tensor and factor.dim() == 0)
    return is_number and bool(factor == 1)


@dataclass
class _Use:
    """The use of the gradient of parameter `name`, until `step()`."""

    name: str
    is_over: bool = False


def protect(gradient: torch.Tensor, name: str) -> None:
    """Make `gradient`, that of the parameter `name`, read-only from now on."""
    if type(gradient) is torch.Tensor:
        _protect(gradient, _Use(name))


def is_used(tensor: torch.Tensor) -> bool:
    """Return True if a tensor is a used gradient, or a view of one, before `step()`."""
    if type(tensor) is UsedGradient and tensor.swapper_use.is_over:  # a view that somebody has kept
        release(tensor)
    return type(tensor) is UsedGradient


def _protect(tensor: torch.Tensor, use: _Use) -> None:
    tensor.__class__ = UsedGradient
    tensor.swapper_use = use  # type: ignore[attr-defined]


def _protect_among(result: Any, used: Sequence[Any]) -> None:
    """Make views of used gradients, and arrays, read-only, for as long as those are."""
    for item in leaves(result) if used else ():
        if isinstance(item, numpy.ndarray):
            item.flags.writeable = False
        elif type(item) is torch.Tensor:
            for gradient in used:
                if share_memory(item, gradient):
                    _protect(item, gradient.swapper_use)
                    break


def release(gradient: torch.Tensor) -> None:
    """Make `gradient` an ordinary tensor again."""
    if type(gradient) is UsedGradient:
        gradient.__class__ = torch.Tensor  # type: ignore[assignment]
        gradient.swapper_use.is_over = True
        del gradient.swapper_use
