"""Guards the local tensors of DTensors, which FSDP2's parameters and gradients are.

DTensor's dispatcher passes by torch's functions, which the other guards see: it calls ATen's operations on `_local_tensor`. So that
is a LocalTensor where it is not what it seems:

- while a deferred step is open that changes or uses shards or gradients: it finishes the step before any operation, on this rank
  alone: no collective is run, since a rank may read its shards by itself. FSDP2 gathers from `FSDPParam._sharded_param_data`, which
  stays what it is;
- of the optimizer's state, as the user reads it: it does what the WatchedTensor does;
- of a gradient on NVMe: it does what a ColdGradient does, and the addition by which FSDP2 accumulates;
- of a shard that stayed on NVMe when its manager was closed: it refuses everything.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from swapper.tensors import torch_private
from swapper.tensors.guarded_tensor import GuardedTensor, native, tensors_among, watch_of
from swapper.tensors.torch_private import count_uses
from swapper.train.gradients.cold_grad import ColdGradient, refuse, stand_for
from swapper.train.sharded.shards import Shard, sharded_like

aten = torch.ops.aten


class LocalTensor(GuardedTensor):
    """Stands for a local tensor. It has no memory.

    Args:
        like: has its form.
        local: the tensor, a ColdGradient if it is on NVMe; None if it is gone.
        finish: makes that usable, or raises.
        parameter: of a ColdGradient, the shard's.
    """

    swapper_local: torch.Tensor | None
    swapper_finish: Callable[[], object]
    swapper_parameter: nn.Parameter

    @staticmethod
    def __new__(
        cls, like: torch.Tensor, local: torch.Tensor | None, finish: Callable[[], object] = lambda: None
    ) -> LocalTensor:
        tensor: LocalTensor = torch_private.make_without_memory(cls, like)
        tensor.swapper_local, tensor.swapper_finish = local, finish
        return tensor

    @classmethod
    def of_gradient(cls, parameter: nn.Parameter, cold: torch.Tensor) -> LocalTensor:
        """Return one for the gradient of a shard, `parameter`."""
        tensor = cls(cold, cold)
        tensor.swapper_parameter = parameter
        return tensor

    @staticmethod
    def _operate(func: Any, args: Any, kwargs: Any) -> Any:
        """Functions of Python, among them those that the dispatcher does not see, as `numpy` and `untyped_storage`."""
        given, named = _finished((args, kwargs))
        if func in (torch.Tensor.__iadd__, torch.Tensor.add_) and type(given[0]) is ColdGradient:
            return native(func, args, kwargs)  # it comes to the dispatcher
        return _FUNCTIONS.get(func, func)(*given, **named)  # DTensor calls some of ATen's operations itself

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        with torch_private.outside_operations():
            given, named = _finished((args, kwargs or {}))
        cold = next((one for one in tensors_among((given, named)) if type(one) is ColdGradient), None)
        if cold is None:
            with torch_private.with_torch_functions():  # watched tensors follow what is done
                return func(*given, **named)
        if func is aten.add_.Tensor and given[0] is cold and type(given[1]) is not ColdGradient and not named:
            _accumulate(args[0].swapper_parameter, cold, given[1])
            return args[0]
        if func not in _FUNCTIONS:
            refuse(cold, func)
        with torch_private.with_torch_functions():
            done = _FUNCTIONS[func](*given, **named)
        done = args[0] if type(done) is ColdGradient else done
        return done if func._schema.returns else None

    def _instead(self, operation: str) -> torch.Tensor:
        local: torch.Tensor = _finished(self)
        return copy.deepcopy(local) if operation == "__deepcopy__" else local


def _finished(tree: Any) -> Any:
    """Return `tree` with what LocalTensors stand for, for which no step is open any more."""

    def finish(tensor: LocalTensor) -> torch.Tensor | None:
        tensor.swapper_finish()
        return tensor.swapper_local

    return torch_private.pytree.tree_map_only(LocalTensor, finish, tree)


def _accumulate(parameter: nn.Parameter, cold: ColdGradient, gradient: torch.Tensor) -> None:
    """Add to the gradient in its pages, as when autograd accumulates."""
    parameter.grad = cold
    for before in (parameter._backward_hooks or {}).values():
        before(gradient)
    parameter.grad = gradient if gradient.device == parameter.device else stand_for(gradient, parameter.device)
    for after in (parameter._post_accumulate_grad_hooks or {}).values():
        after(parameter)


_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    aten.linalg_vector_norm.default: torch.linalg.vector_norm,
    aten.mul_.Tensor: torch.Tensor.mul_,
    aten.mul_.Scalar: torch.Tensor.mul_,
    aten.clamp_.default: torch.Tensor.clamp_,
    aten.zero_.default: torch.Tensor.zero_,
    aten._foreach_norm.Scalar: torch_private.foreach_norm,
    aten._foreach_mul_.Tensor: torch_private.foreach_mul,
    aten._foreach_mul_.Scalar: torch_private.foreach_mul,
    aten._foreach_zero_.default: torch_private.foreach_zero,
    aten._foreach_clamp_min_.Scalar: torch_private.foreach_clamp_min,
    aten._foreach_clamp_max_.Scalar: torch_private.foreach_clamp_max,
    aten._amp_foreach_non_finite_check_and_unscale_.default: torch_private.foreach_unscale,
}
"""By ATen's operation: torch's function, which a ColdGradient does."""


def shown_like(value: Any, parameter: Any) -> Any:
    """As `sharded_like`; what is done with the DTensor is done with `value`, which may be watched."""
    shown = sharded_like(value, parameter)
    if shown is not value and watch_of(value) is not None:
        shown._local_tensor = LocalTensor(value, value)
    return shown


def local_of(tensor: Any) -> Any:
    """Return the local tensor of a DTensor, whether a step is open or not: of a gradient on NVMe its ColdGradient."""
    local = tensor._local_tensor
    return local.swapper_local if type(local) is LocalTensor else local


class OpenShards:
    """Hides the shards of one group, and their gradients.

    Args:
        finish: finishes an open step, if there is one.
    """

    def __init__(self, shards: Sequence[Shard], finish: Callable[[], None]) -> None:
        self._shards = shards
        self._finish = finish
        self._hidden: list[Any] = []
        self._uses = [_uses_of(shard) for shard in shards]

    def hide(self) -> None:
        """A step opens."""
        for shard in self._shards:
            for tensor in (shard.parameter, shard.parameter.grad):
                local = None if tensor is None else tensor._local_tensor  # type: ignore[attr-defined]
                if local is not None and type(local) is not LocalTensor:
                    tensor._local_tensor = LocalTensor(local, local, self._finish)  # type: ignore
                    self._hidden.append(tensor)

    def show(self) -> None:
        """The group is updated, or the model closes."""
        for tensor in self._hidden:
            tensor._local_tensor = local_of(tensor)
        self._hidden.clear()

    def shown(self) -> str | None:
        """Return the name of a parameter whose shard another tensor shows (`to_local`, a state_dict); None if there is none.

        Such a tensor cannot be hidden.
        """
        uses = zip(self._shards, self._uses, strict=True)
        return next((shard.name for shard, before in uses if _uses_of(shard) > before), None)


def _uses_of(shard: Shard) -> int:
    """Return how many tensors share the memory of a shard, which FSDP2's own two always do."""
    return count_uses(shard.fsdp_param._sharded_param_data) if shard.local.numel() else 0
