"""The optimizer's state of one model, as it is looked at and given from outside: `optimizer.state`, state dicts, checkpoints.

It lies in its sections; that of some groups stays on the device, and then what is there counts, not what is at its place. Whoever
looks has the last step finished first, and has brought to its place what stays on the device, or a copy of that.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from swapper.core.pager import Pager
from swapper.core.schedule import Access
from swapper.core.section import Section
from swapper.interrupts import held_back
from swapper.train.entrance import Entrance
from swapper.train.entries import PAGED, StateEntries
from swapper.train.inventory import Inventory
from swapper.train.kept_state import KeptState
from swapper.train.on_device import OnDevice
from swapper.train.slices import Place
from swapper.train.state_dicts import StateDicts
from swapper.train.state_view import StateView
from swapper.train.sweep import Trainable


class OptimizerState:
    """Owns what each parameter's state has, and what of it stays on the device.

    Args:
        optimizer: the user's.
        inventory: what it and the model consist of.
        trainables: what is trained.
        places: where everything lies, by name of a parameter and key.
        sections: of the state.
        pager: what leases go to.
        entrance: where the user comes in.
        finish_update: has the updates done that the last step has left.
        on_device: where forwards and backwards run on an accelerator.

    Attributes:
        entries: what each parameter's state has, as plain torch would have it.
        kept: what stays on the device, where updates are made there.
        view: shows the state of each parameter.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        inventory: Inventory,
        trainables: Sequence[Trainable],
        places: Mapping[tuple[str, str], Place],
        sections: Sequence[Section],
        pager: Pager,
        entrance: Entrance,
        finish_update: Callable[[], None],
        on_device: OnDevice | None,
    ) -> None:
        self._places = places
        self._pager = pager
        self._entrance = entrance
        self._finish_update = finish_update
        order = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._numbers = {id(parameter): number for number, parameter in enumerate(order)}
        self._trained = [pair for t in trainables for pair in zip(t.parameters, t.places, strict=True)]
        self._names = {id(parameter): places_of.name for parameter, places_of in self._trained}
        self._group_of = {id(parameter): t.group for t in trainables for parameter in t.parameters}
        self.entries = StateEntries(inventory.forms)
        self.kept: KeptState | None = None
        if on_device is not None and on_device.updates:
            staying = (trainable for trainable in trainables if trainable.group in inventory.staying_state)
            self.kept = KeptState(staying, on_device, pager)
        self._dicts = StateDicts(self._trained, self._numbers, self.entries, inventory.forms, places, sections, pager)
        self.view = StateView(self._with_state, self._read)

    def close(self) -> None:
        """Nobody wants what is on the device any more. No copy is on its way."""
        if self.kept is not None:
            self.kept.close()

    def let_go(self) -> None:
        """After `close`: keep nothing, and refuse everything. The user's optimizer has this one."""
        entrance = self._entrance
        vars(self).clear()
        self._entrance, self._finish_update = entrance, entrance.enter

    # --- what stays on the device ---------------------------------------------------------------------------------

    def bring_home(self) -> None:
        """Somebody looks at the places of the state: have there what stays on the device.

        Raises:
            IoError, DeviceError: it could not be copied.
        """
        if self.kept is not None:
            self.kept.bring_home()

    def forget_kept(self) -> None:
        """What is at its place is what counts."""
        if self.kept is not None:
            self.kept.forget()

    # --- state dicts ----------------------------------------------------------------------------------------------

    def save(self) -> dict[int, dict[str, Any]]:
        """Return the state in torch's form, {index of parameter: {key: tensor}}, mapped from its places until it changes.

        Raises:
            IoError: what is changed in memory could not be written.
        """
        with self._entrance.turns.turn():
            self._entrance.enter()
            self._finish_update()
            self.bring_home()
            return self._dicts.show()

    def load(self, state: dict[int, dict[str, Any]]) -> None:
        """Take the same.

        Raises:
            ValueError: it is not what the optimizer keeps. Nothing has changed then.
        """
        with self._entrance.turns.turn():
            self._entrance.enter_to_write()
            self.bring_home()
            try:
                self._dicts.take(state)
            finally:
                self.forget_kept()

    def at_its_place(self) -> dict[int, dict[str, Any]]:
        """Return the state in torch's form; its tensors alias the sections, whose data may be away."""
        return self._dicts.in_torch_order(self._alias)

    @property
    def packed_entries(self) -> dict[str, Any]:
        """What each parameter's state has, for a commit."""
        return self.entries.pack()

    def expire(self, why: str) -> None:
        """The state is about to change: what `save` has shown is not to be looked at any more."""
        self._dicts.expire(why)

    def _alias(self, name: str, key: str) -> torch.Tensor:
        place = self._places[name, key]
        return place.section.tensor(place.slot)

    # --- one parameter's state ------------------------------------------------------------------------------------

    def _with_state(self) -> list[torch.Tensor]:
        """Return the parameters that the optimizer keeps something for, in the order of its groups."""
        self._finish_update()
        found = [(self._numbers[id(p)], p) for p, places in self._trained if self.entries[places.name]]
        return [parameter for _, parameter in sorted(found, key=lambda pair: pair[0])]

    def _read(self, parameter: torch.Tensor) -> dict[str, Any]:
        """Return a copy of one parameter's state."""
        self._entrance.enter()
        self._finish_update()
        name, group = self._names[id(parameter)], self._group_of[id(parameter)]
        state: dict[str, Any] = {}
        for key, value in self.entries[name].items():
            if value is not PAGED:
                state[key] = copy.deepcopy(value)
                continue
            place = self._places[name, key]
            kept = None if self.kept is None else self.kept.read(group, place)
            state[key] = self._copy(place) if kept is None else kept
        return state

    def _copy(self, place: Place) -> torch.Tensor:
        access = Access(None, tuple(place.pages(0, place.slot.spec.numel)))
        with held_back:
            self._pager.acquire(access)
            copied = place.section.tensor(place.slot).clone()
            self._pager.release(access)
        return copied
