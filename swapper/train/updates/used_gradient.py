"""Gradients that updates have used while the user may still think that there is time to change them.

With `update="backward"` groups are updated before `optimizer.step()`; clipping or scaling gradients between the two would have no
effect. So until `step()` they can be looked at, and an operation that would write to one raises an error. Writes that this
cannot see (an alias from before) are found in `step()` by the gradient's version.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from swapper.errors import StateError
from swapper.modules.cold import written_among
from swapper.modules.cold_tables import METADATA

ADVICE = (
    "to clip or scale gradients, offload with update='step' or update='deferred'; what needs one gradient alone (clipping its "
    "values) can be done in a hook, parameter.register_post_accumulate_grad_hook, which runs before the update"
)


class UsedGradient(torch.Tensor):
    """A gradient that was used. Never made by anyone: a tensor's class is set to it and back, by `protect` and `release`."""

    swapper_name: str

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.mul_ and _is_one(args[1]):
            return args[0]  # torch's clip_grad_norm_ where nothing is to be clipped
        if func not in METADATA:
            for tensor in written_among(func, args, kwargs):
                if type(tensor) is UsedGradient:
                    raise StateError(
                        f"{getattr(func, '__name__', func)} would change the gradient of {tensor.swapper_name}, which was used in "
                        f"backward already: with update='backward' gradients cannot be changed before optimizer.step(); {ADVICE}"
                    )
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        if func == _DATA and type(args[0]) is UsedGradient:
            protect(result, args[0].swapper_name)  # it has a version counter of its own
        return result

    def __deepcopy__(self, memo: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return self.detach().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__deepcopy__({}).__reduce_ex__(protocol)


def _is_one(factor: Any) -> bool:
    is_number = isinstance(factor, int | float) or (type(factor) is torch.Tensor and factor.dim() == 0)
    return is_number and bool(factor == 1)


_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]


def protect(gradient: torch.Tensor, name: str) -> None:
    """From now on `gradient`, that of the parameter `name`, can only be looked at."""
    if type(gradient) is torch.Tensor:
        gradient.__class__ = UsedGradient
        gradient.swapper_name = name  # type: ignore[attr-defined]


def release(gradient: torch.Tensor) -> None:
    """`gradient` is an ordinary tensor again."""
    if type(gradient) is UsedGradient:
        gradient.__class__ = torch.Tensor  # type: ignore[assignment]
        del gradient.swapper_name
