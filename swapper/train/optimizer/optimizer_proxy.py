"""Applies the user's own optimizer to views.

A *proxy* is an object of the optimizer's class that shares its settings but has its own parameters and state: those of
one slice, set for each call. So the arithmetic is exactly plain torch's with this instance, `fused` or `foreach` as the
user chose, and none of it is written down here.

[Note: one step, many calls] In plain torch one `step()` updates everything; here it takes many calls. Counters of an
optimizer outside of its parameters' state, in its groups (`group["k"] += 1`) or on itself, must advance once and not
with each call. So every call of a step begins with copies of the same settings and attributes, those of `begin_step`,
and `end_step` copies the last call's back to the user's. So a step may continue (train/steps/executor.py) while the
user's settings are already those of the next one.

[Note: unknown code] may begin to couple parameters in any step, so each call is watched (see own_code.py for what is known).
It sees all groups, in which only the tensors of the call are, each a Parameter with the marks of the user's. It must not go
through a group's parameters more often than in the trial (the norm of all needs one more time), must leave the same settings
and attributes as the other calls of the step, and draw no random numbers.
"""

from __future__ import annotations

import copy
import random
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from swapper.errors import UnsupportedError
from swapper.io.tensor_bytes import has_same_bits
from swapper.train.optimizer.entries import Iterations, flat, nested
from swapper.train.optimizer.optimizer_set import OptimizerSet, kind_of
from swapper.train.optimizer.own_code import is_known, may_draw

NAMES = "param_names"
"""Settings of named parameters. As many as parameters, and only for people."""


def _on_cpu_by_default() -> AbstractContextManager[object]:
    """Return a context for new counters, which are in host memory, whatever the default device: torch 2.11 names none for them."""
    return nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")


@dataclass(slots=True)
class Work:
    """A tensor to update: a parameter, its fp32 master, or elements of one, with gradient and state of its dtype.

    `settings` is the number of the parameter's group in the OptimizerSet. `state` is `self.state[tensor]` before
    the update, and afterwards what the optimizer left there: possibly other tensors. [Note: state in lists], entries.py
    `marks` are the attributes that the user has set on the parameter, `passes` what is allowed: None in a trial, where
    anything is. See [Note: unknown code].
    """

    settings: int
    tensor: torch.Tensor
    gradient: torch.Tensor
    state: dict[str, Any]
    marks: Mapping[str, Any] = field(default_factory=dict)
    passes: Iterations | None = None


class OptimizerProxy:
    """Runs the update of `optimizer` on tensors of ours.

    Attributes:
        kind: the optimizer's qualified class name.
        first: the number in the OptimizerSet of its first group. Constant between `begin_step` and `end_step`.
        passed: how often the last call went through the parameters of a group, of unknown code.
    """

    passed = 0
    first = 0

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self.kind = kind_of(optimizer)
        self._step = _unhooked_step(type(optimizer))
        self._is_known = is_known(optimizer)
        self._may_draw = not self._is_known and may_draw(optimizer)
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
        if not self._is_known:
            groups = {index: {**one.copy(), "params": _Watched()} for index, one in enumerate(settings)}
        state: dict[torch.Tensor, dict[str, Any]] = {}
        for work in works:
            if not self._is_known:
                work.tensor = _marked(work)
            work.tensor.grad = work.gradient
            state[work.tensor] = nested(work.state)
            index = work.settings - self.first
            if index not in groups:
                groups[index] = settings[index].copy()
            groups[index]["params"].append(work.tensor)
        before = {index: dict(group) for index, group in groups.items()}
        proxy = object.__new__(type(self._optimizer))
        proxy.__dict__.update(attributes, param_groups=list(groups.values()), state=state)
        chance = _chance() if self._may_draw else None
        with _on_cpu_by_default():
            self._step(proxy)
        if len(proxy.state) != len(works):
            raise UnsupportedError(f"{kind_of(self._optimizer)} keeps state that belongs to none of its parameters")
        if not self._is_known:
            self._check_call(works, [group["params"] for group in groups.values()], chance)
        for work in works:
            work.tensor.grad = None
            work.state = flat(proxy.state[work.tensor])
        self._note_changes(settings, attributes, proxy, groups, before)

    def _check_call(self, works: Sequence[Work], lists: Sequence[_Watched], chance: Any) -> None:
        """Raise UnsupportedError if a call of unknown code did what the trial did not. See [Note: unknown code]."""
        self.passed = max(one.passes for one in lists)
        allowed = [work.passes for work in works if work.passes is not None]
        if allowed and self.passed > max(one.fixed for one in allowed) + sum(one.each for one in allowed):
            raise coupling(self.kind, "it goes through its parameters more often than in its first steps")
        if self._may_draw and not is_same(_chance(), chance):
            raise coupling(self.kind, "it draws random numbers")
        for work in works:
            if not is_same(dict(vars(work.tensor)), dict(work.marks)):
                raise UnsupportedError(
                    f"{self.kind} cannot be paged: it keeps {set(vars(work.tensor)) - set(work.marks) or 'marks'} on the parameter "
                    "itself; keep that in self.state[parameter]"
                )

    def changed_setting(self) -> str | None:
        """Return the setting that the user has changed since `begin_step`, in words; None if none."""
        begun = self._begun[0] if self._begun is not None else []
        if self._begun is not None and len(begun) != len(self._optimizer.param_groups):
            return "the number of the optimizer's groups"
        for index, (ours, theirs) in enumerate(zip(begun, self._optimizer.param_groups, strict=False)):
            if ours.members != [id(parameter) for parameter in theirs.get("params", ())]:
                return f"'params' of the optimizer's group {index}"
            for key in {**ours.values, **theirs}:
                one, other = ours.values.get(key, self), theirs.get(key, self)
                if key != "params" and one is not other and not is_same(one, other):
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
                self._note(self._attributes, name, value)
        for index, group in groups.items():
            theirs = settings[index].values
            for key, value in group.items():
                if key == "params" or value is theirs.get(key, self):
                    continue
                if value is not before[index].get(key, self) or not is_same(value, theirs.get(key)):
                    self._note(self._settings.setdefault(index, {}), key, value)

    def _note(self, changed: dict[str, Any], name: str, value: Any) -> None:
        """Note a changed value. Raise UnsupportedError if another call of the step has left another one."""
        if not self._is_known and name in changed and not is_same(changed[name], value) and _is_number(value):
            raise coupling(self.kind, f"it leaves another {name!r} with each of them")
        changed[name] = value


class OptimizerProxies:
    """Runs the updates of a session: each tensor is updated by the optimizer of its group, by its OptimizerProxy.

    Attributes:
        members: the numbers of the optimizers.
    """

    def __init__(self, optimizers: OptimizerSet) -> None:
        self.members = range(len(optimizers.members))
        self._optimizers = optimizers
        self._proxies = [OptimizerProxy(member) for member in optimizers.members]
        self._number()

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
            by_proxy.setdefault(self._of_group[work.settings], []).append(work)
        return by_proxy.items()

    def changed_setting(self, member: int) -> str | None:
        return self._proxies[member].changed_setting()

    def settings(self, number: int) -> Mapping[str, Any]:
        """Return the settings of a group in this step. Do not change them."""
        return self._of_group[number].settings(number)

    def counts_on_device(self, number: int) -> bool:
        """Return True if a group's update needs its counters, which are single numbers, on the parameters' device."""
        group = self.settings(number)
        return bool(group.get("fused") or group.get("capturable"))

    def end_step(self, members: Iterable[int]) -> None:
        for member in members:
            self._proxies[member].end_step()

    def kind(self, number: int) -> str:
        """Return the qualified class name of a group's optimizer."""
        return self._of_group[number].kind

    def _number(self) -> None:
        self._of_group: dict[int, OptimizerProxy] = {}
        for proxy, groups in zip(self._proxies, self._optimizers.ranges, strict=True):
            proxy.first = groups.start
            self._of_group.update(dict.fromkeys(groups, proxy))


class _Watched(list[Any]):
    """A group's parameters. Counts in `passes` how often code, but swapper's, goes through them or asks for their number."""

    passes = 0

    def __iter__(self) -> Iterator[Any]:
        self._note(sys._getframe(1))
        return super().__iter__()

    def __len__(self) -> int:
        self._note(sys._getframe(1))
        return super().__len__()

    def _note(self, caller: FrameType) -> None:
        self.passes += not caller.f_globals.get("__name__", "").startswith(
            "swapper."
        )  # its hook on all steps looks at them


def _marked(work: Work) -> torch.Tensor:
    """Return the tensor as a Parameter, which has the marks of the user's."""
    if isinstance(work.tensor, nn.Parameter):
        return work.tensor
    parameter = nn.Parameter(work.tensor)
    vars(parameter).update(work.marks)
    return parameter


def _chance() -> Any:
    """Return the states of the generators of random numbers of torch and Python."""
    return torch.get_rng_state(), hash(random.getstate())


def _is_number(value: Any) -> bool:
    return isinstance(value, torch.Tensor | int | float | str | None)


def coupling(kind: str, found: str = "") -> UnsupportedError:
    """Return the error for an optimizer that does not treat parameters separately, for the reason `found`, if known."""
    return UnsupportedError(
        f"{kind} cannot be paged: what it does to one parameter depends on the others, on how often it is called or on chance"
        + (f" ({found})" if found else "")
        + ", so updating them one after the other would give other values. Use an optimizer that treats parameters separately; "
        "if it estimates its learning rate (Prodigy, D-Adaptation), use AdamW with the rate that it finds for a smaller model in "
        "memory"
    )


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
        self.values = self.copy()
        del self.values["params"]

    def copy(self) -> dict[str, Any]:
        """Return the settings for one call, which may change them, with no parameters."""
        values = {**self.values, "params": []}
        for key in self._changeable:
            values[key] = copy.deepcopy(values[key])
        return values


def is_same(one: Any, other: Any) -> bool:
    """Return True if two values are the same, tensors bit for bit, in lists and dictionaries too."""
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and has_same_bits(one, other)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(is_same(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(is_same(one[key], other[key]) for key in one)
    return type(one) is type(other) and bool(one == other or one != one)


def _unhooked_step(cls: type[Optimizer]) -> Callable[[Any], Any]:
    """Return the class's `step` without torch's wrapper, whose hooks are for the user's instance, once a step."""
    step: Any = cls.step
    return step.__wrapped__ if getattr(step, "hooked", False) and hasattr(step, "__wrapped__") else step  # type: ignore[no-any-return]
