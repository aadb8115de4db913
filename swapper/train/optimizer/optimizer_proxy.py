"""Applies the user's own optimizer to views.

A *proxy* is an object of the optimizer's class that shares its settings but has its own parameters and state: those of
one slice, set for each call. So the arithmetic is exactly plain torch's with this instance, `fused` or `foreach` as the
user chose, and none of it is written down here.

[Note: one step, many calls] In plain torch one `step()` updates everything; here it takes many calls. Counters of an
optimizer outside of its parameters' state, in its groups (`group["k"] += 1`) or on itself, must advance once and not
with each call. So every call of a step begins with copies of the same settings and attributes, those of `begin_step`,
and `end_step` copies the last call's back to the user's. So a step may continue (train/updates/at_step.py) while the
user's settings are already those of the next one.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from swapper.errors import UnsupportedError
from swapper.train.optimizer.entries import flat, nested
from swapper.train.optimizer.optimizer_set import OptimizerSet, kind_of

NAMES = "param_names"
"""Settings of named parameters. As many as parameters, and only for people."""


@dataclass(slots=True)
class Work:
    """A tensor to update: a parameter, its fp32 master, or elements of one, with gradient and state of its dtype.

    `settings` is the number of the parameter's group in the OptimizerSet. `state` is `self.state[tensor]` before
    the update, and afterwards what the optimizer left there: possibly other tensors. [Note: state in lists], entries.py
    """

    settings: int
    tensor: torch.Tensor
    gradient: torch.Tensor
    state: dict[str, Any]


class OptimizerProxy:
    """Runs the update of `optimizer` on tensors of ours.

    Attributes:
        kind: the optimizer's qualified class name.
        first: the number in the OptimizerSet of its first group. Constant between `begin_step` and `end_step`.
    """

    first = 0

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self.kind = kind_of(optimizer)
        self._step = _unhooked_step(type(optimizer))
        # The groups and attributes of the step.
        self._begun: tuple[list[_Settings], dict[str, Any]] | None = None
        self._groups: list[dict[str, Any]] = []  # of the optimizer when the step began
        self._attributes: dict[str, Any] = {}  # changed by a call of this step
        self._settings: dict[int, dict[str, Any]] = {}  # the same of groups, by index

    def begin_step(self) -> tuple[list[_Settings], dict[str, Any]]:
        """Fix the optimizer's settings for updates until `end_step`. Return them, and its attributes."""
        self._groups = list(self._optimizer.param_groups)
        self._begun = [_Settings(group) for group in self._groups], self._own_attributes()
        self._settings, self._attributes = {}, {}
        return self._begun

    def update(self, works: Sequence[Work]) -> None:
        """Update the tensors of `works` and their state. A tensor may have other memory afterwards (`p.data = ...`).

        Begins the step, if it has not begun.

        Raises:
            UnsupportedError: the optimizer keeps state that belongs to none of its parameters.
        """
        settings, attributes = self._begun or self.begin_step()
        groups: dict[int, dict[str, Any]] = {}
        state: dict[torch.Tensor, dict[str, Any]] = {}
        for work in works:
            work.tensor.grad = work.gradient
            state[work.tensor] = nested(work.state)
            index = work.settings - self.first
            if index not in groups:
                groups[index] = settings[index].copy()
            groups[index]["params"].append(work.tensor)
        before = {index: dict(group) for index, group in groups.items()}
        proxy = object.__new__(type(self._optimizer))
        proxy.__dict__.update(attributes, param_groups=list(groups.values()), state=state)
        self._step(proxy)
        if len(proxy.state) != len(works):
            raise UnsupportedError(f"{kind_of(self._optimizer)} keeps state that belongs to none of its parameters")
        for work in works:
            work.tensor.grad = None
            work.state = flat(proxy.state[work.tensor])
        self._note_changes(settings, attributes, proxy, groups, before)

    def changed_setting(self) -> str | None:
        """Return the setting that the user has changed since `begin_step`, in words; None if none."""
        begun = self._begun[0] if self._begun is not None else []
        if self._begun is not None and len(begun) != len(self._optimizer.param_groups):
            return "the number of the optimizer's groups"
        for index, (ours, theirs) in enumerate(zip(begun, self._optimizer.param_groups, strict=False)):
            if ours.members != [id(parameter) for parameter in theirs.get("params", ())]:
                return f"'params' of the optimizer's group {index}"
            for key in {**ours.values, **theirs}:
                if key != "params" and not is_same(ours.values.get(key, self), theirs.get(key, self)):
                    return f"{key!r} of the optimizer's group {index}"
        return None

    def settings(self, number: int) -> Mapping[str, Any]:
        """Return the settings of a group of the optimizer in this step. Do not change them."""
        if self._begun is not None:
            return self._begun[0][number - self.first].values
        return self._optimizer.param_groups[number - self.first]

    def end_step(self) -> None:
        """Copy the step's changes of settings and attributes to the optimizer. See [Note: one step, many calls]."""
        self._begun = None
        changed, self._settings = self._settings, {}
        for index, values in changed.items():
            self._groups[index].update(values)
        self._optimizer.__dict__.update(self._attributes)
        self._attributes = {}

    def _own_attributes(self) -> dict[str, Any]:
        own = dict(self._optimizer.__dict__)
        for name in ("step", "state", "param_groups"):  # a scheduler's counter around step is the user's instance's
            own.pop(name, None)
        for name in [name for name in own if name.endswith("_hooks")]:
            own[name] = OrderedDict()
        return own

    def _note_changes(
        self,
        settings: Sequence[_Settings],
        attributes: Mapping[str, Any],
        proxy: Any,
        groups: Mapping[int, dict[str, Any]],
        before: Mapping[int, dict[str, Any]],
    ) -> None:
        known = {**attributes, "param_groups": proxy.param_groups, "state": proxy.state}
        for name, value in proxy.__dict__.items():
            if name not in known or value is not known[name]:
                self._attributes[name] = value
        for index, group in groups.items():
            theirs = settings[index].values
            for key, value in group.items():
                if key == "params" or value is theirs.get(key, self):
                    continue
                if value is not before[index].get(key, self) or not is_same(value, theirs.get(key)):
                    self._settings.setdefault(index, {})[key] = value


class OptimizerProxies:
    """Runs the updates of a session: each tensor is updated by the optimizer of its group, by its OptimizerProxy."""

    def __init__(self, optimizers: OptimizerSet) -> None:
        self._optimizers = optimizers
        self._proxies = [OptimizerProxy(member) for member in optimizers.members]
        self._number()

    @property
    def members(self) -> range:
        """The numbers of the optimizers."""
        return range(len(self._proxies))

    def groups_of(self, member: int) -> range:
        """Return the numbers of a member's groups."""
        return self._optimizers.ranges[member]

    def begin_step(self, member: int) -> None:
        self._number()
        self._proxies[member].begin_step()

    def each_with(self, works: Sequence[Work]) -> Iterable[tuple[OptimizerProxy, Sequence[Work]]]:
        """Return the proxies that are to update `works`, each with its own."""
        if len(self._proxies) == 1:
            return [(self._proxies[0], works)] if works else []
        by_proxy: dict[OptimizerProxy, list[Work]] = {}
        for work in works:
            by_proxy.setdefault(self._proxy(work.settings), []).append(work)
        return by_proxy.items()

    def changed_setting(self, member: int) -> str | None:
        return self._proxies[member].changed_setting()

    def settings(self, number: int) -> Mapping[str, Any]:
        """Return the settings of a group in this step. Do not change them."""
        return self._proxy(number).settings(number)

    def counts_on_device(self, number: int) -> bool:
        """Return True if a group's update needs its counters, which are single numbers, on the parameters' device."""
        group = self.settings(number)
        return bool(group.get("fused") or group.get("capturable"))

    def end_step(self) -> None:
        for proxy in self._proxies:
            proxy.end_step()

    def kind(self, number: int) -> str:
        """Return the qualified class name of a group's optimizer."""
        return self._proxy(number).kind

    def _number(self) -> None:
        for proxy, groups in zip(self._proxies, self._optimizers.ranges, strict=True):
            proxy.first = groups.start

    def _proxy(self, number: int) -> OptimizerProxy:
        return next(proxy for proxy in reversed(self._proxies) if number >= proxy.first)


class _Settings:
    """A copy of a group's settings, without its parameters.

    Attributes:
        values: by key. Do not change them.
        members: ids of its parameters.
    """

    def __init__(self, group: Mapping[str, Any]) -> None:
        self.values = {key: value for key, value in group.items() if key != "params"}
        self.members = [id(parameter) for parameter in group["params"]]
        self._changeable = [
            key
            for key, value in self.values.items()
            if isinstance(value, torch.Tensor | list | dict | set) and key != NAMES
        ]
        self.values.update(self._copies())

    def copy(self) -> dict[str, Any]:
        """Return the settings for one call, which may change them, with no parameters."""
        return {**self.values, **self._copies(), "params": []}

    def _copies(self) -> dict[str, Any]:
        return {key: copy.deepcopy(self.values[key]) for key in self._changeable}


def is_same(one: Any, other: Any) -> bool:
    """Return True if two values are the same, tensors bit for bit, in lists and dictionaries too."""
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return (
            isinstance(one, torch.Tensor)
            and isinstance(other, torch.Tensor)
            and one.dtype == other.dtype
            and one.shape == other.shape
            and _bytes_of(one).equal(_bytes_of(other))
        )
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(is_same(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(is_same(one[key], other[key]) for key in one)
    return type(one) is type(other) and bool(one == other or one != one)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _unhooked_step(cls: type[Optimizer]) -> Callable[[Any], Any]:
    """Return the class's `step` without torch's wrapper, whose hooks are for the user's instance, once a step."""
    step: Any = cls.step
    return step.__wrapped__ if getattr(step, "hooked", False) and hasattr(step, "__wrapped__") else step  # type: ignore[no-any-return]
