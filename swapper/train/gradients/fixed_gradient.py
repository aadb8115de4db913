"""Guards gradients that an update will still use: an operation on one that needs or changes its data waits for that first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from swapper.modules.torch_functions import METADATA, native, tensors_among


class FixedGradient(torch.Tensor):
    """A gradient that a step will still use. Never constructed: `fix` sets a tensor's class to it, and `unfix` sets it back.

    Attributes:
        finish: has the step use it, and calls `unfix`.
    """

    finish: Callable[[], None]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func not in METADATA:
            for tensor in tensors_among((args, kwargs)):
                if type(tensor) is FixedGradient:
                    tensor.finish()
        return native(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        self.finish()
        return repr(self)

    def __deepcopy__(self, memo: Any) -> Any:
        self.finish()
        return self.__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.finish()
        return self.__reduce_ex__(protocol)


def fix(gradient: torch.Tensor, finish: Callable[[], None]) -> None:
    """Have operations on `gradient`, if it is an ordinary tensor, call `finish` first."""
    if type(gradient) is torch.Tensor:
        gradient.__class__ = FixedGradient
        gradient.finish = finish  # type: ignore[attr-defined]


def unfix(gradient: torch.Tensor) -> None:
    """Make `gradient` an ordinary tensor again, if it was fixed."""
    if type(gradient) is FixedGradient:
        gradient.__class__ = torch.Tensor  # type: ignore[assignment]
        del gradient.finish
