"""The base of the hooks that lease a module's parameters around its forward, for training and inference; and of any
hook of swapper's.

Running forwards are a stack of calls. A forward that ends without its hooks (by Ctrl-C) leaves its call there, which is found
when an outer forward ends, or the next one begins.

[Note: side outputs] A mixture of experts leaves a term of the loss in an attribute of a module. Its backward reads
parameters before that of the output does. In host memory such reads are answered; a device answers none, so the groups
must be leased by then, as for an output. What is left elsewhere, by a hook or in a closure, is not found.
"""

from __future__ import annotations

import copyreg
import dataclasses
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized
from torch.utils.hooks import RemovableHandle

from swapper.modules.groups import Unit
from swapper.modules.leased_group import LeasedGroup
from swapper.modules.turns import Turns
from swapper.runtime.interrupts import close_all, defer_signals
from swapper.tensors.torch_private import innermost_transform, not_traced, pytree, storage_of, without_transforms


class OwnHook:
    """A hook that swapper puts into a module, or in place of its `_apply`.

    Deep or pickled copies of the module do not have it: see `copy_without_hooks`. A class with its own `__deepcopy__` or
    `__reduce__` may copy it: the copy does nothing.
    """

    def __init__(self, function: Callable[..., object]) -> None:
        self._function = function

    @not_traced
    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        with defer_signals:
            return self._function(*arguments, **keywords)

    def __reduce__(self) -> Any:
        return getattr, (nullcontext(), "__exit__")  # takes any arguments, does nothing, and unpickles without swapper


def copy_without_hooks(module: nn.Module) -> None:
    """Have pickle and copy leave each OwnHook of modules of this class out, so that plain torch reads what they write.

    A parametrized module has a class of its own, which refers to it: the table would keep it alive. Torch copies it by
    the class's `__deepcopy__`, and does not pickle it.
    """
    if type(module) not in copyreg.dispatch_table and not is_parametrized(module):
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


_NO_CHANGE: AbstractContextManager[object] = nullcontext()


def outside_transforms() -> AbstractContextManager[object]:
    """Return a context within which no transform of torch.func (grad, vjp, jvp, vmap, functionalize) runs.

    A transform wraps every tensor that is made, for as long as it lasts: a commit, a transfer or an update must not see that.
    """
    return _NO_CHANGE if innermost_transform() is None else without_transforms()


@dataclasses.dataclass(eq=False, slots=True)
class Call:
    """One forward of one unit, and the groups that it leases: by name and index, so that it does not keep the model alive."""

    module: str
    groups: list[int] = dataclasses.field(default_factory=list)


GroupT = TypeVar("GroupT", bound=LeasedGroup)
CallT = TypeVar("CallT", bound=Call)


class ModuleHooks(ABC, Generic[GroupT, CallT]):
    """Owns the hooks of one model and the leases of the forwards that run.

    Args:
        units: the modules to hook.
        groups: all groups, by index.
        turns: of threads, one pass each.
    """

    def __init__(
        self,
        units: Iterable[Unit],
        groups: Sequence[GroupT],
        turns: Turns,
    ) -> None:
        self._groups = groups
        self._turns = turns
        self._is_removed = False
        self._running: list[CallT] = []  # forwards, the innermost last
        self._group_of = {id(parameter): group for group in groups for parameter in group.parameters}
        self._storages = {storage for group in groups for storage in group.storages}
        self._modules: dict[str, weakref.ref[nn.Module]] = {}  # by the unit's name; hooks must not keep a model alive
        self._handles: list[RemovableHandle] = []
        for unit in units:
            self._modules[unit.name] = weakref.ref(unit.module)
            copy_without_hooks(unit.module)
            before, after = OwnHook(partial(self._before, unit)), OwnHook(partial(self._after, unit))
            self._handles.append(unit.module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
            self._handles.append(unit.module.register_forward_hook(after, always_call=True))

    @abstractmethod
    def _before(self, unit: Unit, module: nn.Module, args: object, kwargs: object) -> None:
        """The forward of `unit` begins."""

    @abstractmethod
    def _after(self, unit: Unit, module: nn.Module, args: object, output: object) -> object:
        """The forward of `unit` is over, or was stopped, also by what `_before` raised. Returns what it is to return."""

    @abstractmethod
    def _lease_more(self, call: CallT, group: GroupT) -> None:
        """Lease another group for a running forward."""

    @property
    @abstractmethod
    def is_inside(self) -> bool:
        """Whether this thread is in the innermost forward."""

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._is_removed = True

    def exchange(self, thread: threading.Thread | None, state: Any = None) -> Any:
        """Switch to another batch, in `thread`. Return the state of the previous one's pass.

        Args:
            state: of the batch's pass, as this has returned it; None: it begins.
        """
        self._turns.hand_over(thread)
        before, self._running = self._running, [] if state is None else state
        return before

    def fault_in(self, parameter: nn.Parameter) -> bool:
        """Lease a cold parameter's group for the innermost running forward that contains it. False if there is none."""
        group = self._group_of[id(parameter)]
        for call in reversed(self._running) if self.is_inside else ():
            module = self._modules[call.module]()
            if module is not None and any(parameter is inside for inside in module.parameters()):
                with defer_signals, outside_transforms():
                    self._lease_more(call, group)
                return True
        return False

    def _part_of_running(self, unit: Unit | None) -> str | None:
        """Return the name of `unit` if it is inside of the module whose forward runs; None: it is that, or another one."""
        outer = next((call.module for call in self._running), None)
        if unit is None or outer is None or unit.name == outer:
            return None
        return unit.name if not outer or unit.name.startswith(outer + ".") else None

    def _end(self, unit: Unit) -> CallT | None:
        """Remove and return the running call of `unit`. None: it never began, or its pass was abandoned."""
        if self._running and self._running[-1].module == unit.name:
            return self._running.pop()
        if all(call.module != unit.name for call in self._running):
            return None
        while (call := self._running.pop()).module != unit.name:
            self._release(call)  # it ended without its hooks
        return call

    def _own(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return an output that outlives the lease: a copy of a view of a paged parameter (`return self.position[:n]`)."""
        return tensor.clone() if storage_of(tensor) in self._storages else tensor

    def _release(self, call: CallT) -> None:
        if call.groups:
            close_all([self._groups[index].release for index in call.groups])


# --- the tensors in what a module returns --------------------------------------------------------------------------------


def tensors_of(output: Any) -> tuple[list[torch.Tensor], Callable[[list[torch.Tensor]], Any]]:
    """Return the tensors in `output`, and a function that rebuilds it with others.

    They are in nested lists, tuples, dicts and dataclasses, and in attributes of any other object.
    """
    if isinstance(output, torch.Tensor):
        return [output], lambda new: new[0]
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        fields = [f.name for f in dataclasses.fields(output) if hasattr(output, f.name)]
        tensors, rebuild = tensors_of([getattr(output, name) for name in fields])

        def rebuild_dataclass(new: list[torch.Tensor]) -> object:
            for name, value in zip(fields, rebuild(new), strict=True):
                try:
                    setattr(output, name, value)
                except dataclasses.FrozenInstanceError:
                    object.__setattr__(output, name, value)
            return output

        return tensors, rebuild_dataclass
    leaves, spec = pytree.tree_flatten(output)
    if len(leaves) == 1 and leaves[0] is output:
        return _tensors_of_object(output)
    parts = [tensors_of(leaf) for leaf in leaves]

    def rebuild_tree(new: list[torch.Tensor]) -> object:
        taken = iter(new)
        built = [rebuild([next(taken) for _ in tensors]) for tensors, rebuild in parts]
        return pytree.tree_unflatten(built, spec)

    return [tensor for tensors, _ in parts for tensor in tensors], rebuild_tree


def _tensors_of_object(output: object) -> tuple[list[torch.Tensor], Callable[[list[torch.Tensor]], object]]:
    attributes = getattr(output, "__dict__", None)
    if not attributes or callable(output):
        return [], lambda new: output
    values = {name: of for name, of in attributes.items() if isinstance(of, torch.Tensor | list | tuple | dict)}
    tensors, rebuild = tensors_of(list(values.values()))

    def rebuild_object(new: list[torch.Tensor]) -> object:
        attributes.update(zip(values, rebuild(new), strict=True))
        return output

    return tensors, rebuild_object


# --- side outputs -----------------------------------------------------------------------------------------------------


def modules_by_unit(units: Iterable[Unit]) -> dict[str, tuple[weakref.ref[nn.Module], ...]]:
    """Return the modules of each unit, by its name, without those of units inside it. Nothing of a model is kept alive."""
    units = list(units)
    heads = {id(unit.module) for unit in units}
    return {unit.name: tuple(map(weakref.ref, _outside_of_others(unit.module, heads))) for unit in units}


def _outside_of_others(module: nn.Module, heads: Collection[int]) -> Iterator[nn.Module]:
    yield module
    for child in module.children():
        if id(child) not in heads:
            yield from _outside_of_others(child, heads)


def side_outputs(modules: Sequence[weakref.ref[nn.Module]], given: Collection[object]) -> list[torch.Tensor]:
    """Return the tensors with a graph in attributes of `modules`, and in lists, tuples and dicts there, that nothing watches yet.

    See [Note: side outputs].

    Args:
        given: autograd's nodes of what the forward was given.
    """
    return [tensor for tensor in _in_attributes(modules) if tensor.grad_fn not in given and not _is_watched(tensor)]


def _in_attributes(modules: Sequence[weakref.ref[nn.Module]]) -> Iterator[torch.Tensor]:
    for module in [one for reference in modules if (one := reference()) is not None]:
        for value in vars(module).values():
            kind = type(value)
            if kind is torch.Tensor:
                values: Iterable[object] = (value,)
            elif kind is dict:
                values = value.values()
            elif kind is list or kind is tuple:
                values = value
            else:
                continue
            yield from (one for one in values if type(one) is torch.Tensor and one.grad_fn is not None)


def _is_watched(tensor: torch.Tensor) -> bool:
    hooks = tensor._backward_hooks
    return hooks is not None and any(isinstance(hook, OwnHook) for hook in hooks.values())
