"""Cold parameters: the guard in front of memory that is away.

While a parameter's pages may be away its class is `ColdParameter`. It is the same object with the same shape, dtype,
gradient and hooks, but an operation that needs its data is sent to its keeper first. Inside the forward of a module that
contains the parameter the keeper brings it in and the operation goes on (a parent may use a child's weight directly, as
nn.MultiheadAttention does); anywhere else it raises, instead of reading memory that is not there.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from swapper.errors import ColdParameterError
from swapper.modules.conversions import CONVERSIONS, changes_nothing


class Keeper(Protocol):
    """Who brings a cold parameter in.

    Attributes:
        advice: what a user can do who needs the data of one; whole sentences.
    """

    advice: str

    def bring(self, parameter: nn.Parameter) -> bool:
        """Make `parameter` warm for the rest of the running forward. False if no forward is running that contains it."""
        ...

    def catch_up(self, parameter: nn.Parameter) -> None:
        """Make `parameter` warm for good if it is in memory, and cold only because its last update is still to be done."""
        ...

    def detached(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Return what `parameter.detach()` gives while it is cold (state_dict calls that); None: it is refused."""
        ...

    def indexed(self, parameter: nn.Parameter, index: Any) -> torch.Tensor | None:
        """Return `parameter[index]` without bringing all of `parameter` in; None: all of it is brought in."""
        ...

    def note_change(self, group: Any, names: list[str]) -> None:
        """A forward or backward changed parameters of `group` in place; their pages, if any, are being written back."""
        ...

    def describe(self, parameter: nn.Parameter) -> str:
        """Return the parameter's qualified name."""
        ...


# By id of the parameter. A model's hooks keep its manager alive; what is kept here must not, or a manager that nobody closes
# would never go.
_keepers: weakref.WeakValueDictionary[int, Keeper] = weakref.WeakValueDictionary()
_guarded: weakref.WeakValueDictionary[int, nn.Parameter] = weakref.WeakValueDictionary()


def guard(parameter: nn.Parameter, keeper: Keeper) -> None:
    """From now on `set_cold` and `set_warm` may be used for `parameter`."""
    _keepers[id(parameter)] = keeper
    _guarded[id(parameter)] = parameter


def unguard(parameter: nn.Parameter) -> None:
    set_warm(parameter)
    _forget(parameter)


def forsake(parameter: nn.Parameter) -> None:
    """Leave `parameter` cold for good. Nothing here may keep its manager's memory alive, nor mix it up with a later object."""
    set_cold(parameter)
    _forget(parameter)


def _forget(parameter: nn.Parameter) -> None:
    _keepers.pop(id(parameter), None)
    _guarded.pop(id(parameter), None)


def is_guarded(parameter: nn.Parameter) -> bool:
    """True if `parameter` is a manager's."""
    return _guarded.get(id(parameter)) is parameter


def _forbid_in_child() -> None:
    """In a forked child swapper's memory does not exist: no parameter of a manager may be touched, resident ones included."""
    for parameter in list(_guarded.values()):
        set_cold(parameter)
    if _guarded:
        METADATA.difference_update(_getters("grad", "_grad"))  # gradients lie there too


os.register_at_fork(after_in_child=_forbid_in_child)


def set_cold(parameter: nn.Parameter) -> None:
    parameter.__class__ = ColdParameter


def set_warm(parameter: nn.Parameter) -> None:
    if type(parameter) is ColdParameter:
        parameter.__class__ = nn.Parameter  # type: ignore[assignment]


def is_cold(parameter: torch.Tensor) -> bool:
    return type(parameter) is ColdParameter


_thread = threading.local()


@contextmanager
def aliases() -> Iterator[None]:
    """Within, `state_dict()` of a module with cold parameters works: its tensors have their place in memory but no data."""
    _thread.aliases = True
    try:
        yield
    finally:
        _thread.aliases = False


def is_aliasing() -> bool:
    """True within `aliases()`."""
    return getattr(_thread, "aliases", False)


def _getters(*names: str) -> set[Callable[..., Any]]:
    """What `__torch_function__` is given for these attributes; versions of torch differ in which there are."""
    return {getattr(torch.Tensor, name).__get__ for name in names if hasattr(torch.Tensor, name)}


def _setters(*names: str) -> set[Callable[..., Any]]:
    return {getattr(torch.Tensor, name).__set__ for name in names}


# What can be answered without the data.
METADATA: set[Callable[..., Any]] = {
    *_getters(
        *("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "grad", "grad_fn", "names"),
        *("_version", "retains_grad", "is_cuda", "is_cpu", "is_sparse", "is_sparse_csr", "is_quantized"),
        *("is_meta", "is_mkldnn", "is_mps", "is_xpu", "is_nested", "is_vulkan", "is_ort", "is_mtia", "is_ipu"),
        *("output_nr", "_backward_hooks", "_post_accumulate_grad_hooks", "itemsize", "nbytes", "_grad"),
        *("is_xla", "is_maia", "name"),
    ),
    *_setters("requires_grad", "grad", "_backward_hooks", "_post_accumulate_grad_hooks"),
    getattr(torch.Tensor, "grad").__delete__,  # noqa: B009  # mypy takes it for an instance's
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.numel,
    torch.Tensor.nelement,
    torch.Tensor.stride,
    torch.Tensor.element_size,
    torch.Tensor.is_floating_point,
    torch.Tensor.is_complex,
    torch.Tensor.is_contiguous,
    torch.Tensor.is_signed,
    torch.Tensor.is_inference,
    torch.Tensor.storage_offset,
    torch.Tensor.get_device,
    torch.Tensor.requires_grad_,
    torch.Tensor.register_hook,
    torch.Tensor.register_post_accumulate_grad_hook,
    torch.Tensor.retain_grad,
    torch.Tensor.__len__,
    torch.Tensor.is_same_size,
    torch.is_floating_point,
    torch.is_complex,
    torch.is_signed,
    torch.is_inference,
    torch.numel,
    torch.is_same_size,
    torch._has_compatible_shallow_copy_type,
}


SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]


class ColdParameter(nn.Parameter):
    """A parameter whose data may be away. Never made by anyone: a parameter's class is set to it and back."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.autograd.grad:
            return func(args[0], _without_data(args[1]), *args[2:], **kwargs)
        if func is torch.Tensor.detach and not is_aliasing():
            keeper = _keepers.get(id(args[0]))
            detached = None if keeper is None else keeper.detached(args[0])
            if detached is not None:
                return detached
        if func is torch.Tensor.__getitem__ and type(args[0]) is cls:
            keeper = _keepers.get(id(args[0]))
            row = None if keeper is None else keeper.indexed(args[0], args[1])
            if row is not None:
                return row
        if func in CONVERSIONS and changes_nothing(lambda tensor: func(tensor, *args[1:], **kwargs), args[0]):
            return args[0]
        if func == SET_DATA and args[0] is args[1]:  # Module.to, where nothing changes
            return None
        aliasing = func is torch.Tensor.detach and is_aliasing()
        if func not in METADATA and not aliasing:
            cold = [tensor for tensor in tensors_among((args, kwargs)) if type(tensor) is ColdParameter]
            for parameter in cold:
                keeper = _keepers.get(id(parameter))
                if keeper is None or not keeper.bring(parameter):
                    raise _refusal(parameter, keeper, func)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        if _has_caught_up(self):
            return repr(self)
        with torch._C.DisableTorchFunctionSubclass():
            return f"ColdParameter(away, shape={tuple(self.shape)}, dtype={self.dtype}, requires_grad={self.requires_grad})"

    def __format__(self, specification: str) -> str:
        return repr(self) if not specification else str(super().__format__(specification))  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: Any) -> Any:
        if _has_caught_up(self):
            return self.__deepcopy__(memo)
        raise _refusal(self, _keepers.get(id(self)), "deepcopy")

    def __reduce_ex__(self, protocol: Any) -> Any:
        if _has_caught_up(self):
            return self.__reduce_ex__(protocol)
        raise _refusal(self, _keepers.get(id(self)), "pickling")


def _has_caught_up(parameter: nn.Parameter) -> bool:
    """Return whether a parameter that was cold is an ordinary one now."""
    keeper = _keepers.get(id(parameter))
    if keeper is not None:
        keeper.catch_up(parameter)
    return not is_cold(parameter)


def _without_data(inputs: Any) -> Any:
    """What torch.autograd.grad is asked for, cold parameters by their place in the graph: a backward must run with the guard on."""
    with torch._C.DisableTorchFunctionSubclass():
        return [torch.autograd.graph.get_gradient_edge(i) if type(i) is ColdParameter else i for i in inputs]


def written_among(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that `func`, one of torch's, would write to with these arguments."""
    name = getattr(func, "__name__", "")
    in_place = (
        (name.endswith("_") and not name.endswith("__")) or name.startswith("__i") or name in ("__setitem__", "__set__")
    )
    return tensors_among([*(args[:1] if in_place else ()), kwargs.get("out")])


def tensors_among(tree: Any) -> list[torch.Tensor]:
    """Return the tensors in the arguments or the result of a function: in lists, tuples and dictionaries, at any depth."""
    found: list[torch.Tensor] = []
    pending = [tree]
    while pending:
        item = pending.pop()
        if isinstance(item, torch.Tensor):
            found.append(item)
        elif isinstance(item, list | tuple):
            pending.extend(item)
        elif isinstance(item, dict):
            pending.extend(item.values())
    return found


def _refusal(parameter: nn.Parameter, keeper: Keeper | None, operation: Any) -> ColdParameterError:
    if not isinstance(operation, str):
        operation = getattr(operation, "__qualname__", None) or getattr(operation, "__name__", str(operation))
    if keeper is None:
        return ColdParameterError(
            f"a parameter of shape {list(parameter.shape)} stayed on NVMe when its manager was closed or its model unloaded, and "
            f"{operation} needs its data. Before closing a manager, copy it inside `with manager.gather(module_or_parameters):` "
            "or write everything with manager.snapshot(path), which plain torch.load reads"
        )
    name = keeper.describe(parameter)
    return ColdParameterError(f"parameter {name} is away on NVMe and {operation} needs its data. {keeper.advice}")
