"""One offloaded model and its optimizer: everything that is specific to them, under a manager that owns the resources."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from swapper.core.pager import Pager
from swapper.core.section import Section
from swapper.errors import StateError, UnsupportedError
from swapper.stats import Stats
from swapper.train.cold import aliases
from swapper.train.grads import HostGradients
from swapper.train.hooks import Hooks
from swapper.train.inventory import Inventory, find_places, find_trainables
from swapper.train.loading import LoadHooks
from swapper.train.optim import PagedOptimizer, packed_groups
from swapper.train.shadow import Shadow
from swapper.train.storage import GroupParameters
from swapper.train.sweep import Sweep


class OffloadedModel:
    """Moves a model's parameters and its optimizer's state to their sections, and puts the hooks in.

    Args:
        model, optimizer: the user's.
        inventory: what they consist of.
        sections: param and state sections, with memory.
        grad_sections: gradient sections, with memory.
        pager: what leases go to.
        page_bytes: size of a page.
        stats: counters to keep.
        check_usable: raises if the manager cannot be used.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        inventory: Inventory,
        sections: list[Section],
        grad_sections: list[Section],
        pager: Pager,
        page_bytes: int,
        stats: Stats,
        check_usable: Callable[[], None],
    ) -> None:
        self.model = model
        self._inventory = inventory
        self._grad_sections = grad_sections
        self._pager = pager
        self._page_bytes = page_bytes
        self._check_usable = check_usable
        self._optimizer = optimizer
        self._places = find_places(inventory, sections)
        self._trainables = find_trainables(inventory, self._places)
        self._sweep = Sweep(self._trainables, Shadow(optimizer), pager, page_bytes, stats)
        self._names = {id(p): name for group in inventory.groups for name, p in group.parameters}
        self._gathered = 0
        self.groups: list[GroupParameters] = []
        self._hooks: Hooks | None = None
        self._load_hooks: LoadHooks | None = None
        self._gradients: HostGradients | None = None

    def adopt(self, run_step: Callable[[], None]) -> PagedOptimizer:
        """Move everything to its place, group by group, and return the optimizer that works there."""
        order = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        self._numbers = {id(parameter): number for number, parameter in enumerate(order)}
        paged = PagedOptimizer(self._optimizer, run_step, self._save_state, self._load_state)
        trainables = {trainable.group: trainable for trainable in self._trainables}
        for group in self._inventory.groups:
            trainable = trainables.get(group.index)
            if trainable is not None:
                self._sweep.fill(trainable, [self._initial_state(p) for p in trainable.parameters])
            for _, parameter in group.parameters:
                self._optimizer.state.pop(parameter, None)
            places = [
                (self._places[name, "param"].section, self._places[name, "param"].slot) for name, _ in group.parameters
            ]
            parameters = GroupParameters(group, places, self._pager, self)
            self.groups.append(parameters)
            parameters.adopt()
        gradient_places = {
            slot.spec.owner: section.tensor(slot) for section in self._grad_sections for slot in section.plan.slots
        }
        self._gradients = HostGradients(
            [
                (name, parameter, gradient_places[name])
                for group in self._inventory.groups
                for name, parameter in group.parameters
                if name in gradient_places
            ]
        )
        units = self._inventory.units
        self._hooks = Hooks(units, self.groups, self._check_usable, self._pager.drop_leases)
        self._load_hooks = LoadHooks(units, self.groups, self._check_usable, self._refresh_masters)
        return paged

    # --- what a step does -----------------------------------------------------------------------------------------

    def update(self) -> None:
        """Apply the optimizer to every parameter that has a gradient."""
        self._sweep.run()

    @property
    def is_gathered(self) -> bool:
        return self._gathered > 0

    def abandon_pass(self) -> None:
        """Forget a forward, a backward or a load_state_dict that never ended."""
        if self._hooks is not None and self._load_hooks is not None:
            self._hooks.abandon_pass(even_so=self._load_hooks.is_open)
            self._load_hooks.forget()

    # --- looking at it --------------------------------------------------------------------------------------------

    @contextmanager
    def gather(self, parameters: Iterable[nn.Parameter], write: bool) -> Iterator[None]:
        """Lease the groups of `parameters` for the time of the context."""
        wanted = {id(parameter) for parameter in parameters}
        unknown = wanted - self._names.keys()
        if unknown:
            raise StateError("gather was given parameters that are not of the offloaded model")
        groups = [g for g in self.groups if any(id(p) in wanted for p in g.parameters)]
        leased: list[GroupParameters] = []
        versions = {id(p): p._version for group in groups for p in group.parameters}
        try:
            for group in groups:
                group.hold(write)
                leased.append(group)
            self._gathered += 1
            try:
                yield
            finally:
                self._gathered -= 1
        finally:
            changed = [g for g in leased if any(p._version != versions[id(p)] for p in g.parameters)]
            for group in leased:
                group.let_go(write)
        if changed and not write:
            names = [n for g in changed for n, p in g.group.parameters if p._version != versions[id(p)]]
            raise StateError(
                f"parameter {names[0]} was changed inside gather(write=False), and the change may be lost: "
                "say gather(..., write=True)"
            )
        if write:
            self._refresh_masters(leased)

    def bring(self, parameter: nn.Parameter) -> bool:
        """A cold parameter is touched: see Hooks.bring."""
        self._check_usable()
        return self._hooks is not None and self._hooks.bring(parameter)

    def describe(self, parameter: nn.Parameter) -> str:
        return self._names[id(parameter)]

    def checkpoint(self) -> dict[str, Any]:
        """Return the state in the form of a checkpoint. Its tensors alias the sections: look at their place, not at their data."""
        with aliases():
            content: dict[str, Any] = {"model": self.model.state_dict()}
        state: dict[int, dict[str, torch.Tensor]] = {}
        masters: dict[str, torch.Tensor] = {}
        for parameter, places in self._trained():
            number = self._numbers[id(parameter)]
            keys = self._inventory.state_keys[
                self._settings(parameter), (places.state.get("master") or places.param).slot.spec.dtype
            ]
            tensors = {**places.scalars, **places.state}
            state[number] = {key.name: tensors[key.name].section.tensor(tensors[key.name].slot) for key in keys}
            if places.has_master:
                master = places.state["master"]
                masters[places.name] = master.section.tensor(master.slot)
        content["optimizer"] = {
            "state": dict(sorted(state.items())),
            "param_groups": packed_groups(self._optimizer.param_groups),
        }
        if masters:
            content["master"] = masters
        return content

    def close(self, keep_cold: bool) -> None:
        """Take the hooks out. Paged parameters stay cold for good if `keep_cold`."""
        if self._hooks is not None and self._load_hooks is not None:
            self._hooks.remove()
            self._load_hooks.remove()
        if self._gradients is not None:
            self._gradients.remove()
        for group in self.groups:
            group.abandon(keep_cold)

    # --------------------------------------------------------------------------------------------------------------

    def _settings(self, parameter: nn.Parameter) -> int:
        return self._inventory.settings[id(parameter)]

    def _trained(self) -> Iterator[tuple[nn.Parameter, Any]]:
        for trainable in self._trainables:
            yield from zip(trainable.parameters, trainable.places, strict=True)

    def _initial_state(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """What the user's optimizer has for `parameter` already, and its master."""
        state = dict(self._optimizer.state.get(parameter, {}))
        places = self._places
        name = self._names[id(parameter)]
        if (name, "master") in places:
            state["master"] = parameter.data
        known = {kind for owner, kind in places if owner == name}
        strange = state.keys() - known
        if strange:
            raise UnsupportedError(f"the optimizer's state of {name} has entries that swapper does not know: {strange}")
        return state

    def _refresh_masters(self, groups: Iterable[GroupParameters]) -> None:
        indices = {group.group.index for group in groups}
        for trainable in self._trainables:
            if trainable.group in indices and any(places.has_master for places in trainable.places):
                self._sweep.refresh_masters(trainable)

    def _save_state(self) -> dict[int, dict[str, Any]]:
        self._check_usable()
        state: dict[int, dict[str, Any]] = {}
        for trainable in self._trainables:
            for number, tensors in self._sweep.read(trainable):
                tensors.pop("master", None)
                state[self._numbers[id(trainable.parameters[number])]] = tensors
        return dict(sorted(state.items()))

    def _load_state(self, state: dict[int, dict[str, Any]]) -> None:
        self._check_usable()
        for trainable in self._trainables:
            initial = []
            for parameter in trainable.parameters:
                tensors = dict(state.get(self._numbers[id(parameter)], {}))
                initial.append({key: torch.as_tensor(value) for key, value in tensors.items()})
            self._sweep.load(trainable, initial)
