"""Tensors that show memory which is not their own: mapped files, or state that will change.

Every operation on the data of one first asks its owner, and after it whether the files are whole: what was read of a file that
somebody truncated meanwhile is zeros.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from swapper.modules.torch_functions import METADATA, Function, as_plain, tensors_among, written_among


class Shown(ABC):
    """Owns what some tensors show.

    Attributes:
        may_change: what is shown is not there for good: who takes a tensor over gets a copy.
    """

    may_change = False

    @abstractmethod
    def check(self, tensor: ShownTensor) -> None:
        """Raise StateError or CheckpointError if `tensor` does not show any more what it did."""

    @abstractmethod
    def check_whole(self, tensor: ShownTensor) -> None:
        """Raise CheckpointError if what was read of `tensor` just now may not be what it shows."""

    @abstractmethod
    def watch(self, view: torch.Tensor, of: ShownTensor) -> None:
        """Make `view`, a plain tensor in the memory of another one, a tensor that shows it too."""

    def check_written(self, how: str) -> None:
        """Raise StateError if nobody would see writes. `how`: the function that writes."""
        return


class ShownTensor(torch.Tensor):
    """A tensor in memory of `shown_by`, or a view of one. Never constructed: a tensor's class is set to it."""

    shown_by: Shown

    @classmethod
    def __torch_function__(cls, func: Function, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        shown = _shown_among((args, kwargs))
        used = shown if func not in METADATA else []
        for tensor in used:
            tensor.shown_by.check(tensor)
        if used:
            for tensor in _shown_among(
                written_among(func, args or tuple(kwargs.values()), kwargs)
            ):  # torch.nn.init gives names
                tensor.shown_by.check_written(getattr(func, "__name__", str(func)))
        result = _run(func, args, kwargs, shown)
        for tensor in used:
            tensor.shown_by.check_whole(tensor)
        return result

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self._plain())

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        copied = self._plain().clone()
        self.shown_by.check_whole(self)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain().__reduce_ex__(protocol)

    def _plain(self) -> torch.Tensor:
        self.shown_by.check(self)
        return as_plain(self)


def _shown_among(tree: Any) -> list[ShownTensor]:
    return [tensor for tensor in tensors_among(tree) if isinstance(tensor, ShownTensor)]


def _run(func: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any], shown: Sequence[ShownTensor]) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        if func in _ARRAYS:  # an array cannot check anything: it gets memory of its own
            return _array(func, args, kwargs, any(tensor.shown_by.may_change for tensor in shown))
        result = func(*args, **kwargs)
        if func is torch.Tensor.to and any(result is tensor and tensor.shown_by.may_change for tensor in shown):
            return result.detach().as_subclass(torch.Tensor).clone()  # the new owner of the state may change it
        for tensor in shown:
            for view in views_among(result, tensor):
                tensor.shown_by.watch(view, tensor)
    return result


_ARRAYS = {torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.__dlpack__}


def _array(func: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any], is_fixed: bool) -> Any:
    array = func(args[0].as_subclass(torch.Tensor).clone(), *args[1:], **kwargs)
    if is_fixed and func is not torch.Tensor.__dlpack__:
        array.flags.writeable = False  # nobody would see it
    return array


def views_among(result: Any, memory: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the plain tensors in `result` that share the storage of `memory`."""
    storage = memory.untyped_storage().data_ptr()
    for view in tensors_among(result):
        is_plain = type(view) is torch.Tensor and view.device.type == "cpu" and view.layout is torch.strided
        if is_plain and view.numel() and view.untyped_storage().data_ptr() == storage:
            yield view
