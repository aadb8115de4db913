"""Guarded tensors: an operation on one is done, done otherwise, or refused, by rules (docs/architecture.md has the table).

A guarded tensor is an ordinary one whose class is a `GuardedTensor` for a time: the same object, with its shape, dtype and hooks.
What reads or changes its properties (METADATA) is done at once. A `WatchedTensor` has its data, does operations as an ordinary
tensor does, and its `TensorWatch` has the rules. Where the data is not in memory a class has them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy
import torch

from swapper.tensors.torch_functions import METADATA, Function, leaves, share_memory, tensors_among, written_among
from swapper.tensors.torch_private import not_traced, without_torch_functions


class GuardedTensor(torch.Tensor):
    """The base of classes that a tensor's class is set to. A subclass has the rules for what needs data."""

    @classmethod
    @not_traced
    def __torch_function__(cls, func: Function, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func in METADATA:
            with without_torch_functions():
                return func(*args, **(kwargs or {}))
        return cls._operate(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return self._text()

    def __deepcopy__(self, memo: Any) -> Any:
        if id(self) not in memo:
            instead = self._instead("__deepcopy__")
            memo[id(self)] = self.__deepcopy__(memo) if instead is self else instead
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._instead("__reduce_ex__").__reduce_ex__(protocol)

    @staticmethod
    def _operate(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do torch's function `func`, which needs data or may need it, with these arguments; some are of this class."""
        raise NotImplementedError

    def _text(self) -> str:
        return repr(self._instead("__repr__"))

    def _instead(self, operation: str) -> torch.Tensor:
        """Return what `operation`, a method's name, is done with.

        Returns:
            Itself if it is an ordinary tensor now. Else one with its content; for `__deepcopy__`: the copy.
        """
        raise NotImplementedError


class TensorWatch:
    """The rules of watched tensors. These do as ordinary tensors do.

    Attributes:
        is_mapped: the tensors are mapped from files: an array gets a copy, and pickling one needs none.
        locks_arrays: arrays are read-only.
        moves_copy: `.to()` returns a copy also where nothing changes.
        follows_writes: `wrote` is called.
    """

    is_mapped = False
    locks_arrays = True
    moves_copy = False
    follows_writes = False

    def watch(self, tensor: torch.Tensor) -> torch.Tensor:
        """Watch `tensor`, an ordinary one, from now on; return it."""
        tensor.__class__ = WatchedTensor
        tensor.swapper_watch = self  # type: ignore[attr-defined]
        return tensor

    def use(self, tensor: torch.Tensor) -> None:
        """An operation needs the data of `tensor`: raise, or make an ordinary tensor of it, or allow it."""

    def used(self, tensor: torch.Tensor) -> None:
        """It is done: raise if its result may be wrong."""

    def changes_nothing(self, func: Function, args: Sequence[Any]) -> bool:
        """Return whether `func`, which writes to a tensor, need not be done."""
        return False

    def write(self, how: str) -> None:
        """A function of this name is about to write to a tensor: raise, or allow it."""

    def wrote(self, how: str) -> None:
        """It has written."""

    def text(self, tensor: torch.Tensor) -> str | None:
        """Return a text in place of the content."""
        return None


class WatchedTensor(GuardedTensor):
    """A tensor whose data is in memory.

    Attributes:
        swapper_watch: has the rules.
    """

    swapper_watch: TensorWatch

    @staticmethod
    def _operate(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for tensor in tensors_among((args, kwargs)):
            if type(tensor) is WatchedTensor:  # yet: one use may end several watches
                tensor.swapper_watch.use(tensor)
        watched = _watched_among((args, kwargs))
        if not watched:
            return func(*args, **kwargs)
        how = getattr(func, "__name__", str(func))
        for tensor in _watched_among(written_among(func, args, kwargs)):
            if tensor.swapper_watch.changes_nothing(func, args):
                return tensor
            tensor.swapper_watch.write(how)
        followed = [tensor for tensor in watched if tensor.swapper_watch.follows_writes]
        versions = [tensor._version for tensor in followed]
        result = _run(func, args, kwargs, watched)
        for tensor in watched:
            tensor.swapper_watch.used(tensor)
        written = [tensor for tensor, version in zip(followed, versions, strict=True) if tensor._version != version]
        for watch in dict.fromkeys(tensor.swapper_watch for tensor in written):
            watch.wrote(how)
        return result

    def _text(self) -> str:
        return self.swapper_watch.text(self) or super()._text()

    def _instead(self, operation: str) -> torch.Tensor:
        watch = self.swapper_watch
        watch.use(self)
        if type(self) is not WatchedTensor:
            return self
        with without_torch_functions():
            plain = self.as_subclass(torch.Tensor)
        if operation == "__repr__" or (watch.is_mapped and operation == "__reduce_ex__"):
            return plain
        copied = plain.detach().clone()
        watch.used(self)
        return copied


def watch_of(tensor: Any) -> TensorWatch | None:
    return tensor.swapper_watch if type(tensor) is WatchedTensor else None


def unwatch(tensor: torch.Tensor) -> None:
    """Make a watched tensor an ordinary one again."""
    tensor.__class__ = torch.Tensor
    del tensor.swapper_watch  # type: ignore[attr-defined]


def _watched_among(tree: Any) -> list[WatchedTensor]:
    return [tensor for tensor in tensors_among(tree) if type(tensor) is WatchedTensor]


_ARRAYS: set[Callable[..., Any]] = {torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.__dlpack__}


def _run(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any], watched: Sequence[WatchedTensor]) -> Any:
    """Do `func` as with ordinary tensors, and watch results that share memory with `watched`."""
    watches = [tensor.swapper_watch for tensor in watched]
    with without_torch_functions():
        if func in _ARRAYS and watches[0].is_mapped:  # an array checks nothing
            args = (args[0].as_subclass(torch.Tensor).clone(), *args[1:])
        result = func(*args, **kwargs)
        if func is torch.Tensor.to and any(result is t and t.swapper_watch.moves_copy for t in watched):
            return result.detach().as_subclass(torch.Tensor).clone()
        for item in leaves(result):
            if isinstance(item, numpy.ndarray):
                if any(watch.locks_arrays for watch in watches):
                    item.flags.writeable = False
            elif type(item) is torch.Tensor:
                shown = next((tensor for tensor in watched if share_memory(item, tensor)), None)
                if shown is not None:
                    shown.swapper_watch.watch(item)
    return result
