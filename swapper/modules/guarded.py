"""Guarded parameters: those that a manager or a loaded model may leave cold, and the handlers of their faults.

A fault is an operation that needs the data of a cold parameter (cold.py).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, Protocol

import torch
from torch import nn

from swapper.errors import ColdParameterError
from swapper.tensors.guarded_tensor import Function

RunWith = Callable[[Mapping[int, torch.Tensor]], object]
"""An operation on parameters that have their data while it runs, or is given tensors in their places, by id."""


class FaultHandler(Protocol):
    """Reads a cold parameter in, or does an operation on it.

    Attributes:
        advice: what a user can do who needs the data of one; whole sentences.
        answers: operations outside of a forward are done; else they are refused.
    """

    advice: str

    @property
    def answers(self) -> bool: ...

    def fault_in(self, parameter: nn.Parameter) -> bool:
        """Materialize `parameter` for the rest of the running forward. False if no forward is running that contains it."""

    def read(self, parameters: Sequence[nn.Parameter], function: Function, run: RunWith) -> object:
        """Do an operation of torch's `function` that reads these cold parameters. Returns what `run` returns, which does it."""

    def write(self, parameters: Sequence[nn.Parameter], function: Function, run: RunWith) -> object:
        """As `read`, where they are changed."""

    def whole(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Return the tensor that views of the cold `parameter` show; None: the parameter itself."""
        return None

    def catch_up(self, parameter: nn.Parameter) -> None:
        """Materialize `parameter` for good if it is in memory, and cold only because its last update is deferred."""
        return

    def detached(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Return what `parameter.detach()` gives while it is cold (state_dict calls that); None: do it as other operations."""

    def in_part(
        self, parameter: nn.Parameter, function: Function, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> object:
        """Do an operation on the cold `parameter` that reads only some of it (a row, those of an embedding, a product by parts), or
        that writes what it has.

        Returns:
            Its result. NotImplemented: do it as other operations.
        """
        return NotImplemented

    def check_assignable(self, parameter: nn.Parameter) -> None:
        """Raise ColdParameterError if `parameter.data = x` cannot be a write of its values."""
        return

    def owns(self, tensor: torch.Tensor) -> bool:
        """Return True if a tensor lies in the memory of parameters."""
        return False

    def note_change(self, group: Any, names: list[str]) -> None:
        """Note that a forward or backward changed parameters of `group` in place; their pages, if any, are being written back."""
        return

    def unmanage(self, parameter: nn.Parameter) -> bool:
        """Make the cold `parameter` an ordinary one, which is given other data next. False: it is not done."""
        return False

    def describe(self, parameter: nn.Parameter) -> str:
        """Return the parameter's qualified name."""


# By id of the parameter. Weak: a model's hooks keep its manager alive, but these must not, or a manager that is not closed would
# never be collected.
_fault_handlers: weakref.WeakValueDictionary[int, FaultHandler] = weakref.WeakValueDictionary()
_guarded: weakref.WeakValueDictionary[int, nn.Parameter] = weakref.WeakValueDictionary()


def guard(parameter: nn.Parameter, fault_handler: FaultHandler) -> None:
    """Guard `parameter`: from now on `set_cold` and `materialize` may be used for it."""
    _fault_handlers[id(parameter)] = fault_handler
    _guarded[id(parameter)] = parameter


def forget(parameter: nn.Parameter) -> None:
    """Undo `guard`."""
    _fault_handlers.pop(id(parameter), None)
    _guarded.pop(id(parameter), None)


def handler_of(parameter: nn.Parameter) -> FaultHandler | None:
    """Return the fault handler of `parameter`; None if its manager is gone."""
    return _fault_handlers.get(id(parameter))


def answering_handler(parameter: nn.Parameter, operation: object) -> FaultHandler:
    """Return the fault handler of `parameter`, for `operation`, torch's function or its name.

    Raises:
        ColdParameterError: it does no operations.
    """
    fault_handler = handler_of(parameter)
    if fault_handler is None or not fault_handler.answers:
        refuse(parameter, operation)
    return fault_handler


def is_guarded(parameter: nn.Parameter) -> bool:
    """Return whether `parameter` is a manager's or a loaded model's."""
    return _guarded.get(id(parameter)) is parameter


def guarded_parameters() -> list[nn.Parameter]:
    """Return all guarded parameters of the process."""
    return list(_guarded.values())


def name_of(func: object) -> str:
    name = getattr(func, "__qualname__", None) or getattr(func, "__name__", func)
    return str(name)


def refuse(parameter: nn.Parameter, operation: object) -> NoReturn:
    fault_handler = handler_of(parameter)
    if fault_handler is None:
        raise ColdParameterError(
            f"a parameter of shape {list(parameter.shape)} stayed on NVMe when its manager was closed or its model unloaded, and "
            f"{name_of(operation)} needs its data. Before closing a manager, copy it inside "
            "`with manager.gather(module_or_parameters):` or write everything with manager.snapshot(path), which plain torch.load "
            "reads"
        )
    raise ColdParameterError(
        f"parameter {fault_handler.describe(parameter)} is away on NVMe and {name_of(operation)} needs its data. "
        f"{fault_handler.advice}"
    )
