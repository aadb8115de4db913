"""Tracks the entries of `optimizer.state[p]` for each parameter, as plain torch would have them, and defines their form.

Tensors of state lie in sections, whether or not the optimizer has made them yet. Which entries it has made, in which
order, and entries that are no tensors (a step counter that is a Python number, None) are kept here, in memory, and go
into commits and snapshots. A parameter that has never had a gradient has no entries, and its first update begins with
an empty state, as in plain torch: SGD's momentum begins as the first gradient, NAdam's product as one, not as zeros.

[Note: state in lists] Some optimizers keep a list of tensors under one key: SOAP a factor for each dimension. In here each
item has a key of its own, "GG[0]". The optimizer and the user see lists: `flat` and `nested` translate where they begin.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch


@dataclass(frozen=True, slots=True)
class StateKey:
    """A tensor that an optimizer keeps for a parameter.

    `axes` has for each of its dimensions the parameter's dimension of the same size, or -n-1 for a constant n.
    `is_never_negative`: no element was negative in the trial.
    `order`: its dimensions from the largest stride to the smallest, if that is not their own order (a factor that LAPACK
    made): products of matrices round differently in another order of memory. Empty: contiguous.
    """

    name: str
    dtype: torch.dtype
    axes: tuple[int, ...]
    is_never_negative: bool = False
    order: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.name!r} in {str(self.dtype).removeprefix('torch.')}"

    def shape(self, parameter: Sequence[int]) -> tuple[int, ...]:
        return tuple(parameter[axis] if axis >= 0 else -axis - 1 for axis in self.axes)

    def is_like(self, ndim: int) -> bool:
        """Return True if it has the parameter's own shape."""
        return self.axes == tuple(range(ndim))


class Iterations(NamedTuple):
    """How often unknown code goes through a group's parameters: in any call, and more for each of them.

    [Note: unknown code], optimizer_proxy.py
    """

    fixed: int
    each: int


@dataclass(frozen=True, slots=True)
class StateForm:
    """An optimizer's state for parameters of one kind.

    Attributes:
        keys: the tensors that it keeps, after any step.
        always: names, of tensors and other entries, that were there after every step of the trial.
        may_cut: see [Note: what the trial decides] (optimizer_trial.py).
        starts_together: parameters must get their first gradients in one step: SGD(foreach=True, momentum=...) in bf16
            rounds differently in a step in which any of them is new.
        sets: names of settings in its groups that a step changes.
        passes: of unknown code, in the trial.
        changes_gradient: a step writes to the gradient that it is given, as schedule-free ones do.
    """

    keys: tuple[StateKey, ...]
    always: frozenset[str]
    may_cut: bool
    starts_together: bool = False
    sets: frozenset[str] = frozenset()
    passes: Iterations | None = None
    changes_gradient: bool = False

    def find(self, name: str) -> StateKey | None:
        return next((key for key in self.keys if key.name == name), None)


class _Paged:
    """Represents a tensor that lies in a section."""

    def __repr__(self) -> str:
        return "PAGED"

    def __deepcopy__(self, memo: Any) -> _Paged:
        return self


PAGED: Final = _Paged()


class StateEntries:
    """Owns the entries of every trained parameter."""

    def __init__(self, forms: Mapping[str, StateForm]) -> None:
        self._forms = forms
        self._entries: dict[str, dict[str, Any]] = {name: {} for name in forms}
        self._packed: dict[str, Any] | None = None  # valid until something changes

    def __getitem__(self, name: str) -> dict[str, Any]:
        """Return the entries of parameter `name`: PAGED, or the value. Do not change them."""
        return self._entries[name]

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def passes(self, name: str) -> Iterations | None:
        """Return what is allowed in an update of a parameter. See StateForm."""
        return self._forms[name].passes

    def changes_gradient(self, name: str) -> bool:
        """Return whether an update of a parameter writes to the gradient that it is given."""
        return self._forms[name].changes_gradient

    def replace(self, name: str, entries: dict[str, Any]) -> None:
        if entries != self._entries[name]:
            self._entries[name] = entries
            self._packed = None

    def may_change(self, value: Any) -> None:
        """Note that a returned entry may be changed in place."""
        if isinstance(value, list | dict):
            self._packed = None

    def take(self, name: str, state: Mapping[str, Any]) -> None:
        """Take over `optimizer.state[p]`; the caller stores the tensors."""
        form = self._forms[name]
        self.replace(name, {key: entry_of(form, key, value) for key, value in state.items()})

    def pack(self) -> dict[str, Any]:
        """Return all in a form that torch.load(weights_only=True) reads; parameters with equal entries share them."""
        if self._packed is None:
            kinds: dict[str, int] = {}
            lists: list[list[tuple[str, bool, Any]]] = []
            of: dict[str, int] = {}
            for name, entries in self._entries.items():
                flat = [(key, value is PAGED, None if value is PAGED else value) for key, value in entries.items()]
                number = kinds.setdefault(repr(flat), len(lists))
                if number == len(lists):
                    lists.append(copy.deepcopy(flat))
                of[name] = number
            self._packed = {"kinds": lists, "of": of}
        return self._packed

    def unpack(self, packed: Mapping[str, Any], only: Collection[str] | None = None) -> None:
        """Take over the result of `pack`, for all parameters or for some only."""
        for name, number in packed["of"].items():
            if only is not None and name not in only:
                continue
            flat = packed["kinds"][number]
            self.replace(name, {key: PAGED if paged else copy.deepcopy(value) for key, paged, value in flat})


def entry_of(form: StateForm, key: str, value: Any) -> Any:
    """Return the entry for `value`: a number may replace a tensor, as in older checkpoints."""
    known = form.find(key)
    if isinstance(value, torch.Tensor) or (known is not None and not known.axes and isinstance(value, int | float)):
        return PAGED
    return copy.deepcopy(value)


# --- [Note: state in lists] ---------------------------------------------------------------------------------------------

_ITEM = re.compile(r"(.*)\[([0-9]+)\]", re.DOTALL)


def flat(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state of a parameter with a key for each item of a list of tensors; others stay lists."""
    found: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, list | tuple) and any(isinstance(item, torch.Tensor) for item in value):
            found.update((f"{key}[{number}]", item) for number, item in enumerate(value))
        else:
            found[key] = value
    return found


def nested(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same with lists, as the optimizer keeps it."""
    found: dict[str, Any] = {}
    for key, value in state.items():
        item = _ITEM.fullmatch(key) if key.endswith("]") else None
        if item is None:
            found[key] = value
        else:
            found.setdefault(item[1], []).append(value)
    return found


def in_order(tensor: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """Return a copy of a tensor with the order of memory of `StateKey.order`."""
    turned = tensor.permute(*order).clone(memory_format=torch.contiguous_format)
    return turned.permute(*(order.index(dim) for dim in range(len(order))))


def order_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the `StateKey.order` of a tensor; empty if it is contiguous, or has gaps or overlaps."""
    order = tuple(sorted(range(tensor.dim()), key=tensor.stride().__getitem__, reverse=True))
    return order if not tensor.is_contiguous() and tensor.permute(*order).is_contiguous() else ()


def is_plain(value: Any) -> bool:
    """Return True if `value` can be stored next to the tensors of an optimizer's state."""
    if isinstance(value, list | tuple):
        return all(is_plain(item) for item in value)
    if isinstance(value, dict):
        return all(is_plain(item) for pair in value.items() for item in pair)
    return type(value) in (int, float, bool, str, type(None))


def axes_of(
    one: torch.Size, other: torch.Size, shapes: tuple[tuple[int, ...], tuple[int, ...]]
) -> tuple[int, ...] | None:
    """Return the axes of a StateKey, given the shapes of state for parameters of two `shapes`. None: they do not follow."""
    if one == shapes[0] and other == shapes[1]:
        return tuple(range(len(one)))
    if len(one) != len(other):
        return None
    axes = []
    for size, other_size in zip(one, other, strict=True):
        found = [axis for axis, pair in enumerate(zip(*shapes, strict=True)) if pair == (size, other_size)]
        if size == other_size:
            axes.append(-size - 1)
        elif len(found) == 1:
            axes.append(found[0])
        else:
            return None
    return tuple(axes)
