"""Shows a gradient of a shard that lies on NVMe as the local part of FSDP2's gradient, a DTensor.

Of a plain parameter `grad` is a ColdGradient (gradients/cold_grad.py), which sees torch's functions. DTensor's dispatcher passes
by that: it calls ATen's operations on `_local_tensor`. So that is a ColdShard, which does the same few of them: what clipping
needs, and the addition by which FSDP2 accumulates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn

from swapper.tensors.guarded_tensor import GuardedTensor
from swapper.tensors.torch_functions import native
from swapper.tensors.torch_private import make_subclass
from swapper.train.gradients.cold_grad import ACTIONS, ColdGradient, refuse

aten = torch.ops.aten


class ColdShard(GuardedTensor):
    """The local part of a gradient."""

    swapper_parameter: nn.Parameter
    swapper_cold: ColdGradient

    _operate = staticmethod(native)  # it comes to the dispatcher

    @staticmethod
    def __new__(cls, parameter: nn.Parameter, cold: ColdGradient) -> ColdShard:
        tensor: ColdShard = make_subclass(cls, cold)
        tensor.swapper_parameter, tensor.swapper_cold = parameter, cold
        return tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Raises ColdParameterError for what needs the gradient's data."""
        if func is aten.add_.Tensor and isinstance(args[0], cls) and not isinstance(args[1], cls) and not kwargs:
            return _accumulate(args[0], args[1])
        act = _ACTIONS.get(func)
        done = NotImplemented if act is None else act(*args, **(kwargs or {}))
        if done is NotImplemented:
            shards = (one for arg in args for one in (arg if isinstance(arg, list | tuple) else [arg]))
            refuse(next((one.swapper_cold for one in shards if isinstance(one, cls)), None), func)
        return done if func._schema.returns else None

    def _text(self) -> str:
        return repr(self.swapper_cold)

    def _instead(self, operation: str) -> NoReturn:
        refuse(self.swapper_cold, "pickling")


def _accumulate(shard: ColdShard, gradient: torch.Tensor) -> ColdShard:
    """Add to the gradient in its pages, as when autograd accumulates."""
    parameter = shard.swapper_parameter
    parameter.grad = shard.swapper_cold
    for before in (parameter._backward_hooks or {}).values():
        before(gradient)
    parameter.grad = gradient
    for after in (parameter._post_accumulate_grad_hooks or {}).values():
        after(parameter)
    return shard


def _on_one(function: Any, name: str | None = None) -> Callable[..., Any]:
    """Return what does torch's `function` on a ColdShard; `name` is that of its second argument, if it has to be named."""

    def act(tensor: Any, *others: Any) -> Any:
        if not isinstance(tensor, ColdShard):
            return NotImplemented
        cold = tensor.swapper_cold
        done = ACTIONS[function](cold, *others) if name is None else ACTIONS[function](cold, **{name: others[0]})
        return tensor if done is cold else done

    return act


def _on_each(alone: Any, function: Any, name: str | None = None) -> Callable[..., Any]:
    """Return the same for a list; `alone` is the operation on one other tensor."""
    act = _on_one(function, name)

    def do(tensors: Any, *others: Any) -> Any:
        found = [act(t, *others) if isinstance(t, ColdShard) else alone(t, *others) for t in tensors]
        return NotImplemented if any(one is NotImplemented for one in found) else found

    return do


_NORM, _MUL, _CLAMP, _ZERO = torch.linalg.vector_norm, torch.Tensor.mul_, torch.Tensor.clamp_, torch.Tensor.zero_
_ACTIONS: dict[Any, Callable[..., Any]] = {
    aten.linalg_vector_norm.default: _on_one(_NORM),
    aten.mul_.Tensor: _on_one(_MUL),
    aten.mul_.Scalar: _on_one(_MUL),
    aten.clamp_.default: _on_one(_CLAMP),
    aten.zero_.default: _on_one(_ZERO),
    aten._foreach_norm.Scalar: _on_each(aten.linalg_vector_norm.default, _NORM),
    aten._foreach_mul_.Tensor: _on_each(aten.mul_.Tensor, _MUL),
    aten._foreach_mul_.Scalar: _on_each(aten.mul_.Scalar, _MUL),
    aten._foreach_zero_.default: _on_each(aten.zero_.default, _ZERO),
    aten._foreach_clamp_min_.Scalar: _on_each(aten.clamp_min_.default, _CLAMP, "min"),
    aten._foreach_clamp_max_.Scalar: _on_each(aten.clamp_max_.default, _CLAMP, "max"),
}
