"""Keeps gradients as autograd's own tensors until the update.

`parameter.grad` is an ordinary tensor: clipping, scaling, accumulating and reading it are torch's own, nothing of it is
copied, and `zero_grad` frees its memory. The plan reserves the size of all of these gradients. On an accelerator they
serve updates made there; in host memory, parameters that are always there (others use their gradients' slots as a
cache: victim_cache.py).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from swapper.device.device_storage import DEVICE_ALIGNMENT_BYTES
from swapper.errors import UnsupportedError
from swapper.modules.own_hook import hookable
from swapper.train.device.train_device import TrainingDevice
from swapper.train.gradients.gradient_slot import Accumulation, GradientMeta


class AutogradGradients:
    """Ensures that each gradient has memory of its own.

    Args:
        parameters: with their qualified names.
        came: called with a parameter whose gradient arrived; optional.
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
    """Gradients that stay on an accelerator.

    Args:
        parameters: with their qualified names.
        on_device: the accelerator; notified of each gradient.
    """

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]], on_device: TrainingDevice) -> None:
        self._device = on_device.device.device
        self._arriving: dict[str, torch.Tensor] = {}  # flat, in host memory
        where = weakref.ref(on_device)  # the garbage collector does not traverse hooks

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

    # --- for relayout
    # --------------------------------------------------------------------------------------------------

    def present(self) -> list[str]:
        """Return the names of the parameters that have a gradient."""
        return [name for name, parameter in self._parameters.items() if parameter.grad is not None]

    def parts(self, name: str) -> Iterator[torch.Tensor]:
        """Yield a gradient in host memory, flat: for reading if there is one, else to be filled."""
        parameter = self._parameters[name]
        if parameter.grad is None:
            self._arriving[name] = torch.empty(parameter.numel(), dtype=parameter.dtype)
            yield self._arriving[name]
        else:
            yield parameter.grad.detach().reshape(-1).cpu()

    def present_again(self, name: str, content: GradientMeta) -> None:
        """Restore the parameter's gradient from its `parts` and `content`."""
        parameter = self._parameters[name]
        parameter.grad = content.of(self._arriving.pop(name)).view(parameter.shape).to(self._device)


def _make_hooks(
    name: str, parameter: nn.Parameter, came: Callable[[nn.Parameter], None] | None
) -> tuple[Callable[[torch.Tensor], None], Callable[[torch.Tensor], None]]:
    """Make hooks of the parameter, which do not keep it alive, as the garbage collector does not traverse hooks."""
    of = weakref.ref(parameter)
    accumulation = Accumulation(name)

    def begin(_: torch.Tensor) -> None:
        if (parameter := of()) is not None:
            accumulation.begins(parameter)

    def own(_: torch.Tensor) -> None:
        """Copy a gradient that would keep more memory alive than its own."""
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
