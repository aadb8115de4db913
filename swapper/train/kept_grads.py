"""Gradients that stay on an accelerator until the update, which is made there: `parameter.grad` is what autograd made.

It is an ordinary tensor: clipping, scaling, accumulating and looking at it are torch's own, and nothing of it goes to host memory.
What the plan has set aside for it on the device is as much as all of these gradients take; `zero_grad` gives it back.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from swapper.device.layout import DEVICE_ALIGNMENT_BYTES
from swapper.errors import UnsupportedError
from swapper.modules.own_hook import hookable
from swapper.train.grad_home import Content
from swapper.train.on_device import OnDevice


class KeptGradients:
    """Sees to it that each gradient has memory of its own there.

    Args:
        parameters: whose gradients stay, with their qualified names.
        on_device: where; told of each gradient that comes.
    """

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]], on_device: OnDevice) -> None:
        self._device = on_device.device.device
        self._parameters = dict(parameters)
        self._arriving: dict[str, torch.Tensor] = {}  # flat, in host memory
        self._handles: list[Any] = []
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                parameter.grad = parameter.grad.to(self._device)
            with hookable(parameter):
                hook = _make_hook(name, parameter, on_device)
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]

    def __contains__(self, name: str) -> bool:
        return name in self._parameters

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for parameter in self._parameters.values():
            parameter.grad = None

    # --- when the layout changes ----------------------------------------------------------------------------------

    def present(self) -> list[str]:
        """Return the names of the parameters that have a gradient."""
        return [name for name, parameter in self._parameters.items() if parameter.grad is not None]

    def parts(self, name: str) -> Iterator[torch.Tensor]:
        """Yield a gradient in host memory, flat: to be read if there is one, else to be made anew."""
        parameter = self._parameters[name]
        if parameter.grad is None:
            self._arriving[name] = torch.empty(parameter.numel(), dtype=parameter.dtype)
            yield self._arriving[name]
        else:
            yield parameter.grad.detach().reshape(-1).cpu()

    def present_again(self, name: str, content: Content) -> None:
        """With what was put into its `parts`, `content` is the parameter's gradient."""
        parameter = self._parameters[name]
        parameter.grad = content.of(self._arriving.pop(name)).view(parameter.shape).to(self._device)


def _make_hook(name: str, parameter: nn.Parameter, on_device: OnDevice) -> Callable[[torch.Tensor], None]:
    """Make a hook of the parameter. Hooks are not looked through for cycles: it keeps neither of the two alive."""
    of, where = weakref.ref(parameter), weakref.ref(on_device)

    def own(_: torch.Tensor) -> None:
        """Have a gradient not keep more memory than its own."""
        parameter = of()
        gradient = None if parameter is None else parameter.grad
        if parameter is None or gradient is None:
            return
        if gradient.layout is not torch.strided:
            raise UnsupportedError(
                f"parameter {name} got a sparse gradient, which swapper cannot keep: build the embedding with sparse=False"
            )
        if gradient.untyped_storage().nbytes() > gradient.nbytes + DEVICE_ALIGNMENT_BYTES:
            parameter.grad = gradient.clone()
        if (there := where()) is not None:
            there.gradient_came(id(parameter))

    return own
