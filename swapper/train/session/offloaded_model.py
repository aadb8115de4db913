"""Uses an offloaded model: its hooks, gradients, passes and updates, from the end of `adopt` to its closing.

The parts: gradients (grads.py), updates (executor.py) and their rollback (step_rollback.py), passes (placed_model.py). Where
parameters and state lie is placed_model.py's.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from swapper import _C
from swapper.errors import StateError
from swapper.modules.module_hooks import outside_transforms
from swapper.paging.residency import DIRTY, WRITING
from swapper.paging.section import EXTERNAL, Page, Section, pieces_of
from swapper.runtime.interrupts import close_all, forget, is_closed
from swapper.runtime.notices import tracked
from swapper.tensors.torch_private import without_torch_functions
from swapper.train.gradients.grads import Gradients, find_regions, is_gradient_aliased
from swapper.train.groups.train_device import TrainingDevice
from swapper.train.layout.given_values import Values
from swapper.train.layout.slices import ALL_GROUPS, GroupUpdate, ParameterLocations, Trainable
from swapper.train.optimizer.optimizer_proxy import OptimizerProxies
from swapper.train.passes.accumulation_pass import AccumulationOrder
from swapper.train.passes.gathering import Gathering, Masters
from swapper.train.passes.given_model import HookTargets
from swapper.train.session.placed_model import PassLifecycle, PlacedModel
from swapper.train.state.conditions import Conditions, averaging_refused
from swapper.train.state.optim import OtherOptimizers
from swapper.train.steps.executor import UpdateExecutor
from swapper.train.steps.policies import POLICIES
from swapper.train.updates.device_sweep import DeviceSweep
from swapper.train.updates.sweep import Sweep

log = logging.getLogger("swapper")


class OffloadedModel:
    """Owns the hooks of one model, and what they and its optimizers' steps act on.

    Args:
        placed: the model at its locations; resident gradients have memory.

    Attributes:
        updates: decides when groups are updated.
    """

    def __init__(self, placed: PlacedModel) -> None:
        self.model = placed.plan.request.model
        self.groups = placed.groups
        self.optimizer_state = placed.optimizer_state
        self.fault_handler = placed.fault_handler
        self._placed = placed
        self._events = placed.events
        self._processor = placed.processor
        self._names = placed.plan.inventory.names
        self._has_warned = False
        try:
            self._install(placed)
        except BaseException:
            self.close(keep_cold=True)
            raise

    def _install(self, placed: PlacedModel) -> None:
        """Construct the parts in order, each with what it needs, and install the hooks."""
        plan, pager, processor = placed.plan, placed.pager, placed.processor
        inventory, update = plan.inventory, plan.request.options.update
        order = AccumulationOrder(self.model.module)  # before all other hooks of the parameters
        parameters = [entry for group in inventory.groups for entry in group.parameters]
        regions = find_regions(placed.sections, placed.grad_sections) if not processor.is_device else {}
        kept, grad_sections = placed.kept_gradients(), placed.grad_sections
        self.gradients = Gradients(parameters, grad_sections, pager, regions, self.finish_update, processor, kept)
        self._other_optimizers = OtherOptimizers(plan.request.given_optimizers, self.model.names_of_given(self._names))
        self._sweep = self._make_sweep(placed)
        self._conditions = Conditions(inventory, placed.trainables, placed.membership, self.optimizer_state.entries)
        self.updates = UpdateExecutor(POLICIES[update], self._sweep, self.groups, self)
        masters = Masters(self._sweep, pager, self._events)
        self.gathering = Gathering(self.groups, masters, placed.guard.turns, pager)
        leave = bool(grad_sections) if processor.is_device else plan.request.options.gradients == "nvme"
        without_averaging = averaging_refused(update, gradients_leave=leave)
        self.passes = PassLifecycle(placed, self.updates, self.gradients, masters, order, without_averaging)
        self.hooks = self.passes.hooks
        placed.use(self)
        targets = HookTargets(
            self.fault_handler, self.groups, placed.places, kept, processor.is_device, without_averaging, self.updates,
            self.passes, self._make_finish(), self._events,
        )  # fmt: skip
        self._binding = self.model.bind(targets)
        self.updates.watch(parameter for parameter, _ in self._trained())
        processor.start()

    def _make_sweep(self, placed: PlacedModel) -> Sweep:
        kept_state, gradients = self.optimizer_state.kept, self.gradients
        proxies, entries = OptimizerProxies(placed.optimizers), self.optimizer_state.entries
        parts = placed.trainables, proxies, entries, placed.pager, placed.plan.slice_bytes, gradients
        if not isinstance(placed.processor, TrainingDevice) or kept_state is None:
            return Sweep(*parts)
        return DeviceSweep(placed.processor, gradients.paged.where, kept_state, placed.plan.request.kernel, *parts)

    def initialize(self, values: Values) -> None:
        """Fill a model that was on the meta device, group by group."""
        groups = tracked(self._placed.plan.inventory.groups, "filling the model", lambda group: group.nbytes)
        for parameters, needed in values.batches(groups):
            with self.gathering.gather(needed, write=True):
                values.fill(parameters)
        values.finish()
        for section in self._placed.sections:
            if section.plan.external is not None and any(map(_is_changed, pieces_of(section))):
                names = ", ".join(slot.spec.owner for slot in section.plan.slots)
                raise StateError(f"init= changed {names}, which external= has: let the function leave them as they are")

    # --- a step; also what UpdateOwner declares -----------------------------------------------------------------------

    @property
    def fails_at_step(self) -> bool:
        return self.model.is_sharded

    def check_usable(self) -> None:
        self._placed.guard.events.check()

    @property
    def has_more_to_train(self) -> bool:
        """True if a parameter in the optimizers' groups has a gradient but no space for state: it was frozen."""
        untrained = self._placed.membership.untrained
        return bool(untrained) and any(parameter.grad is not None for parameter in untrained)

    def follow_groups(self) -> None:
        """Follow edits of `optimizer.param_groups`, before a step. See Membership.

        Raises:
            StateError: an edit cannot be followed.
        """
        self._binding.follow_gradients()
        if not self.updates.has_begun_early:
            if self.updates.is_open and self._placed.membership.is_outdated:
                self.finish_update(in_order=True)  # another optimizer's step, of the groups before
            self._placed.membership.follow()

    def check_step(self, member: int) -> None:
        """Raise StateError if an optimizer's step cannot be taken exactly as plain torch would, BudgetError if memory is short.

        See Conditions and Gradients.check.
        """
        groups = self._sweep.groups_of(member)
        self.gradients.check(self._placed.trainables, groups)
        if not self.updates.has_begun_early:
            self._conditions.check_step(groups)
            self.updates.prepare()

    def before_update(self) -> None:
        """Prepare for `updates.take_step`."""
        if not self.updates.has_begun_early:
            self._note_before()
        else:
            self._placed.rollback.note_settings()
        self.gradients.paged.before_step()

    def have_arrived(self, trainable: Trainable) -> bool:
        """Of shards on an accelerator never: when copies arrive differs, and all ranks begin with the same group, or none does."""
        arrived = self.gradients.paged.have_arrived(trainable.parameters)
        return arrived and not (self.model.is_sharded and self._processor.is_device)

    def _note_before(self) -> None:
        self.optimizer_state.expire("the next step")
        self.fault_handler.shown.expire("the next step")
        self._placed.rollback.note()

    def begin_early(self) -> bool:
        if not self._agree_to_begin(self._may_begin_early):
            return False
        self._events.begin_step()
        self._note_before()
        return True

    def _may_begin_early(self) -> bool:
        self.follow_groups()
        more_to_train = any(parameter.requires_grad for parameter in self._placed.membership.untrained)
        if (
            self.gathering.is_open
            or more_to_train
            or self._conditions.all_gradients_matter
            or self._shown_shard() is not None
        ):
            return False
        if self._events.step_is_open:
            return False
        self._conditions.check_settings()
        return True

    def _agree_to_begin(self, may: Callable[[], bool]) -> bool:
        """Return True if `may` does, on all ranks of a sharded model: those that begin wait for each other."""
        if not self.model.is_sharded:
            return may()
        return all(self._events.directory.ranks.settle("begin a step in backward", may, bool, each_step=True)[1])

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

    def take_in_changed(self) -> None:
        """Finish the last step if parameters were assigned since (`parameter.data = x`), and take in what was written to shards.

        Operations of DTensors write past the guard. Where there are masters, which do not follow, a forward says so.

        Raises:
            IoError, DeviceError: as `finish_update`.
        """
        if any(group.may_be_assigned and group.assigned() for group in self.groups):
            self.finish_update()
        may_be_written = self.model.is_sharded and not self.update_is_open
        if may_be_written and not any(places.has_master for _, places in self._trained()):
            self._sweep.take_in_written()

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
            if model is not None and not is_closed(model):
                with model._placed.guard.turns.turn(), outside_transforms():
                    model._placed.guard.events.check_usable()
                    model.finish_update()

        return finish

    def may_defer(self, member: int) -> bool:
        shown = self._shown_shard() or self._find_aliased(self._placed.trainables, self._sweep.groups_of(member))
        if shown is not None:
            self._warn_of_alias(shown)
        return shown is None

    def _shown_shard(self) -> str | None:
        shown = self._binding.shown()
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
        self._placed.rollback.undo_step()
        self.updates.forget()
        self._sweep.abandon()

    def is_aliased(self, trainable: Trainable) -> bool:
        return self._find_aliased([trainable], ALL_GROUPS) is not None

    def undo_update(self, updates: Collection[GroupUpdate], error: BaseException) -> bool:
        self.passes.forget_leases()
        names = {name for update in updates for name in update.names}
        return not names or self._placed.rollback.undo_updates(names, error, self.updates.ahead)

    def names_of(self, members: Collection[int]) -> set[str]:
        """Return the names of the trained parameters in the groups of these optimizers."""
        numbers = {number for member in members for number in self._placed.optimizers.ranges[member]}
        pairs = (zip(of.places, of.settings, strict=True) for of in self._placed.trainables)
        return {places.name for pair in pairs for places, at in pair if at in numbers}

    def sections_of(self, member: int) -> list[Section]:
        """Return the sections that an optimizer's step changes."""
        return self._placed.rollback.sections_of(self.names_of([member]))

    def members_of(self, sections: Iterable[Section]) -> set[int]:
        """Return the optimizers of the parameters in these sections."""
        owners = {slot.spec.owner for section in sections for slot in section.plan.slots}
        return {member for member in range(len(self._placed.optimizers.members)) if owners & self.names_of([member])}

    # --- closing ------------------------------------------------------------------------------------------------------

    def checkpoint(self) -> dict[str, Any]:
        """Return the state in the form of a checkpoint. Its tensors alias the sections, whose data may be cold."""
        placed = self._at_its_place if self._processor.is_device else None
        content: dict[str, Any] = {"model": self.model.state_dict(placed)}
        with_masters = [places.name for _, places in self._trained() if places.has_master]
        masters = {name: self.optimizer_state.stored(name, "master") for name in with_masters}
        packed = [
            self.model.optimizer_state_dict(
                member, self.optimizer_state.at_its_place(self._placed.optimizers.numbers(number))
            )
            for number, member in enumerate(self._placed.optimizers.members)
        ]
        content["optimizer"] = packed if len(packed) > 1 else packed[0]
        if masters:
            content["master"] = masters
        return content

    def close(self, keep_cold: bool) -> None:
        """Remove the hooks, and wait for copies to and from a device. Paged parameters stay cold if `keep_cold`."""
        parts = vars(self)
        endings: list[Callable[[], object]] = []
        if "_binding" in parts:
            endings.append(partial(self._binding.remove, keep_cold))
        names = "passes", "updates", "gradients", "_other_optimizers"
        endings += [parts[name].remove for name in names if name in parts]
        endings.append(self._processor.finish)
        if "_sweep" in parts:
            endings.append(self._sweep.abandon)
        close_all(endings)

    def release(self, why: str) -> None:
        """After `close`: drop all memory, even if a cycle or a traceback keeps parts of this object."""
        for part in (self.passes, self._sweep, self._conditions, self.gradients, self):
            forget(part, why)

    def _at_its_place(self, parameter: int) -> torch.Tensor | None:
        """Return the tensor in the section of the parameter with this id, if it is one. Its data may be cold."""
        name = self._names.get(parameter)
        if name is None:
            return None
        place = self._placed.places[name, "param"]
        return place.section.tensor(place.slot)

    def _trained(self) -> Iterator[tuple[nn.Parameter, ParameterLocations]]:
        for trainable in self._placed.trainables:
            yield from zip(trainable.parameters, trainable.places, strict=True)


def _is_changed(page: Page) -> bool:
    """Return True if an external page was written to."""
    if page.location != EXTERNAL or page.residency in (DIRTY, WRITING):
        return True
    memory = page.section.memory if page.section.resident else None
    return memory is not None and _C.crc32_address(memory.data_ptr(), page.stored_bytes) != page.crc32
