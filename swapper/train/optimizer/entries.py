"""Tracks the entries of `optimizer.state[p]` for each parameter, as plain torch would have them.

Tensors of state lie in sections, whether or not the optimizer has made them yet. Which entries it has made, in which
order, and entries that are no tensors (a step counter that is a Python number, None) are kept here, in memory, and go
into commits and snapshots. A parameter that has never had a gradient has no entries, and its first update begins with
an empty state, as in plain torch: SGD's momentum begins as the first gradient and NAdam's product as one, which zeros
would not be.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import Any, Final

import torch

from swapper.train.optimizer.optimizer_probe import StateForm


class _Paged:
    """Represents a tensor that lies in a section."""

    def __repr__(self) -> str:
        return "PAGED"

    def __deepcopy__(self, memo: Any) -> _Paged:
        return self


PAGED: Final = _Paged()


class StateEntries:
    """Owns the entries of every trained parameter.

    Args:
        forms: by parameter's name, the form of its state.
    """

    def __init__(self, forms: Mapping[str, StateForm]) -> None:
        self._forms = forms
        self._entries: dict[str, dict[str, Any]] = {name: {} for name in forms}
        self._packed: dict[str, Any] | None = None  # valid until something changes

    def __getitem__(self, name: str) -> dict[str, Any]:
        """Return the entries of parameter `name`: PAGED, or the value. Do not change them."""
        return self._entries[name]

    def __contains__(self, name: str) -> bool:
        return name in self._entries

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
        """Return everything in a form that torch.load(weights_only=True) reads; parameters with equal entries share
        them."""
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
