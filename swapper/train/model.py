"""One offloaded model and its optimizer: everything that is specific to them, under a manager that owns the resources."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from swapper.core.layout import Slot
from swapper.core.pager import Pager
from swapper.core.schedule import Access
from swapper.core.section import Section
from swapper.errors import DeviceError, StateError
from swapper.interrupts import held_back
from swapper.modules.cold import is_cold
from swapper.modules.groups import Group, changes_itself
from swapper.stats import StepClock
from swapper.train.checkpoint_form import state_dict_of
from swapper.train.conditions import Conditions
from swapper.train.content import Content
from swapper.train.deferred import DeferredStep
from swapper.train.device_group import DeviceGroupParameters
from swapper.train.device_sweep import DeviceSweep
from swapper.train.during_backward import StepInBackward
from swapper.train.entries import PAGED, StateEntries
from swapper.train.gathering import Gathering
from swapper.train.grads import Gradients
from swapper.train.hooks import Hooks
from swapper.train.initial import Values
from swapper.train.inventory import Inventory, find_places, find_trainables
from swapper.train.kept_state import KeptState
from swapper.train.loading import LoadHooks
from swapper.train.on_device import OnDevice
from swapper.train.optim import packed_groups
from swapper.train.shadow import Shadow
from swapper.train.shown_parameters import ShownParameters
from swapper.train.spare import find_rooms
from swapper.train.state_dicts import StateDicts
from swapper.train.state_view import StateView
from swapper.train.storage import GroupParameters
from swapper.train.sweep import Sweep, Trainable
from swapper.train.updates import Updates
from swapper.train.visit import fill


class OffloadedModel:
    """Moves a model's parameters and its optimizer's state to their sections, and puts the hooks in.

    Args:
        model, optimizer: the user's.
        inventory: what they consist of.
        sections: param and state sections, with memory.
        grad_sections: of gradients; those that are resident get their memory before `start`.
        pager: what leases go to.
        page_bytes: size of a page.
        clock: is told what phase a step is in; has the counters to keep.
        enter: called first whenever the user comes in; raises if the manager cannot be used.
        enter_to_write: the same, where parameters or state are about to be changed from outside.
        update: when parameters are updated.
        begin_step: called before a backward updates the first group of a step.
        undo: called with sections and an error when updates outside of `optimizer.step()` fail; has the sections as they were
            before their step, so many after the last one that was counted, and returns whether it could.
        on_device: where forwards and backwards run on an accelerator.
    """

    advice = (
        "Look at it inside `with manager.gather(module_or_parameters):` (write=True to change it); deepcopy() works there "
        "too. model.state_dict() and load_state_dict() work anywhere; manager.snapshot(path) keeps the whole state in a file "
        "that plain torch.load reads. .to(), .half() and the like cannot be applied after offload: apply them before."
    )

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        inventory: Inventory,
        sections: list[Section],
        grad_sections: list[Section],
        pager: Pager,
        page_bytes: int,
        clock: StepClock,
        enter: Callable[[], None],
        enter_to_write: Callable[[], None],
        update: str,
        begin_step: Callable[[], None],
        undo: Callable[[list[Section], BaseException, int], bool],
        on_device: OnDevice | None,
    ) -> None:
        self.model = model
        self._on_device = on_device
        self._inventory = inventory
        self._pager = pager
        self._page_bytes = page_bytes
        self._clock = clock
        self._enter = enter
        self._enter_to_write = enter_to_write
        self._optimizer = optimizer
        self._state_sections = [section for section in sections if section.plan.family == "state"]
        self._sections = sections
        self._grad_sections = grad_sections
        self._places = find_places(inventory, [*sections, *grad_sections])
        self._trainables = find_trainables(inventory, self._places)
        self.entries = StateEntries(inventory.forms)
        parts = (
            self._trainables, Shadow(optimizer), self.entries, pager, page_bytes, clock.counters,
            lambda parameter, gradient, begin, end: self.gradients.part(parameter, gradient, begin, end), self._make_ready,
        )  # fmt: skip
        self._sweep = Sweep(*parts)
        self._kept_state: KeptState | None = None
        if on_device is not None and on_device.updates:
            self._kept_state = KeptState(
                (t for t in self._trainables if t.group in inventory.staying_state), on_device, pager
            )
            self._sweep = DeviceSweep(
                on_device, lambda parameter: self.gradients.paged.where(parameter), self._kept_state, *parts
            )
        self._conditions = Conditions(inventory, self._trainables, self.entries)
        self._names = {id(p): name for group in inventory.groups for name, p in group.parameters}
        self._group_of = {id(p): group.index for group in inventory.groups for _, p in group.parameters}
        groups_by_name = {name: group.index for group in inventory.groups for name, _ in group.parameters}
        self._shown = ShownParameters(self._places, groups_by_name, pager)
        self.groups: list[GroupParameters] = []
        self.gathering = Gathering(self.groups, self._refresh_masters)
        self.state_view = StateView(self._with_state, self._read_state)
        self._hooks: Hooks | None = None
        self._load_hooks: LoadHooks | None = None
        self._gradients: Gradients | None = None
        self._original_guard: Any = None
        self._undo = undo
        self._begin_step = begin_step
        self.updates: Updates = Updates(self._sweep)
        if update == "deferred":
            self.updates = DeferredStep(self._sweep, self.groups, self._undo_update)
        elif update == "backward":
            self.updates = StepInBackward(
                self._sweep, self.groups, self._begin_early, self._undo_update, enter, self._have_arrived
            )
        self._changes_itself = changes_itself(model)
        self.changed_in_pass: Callable[[], None] = lambda: None  # to be told when a forward has changed parameters
        self._before: tuple[list[dict[str, Any]], dict[str, Any]] | None = (
            None  # settings and entries before the last step
        )

    def adopt(self, content: Content | None) -> None:
        """Move everything to its place, group by group.

        Args:
            content: fills the places. None where a run goes on: they have their content already, and the model's values are
                dropped.
        """
        order = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        self._numbers = {id(parameter): number for number, parameter in enumerate(order)}
        trained = {id(parameter) for parameter, _ in self._trained()}
        self._untrained = [parameter for parameter in order if id(parameter) not in trained]
        self._state_dicts = StateDicts(
            list(self._trained()),
            self._numbers,
            self.entries,
            self._inventory.forms,
            self._places,
            self._state_sections,
            self._pager,
        )
        self._original_guard = self._optimizer.register_step_pre_hook(self._refuse_original)
        state_sections: dict[int, list[Section]] = {}
        for section in self._state_sections:
            state_sections.setdefault(section.plan.group, []).append(section)
        for group in self._inventory.groups:
            if content is not None:
                content.begin(group.parameters)
                for section in state_sections.get(group.index, ()):
                    fill(section, self._pager, content)
            for name, parameter in group.parameters:
                if content is not None and name in self.entries:
                    self.entries.take(name, content.state(name))
                self._optimizer.state.pop(parameter, None)
            places = [
                (self._places[name, "param"].section, self._places[name, "param"].slot) for name, _ in group.parameters
            ]
            parameters = self._group(group, places)
            self.groups.append(parameters)
            parameters.adopt(content)
        if content is not None:
            content.begin(())

    def _group(self, group: Group, places: Sequence[tuple[Section, Slot]]) -> GroupParameters:
        expire = partial(self._shown.expire, group=group.index)
        if self._on_device is None:
            return GroupParameters(group, places, self._pager, self, expire)
        return DeviceGroupParameters(group, places, self._pager, self, expire, self._on_device)

    def restore_settings(self, param_groups: list[dict[str, Any]]) -> None:
        """Give the optimizer's groups the settings of a run that goes on."""
        for ours, saved in zip(self._optimizer.param_groups, param_groups, strict=True):
            ours.update({key: value for key, value in saved.items() if key != "params"})

    def packed_groups(self) -> list[dict[str, Any]]:
        """Return a copy of the optimizer's groups in torch's packed form."""
        return copy.deepcopy(packed_groups(self._optimizer.param_groups))

    def start(self) -> None:
        """Gradients get their places, and the hooks are put in."""
        parameters = [entry for group in self._inventory.groups for entry in group.parameters]
        rooms = find_rooms(self._sections, self._grad_sections) if self._on_device is None else {}
        self._gradients = Gradients(
            parameters, self._grad_sections, self._pager, rooms, self._on_device, self._kept_gradients()
        )
        self._gradients.paged.finish_update = self.finish_update
        units = self._inventory.units
        self._hooks = Hooks(units, self.groups, self._enter_forward, self._drop_leases, self._clock.enter, self.updates)
        if self._on_device is not None:
            self._hooks.check_inputs = self._on_device.check_inputs
        self._load_hooks = LoadHooks(units, self.groups, self._enter_to_write, self._refresh_masters)
        self.updates.watch(parameter for parameter, _ in self._trained())
        if self._on_device is not None:
            self._on_device.start()

    def _kept_gradients(self) -> frozenset[str]:
        """Names of the parameters whose gradients stay on the device."""
        kept = self._on_device.kept_gradients if self._on_device is not None else ()
        return frozenset(s.spec.owner for p in self._inventory.grad_plans if p.group in kept for s in p.slots)

    def initialise(self, values: Values) -> None:
        """Give a model that was on the meta device its first values, group by group."""
        for group in self.groups:
            missing = values.missing(group.parameters)
            if missing:
                with self.gathering.gather(values.owners(missing), write=True):
                    values.fill(missing)
        values.finish()

    def move_buffers(self) -> None:
        """What the model has besides parameters is whole: it goes where forwards run."""
        if self._on_device is not None:
            self._on_device.move(self.model)

    def _enter_forward(self) -> None:
        is_backward = torch._C._current_graph_task_id() != -1  # or a forward within one
        if is_backward:
            self.finish_update(in_order=True)
        else:
            self.updates.pass_begins()
        if self._changes_itself and not is_backward:
            self._enter_to_write()
        self._enter()
        if self._gradients is not None and not is_backward:
            self._gradients.entered()
        if self._on_device is not None and not is_backward and not self.pass_is_open:
            self._on_device.pass_begins()

    @property
    def gradients(self) -> Gradients:
        if self._gradients is None:
            raise StateError("the model is not offloaded yet")
        return self._gradients

    # --- what a step does -----------------------------------------------------------------------------------------

    @property
    def has_more_to_train(self) -> bool:
        """Whether a parameter in the optimizer's groups has a gradient but no place for its state: it was frozen."""
        return any(parameter.grad is not None for parameter in self._untrained)

    def check_step(self) -> None:
        """Raise StateError if a step cannot be taken as plain torch would. See Conditions."""
        if not self.updates.has_begun_early:
            self._conditions.check_step()

    def update(self) -> None:
        """Apply the optimizer to every parameter that has a gradient; where updates are deferred, fix what is to be done."""
        if not self.updates.has_begun_early:
            self._note_before()
        elif self._before is not None:
            self._before = self.packed_groups(), self._before[1]
        self.gradients.before_step()
        self.updates.take_step()
        if self._on_device is not None:
            self._on_device.after_update()

    def _make_ready(self, trainable: Trainable) -> None:
        """A group is about to be updated: see Sweep."""
        self.gradients.paged.settle(trainable.parameters)
        if self._on_device is not None:
            self._on_device.before_update(trainable.group)

    def _have_arrived(self, trainable: Trainable) -> bool:
        """Whether an update need not wait for gradients."""
        return self.gradients.paged.have_arrived(trainable.parameters)

    def _note_before(self) -> None:
        self._state_dicts.expire("the next step")
        self._shown.expire("the next step")
        self._before = self.packed_groups(), self.entries.pack()

    def _begin_early(self) -> bool:
        """A backward is about to update the first group of a step. Returns False where everything must wait for the step."""
        more_to_train = any(parameter.requires_grad for parameter in self._untrained)
        if self.gathering.is_open or more_to_train or self._conditions.all_gradients_matter:
            return False
        self._conditions.check_settings()
        self._begin_step()
        self._note_before()
        return True

    @property
    def update_is_open(self) -> bool:
        """Whether updates of the last step are still to be done."""
        return self.updates.is_open

    @property
    def packed_entries(self) -> dict[str, Any]:
        """What the optimizer's state of each parameter has, for a commit."""
        return self.entries.pack()

    def finish_update(self, in_order: bool = False) -> None:
        """Do the updates of the last step that are still to be done, if any.

        Raises:
            IoError: a transfer failed; see `undo`.
            StateError: a step was begun in backward.
        """
        self.updates.finish(in_order)

    def bring_state_home(self) -> None:
        """Somebody looks at the places of the optimizer's state: have there what stays on the device.

        Raises:
            IoError, DeviceError: it could not be copied.
        """
        if self._kept_state is not None:
            self._kept_state.bring_home()

    def _forget_kept_state(self) -> None:
        """The places of the optimizer's state have what counts."""
        if self._kept_state is not None:
            self._kept_state.forget()

    def step_undone(self) -> None:
        """All sections are as they were before the last step: so be the rest."""
        self._forget_kept_state()
        if self._before is not None:
            settings, entries = self._before
            self.restore_settings(settings)
            self.entries.unpack(entries)
        self.updates.forget()
        self._sweep.abandon()

    def _undo_update(self, groups: Collection[int], error: BaseException) -> bool:
        """See Undo."""
        self.abandon_pass()
        self._drop_leases([access for parameters in self.groups for access in parameters.holds])
        if not groups:
            return True
        sections = [section for section in self._sections if section.plan.group in groups]
        if self._before is None or not self._undo(sections, error, self.updates.ahead):
            return False
        self._forget_kept_state()
        self.entries.unpack(self._before[1], {n for g in groups for n, _ in self.groups[g].group.parameters})
        return True

    @property
    def pass_is_open(self) -> bool:
        """Whether a forward or a backward has groups leased."""
        return self._hooks is not None and self._hooks.pass_is_open

    def abandon_pass(self) -> None:
        """Forget a forward, a backward or a load_state_dict that never ended."""
        self.updates.pass_begins()
        if self._hooks is not None and self._load_hooks is not None:
            self._load_hooks.forget()
            self._hooks.abandon_pass()

    def _drop_leases(self, kept: Iterable[Access]) -> None:
        """All leases of passes are gone, and so are those of copies, which are waited for."""
        with contextlib.suppress(DeviceError):
            self._sweep.settle()
        if self._on_device is not None:
            self._on_device.finish()
            self._on_device.forget_uses()
        self._pager.drop_leases(kept)

    def _refuse_original(self, optimizer: Optimizer, *_: Any) -> None:
        """A step hook, which both optimizers share."""
        if optimizer is self._optimizer:
            raise StateError(
                "this optimizer's state was taken over by manager.offload: step the one that it returned, "
                "`model, optimizer = manager.offload(model, optimizer)`"
            )

    # --- looking at it --------------------------------------------------------------------------------------------

    def bring(self, parameter: nn.Parameter) -> bool:
        """A cold parameter is touched: see Hooks.bring."""
        self._enter()
        self.catch_up(parameter)
        if not is_cold(parameter):
            return True
        return self._hooks is not None and self._hooks.bring(parameter)

    def catch_up(self, parameter: nn.Parameter) -> None:
        """A parameter in memory is cold while its update is still to be done: do it."""
        group = self.groups[self._group_of[id(parameter)]]
        if group.catch_up is not None and not group.paged:
            group.catch_up(None)

    def detached(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """For state_dict: the parameter as the swap file is mapped. Within a forward it is brought in instead."""
        if self.gathering.is_closed or self.bring(parameter):
            return None
        self.finish_update()
        return self._shown.show(self._names[id(parameter)])

    def indexed(self, parameter: nn.Parameter, index: Any) -> torch.Tensor | None:
        return None

    def note_change(self, group: GroupParameters, names: list[str]) -> None:
        """A module's forward changed its own parameters. Masters cannot follow in the middle of a pass.

        From now on a step is committed before the next forward begins.
        """
        self._changes_itself = True
        self.changed_in_pass()
        mastered = {places.name for _, places in self._trained() if places.has_master}
        for name in names:
            if name in mastered:
                raise StateError(
                    f"parameter {name} was changed in a forward or backward, and its fp32 master would not follow: change it "
                    "inside `with manager.gather(..., write=True)`, or offload with master_weights=None"
                )

    def describe(self, parameter: nn.Parameter) -> str:
        return self._names[id(parameter)]

    def checkpoint(self) -> dict[str, Any]:
        """Return the state in the form of a checkpoint. Its tensors alias the sections: look at their place, not at their data."""
        placed = None if self._on_device is None else self._placed
        content: dict[str, Any] = {"model": state_dict_of(self.model, placed)}
        masters = {
            places.name: self._alias(places.name, "master") for _, places in self._trained() if places.has_master
        }
        content["optimizer"] = {
            "state": self._state_dicts.in_torch_order(self._alias),
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
        self.updates.remove()
        if self._gradients is not None:
            self._gradients.remove()
        if self._original_guard is not None:
            self._original_guard.remove()
        if self._on_device is not None:
            self._on_device.finish()
        self._sweep.abandon()
        for group in self.groups:
            group.abandon(keep_cold)
        if self._kept_state is not None:
            self._kept_state.close()
        if self._on_device is not None:
            self._on_device.close()

    def part(self, why: str) -> None:
        """Another takes this one's place: leave the parameters without data, and refuse what an old graph still asks for.

        Args:
            why: whole sentence, for the error.
        """

        def refuse() -> None:
            raise StateError(why)

        self._state_dicts.expire("more is trained")
        self._shown.expire("more is trained")
        self.close(keep_cold=False)
        self._enter = self._enter_to_write = refuse
        for group in self.groups:
            group.part()

    # --------------------------------------------------------------------------------------------------------------

    def _alias(self, name: str, kind: str) -> torch.Tensor:
        """Return the tensor at its place, which may be away."""
        place = self._places[name, kind]
        return place.section.tensor(place.slot)

    def _placed(self, parameter: int) -> torch.Tensor | None:
        """Return the tensor at a parameter's place, given its id."""
        name = self._names.get(parameter)
        return None if name is None else self._alias(name, "param")

    def _trained(self) -> Iterator[tuple[nn.Parameter, Any]]:
        for trainable in self._trainables:
            yield from zip(trainable.parameters, trainable.places, strict=True)

    def _refresh_masters(self, groups: Iterable[GroupParameters]) -> None:
        indices = {group.group.index for group in groups}
        for trainable in self._trainables:
            if trainable.group in indices and any(places.has_master for places in trainable.places):
                self._sweep.refresh_masters(trainable)

    def _with_state(self) -> list[torch.Tensor]:
        """Return the parameters that the optimizer keeps something for, in the order of its groups."""
        self.finish_update()
        found = [(self._numbers[id(p)], p) for p, places in self._trained() if self.entries[places.name]]
        return [parameter for _, parameter in sorted(found, key=lambda pair: pair[0])]

    def _read_state(self, parameter: torch.Tensor) -> dict[str, Any]:
        """Return a copy of one parameter's state."""
        self._enter()
        self.finish_update()
        name = self._names[id(parameter)]
        state: dict[str, Any] = {}
        for key, value in self.entries[name].items():
            state[key] = copy.deepcopy(value)
            if value is PAGED:
                place = self._places[name, key]
                kept = None if self._kept_state is None else self._kept_state.read(self._group_of[id(parameter)], place)
                if kept is not None:
                    state[key] = kept
                    continue
                access = Access(None, tuple(place.pages(0, place.slot.spec.numel)))
                with held_back:
                    self._pager.acquire(access)
                    state[key] = place.section.tensor(place.slot).clone()
                    self._pager.release(access)
        return state

    def save_state(self) -> dict[int, dict[str, Any]]:
        self._enter()
        self.finish_update()
        self.bring_state_home()
        return self._state_dicts.show()

    def load_state(self, state: dict[int, dict[str, Any]]) -> None:
        self._enter_to_write()
        self.bring_state_home()
        try:
            self._state_dicts.take(state)
        finally:
            self._forget_kept_state()
