"""Hooks into autograd's accumulation, and gradients that stay autograd's own tensors until the update.

Of those `parameter.grad` is an ordinary tensor: clipping, scaling, accumulating and reading it are torch's own, nothing
of it is copied, and `zero_grad` frees its memory. The plan reserves the size of all of these gradients. On an
accelerator they serve updates made there; in host memory, parameters that are always there (others use their gradients'
slots as a cache: grads.py).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from swapper.device.device_memory import DEVICE_ALIGNMENT_BYTES
from swapper.errors import UnsupportedError
from swapper.modules.module_hooks import hookable
from swapper.train.gradients.cold_grad import Accumulation, GradientMeta
from swapper.train.groups.train_device import TrainingDevice

Hook = Callable[[torch.Tensor], None]


class AccumulationHooks:
    """Owns hooks of parameters. They must refer weakly to parameters and managers: the collector does not traverse them."""

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []

    def add(self, parameter: nn.Parameter, before: Hook | None = None, after: Hook | None = None) -> None:
        """Call `before` with each gradient that is about to be accumulated, `after` with the parameter that has it."""
        with hookable(parameter):
            if before is not None:
                self._handles.append(parameter.register_hook(before))
            if after is not None:
                self._handles.append(parameter.register_post_accumulate_grad_hook(after))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def check_dense(name: str, gradient: torch.Tensor) -> None:
    """Raise UnsupportedError if autograd made a sparse gradient of parameter `name`."""
    if gradient.layout is not torch.strided:
        raise UnsupportedError(f"parameter {name} got a sparse gradient, which cannot be paged: say sparse=False")


class AutogradGradients:
    """Ensures that each gradient has memory of its own.

    Args:
        came: called with a parameter whose gradient arrived; optional.
    """

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]], came: Hook | None = None) -> None:
        self._parameters = dict(parameters)
        self._hooks = AccumulationHooks()
        for name, parameter in self._parameters.items():
            accumulation = Accumulation(name, parameter)
            self._hooks.add(parameter, accumulation.begin, partial(_own, name, accumulation, came))

    def remove(self) -> None:
        self._hooks.remove()


class GradientsOnDevice(AutogradGradients):
    """Gradients that stay on an accelerator."""

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]], on_device: TrainingDevice) -> None:
        self._device = on_device.device.device
        self._arriving: dict[str, torch.Tensor] = {}  # flat, in host memory
        where = weakref.ref(on_device)

        def came(parameter: torch.Tensor) -> None:
            if (there := where()) is not None:
                there.order.note()
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

    # --- for relayout: see PagedGradients ----------------------------------------------------------------------------------

    def present(self) -> list[str]:
        return [name for name, parameter in self._parameters.items() if parameter.grad is not None]

    def content(self, name: str) -> GradientMeta:
        return GradientMeta()

    def parts(self, name: str) -> Iterator[torch.Tensor]:
        parameter = self._parameters[name]
        if parameter.grad is None:
            self._arriving[name] = torch.empty(parameter.numel(), dtype=parameter.dtype, device="cpu")
            yield self._arriving[name]
        else:
            yield parameter.grad.detach().reshape(-1).cpu()

    def present_again(self, name: str, content: GradientMeta) -> None:
        parameter = self._parameters[name]
        parameter.grad = content.of(self._arriving.pop(name)).view(parameter.shape).to(self._device)


def _own(name: str, accumulation: Accumulation, came: Hook | None, parameter: torch.Tensor) -> None:
    """Copy a gradient that would keep more memory alive than its own."""
    gradient = parameter.grad
    if gradient is None:
        return
    check_dense(name, gradient)
    is_large = gradient.untyped_storage().nbytes() > gradient.nbytes + DEVICE_ALIGNMENT_BYTES
    if is_large and not accumulation.was_there(gradient):
        parameter.grad = gradient.clone()
    if came is not None:
        came(parameter)
