"""Implements `optimizer.state_dict` and `load_state_dict` of one model: between sections and torch's form."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from swapper.paging.pager import Pager
from swapper.paging.section import Section
from swapper.train.layout.content import iter_section_pages
from swapper.train.layout.inventory import MASTER
from swapper.train.layout.slices import ParameterLocations, TensorLocation
from swapper.train.optimizer.entries import PAGED, StateEntries, entry_of
from swapper.train.optimizer.mapped_state import MappedState, expire, steady
from swapper.train.optimizer.membership import Membership
from swapper.train.optimizer.optimizer_probe import StateForm


class StateDicts:
    """Makes and loads state_dicts.

    Args:
        trained: parameters whose state has a location.
        membership: has the parameters' numbers in torch's form.
        entries: the optimizer's state of each.
        forms: by name of a parameter, its possible state.
        places: by name of a parameter and key.
        sections: of the state.
        pager: makes the leases.

    Attributes:
        generation: how often the state has changed as a whole.
    """

    def __init__(
        self,
        trained: Sequence[tuple[nn.Parameter, ParameterLocations]],
        membership: Membership,
        entries: StateEntries,
        forms: Mapping[str, StateForm],
        places: Mapping[tuple[str, str], TensorLocation],
        sections: Sequence[Section],
        pager: Pager,
    ) -> None:
        self._trained = trained
        self._membership = membership
        self._entries = entries
        self._forms = forms
        self._places = places
        self._sections = sections
        self._pager = pager
        self._shown: weakref.WeakSet[MappedState] = weakref.WeakSet()
        self.generation = 0

    def show(self) -> dict[int, dict[str, Any]]:
        """Return the state in torch's form; its tensors show it until `expire` is called, and take no memory.

        Raises:
            IoError: changes in memory could not be written.
        """
        self._pager.flush()
        shown = MappedState(self._pager, "optimizer.state_dict()")
        self._shown.add(shown)
        return self.in_torch_order(lambda name, key: shown.tensor(self._places[name, key]))

    def expire(self, why: str) -> None:
        """Expire returned tensors before the state changes."""
        self.generation += 1
        expire(self._shown, why)

    def read(self, place: TensorLocation) -> torch.Tensor:
        """Return a copy of the tensor at a location."""
        copied = torch.empty(place.slot.spec.shape, dtype=place.slot.spec.dtype)
        for _, begin, end, view in iter_section_pages(place.section, self._pager, only=[place.slot]):
            copied.view(-1)[begin:end] = view
        return copied

    def write(self, place: TensorLocation, value: torch.Tensor, why: str) -> None:
        """Store `value` at a location. Returned state dicts expire."""
        for _, begin, end, view in iter_section_pages(place.section, self._pager, write=True, only=[place.slot]):
            view.copy_(value.reshape(-1)[begin:end])
        expire(self._shown, why)

    def in_torch_order(self, find: Callable[[str, str], torch.Tensor]) -> dict[int, dict[str, Any]]:
        """Return the optimizer's state as in its state_dict: by number of parameter, keys in the optimizer's order.

        Args:
            find: returns the tensor for a name of a parameter and a key.
        """
        state: dict[int, dict[str, Any]] = {}
        for number, places in self._numbered():
            entries = self._entries[places.name]
            if entries and number is not None:
                state[number] = {
                    key: find(places.name, key) if value is PAGED else copy.deepcopy(value)
                    for key, value in entries.items()
                }
        return dict(sorted(state.items()))

    def take(self, state: Mapping[int, Mapping[str, Any]]) -> None:
        """Store a state_dict.

        Raises:
            ValueError: it is not what the optimizer keeps. Nothing has changed then.
        """
        self.take_some({of.name: {} if number is None else state.get(number, {}) for number, of in self._numbered()})

    def take_some(self, states: Mapping[str, Mapping[str, Any]], why: str = "load_state_dict") -> None:
        """Store the state of some parameters, by name.

        Args:
            why: the reason why earlier tensors expire, for their errors.

        Raises:
            ValueError: it is not what the optimizer keeps. Nothing has changed then.
        """
        for _, places in self._trained:
            if places.name in states:
                self._check(places, states[places.name])
        for name, given in states.items():
            self._entries.take(name, given)
        values = {
            (name, key): steady(value, self._places.get((name, key)))
            for name, given in states.items()
            for key, value in given.items()
        }
        for section in self._sections:
            slots = [slot for slot in section.plan.slots if slot.spec.owner in states and slot.spec.kind != MASTER]
            for slot, begin, end, view in iter_section_pages(section, self._pager, write=True, only=slots):
                owner, key = slot.spec.owner, slot.spec.kind  # masters belong to the parameters
                if self._entries[owner].get(key) is PAGED:
                    view.copy_(torch.as_tensor(values[owner, key]).reshape(-1)[begin:end])
                else:
                    view.zero_()
        self.expire(why)

    def _numbered(self) -> Iterator[tuple[int | None, ParameterLocations]]:
        """Yield the trained parameters with their numbers; None for one that has left its group."""
        self._membership.follow()
        for parameter, places in self._trained:
            yield self._membership.numbers.get(id(parameter)), places

    def _check(self, places: ParameterLocations, state: Mapping[str, Any]) -> None:
        """Raise ValueError unless `state` is empty or what the optimizer keeps for this parameter."""
        form = self._forms[places.name]
        slots = {key: place.slot for key, place in {**places.others, **places.state}.items() if key != MASTER}
        tensors = {key for key, value in state.items() if entry_of(form, key, value) is PAGED}
        if state and (tensors - slots.keys() or form.always - state.keys()):
            raise ValueError(f"the state of {places.name} has {sorted(state)}; this optimizer keeps {sorted(slots)}")
        for key in tensors:
            if torch.as_tensor(state[key]).shape != slots[key].spec.shape:
                shapes = f"{list(torch.as_tensor(state[key]).shape)}; this optimizer's is {list(slots[key].spec.shape)}"
                raise ValueError(f"the state {key!r} of {places.name} has the shape {shapes}")
