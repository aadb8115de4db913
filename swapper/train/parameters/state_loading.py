"""`model.load_state_dict` and `model.state_dict` on an offloaded model: they work exactly.

torch loads module by module and calls hooks before and after each: these bring the unit's parameters in for writing, and let
fp32 masters follow. So a state dict that is mapped from a file is loaded without the whole model ever being in memory.
A state_dict of gathered parameters is a copy: plain torch's refers to the parameters' memory, which here goes away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from swapper.modules.cold import aliases, is_aliasing
from swapper.modules.groups import Models, Unit
from swapper.modules.leased_group import storage_of
from swapper.modules.own_hook import OwnHook, copy_without_hooks
from swapper.runtime.interrupts import close_all
from swapper.train.parameters.parameter_group import GroupParameters


class LoadHooks:
    """Owns the hooks around `load_state_dict` and `state_dict`.

    Args:
        units: the modules to hook.
        groups: all groups, by index.
        check_usable: raises if the manager cannot be used.
        written: called with the groups that were loaded into, when they are let go.
    """

    def __init__(
        self,
        units: Iterable[Unit],
        groups: list[GroupParameters],
        check_usable: Callable[[], None],
        written: Callable[[list[GroupParameters]], None],
    ) -> None:
        self._groups = groups
        self._check_usable = check_usable
        self._written = written
        self._open: list[tuple[nn.Module, list[GroupParameters]]] = []  # what is being loaded and held, outermost first
        self._handles: list[Any] = []
        self._storages = {storage for group in groups for storage in group.storages}
        for owner in {owner: None for unit in units for owner in unit.module.modules()}:
            copy_without_hooks(owner)
            copy = OwnHook(self._copy)
            self._handles.append(owner.register_state_dict_post_hook(copy))  # type: ignore[no-untyped-call]
        for unit in units:
            if unit.groups:
                before, after = OwnHook(self._before(unit)), OwnHook(self._after(unit))
                self._handles.append(unit.module.register_load_state_dict_pre_hook(before))  # type: ignore[no-untyped-call]
                self._handles.append(unit.module.register_load_state_dict_post_hook(after))  # type: ignore[no-untyped-call]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def forget(self) -> None:
        """End a load that an exception or Ctrl-C went through. What it loaded stays loaded."""
        while self._open:
            self._end()

    def _before(self, unit: Unit) -> Callable[..., None]:
        def hook(module: nn.Module, *_: Any) -> None:
            self._check_usable()
            held: list[GroupParameters] = []
            self._open.append((module, held))
            for index in unit.groups:
                self._groups[index].hold(write=True)
                held.append(self._groups[index])

        return hook

    def _after(self, unit: Unit) -> Callable[..., None]:
        def hook(module: nn.Module, _: Any) -> None:
            if self._open and self._open[-1][0] is module:
                self._end()

        return hook

    def _end(self) -> None:
        _, held = self._open.pop()
        close_all(partial(group.let_go, write=True) for group in held)
        self._written(held)

    def _copy(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
        if is_aliasing():
            return
        for name, parameter in module._parameters.items():
            tensor = state_dict.get(prefix + name)
            if tensor is None or tensor is parameter:  # keep_vars: the guarded parameter itself
                continue
            if storage_of(tensor) in self._storages:
                state_dict[prefix + name] = tensor.clone()


Placed = Callable[[int], torch.Tensor | None]
"""Returns the tensor at the place of the parameter of that id; None for what is no such parameter."""


def state_dict_of(model: nn.Module, placed: Placed | None) -> dict[str, Any]:
    """Return the model's state dict, or those of several by name, of tensors that are elsewhere: a checkpoint's form.

    A parameter is shown by the tensor at its place, which has no data unless its pages are in memory: who writes the
    checkpoint looks at the place. Where kernels run on an accelerator the parameter is not at its place.

    Args:
        placed: where parameters are not at their places.
    """
    with aliases():
        if isinstance(model, Models):
            return {name: _state_dict(child, placed) for name, child in model.named_children()}
        return _state_dict(model, placed)


def _state_dict(model: nn.Module, placed: Placed | None) -> dict[str, Any]:
    content: dict[str, Any] = model.state_dict(keep_vars=placed is not None)
    for key, value in list(content.items()):
        if placed is not None and isinstance(value, torch.Tensor):
            there = placed(id(value))
            content[key] = value.detach().cpu() if there is None else there
    return content
