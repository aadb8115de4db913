"""Presents the optimizer's state of one model: `optimizer.state`, state dicts, checkpoints.

It lies in its sections. State of some groups stays on the device; then that is valid, and not the section. An access
first finishes the last step, and copies state on the device, or a part of it, to the host.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from swapper.errors import StateError
from swapper.paging.layout import Slot
from swapper.paging.pager import Pager
from swapper.paging.section import Section
from swapper.runtime.interrupts import defer_signals
from swapper.train.groups.processor import Processor
from swapper.train.groups.session_guard import SessionGuard
from swapper.train.groups.train_device import TrainingDevice
from swapper.train.layout.content import as_tensor, copy_of, iter_section_pages
from swapper.train.layout.inventory import Inventory, updated_dtype
from swapper.train.layout.slices import NO_GROUP, ParameterLocations, TensorLocation, Trainable
from swapper.train.layout.state_codecs import MASTER
from swapper.train.optimizer.entries import PAGED, StateEntries, entry_of, flat, nested
from swapper.train.state.coded_state import CodedTensors
from swapper.train.state.conditions import Membership
from swapper.train.state.mapped_state import MappedState, expire, steady
from swapper.train.state.resident_state import DeviceResidentState
from swapper.train.state.state_view import ShownState, StateView, outdated


class OptimizerState:
    """Owns each parameter's state entries, and the state that stays on the device.

    Args:
        membership: of parameters in the optimizer's groups.
        inventory: contents of the optimizer and the model.
        trainables: the trained parameters.
        places: of everything, by name of a parameter and key.
        sections: of the state.
        pager: makes the leases.
        session_guard: called at each use by the user.
        finish_update: finishes the last step's updates, and waits for their results.
        processor: of forwards and backwards.
        directory: on a drive, for state dicts of encoded state.

    Attributes:
        entries: each parameter's state entries, as plain torch would have them.
        kept: state that stays on the device, if updates run there.
        view: shows the state of each parameter.
        hidden: see StateOwner (optim.py).
    """

    hidden: str | None = None

    def __init__(
        self,
        membership: Membership,
        inventory: Inventory,
        trainables: Sequence[Trainable],
        places: Mapping[tuple[str, str], TensorLocation],
        sections: Sequence[Section],
        pager: Pager,
        session_guard: SessionGuard,
        finish_update: Callable[[], None],
        processor: Processor,
        directory: Path,
        *,
        uses_gradients_up: bool,
    ) -> None:
        self._inventory = inventory
        if uses_gradients_up:
            self.hidden = "update='backward' has used the gradients up when it begins. Offload with update='step'"
        elif inventory.master_dtype is not None:
            self.hidden = (
                "it would see parameters and gradients in place of their fp32 masters. Leave out master_weights"
            )
        self._trainables = trainables
        self._places = places
        self._sections = sections
        self._pager = pager
        self._session_guard = session_guard
        self._finish_update = finish_update
        self._membership = membership
        self._trained = [pair for t in trainables for pair in zip(t.parameters, t.places, strict=True)]
        self._names = {id(parameter): places_of.name for parameter, places_of in self._trained}
        self._group_of = {id(parameter): t.group for t in trainables for parameter in t.parameters}
        self.entries = StateEntries(inventory.forms)
        self._coded = CodedTensors([places_of for _, places_of in self._trained], pager, directory)
        self.kept: DeviceResidentState | None = None
        if isinstance(processor, TrainingDevice) and processor.updates:
            resident_set = (trainable for trainable in trainables if trainable.group in inventory.staying_state)
            self.kept = DeviceResidentState(resident_set, processor, pager)
        self._elsewhere = [one for one in (self.kept, processor) if one is not None]  # what may have newer content
        self._shown: weakref.WeakSet[MappedState] = weakref.WeakSet()  # state dicts
        self._copies: weakref.WeakValueDictionary[tuple[str, str], ShownState] = weakref.WeakValueDictionary()
        self._generation = 0  # increases when the state changes as a whole
        self._copied_generation = 0
        self.view = StateView(self)

    def close(self) -> None:
        """Release state on the device. Requires that no copy is in flight."""
        if self.kept is not None:
            self.kept.close()

    # --- state on the device ------------------------------------------------------------------------------------------

    def sync_to_host(self) -> None:
        """Copy state that stays on the device, and parameters that were updated there, to their sections, for an access there.

        A master that is stored encoded is a difference from its parameter.

        Raises:
            IoError, DeviceError: it could not be copied.
        """
        for one in self._elsewhere:
            one.sync_to_host()

    def forget_kept(self, groups: Collection[int] | None = None) -> None:
        """Discard state on the device, of these groups or all: their sections are valid."""
        if self.kept is not None:
            self.kept.forget(groups)

    # --- state dicts --------------------------------------------------------------------------------------------------

    def save(self, numbers: range | None = None) -> dict[int, dict[str, Any]]:
        """Return the state in torch's form, {number: {key: tensor}}, mapped from its sections until it changes.

        Args:
            numbers: those of one optimizer's parameters among all, which then count from 0; None for all.

        Raises:
            IoError: changes in memory could not be written.
        """
        with self._session_guard.turns.turn():
            self._session_guard.events.check_usable()
            self._finish_update()
            self.sync_to_host()
            self._pager.flush()
            shown = MappedState(self._pager, "optimizer.state_dict()")
            self._shown.add(shown)

            def find(name: str, key: str) -> torch.Tensor:
                if self._coded.has(name, key):
                    return shown.only_shown(self._coded.read(name, key, on_drive=True))
                return shown.tensor(self._places[name, key])

            return self._in_torch_order(find, numbers)

    def load(self, state: dict[int, dict[str, Any]], numbers: range | None = None) -> None:
        """Load the same. Raises ValueError: it is not what the optimizer keeps. Nothing has changed then."""
        with self._session_guard.turns.turn():
            self._session_guard.events.check_to_write()
            self.sync_to_host()
            try:
                numbered = list(self._numbered())
                if numbers is not None:
                    numbered = [(n - numbers.start, p) for n, p in numbered if n is not None and n in numbers]
                self._take({p.name: {} if number is None else flat(state.get(number, {})) for number, p in numbered})
            finally:
                self.forget_kept()

    def find_frozen(
        self, state: dict[int, dict[str, Any]], numbers: range | None = None
    ) -> dict[nn.Parameter, dict[str, Any]]:
        """Return what of `state` there is no space for. See StateOwner.

        Args:
            numbers: see `save`.
        """
        with self._session_guard.turns.turn():
            self._session_guard.events.check_usable()
            self._finish_update()
            self._membership.follow()
            first = 0 if numbers is None else numbers.start
            found = {p: state.get(self._membership.numbers[id(p)] - first, {}) for p in self._membership.untrained}
            return {parameter: given for parameter, given in found.items() if given}

    def begin_frozen(self, state: Mapping[nn.Parameter, Mapping[str, object]]) -> None:
        """See StateOwner."""
        self._membership.keep_state(state)

    def at_its_place(self, numbers: range | None = None) -> dict[int, dict[str, Any]]:
        """Return the state in torch's form, with `stored` tensors. See `save`."""
        return self._in_torch_order(self.stored, numbers)

    def stored(self, name: str, key: str) -> Any:
        """Return a tensor in its section, whose data may be cold; of encoded state the codec's name and the parts."""
        if self._coded.has(name, key):
            return self._coded.stored(name, key)
        place = self._places[name, key]
        return place.section.tensor(place.slot)

    @property
    def codecs(self) -> dict[str, str]:
        """The names of the codecs of encoded state, by key."""
        return self._coded.names

    def begin(self, name: str, state: Mapping[str, object]) -> None:
        """Take over a parameter's state when it is offloaded; its sections have all that is not stored encoded."""
        self.entries.take(name, state)
        for key, value in state.items():
            if self._coded.has(name, key):
                self._coded.write(name, key, as_tensor(value))

    @property
    def packed_entries(self) -> dict[str, Any]:
        """Each parameter's state entries, for a commit."""
        return self.entries.pack()

    def expire(self, why: str) -> None:
        """Expire the tensors of `save` before the state changes."""
        self._generation += 1
        expire(self._shown, why)

    def skip_step(self, parameters: Iterable[torch.Tensor]) -> None:
        """Begin the state of `parameters` as torch's fused optimizers do in a step that torch.amp.GradScaler skips.

        Args:
            parameters: those that have a gradient.
        """
        with self._session_guard.turns.turn():
            self._session_guard.events.check()
            self._finish_update()
            self._membership.follow()
            active = {id(parameter) for parameter in parameters}
            new = [
                (places.name, at, updated_dtype(parameter, self._inventory.master_dtype))
                for trainable in self._trainables
                for parameter, places, at in trainable.members
                if id(parameter) in active and at != NO_GROUP and not self.entries[places.name]
            ]
            if new:
                self._session_guard.events.check_to_write()
            for name, settings, dtype in new:
                self.entries.take(name, self._inventory.probe.skipped_state(settings, dtype))

    def _in_torch_order(self, find: Callable[[str, str], Any], numbers: range | None) -> dict[int, dict[str, Any]]:
        """Return the optimizer's state as in its state_dict: by number of parameter, keys in the optimizer's order.

        Args:
            find: returns the tensor of a parameter, by name, and a key.
            numbers: see `save`.
        """
        state: dict[int, dict[str, Any]] = {}
        for number, places in self._numbered():
            entries = self.entries[places.name]
            if entries and number is not None and (numbers is None or number in numbers):
                own = {k: find(places.name, k) if v is PAGED else copy.deepcopy(v) for k, v in entries.items()}
                state[number - (0 if numbers is None else numbers.start)] = nested(own)
        return dict(sorted(state.items()))

    def _take(self, states: Mapping[str, Mapping[str, object]], why: str = "load_state_dict") -> None:
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
            self.entries.take(name, given)
        values = {
            (name, key): steady(value, self._places.get((name, key)))
            for name, given in states.items()
            for key, value in given.items()
        }
        for section in self._sections:
            slots = [slot for slot in section.plan.slots if slot.spec.owner in states and self._is_plain(slot)]
            for slot, begin, end, view in iter_section_pages(section, self._pager, write=True, only=slots):
                owner, key = slot.spec.owner, slot.spec.kind  # masters belong to the parameters
                if self.entries[owner].get(key) is PAGED:
                    view.copy_(as_tensor(values[owner, key]).reshape(-1)[begin:end])
                else:
                    view.zero_()
        for name in states:
            for key in self._coded.keys(name):
                is_kept = self.entries[name].get(key) is PAGED
                self._coded.write(name, key, as_tensor(values[name, key]) if is_kept else None)
        self.expire(why)

    def _is_plain(self, slot: Slot) -> bool:
        return slot.spec.kind != MASTER and not self._coded.is_part(slot)

    def _numbered(self) -> Iterator[tuple[int | None, ParameterLocations]]:
        """Yield the trained parameters with their numbers; None for one that has left its group."""
        self._membership.follow()
        for parameter, places in self._trained:
            yield self._membership.numbers.get(id(parameter)), places

    def _check(self, places: ParameterLocations, state: Mapping[str, object]) -> None:
        """Raise ValueError unless `state` is empty or what the optimizer keeps for this parameter."""
        form = self._inventory.forms[places.name]
        shapes = {key: place.slot.spec.shape for key, place in {**places.others, **places.state}.items()}
        shapes |= dict.fromkeys(self._coded.keys(places.name), places.param.slot.spec.shape)
        shapes.pop(MASTER, None)
        tensors = {key for key, value in state.items() if entry_of(form, key, value) is PAGED}
        if state and (tensors - shapes.keys() or form.always - state.keys()):
            raise ValueError(f"the state of {places.name} has {sorted(state)}; this optimizer keeps {sorted(shapes)}")
        for key in tensors:
            given = as_tensor(state[key])
            if given.shape != shapes[key]:
                both = f"{list(given.shape)}; this optimizer's is {list(shapes[key])}"
                raise ValueError(f"the state {key!r} of {places.name} has the shape {both}")
            if self._coded.has(places.name, key):
                self._coded.check(places.name, key, given)

    # --- one parameter's state: see StateStore ------------------------------------------------------------------------

    def with_state(self) -> list[torch.Tensor]:
        """Return the parameters that have state, in the order of the optimizer's groups."""
        self._finish_update()
        self._membership.follow()
        numbers = self._membership.numbers
        found = [p for p, places in self._trained if self.entries[places.name]]
        return sorted(found, key=lambda p: numbers.get(id(p), len(numbers)))  # those in no group are last

    def keys(self, parameter: torch.Tensor) -> list[str]:
        self._session_guard.events.check_usable()
        self._finish_update()
        name = self._names.get(id(parameter))
        return [] if name is None else list(nested(self.entries[name]))

    def read(self, parameter: torch.Tensor, key: str) -> Any:
        """Return one entry: a copy of a tensor, a tuple of them in place of a list, or the value itself."""
        self._finish_update()
        name = self._names[id(parameter)]
        if key not in self.entries[name]:
            items = nested(self.entries[name])[key]
            return tuple(self.read(parameter, f"{key}[{number}]") for number in range(len(items)))
        value = self.entries[name][key]
        if value is not PAGED:
            self.entries.may_change(value)
            return value
        if self._copied_generation != self._generation:
            self._copies.clear()
            self._copied_generation = self._generation
        shown = self._copies.get((name, key))
        if shown is None:
            with defer_signals, torch.no_grad():
                copied = self._copy_of(name, key, self._group_of[id(parameter)])
                shown = ShownState(copied, self._make_write(name, key))
            self._copies[name, key] = shown
        return shown.tensor()

    def put(self, states: Mapping[torch.Tensor, Mapping[str, object]]) -> None:
        """Take over these parameters' state.

        Raises:
            StateError: it is not what the optimizer keeps. Nothing has changed then.
        """
        named: dict[str, Mapping[str, object]] = {}
        for parameter, state in states.items():
            name = self._names.get(id(parameter))
            if name is not None:
                named[name] = flat(state)
                self._check_dtypes(name, named[name])
            elif state:
                raise StateError(
                    f"optimizer.state was given state for a parameter of shape {list(parameter.shape)} that the optimizer does not "
                    "train: add it to a group first, optimizer.add_param_group(); of one that is frozen, use load_state_dict()"
                )
        self._change(lambda: self._take(named, "a replacement in optimizer.state"))

    def _change(self, change: Callable[[], None]) -> None:
        """Make a change of the state in its sections. Raises StateError: it cannot be made."""
        self._session_guard.events.check_to_write()
        self._finish_update()
        self.sync_to_host()
        try:
            with defer_signals, torch.inference_mode(False), torch.no_grad():
                change()
        except ValueError as error:
            raise StateError(f"optimizer.state was not changed: {error}") from error
        finally:
            self.forget_kept()

    def _check_dtypes(self, name: str, state: Mapping[str, object]) -> None:
        """Raise StateError if a tensor has another dtype than the stored one: plain torch would continue with that."""
        for key, value in state.items():
            place = self._places.get((name, key))
            dtype = torch.float32 if self._coded.has(name, key) else None if place is None else place.slot.spec.dtype
            if isinstance(value, torch.Tensor) and dtype is not None and value.dtype != dtype:
                raise StateError(f"optimizer.state keeps {key!r} of {name} as {dtype}, not {value.dtype}: convert it")

    def _copy_of(self, name: str, key: str, group: int) -> torch.Tensor:
        if self._coded.has(name, key):
            self.sync_to_host()
            return self._coded.read(name, key)
        place = self._places[name, key]
        kept = None if self.kept is None else self.kept.read(group, place)
        return copy_of(place, self._pager) if kept is None else kept

    def _make_write(self, name: str, key: str) -> Callable[[torch.Tensor, str], None]:
        """Return a function that writes back a changed copy. A copy that the user keeps must not keep us alive."""
        owner, generation = weakref.ref(self), self._generation

        def write(value: torch.Tensor, how: str) -> None:
            alive = owner()
            if alive is None or alive._generation != generation:
                raise outdated(name, key, how)
            alive._change(lambda: alive._write(name, key, value, f"{how} on optimizer.state"))

        return write

    def _write(self, name: str, key: str, value: torch.Tensor, why: str) -> None:
        """Store `value`. Returned state dicts expire."""
        if self._coded.has(name, key):
            self._coded.check(name, key, value)
            self._coded.write(name, key, value)
            expire(self._shown, why)
            return
        place = self._places[name, key]
        for _, begin, end, view in iter_section_pages(place.section, self._pager, write=True, only=[place.slot]):
            view.copy_(value.reshape(-1)[begin:end])
        expire(self._shown, why)
