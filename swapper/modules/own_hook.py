"""Hooks that swapper puts into a module or a tensor: torch.compile, Ctrl-C, copies, and the transforms of torch.func."""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from swapper.runtime.interrupts import defer_signals
from swapper.tensors.torch_private import innermost_transform, not_traced, without_transforms


class OwnHook:
    """A hook that swapper puts into a module, or in place of its `_apply`.

    Deep or pickled copies of the module do not have it: see `copy_without_hooks`. A class with its own `__deepcopy__` or
    `__reduce__` may copy it: the copy does nothing.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    @not_traced
    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        with defer_signals:
            return self._function(*arguments, **keywords)

    def __reduce__(self) -> Any:
        return getattr, (nullcontext(), "__exit__")  # takes any arguments, does nothing, and unpickles without swapper


def copy_without_hooks(module: nn.Module) -> None:
    """Have pickle and copy leave each OwnHook of modules of this class out, so that plain torch reads what they write."""
    if type(module) not in copyreg.dispatch_table:
        copyreg.pickle(type(module), _reduce)


def _reduce(module: nn.Module) -> Any:
    """Return what `module.__reduce_ex__` does, with the module's tables of hooks as they would be without swapper."""
    reduced = module.__reduce_ex__(2)
    if isinstance(reduced, str) or len(reduced) < 3 or not isinstance(reduced[2], dict):
        return reduced
    state = reduced[2]
    own = {
        key
        for table in state.values()
        if isinstance(table, dict)
        for key, hook in table.items()
        if isinstance(getattr(hook, "hook", hook), OwnHook)  # torch wraps those of load_state_dict
    }
    replaced = {name for name, value in state.items() if isinstance(value, OwnHook)}
    # torch numbers hooks across all of a module's tables, and notes by that number how some are called.
    plain = {
        name: type(table)((key, hook) for key, hook in table.items() if key not in own)
        if isinstance(table, dict) and "_hooks" in name
        else table
        for name, table in state.items()
        if name not in replaced
    }
    return (*reduced[:2], plain, *reduced[3:]) if own or replaced else reduced


@contextmanager
def hookable(parameter: torch.Tensor) -> Iterator[None]:
    """Return a context in which a frozen parameter accepts hooks, for a time when it is not frozen."""
    was = parameter.requires_grad
    parameter.requires_grad_(True)
    try:
        yield
    finally:
        parameter.requires_grad_(was)


_NO_CHANGE: AbstractContextManager[Any] = nullcontext()


def outside_transforms() -> AbstractContextManager[Any]:
    """Return a context within which no transform of torch.func (grad, vjp, jvp, vmap, functionalize) runs.

    A transform wraps every tensor that is made, for as long as it lasts: a commit, a transfer or an update must not see that.
    """
    return _NO_CHANGE if innermost_transform() is None else without_transforms()
