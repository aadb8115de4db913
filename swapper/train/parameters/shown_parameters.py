"""`model.state_dict()` of parameters that are away: tensors that show them and take no memory, until they change."""

from __future__ import annotations

import weakref
from collections.abc import Mapping

import torch

from swapper.paging.pager import Pager
from swapper.train.layout.slices import TensorLocation
from swapper.train.optimizer.mapped_state import MappedState, expire


class ShownParameters:
    """Shows parameters, each by one tensor however often it is asked for: torch.save writes a tied one once.

    Args:
        places: of all parameters, by name and kind.
        group_of: the number of the group of each parameter, by name.
        pager: what is changed in memory is written by it before it is shown.
    """

    def __init__(
        self, places: Mapping[tuple[str, str], TensorLocation], group_of: Mapping[str, int], pager: Pager
    ) -> None:
        self._places = places
        self._group_of = group_of
        self._pager = pager
        self._groups: dict[int, MappedState] = {}
        self._tensors: weakref.WeakValueDictionary[str, torch.Tensor] = weakref.WeakValueDictionary()
        self._all_written = False

    def show(self, name: str) -> torch.Tensor:
        """Return what shows the parameter of that name.

        Raises:
            IoError: what is changed in memory could not be written.
        """
        shown = self._tensors.get(name)
        if shown is not None:
            return shown
        if not self._all_written:
            self._pager.flush()
            self._all_written = True
        group = self._group_of[name]
        if group not in self._groups:
            self._groups[group] = MappedState(self._pager, "state_dict()")
        shown = self._tensors[name] = self._groups[group].tensor(self._places[name, "param"])
        return shown

    def expire(self, why: str, group: int | None = None) -> None:
        """Parameters of `group`, or all, are about to change: what was shown of them is not to be looked at any more."""
        self._all_written = False
        for index in list(self._groups) if group is None else [group]:
            if index in self._groups:
                expire([self._groups.pop(index)], why)
        for name in [name for name in self._tensors if group in (None, self._group_of[name])]:
            self._tensors.pop(name, None)
