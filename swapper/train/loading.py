"""`model.load_state_dict` on an offloaded model: works exactly, one unit at a time.

torch loads module by module and calls hooks before and after each: these bring the unit's parameters in for writing, and let
fp32 masters follow. So a state dict that is mapped from a file is loaded without the whole model ever being in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from swapper.train.groups import Unit
from swapper.train.storage import GroupParameters


class LoadHooks:
    """Owns the hooks around `load_state_dict`.

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
        self._open: list[nn.Module] = []  # modules that are being loaded, outermost first
        self._handles: list[Any] = []
        for unit in units:
            if unit.groups:
                before, after = self._before(unit), self._after(unit)
                self._handles.append(unit.module.register_load_state_dict_pre_hook(before))  # type: ignore[no-untyped-call]
                self._handles.append(unit.module.register_load_state_dict_post_hook(after))  # type: ignore[no-untyped-call]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @property
    def is_open(self) -> bool:
        """True while a load holds parameters, or an exception went through one."""
        return bool(self._open)

    def forget(self) -> None:
        self._open.clear()

    def _before(self, unit: Unit) -> Callable[..., None]:
        def hook(module: nn.Module, *_: Any) -> None:
            self._check_usable()
            for index in unit.groups:
                self._groups[index].hold(write=True)
            self._open.append(module)

        return hook

    def _after(self, unit: Unit) -> Callable[..., None]:
        def hook(module: nn.Module, _: Any) -> None:
            if not self._open or self._open[-1] is not module:
                return
            self._open.pop()
            groups = [self._groups[index] for index in unit.groups]
            for group in groups:
                group.let_go(write=True)
            self._written(groups)

        return hook
