"""Pins parameters in memory outside of the order of a step: `manager.gather`, `load_state_dict` and `state_dict`.

torch loads a state dict module by module, and calls hooks before and after each: they pin the unit's parameters for
writing, and update fp32 masters. So a state dict mapped from a file is loaded without the whole model in memory. A
state_dict of gathered parameters is a copy: plain torch's refers to the parameters' memory, which is released here.

Masters follow parameters that are changed so, or by operations. A master that is stored encoded is the difference from its
parameter, so the parameter is noted before it may change: 2 bytes for each element that is gathered for writing, in addition to
the budget, until the change is over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from swapper.errors import StateError
from swapper.modules.cold import aliases, is_aliasing
from swapper.modules.groups import Models, Unit
from swapper.modules.module_hooks import OwnHook, copy_without_hooks, outside_transforms
from swapper.modules.turns import Turns
from swapper.paging.pager import Pager
from swapper.runtime.interrupts import close_all, defer_signals, run_uninterrupted
from swapper.tensors.torch_private import storage_of
from swapper.train.groups.parameter_group import GroupParameters
from swapper.train.groups.session_guard import SessionEvents, SessionGuard
from swapper.train.layout.content import copy_of
from swapper.train.layout.slices import Trainable
from swapper.train.updates.sweep import Sweep


class Masters:
    """Notes parameters before changes, and refreshes their masters afterwards.

    Args:
        events: of the session.
    """

    def __init__(self, sweep: Sweep, pager: Pager, events: SessionEvents) -> None:
        self._sweep = sweep
        self._pager = pager
        self._events = events
        self._of = {t.group: t for t in sweep.trainables if any(places.has_master for places in t.places)}
        self._changes: Counter[int] = Counter()  # that are open, by group
        self._before: dict[int, dict[str, torch.Tensor]] = {}  # by group and name: parameters before a change

    def before_change(self, groups: Iterable[GroupParameters]) -> None:
        """Parameters of `groups`, which are in memory, may be changed until `after_change`."""
        found = list(groups)
        for group in found:
            group.home.sync_to_host()
        for trainable in self._among(found):
            if self._changes[trainable.group] == 0:
                coded = [places for places in trainable.places if places.has_coded_master]
                self._before[trainable.group] = {one.name: copy_of(one.param, self._pager).view(-1) for one in coded}
            self._changes[trainable.group] += 1

    def after_change(self, groups: Iterable[GroupParameters]) -> None:
        """Set masters of `groups` to changed parameters, when the outermost change of each is over: no step is taken before."""
        for trainable in self._among(groups):
            self._changes[trainable.group] -= 1
            if self._changes[trainable.group] == 0:
                try:
                    self._sweep.refresh_masters(trainable, self._before.pop(trainable.group))
                except BaseException as error:
                    self._events.fail_change(error)
                    raise

    def _among(self, groups: Iterable[GroupParameters]) -> Iterator[Trainable]:
        found = (self._of.get(group.index) for group in groups)
        return (trainable for trainable in found if trainable is not None)


@dataclass(eq=False, repr=False)
class Gathering:
    """Owns the pins of `manager.gather`.

    Args:
        groups: all groups, by index; they may be added later.

    Attributes:
        is_closed: the manager is closed.
    """

    _groups: Sequence[GroupParameters]
    _masters: Masters
    _turns: Turns
    _pager: Pager
    _open: int = 0
    is_closed: bool = False

    @property
    def is_open(self) -> bool:
        return self._open > 0

    @contextmanager
    def gather(self, parameters: Iterable[nn.Parameter], write: bool) -> Iterator[None]:
        """Pin the groups of `parameters` within the context."""
        wanted = {id(parameter) for parameter in parameters}
        groups = [g for g in self._groups if any(id(p) in wanted for p in g.parameters)]
        unknown = wanted - {id(p) for group in groups for p in group.parameters}
        if unknown:
            raise StateError("gather was given parameters that are not of the offloaded model")
        pinned: list[GroupParameters] = []
        versions = {id(p): p._version for group in groups for p in group.parameters}
        names: list[str] = []  # of parameters that were changed without `write`
        self._open += 1
        try:
            with self._turns.turn(), outside_transforms(), defer_signals:
                self._pager.check_room({index for group in groups for index in group.home.pages})
                for group in groups:
                    _pin(group, write, self._masters)
                    pinned.append(group)
            yield
        finally:
            run_uninterrupted(lambda: self._end(pinned, versions, write, names))
        if names:
            raise StateError(
                f"parameter {names[0]} was changed inside gather(write=False), and the change may be lost: "
                "say gather(..., write=True)"
            )

    def _end(self, pinned: list[GroupParameters], versions: dict[int, int], write: bool, names: list[str]) -> None:
        """Unpin, and add to `names` the parameters that were changed without `write`."""
        with self._turns.turn(), outside_transforms():
            self._open -= 1
            if self.is_closed:
                return  # `close` has unpinned them
            try:
                close_all(partial(_unpin, group, versions, write, names) for group in pinned)
            finally:
                if write:
                    self._masters.after_change(pinned)

    def close(self) -> None:
        """End all contexts: the manager closes inside of them."""
        for group in self._groups:
            for write in list(group.home.pins):
                group.unpin(write)
                if write:
                    self._masters.after_change([group])
        self.is_closed = True


def _pin(group: GroupParameters, write: bool, masters: Masters) -> None:
    group.pin(write)
    if write:
        try:
            masters.before_change([group])
        except BaseException:
            group.unpin(write)
            raise


def _unpin(group: GroupParameters, versions: dict[int, int], write: bool, names: list[str]) -> None:
    try:
        seen = [n for n, p in group.group.parameters if p._version != versions[id(p)]]
        unannounced = [] if write else [*seen, *(group.names[number] for number in group.assigned()), *group.written()]
        if unannounced:  # memory and file must not differ
            group.pin(write=True)
            group.unpin(write=True)
    finally:
        group.unpin(write)
    names += unannounced


class LoadHooks:
    """Owns the hooks around `load_state_dict` and `state_dict`.

    Args:
        session_guard: raises if parameters cannot be changed now.
    """

    def __init__(
        self, units: Iterable[Unit], groups: list[GroupParameters], session_guard: SessionGuard, masters: Masters
    ) -> None:
        self._groups = groups
        self._session_guard = session_guard
        self._masters = masters
        self._open: list[tuple[nn.Module, list[GroupParameters]]] = []  # modules being loaded, the outermost first
        self._handles: list[Any] = []
        self._storages = {storage for group in groups for storage in group.storages}
        for owner in {owner: None for unit in units for owner in unit.module.modules()}:
            copy_without_hooks(owner)
            copy = OwnHook(self._copy)
            self._handles.append(owner.register_state_dict_post_hook(copy))
        for unit in units:
            if unit.groups:
                before, after = OwnHook(partial(self._before, unit)), OwnHook(self._after)
                self._handles.append(unit.module.register_load_state_dict_pre_hook(before))
                self._handles.append(unit.module.register_load_state_dict_post_hook(after))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def forget(self) -> None:
        """End a load that an exception or Ctrl-C has ended. What it loaded stays loaded."""
        while self._open:
            self._end()

    def _before(self, unit: Unit, module: nn.Module, *_: object) -> None:
        self._session_guard.events.check_to_write()
        pinned: list[GroupParameters] = []
        self._open.append((module, pinned))
        for index in unit.groups:
            _pin(self._groups[index], True, self._masters)
            pinned.append(self._groups[index])

    def _after(self, module: nn.Module, _: object) -> None:
        if self._open and self._open[-1][0] is module:
            self._end()

    def _end(self) -> None:
        _, pinned = self._open.pop()
        close_all(partial(group.unpin, write=True) for group in pinned)
        self._masters.after_change(pinned)

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
"""Returns the tensor at the location of the parameter with this id; None for another tensor."""


def state_dict_of(model: nn.Module, placed: Placed | None) -> dict[str, Any]:
    """Return the model's state dict, or those of several by name, as a checkpoint has it.

    Parameters are shown by tensors at their locations. These have no data unless their pages are in memory: a writer of
    checkpoints reads the location instead.

    Args:
        placed: finds the locations if the model runs on an accelerator, where parameters are elsewhere; else None.
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
