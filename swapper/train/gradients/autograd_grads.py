"""Gradients that stay where autograd made them until the update: `parameter.grad` is what autograd made.

It is an ordinary tensor: clipping, scaling, accumulating and looking at it are torch's own, nothing of it is copied,
and `zero_grad` gives its memory back. The plan sets aside as much as all of these gradients take. On an accelerator
they stay for updates that are made there; in host memory, where parameters are always there (others wait in their
gradients' room: victim_cache.py).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from swapper.device.image_layout import DEVICE_ALIGNMENT_BYTES
from swapper.errors import UnsupportedError
from swapper.modules.own_hook import hookable
from swapper.train.device.train_device import TrainingDevice
from swapper.train.gradients.gradient_slot import Accumulation, GradientMeta


class AutogradGradients:
    """Sees to it that each gradient has memory of its own.

    Args:
        parameters: whose gradients stay, with their qualified names.
        came: called with a parameter that got one, if anybody wants to know.
    """

    def __init__(
        self, parameters: Iterable[tuple[str, nn.Parameter]], came: Callable[[nn.Parameter], None] | None = None
    ) -> None:
        self._parameters = dict(parameters)
        self._handles: list[Any] = []
        for name, parameter in self._parameters.items():
            with hookable(parameter):
                before, after = _make_hooks(name, parameter, came)
                self._handles.append(parameter.register_hook(before))  # type: ignore[no-untyped-call]
                self._handles.append(parameter.register_post_accumulate_grad_hook(after))  # type: ignore[no-untyped-call]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


class GradientsOnDevice(AutogradGradients):
    """Those that stay on an accelerator.

    Args:
        parameters: whose gradients stay, with their qualified names.
        on_device: where; told of each gradient that comes.
    """

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]], on_device: TrainingDevice) -> None:
        self._device = on_device.device.device
        self._arriving: dict[str, torch.Tensor] = {}  # flat, in host memory
        where = weakref.ref(on_device)  # hooks are not looked through for cycles

        def came(parameter: nn.Parameter) -> None:
            if (there := where()) is not None:
                there.gradient_came(id(parameter))

        super().__init__(parameters, came)
        for parameter in self._parameters.values():
            if parameter.grad is not None:
                parameter.grad = parameter.grad.to(self._device)

    def __contains__(self, name: str) -> bool:
        return name in self._parameters

    def remove(self) -> None:
        super().remove()
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

    def present_again(self, name: str, content: GradientMeta) -> None:
        """With what was put into its `parts`, `content` is the parameter's gradient."""
        parameter = self._parameters[name]
        parameter.grad = content.of(self._arriving.pop(name)).view(parameter.shape).to(self._device)


def _make_hooks(
    name: str, parameter: nn.Parameter, came: Callable[[nn.Parameter], None] | None
) -> tuple[Callable[[torch.Tensor], None], Callable[[torch.Tensor], None]]:
    """Make hooks of the parameter. Hooks are not looked through for cycles: they do not keep it alive."""
    of = weakref.ref(parameter)
    accumulation = Accumulation(name)

    def begin(_: torch.Tensor) -> None:
        if (parameter := of()) is not None:
            accumulation.begins(parameter)

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
        is_large = gradient.untyped_storage().nbytes() > gradient.nbytes + DEVICE_ALIGNMENT_BYTES
        if is_large and not accumulation.was_there(gradient):
            parameter.grad = gradient.clone()
        if came is not None:
            came(parameter)

    return begin, own
