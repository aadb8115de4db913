"""Owns one offloaded model and its optimizer: constructs and closes their parts, within a session that owns the resources.

The parts: optimizer state (optimizer_state.py), the fault handler of parameters (fault_handler.py), updates (executor.py)
and their rollback (step_rollback.py), gradients (grads.py), passes (pass_lifecycle.py).
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from swapper import _C
from swapper.errors import StateError
from swapper.modules.cold import follow
from swapper.modules.groups import Group, changes_itself
from swapper.modules.home import GroupHome, HostHome
from swapper.modules.own_hook import outside_transforms
from swapper.paging.pager import Pager
from swapper.paging.planning.layout import Slot
from swapper.paging.residency import DIRTY, WRITING
from swapper.paging.section import EXTERNAL, Page, Section, pieces_of
from swapper.runtime.counters import Counters
from swapper.tensors.torch_private import without_torch_functions
from swapper.train.gradients.grads import Gradients, find_regions, is_gradient_aliased
from swapper.train.groups.parameter_group import GroupParameters
from swapper.train.groups.session_guard import SessionGuard
from swapper.train.groups.train_device import TrainingDevice
from swapper.train.layout.content import SectionSource, fill
from swapper.train.layout.initial import Values
from swapper.train.layout.inventory import find_places, find_trainables
from swapper.train.layout.model_checks import find_shared_attributes
from swapper.train.layout.slices import GroupUpdate, ParameterLocations, Trainable
from swapper.train.optimizer.optimizer_proxy import OptimizerProxies
from swapper.train.passes.accumulation_pass import AccumulationOrder
from swapper.train.passes.fault_handler import ParameterFaultHandler
from swapper.train.passes.gathering import Gathering, Masters
from swapper.train.passes.given_model import HookTargets
from swapper.train.passes.pass_lifecycle import PassLifecycle
from swapper.train.passes.preparation import ModelBinding
from swapper.train.planning.plan import Plan
from swapper.train.session.session_events import SessionEvents
from swapper.train.state.conditions import Conditions, Membership, averaging_refused
from swapper.train.state.optim import OtherOptimizers
from swapper.train.state.optimizer_state import OptimizerState
from swapper.train.steps.executor import UpdateExecutor
from swapper.train.steps.policies import POLICIES
from swapper.train.steps.step_rollback import StepRollback
from swapper.train.updates.device_sweep import DeviceSweep
from swapper.train.updates.sweep import Sweep

log = logging.getLogger("swapper")


class OffloadedModel:
    """Moves a model's parameters and its optimizer's state to their sections, and installs the hooks.

    Args:
        plan: of the session; has the user's model and optimizer.
        sections: param and state sections, with memory.
        grad_sections: of gradients; resident ones get their memory before `start`.
        current: the manager's slot for sessions.

    Attributes:
        fault_handler: answers accesses to cold parameters.
        updates: decides when groups are updated.
    """

    def __init__(
        self,
        plan: Plan,
        sections: list[Section],
        grad_sections: list[Section],
        pager: Pager,
        current: SessionEvents,
        on_device: TrainingDevice | None,
    ) -> None:
        inventory, model, optimizers = plan.inventory, plan.request.model, plan.request.optimizers
        session_guard = SessionGuard(
            current.check, current.check_to_write, current.turns, plan.request.manager.operates
        )
        self.model = model
        self._clock = current.clock
        self._binding: ModelBinding | None = None
        self._has_warned = False
        self._update = plan.request.options.update
        self._on_device = on_device
        self._kernel = plan.request.kernel
        self._inventory = inventory
        self._pager = pager
        self._session_guard = session_guard
        self._optimizers = optimizers
        self._sections = sections
        self._grad_sections = grad_sections
        self._places = find_places([*sections, *grad_sections])
        self._trainables = find_trainables(inventory, self._places)
        self._names = inventory.names
        self._membership = Membership(optimizers, self._trainables, self._names, inventory.optimizer_of)
        state_sections = [section for section in sections if section.plan.family == "state"]
        self.optimizer_state = OptimizerState(
            self._membership, inventory, self._trainables, self._places, state_sections, pager, session_guard, self.settle_update,
            on_device, plan.request.manager.drives.directories[0],
        )  # fmt: skip
        if self._update == "backward":
            self.optimizer_state.hidden = (
                "update='backward' has used the gradients up when it begins. Offload with update='step'"
            )
        self._sweep = self._make_sweep(plan.budget.page_bytes, current.clock.counters)
        self._conditions = Conditions(inventory, self._trainables, self._membership, self.optimizer_state.entries)
        self.groups: list[GroupParameters] = []
        self._masters = Masters(self._sweep, pager, current.fail_change)
        self.gathering = Gathering(self.groups, self._masters, session_guard.turns, pager.check_room)
        self.fault_handler = ParameterFaultHandler(
            inventory, self._trainables, self.groups, self._places, pager, session_guard, self.gathering, self.finish_update,
            changes_itself(model.module), current.changed_in_pass,
        )  # fmt: skip
        self._gradients: Gradients | None = None
        self._passes: PassLifecycle | None = None
        self._other_optimizers = OtherOptimizers(plan.request.given_optimizers, model.names_of_given(self._names))
        self._rollback = StepRollback(optimizers, self.optimizer_state, sections, current.undo_update)
        self._begin_step = current.begin_step
        self._current = current
        self._lose_ranks = current.lose_ranks
        self._ranks = current.directory.ranks
        self.updates = UpdateExecutor(POLICIES[self._update], self._sweep, self.groups, self)

    def _make_sweep(self, page_bytes: int, counters: Counters) -> Sweep:
        entries, kept_state = self.optimizer_state.entries, self.optimizer_state.kept
        parts = (
            self._trainables, OptimizerProxies(self._optimizers), entries, self._pager, page_bytes, counters,
            lambda parameter, gradient, begin, end: self.gradients.part(parameter, gradient, begin, end), self._make_ready,
        )  # fmt: skip
        if self._on_device is None or kept_state is None:
            return Sweep(*parts)
        where, kernel = lambda parameter: self.gradients.paged.where(parameter), self._kernel
        return DeviceSweep(self._on_device, where, kept_state, kernel, *parts)

    def adopt(self, content: SectionSource | None) -> None:
        """Move everything to its sections, group by group.

        Args:
            content: fills the sections. None if they have their content already: the model's values are dropped.
        """
        self._warn_of_strides()
        follows = self._on_device is None and not self.model.is_sharded
        attributes = find_shared_attributes(self.model.module) if follows else []
        state_sections: dict[int, list[Section]] = {}
        for section in self._sections:
            if section.plan.family == "state":
                state_sections.setdefault(section.plan.group, []).append(section)
        for group in self._inventory.groups:
            if content is not None:
                content.begin(group.parameters)
                for section in state_sections.get(group.index, ()):
                    fill(section, self._pager, content)
            for name, parameter in group.parameters:
                if content is not None and name in self.optimizer_state.entries:
                    self.optimizer_state.begin(name, content.state(name))
                self._optimizers.drop_state(parameter)
            parameters = self._make_group(group)
            self.groups.append(parameters)
            parameters.adopt(content)
        if content is not None:
            content.begin(())
        for shared in attributes:
            follow(shared.tensor, shared.parameter, shared.offset)
        for parameters in self.groups:
            if parameters.paged:  # its views are ColdViews
                parameters.note_uses()

    def _warn_of_strides(self) -> None:
        """Log a warning for parameters that are not contiguous: in their sections all are."""
        strided = [
            name
            for group in self._inventory.groups
            for name, p in group.parameters
            if not p.is_contiguous() and p.untyped_storage().nbytes() > p.element_size()  # else detached by a relayout
        ]
        if strided:
            log.warning(
                "offload: %s%s not contiguous (channels_last, transposed, expanded), and will be: everything is as in plain torch "
                "after `parameter.data = parameter.data.contiguous()`, and in the last bits perhaps not as before that",
                ", ".join(strided[:3]), " is" if len(strided) == 1 else f" ({len(strided)} in all) are",
            )  # fmt: skip

    def _make_group(self, group: Group) -> GroupParameters:
        locations = [self._places[name, "param"] for name, _ in group.parameters]
        places = [(location.section, location.slot) for location in locations]
        expire = partial(self.fault_handler.shown.expire, group=group.index)
        home, tensors = (
            self._host_home(group, places) if self._on_device is None else self._on_device.home(group, places)
        )
        return GroupParameters(group, places, home, tensors, self._pager, self.fault_handler, expire)

    def _host_home(self, group: Group, places: Sequence[tuple[Section, Slot]]) -> tuple[GroupHome, list[torch.Tensor]]:
        pages = [page for section in dict.fromkeys(section for section, _ in places) for page in section.pages]
        return HostHome(self._pager, group.index, pages), [section.own_tensor(slot) for section, slot in places]

    def start(self) -> None:
        """Construct the gradients, and install the hooks."""
        parameters = [entry for group in self._inventory.groups for entry in group.parameters]
        order = AccumulationOrder(self.model.module)  # before all other hooks of the parameters
        regions = find_regions(self._sections, self._grad_sections) if self._on_device is None else {}
        kept = self._kept_gradients()
        self._gradients = Gradients(
            parameters, self._grad_sections, self._pager, regions, self.finish_update, self._on_device, kept
        )
        without_averaging = averaging_refused(
            self._update, gradients_leave=self._on_device is not None and bool(self._grad_sections)
        )
        self._passes = PassLifecycle(
            self._inventory, self.groups, self.updates, self._sweep, self._pager, self.fault_handler, self._session_guard,
            self._clock, self._on_device, self._gradients, self._masters, order, without_averaging,
        )  # fmt: skip
        self._binding = self.model.bind(
            HookTargets(
                fault_handler=self.fault_handler,
                groups=self.groups,
                place=lambda name: self._places[name, "param"],
                kept_gradients=self._kept_gradients(),
                without_averaging=without_averaging,
                updates=self.updates,
                enter_forward=self._passes.enter_forward,
                enter_phase=self._clock.enter,
                finish=self._make_finish(),
                lose_ranks=self._lose_ranks,
            )
        )
        self.updates.watch(parameter for parameter, _ in self._trained())
        if self._on_device is not None:
            self._on_device.start()

    def _kept_gradients(self) -> frozenset[str]:
        """Return the names of the parameters whose gradients stay autograd's own."""
        placed = {slot.spec.owner for section in self._grad_sections for slot in section.plan.slots}
        trained = {slot.spec.owner for plan in self._inventory.grad_plans for slot in plan.slots}
        return frozenset(trained - placed)

    def initialize(self, values: Values) -> None:
        """Fill a model that was on the meta device with its initial values, group by group."""
        for parameters, needed in values.batches(self._inventory.groups):
            with self.gathering.gather(needed, write=True):
                values.fill(parameters)
        values.finish()
        self._check_external()

    def _check_external(self) -> None:
        """Raise StateError if `init` has changed external parameters."""
        for section in self._sections:
            if section.plan.external is not None and any(map(self._is_changed, pieces_of(section))):
                names = ", ".join(slot.spec.owner for slot in section.plan.slots)
                raise StateError(f"init= changed {names}, which external= has: let the function leave them as they are")

    def _is_changed(self, page: Page) -> bool:
        """Return True if an external page was written to."""
        if page.location != EXTERNAL or page.residency in (DIRTY, WRITING):
            return True
        memory = page.section.memory if page.section.resident else None
        return memory is not None and _C.crc32_address(memory.data_ptr(), page.stored_bytes) != page.crc32

    def move_buffers(self) -> None:
        """Move the model's buffers to the accelerator, if any, after their initial values."""
        if self._on_device is not None:
            self._on_device.move(self.model.module)

    @property
    def gradients(self) -> Gradients:
        if self._gradients is None:
            raise StateError("the model is not offloaded yet")
        return self._gradients

    @property
    def passes(self) -> PassLifecycle:
        if self._passes is None:
            raise StateError("the model is not offloaded yet")
        return self._passes

    def named_given_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters that the user sees, with their names."""
        names = self.model.names_of_given(self._names)
        return ((names[id(parameter)], parameter) for parameter in self.model.given.parameters())

    def restore_groups(self, settings: list[dict[str, Any]], members: Sequence[Sequence[str]] | None) -> None:
        """Restore the optimizers' groups from a commit: settings and, if the run has edited them, members by name."""
        self._rollback.restore_settings(settings)
        if members is not None:
            parameters = {name: p for group in self._inventory.groups for name, p in group.parameters}
            for group, names in zip(self._optimizers.param_groups, members, strict=True):
                group["params"] = [parameters[name] for name in names]

    # --- a step; also what UpdateOwner declares ----------------------------------------------------------------------

    @property
    def fails_at_step(self) -> bool:
        return self.model.is_sharded

    def check_usable(self) -> None:
        self._session_guard.check()

    @property
    def has_more_to_train(self) -> bool:
        """True if a parameter in the optimizers' groups has a gradient but no space for state: it was frozen."""
        return any(parameter.grad is not None for parameter in self._membership.untrained)

    def follow_groups(self) -> None:
        """Follow edits of `optimizer.param_groups`, before a step. See Membership.

        Raises:
            StateError: an edit cannot be followed.
        """
        if self._binding is not None:
            self._binding.follow_gradients()
        if not self.updates.has_begun_early:
            if self.updates.is_open and self._membership.is_outdated:
                self.finish_update(in_order=True)  # another optimizer's step, of the groups before
            self._membership.follow()

    def check_step(self, member: int) -> None:
        """Raise StateError if an optimizer's step cannot be taken exactly as plain torch would.

        See Conditions and Gradients.check.
        """
        names = self.names_of([member])
        self.gradients.check((places.name, p) for p, places in self._trained() if places.name in names)
        if not self.updates.has_begun_early:
            self._conditions.check_step(self._optimizers.ranges[member])

    def before_update(self) -> None:
        """Prepare for `updates.take_step`, which `after_update` follows."""
        if not self.updates.has_begun_early:
            self._note_before()
        else:
            self._rollback.note_settings()
        self.gradients.paged.before_step()

    def after_update(self) -> None:
        """Note that an optimizer's step was taken."""
        if self._on_device is not None:
            self._on_device.after_update()

    def _make_ready(self, update: GroupUpdate) -> None:
        """Prepare the update of a group. See Sweep."""
        self.gradients.make_ready(update.trainable.parameters, update.gradients)
        if self._on_device is not None:
            self._on_device.before_update(update.trainable.group)

    def have_arrived(self, trainable: Trainable) -> bool:
        return self.gradients.paged.have_arrived(trainable.parameters)

    def _note_before(self) -> None:
        self.optimizer_state.expire("the next step")
        self.fault_handler.shown.expire("the next step")
        self._rollback.note()

    def begin_early(self) -> bool:
        if not self._agree_to_begin(self._may_begin_early):
            return False
        self._begin_step()
        self._note_before()
        return True

    def _may_begin_early(self) -> bool:
        self.follow_groups()
        more_to_train = any(parameter.requires_grad for parameter in self._membership.untrained)
        if (
            self.gathering.is_open
            or more_to_train
            or self._conditions.all_gradients_matter
            or self._shown_shard() is not None
        ):
            return False
        if self._current.training_step.is_open:
            return False
        self._conditions.check_settings()
        return True

    def _agree_to_begin(self, may: Callable[[], bool]) -> bool:
        """Return True if `may` does, on all ranks of a sharded model: those that begin wait for each other."""
        if not self.model.is_sharded:
            return may()
        return all(self._ranks.settle("begin a step in backward", may, bool, each_step=True)[1])

    @property
    def update_is_open(self) -> bool:
        """True if the last step is not finished."""
        return self.updates.is_open

    def finish_update(self, in_order: bool = False) -> None:
        """Finish the last step, if deferred updates of it are left.

        Raises:
            IoError: a transfer failed; see StepRollback.
            StateError: a step was begun in backward.
        """
        self.updates.finish(in_order)
        for group in self.groups:
            if group.may_be_assigned:
                group.take_in_assigned()

    def settle_update(self) -> None:
        """Finish the last step, and wait until its results are in host memory. Raises as `finish_update`, or DeviceError."""
        self.finish_update()
        self._sweep.settle()

    def sync_to_host(self) -> None:
        """Have all parameters and state at their places in host memory, also what was updated on the device.

        Raises:
            IoError: a page could not be read or written.
            DeviceError: the device failed.
        """
        self._sweep.settle()
        self.optimizer_state.sync_to_host()

    def _make_finish(self) -> Callable[[], None]:
        """Return a function that finishes the last step before the user looks at shards. It keeps nothing alive."""
        of = weakref.ref(self)

        def finish() -> None:
            model = of()
            if model is not None and vars(model):  # else it is closed
                with model._session_guard.turns.turn(), outside_transforms():
                    model._session_guard.check()
                    model.finish_update()

        return finish

    def may_defer(self, member: int) -> bool:
        shown = self._shown_shard() or self._find_aliased(self._trainables, self._sweep.groups_of(member))
        if shown is not None:
            self._warn_of_alias(shown)
        return shown is None

    def _shown_shard(self) -> str | None:
        shown = None if self._binding is None else self._binding.shown()
        if shown is not None:
            self._warn_of_alias(shown)
        return shown

    def _find_aliased(self, trainables: Iterable[Trainable], groups: range) -> str | None:
        """Return the name of a parameter in these groups of the optimizers to whose memory, or gradient's, something refers."""
        if self.model.is_sharded:
            return None
        with without_torch_functions():
            for trainable in trainables:
                aliased = set(self.groups[trainable.group].aliased())
                members = zip(trainable.parameters, trainable.places, trainable.settings, strict=True)
                for parameter, places, number in members:
                    if number not in groups or parameter.grad is None:
                        continue
                    if places.name in aliased or is_gradient_aliased(parameter.grad):
                        return places.name
        return None

    def _warn_of_alias(self, name: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "a tensor or an array shares the memory of parameter %s or of its gradient (.data, a view, to_local, a state_dict "
                "that is kept, a graph without its backward): as long as there is one, steps are done whole in optimizer.step()",
                name,
            )  # fmt: skip

    def step_undone(self) -> None:
        """Restore the rest, after all sections were restored to the state before the last step."""
        self._rollback.undo_step()
        self.updates.forget()
        self._sweep.abandon()

    def is_aliased(self, trainable: Trainable) -> bool:
        return self._find_aliased([trainable], self._sweep.all_groups) is not None

    def undo_update(self, updates: Collection[GroupUpdate], error: BaseException) -> bool:
        self.passes.forget_leases()
        names = {name for update in updates for name in update.names}
        return not names or self._rollback.undo_updates(names, error, self.updates.ahead)

    def names_of(self, members: Collection[int]) -> set[str]:
        """Return the names of the trained parameters in the groups of these optimizers."""
        numbers = {number for member in members for number in self._optimizers.ranges[member]}
        pairs = (zip(of.places, of.settings, strict=True) for of in self._trainables)
        return {places.name for pair in pairs for places, at in pair if at in numbers}

    def sections_of(self, member: int) -> list[Section]:
        """Return the sections that an optimizer's step changes."""
        return self._rollback.sections_of(self.names_of([member]))

    def members_of(self, sections: Iterable[Section]) -> set[int]:
        """Return the optimizers of the parameters in these sections."""
        owners = {slot.spec.owner for section in sections for slot in section.plan.slots}
        return {member for member in range(len(self._optimizers.members)) if owners & self.names_of([member])}

    # --- closing ------------------------------------------------------------------------------------------------------

    def checkpoint(self) -> dict[str, Any]:
        """Return the state in the form of a checkpoint. Its tensors alias the sections, whose data may be cold."""
        placed = None if self._on_device is None else self._placed
        content: dict[str, Any] = {"model": self.model.state_dict(placed)}
        with_masters = [places.name for _, places in self._trained() if places.has_master]
        masters = {name: self.optimizer_state.stored(name, "master") for name in with_masters}
        packed = [
            self.model.optimizer_state_dict(member, self.optimizer_state.at_its_place(self._optimizers.numbers(number)))
            for number, member in enumerate(self._optimizers.members)
        ]
        content["optimizer"] = packed if len(packed) > 1 else packed[0]
        if masters:
            content["master"] = masters
        return content

    def close(self, keep_cold: bool) -> None:
        """Remove the hooks. Paged parameters stay cold if `keep_cold`."""
        if self._binding is not None:
            self._binding.remove(keep_cold)
        if self._passes is not None:
            self._passes.remove()
        self.updates.remove()
        if self._gradients is not None:
            self._gradients.remove()
        self._other_optimizers.remove()
        if self._on_device is not None:
            self._on_device.finish()
        self._sweep.abandon()
        for group in self.groups:
            group.abandon(keep_cold)
        self.optimizer_state.close()
        if self._on_device is not None:
            self._on_device.close()

    def release(self) -> None:
        """After `close`: drop the model and all memory, even if a cycle or a traceback keeps parts of this object."""
        own = self._passes, self._sweep, self._rollback, self._conditions, self._gradients
        for part in (*self.groups, *self._trainables, *own):
            if part is not None:
                vars(part).clear()
        self.groups.clear()
        self.optimizer_state.release_all()
        vars(self).clear()

    def detach(self, why: str) -> None:
        """Close, leave the parameters without data for another session, and refuse accesses by old graphs, with `why`."""
        self.optimizer_state.expire("more is trained")
        self.fault_handler.shown.expire("more is trained")
        self.close(keep_cold=False)
        self._session_guard.revoke(why)
        for group in self.groups:
            group.detach()

    # ------------------------------------------------------------------------------------------------------------------

    def _alias(self, name: str, kind: str) -> torch.Tensor:
        """Return the tensor in its section; its data may be cold."""
        place = self._places[name, kind]
        return place.section.tensor(place.slot)

    def _placed(self, parameter: int) -> torch.Tensor | None:
        """Return the tensor in the section of the parameter with this id, if it is one."""
        name = self._names.get(parameter)
        return None if name is None else self._alias(name, "param")

    def _trained(self) -> Iterator[tuple[nn.Parameter, ParameterLocations]]:
        for trainable in self._trainables:
            yield from zip(trainable.parameters, trainable.places, strict=True)
