"""Owns an offloaded model at its places: moves tensors to their sections and answers accesses there; begins its passes.

A forward or a backward that never ended is forgotten when the next one begins.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from swapper.errors import DeviceError, StateError, UnsupportedError
from swapper.modules.cold import follow, leave_view
from swapper.modules.groups import Group, changes_itself
from swapper.paging.pager import Pager
from swapper.paging.schedule import Access
from swapper.paging.section import Section
from swapper.runtime.interrupts import close_all, forget
from swapper.runtime.notices import tracked
from swapper.tensors.torch_private import dispatch_modes, innermost_transform
from swapper.train.gradients.grads import Gradients
from swapper.train.groups.parameter_group import GroupParameters
from swapper.train.groups.processor import Processor
from swapper.train.groups.session_guard import SessionEvents, SessionGuard
from swapper.train.layout.content import SectionSource, fill
from swapper.train.layout.inventory import find_places, find_trainables
from swapper.train.layout.model_checks import find_shared_attributes
from swapper.train.passes.accumulation_pass import (
    REMEDY,
    AccumulationOrder,
    AccumulationPass,
    forget_failed_backward,
)
from swapper.train.passes.fault_handler import ModelInUse, ParameterFaultHandler
from swapper.train.passes.gathering import LoadHooks, Masters
from swapper.train.passes.train_hooks import TrainingHooks
from swapper.train.planning.plan import Plan
from swapper.train.state.conditions import Membership, check_not_averaged
from swapper.train.state.mapped_state import leave_expired
from swapper.train.state.optim import restore_settings
from swapper.train.state.optimizer_state import OptimizerState
from swapper.train.steps.executor import UpdateExecutor
from swapper.train.steps.step_rollback import StepRollback

log = logging.getLogger("swapper")


class PlacedModel:
    """Owns the locations of a model's parameters and its optimizer's state, from `adopt` to `close` or `detach`.

    Args:
        plan: of the session; has the user's model and optimizer.
        sections: param and state sections, with memory.
        grad_sections: of gradients.
        events: of the session.

    Attributes:
        fault_handler: answers accesses to cold parameters.
        groups: all of them, by index; none before `adopt`.
    """

    def __init__(
        self,
        plan: Plan,
        sections: list[Section],
        grad_sections: list[Section],
        pager: Pager,
        events: SessionEvents,
        processor: Processor,
    ) -> None:
        inventory, model, self.optimizers = plan.inventory, plan.request.model, plan.request.optimizers
        self.plan = plan
        self.sections = sections
        self.grad_sections = grad_sections
        self.pager = pager
        self.events = events
        self.processor = processor
        self.guard = SessionGuard(events, plan.request.manager.operates)
        self.places = find_places([*sections, *grad_sections])
        self.trainables = find_trainables(inventory, self.places)
        self.membership = Membership(self.optimizers, self.trainables, inventory.names, inventory.optimizer_of)
        self.optimizer_state = OptimizerState(
            self.membership, inventory, self.trainables, self.places, self._sections_of("state"), pager, self.guard,
            self.settle_update, processor, plan.request.manager.drives.directories[0],
            uses_gradients_up=plan.request.options.update == "backward",
        )  # fmt: skip
        self.rollback = StepRollback(self.optimizers, self.optimizer_state, sections, events)
        self.groups: list[GroupParameters] = []
        self.fault_handler = ParameterFaultHandler(
            inventory, self.trainables, self.groups, self.places, pager, self.guard, self, changes_itself(model.module)
        )
        self._in_use: ModelInUse | None = None
        self._followers: list[torch.Tensor] = []  # attributes of modules that are views of parameters

    def _sections_of(self, family: str) -> list[Section]:
        return [section for section in self.sections if section.plan.family == family]

    def adopt(self, content: SectionSource | None) -> None:
        """Move everything to its sections, group by group.

        Args:
            content: fills the sections. None if they have their content already: the model's values are dropped.
        """
        self._warn_of_strides()
        is_sharded = self.plan.request.model.is_sharded
        attributes = [] if is_sharded else find_shared_attributes(self.plan.request.model.module)
        state_sections: dict[int, list[Section]] = {}
        for section in self._sections_of("state"):
            state_sections.setdefault(section.plan.group, []).append(section)

        def nbytes(group: Group) -> int:
            return group.nbytes + sum(section.plan.nbytes for section in state_sections.get(group.index, ()))

        groups = self.plan.inventory.groups
        for group in groups if content is None else tracked(groups, "making the swap files", nbytes):
            if content is not None:
                content.begin(group.parameters)
                for section in state_sections.get(group.index, ()):
                    fill(section, self.pager, content)
            for name, parameter in group.parameters:
                if content is not None and name in self.optimizer_state.entries:
                    self.optimizer_state.begin(name, content.state(name))
                self.optimizers.drop_state(parameter)
            parameters = self._make_group(group)
            self.groups.append(parameters)
            parameters.adopt(content)
        if content is not None:
            content.begin(())
        of = {id(parameter): group for group in self.groups for parameter in group.parameters}
        for shared in attributes:
            with of[id(shared.parameter)].home.sized():
                follow(shared.tensor, shared.parameter, shared.offset)
            self._followers.append(shared.tensor)
        for parameters in self.groups:
            if parameters.paged:  # its views are ColdViews
                parameters.note_uses()

    def _warn_of_strides(self) -> None:
        """Log a warning for parameters that are not contiguous: in their sections all are."""
        strided = [
            name
            for group in self.plan.inventory.groups
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
        locations = [self.places[name, "param"] for name, _ in group.parameters]
        places = [(location.section, location.slot) for location in locations]
        expire = partial(self.fault_handler.shown.expire, group=group.index)
        home, tensors = self.processor.home(group, places)
        return GroupParameters(group, places, home, tensors, self.pager, self.fault_handler, expire)

    def restore_groups(self, settings: list[dict[str, Any]], members: Sequence[Sequence[str]] | None) -> None:
        """Restore the optimizers' groups from a commit: settings and, if the run has edited them, members by name."""
        restore_settings(self.optimizers.param_groups, settings)
        if members is not None:
            parameters = {name: p for group in self.plan.inventory.groups for name, p in group.parameters}
            for group, names in zip(self.optimizers.param_groups, members, strict=True):
                group["params"] = [parameters[name] for name in names]

    def kept_gradients(self) -> frozenset[str]:
        """Return the names of the parameters whose gradients stay autograd's own."""
        placed = {slot.spec.owner for section in self.grad_sections for slot in section.plan.slots}
        trained = {slot.spec.owner for plan in self.plan.inventory.grad_plans for slot in plan.slots}
        return frozenset(trained - placed)

    def use(self, user: ModelInUse) -> None:
        """Have `user` answer what accesses ask."""
        self._in_use = user

    @property
    def in_use(self) -> ModelInUse:
        if self._in_use is None:
            raise StateError("the model is not offloaded yet")
        return self._in_use

    def settle_update(self) -> None:
        self.in_use.settle_update()

    # --- closing ------------------------------------------------------------------------------------------------------

    def close(self, keep_cold: bool) -> None:
        """End all accesses. Paged parameters stay cold if `keep_cold`. Copies to and from a device are over."""
        endings: list[Callable[[], object]] = [partial(group.abandon, keep_cold) for group in self.groups]
        endings += [partial(leave_view, tensor) for tensor in self._followers]
        close_all([*endings, partial(leave_expired, self.pager), self.optimizer_state.close, self.processor.close])

    def expire(self) -> None:
        """Expire what shows parameters and state: another session takes them."""
        self.optimizer_state.expire("more is trained")
        self.fault_handler.shown.expire("more is trained")

    def leave(self, why: str) -> None:
        """After `close`: leave the parameters without data for another session. Accesses by old graphs are refused, with `why`."""
        self.guard.revoke(why)
        for group in self.groups:
            group.detach()

    def release(self, why: str) -> None:
        """After `close`: drop the model and all memory, even if a cycle or a traceback keeps parts of this object."""
        parts: list[Any] = [*self.groups, *self.trainables, self.rollback, self.optimizer_state]
        self.groups.clear()
        for part in (*parts, self):
            forget(part, why)


# --- its passes -------------------------------------------------------------------------------------------------------


class PassLifecycle:
    """Owns the hooks of one model, and installs them. Answers what they ask of their owner: see PassOwner (train_hooks.py).

    Args:
        placed: the model at its locations.
        masters: follow what `load_state_dict` changes.
        order: of the gradients of micro-batches that run together.
        without_averaging: why DDP cannot average gradients: see `averaging_refused`; "" if it can.

    Attributes:
        hooks: of forwards and backwards.
    """

    def __init__(
        self,
        placed: PlacedModel,
        updates: UpdateExecutor,
        gradients: Gradients,
        masters: Masters,
        order: AccumulationOrder,
        without_averaging: str,
    ) -> None:
        self.clock = placed.events.clock
        self._inventory = placed.plan.inventory
        self._names = self._inventory.names
        self._groups = placed.groups
        self._updates = updates
        self._pager = placed.pager
        self._fault_handler = placed.fault_handler
        self._guard = placed.guard
        self._processor = placed.processor
        self._gradients = gradients
        self._order = order
        self._without_averaging = without_averaging
        units = self._inventory.units
        self.hooks = TrainingHooks(units, placed.groups, self, updates, placed.guard, placed.processor)
        self._load_hooks = LoadHooks(units, placed.groups, placed.guard, masters)

    def remove(self) -> None:
        self.hooks.remove()
        self._load_hooks.remove()
        self._order.remove()
        forget_failed_backward()

    @property
    def is_open(self) -> bool:
        """True while a forward or a backward holds leases."""
        return self.hooks.pass_is_open

    def abandon(self) -> None:
        """Forget a forward, a backward or a load_state_dict that never ended, and leases that an exception left without a holder.

        Raises:
            StateError: called by a loss_fn.
        """
        if self.hooks.is_batched:
            raise StateError("loss_fn called what must wait for the end of accumulate_batches, as a step or snapshot")
        self._abandon()
        leased = self._pager.leased_pages
        if not leased or self._processor.is_device:  # copies to a device have leases, too
            return
        kept = self._kept_accesses()
        if leased > sum(len(access.pages) for access in kept):
            for group in self._groups:
                group.forget_leases()
            self.drop_leases(kept)

    def _abandon(self) -> None:
        self._updates.pass_begins()
        self._load_hooks.forget()
        self.hooks.abandon_pass()

    def forget_leases(self) -> None:
        """Abandon the pass, and drop all leases of the pager and the device except pins, even if no pass is open."""
        self._abandon()
        self.drop_leases(self._kept_accesses())

    def _kept_accesses(self) -> list[Access]:
        return [access for group in self._groups for access in group.home.kept_accesses]

    def accumulate(self, loss_fn: Callable[[Any], torch.Tensor], batches: Sequence[Any]) -> list[torch.Tensor]:
        """See SwapManager.accumulate_batches. Failed backwards leave no gradients."""
        with self._guard.turns.turn():
            self.abandon()
            self._guard.events.check()
            if len(batches) < 2 or not any(group.paged for group in self._groups):
                return self._accumulate_one_by_one(loss_fn, batches)
            self._check_together()
            together = AccumulationPass(self.hooks, self._order, loss_fn, batches, self._fault_handler)
            self.hooks.share(together)
            try:
                with self._order.of(together), self._updates.together(together):
                    return together.run()
            except BaseException:
                self.hooks.abandon_batches()
                self.forget_leases()
                if together.has_losses:
                    for parameter in self._order.parameters:
                        parameter.grad = None
                raise
            finally:
                self.hooks.share(None)

    def _accumulate_one_by_one(
        self, loss_fn: Callable[[Any], torch.Tensor], batches: Sequence[Any]
    ) -> list[torch.Tensor]:
        losses = []
        for number, batch in enumerate(batches, 1):
            with ExitStack() as stack:
                if number < len(batches):
                    stack.enter_context(self._updates.accumulating())
                loss = loss_fn(batch)
                loss.backward()
                losses.append(loss.detach())
        return losses

    def _check_together(self) -> None:
        """Raise UnsupportedError unless micro-batches can run together."""
        for is_so, why in (
            (self._processor.is_device, "a model on an accelerator, whose backwards run in one thread of autograd's"),
            (self._fault_handler.changes_itself, "forwards that change parameters, as Embedding(max_norm=...) does"),
            (_has_modes(), "the modes and transforms that are active here (torch.func, TorchDispatchMode)"),
        ):
            if is_so:
                raise UnsupportedError(f"accumulate_batches does not go with {why}; {REMEDY}")

    def enter_forward(self, is_outermost: bool = True) -> None:
        self._updates.forward_begins(is_outermost)
        events, is_evaluation = self._guard.events, not torch.is_grad_enabled()
        if self._fault_handler.changes_itself:
            (events.check_to_write if is_evaluation else events.check_to_write_in_pass)()
        events.check(is_evaluation)
        if not is_outermost:
            return
        if self._without_averaging:
            check_not_averaged(self._names, self._without_averaging)
        self._inventory.check_files()
        self._gradients.entered()
        if not self.is_open:
            self._processor.pass_begins()

    def drop_leases(self, kept: Iterable[Access]) -> None:
        with contextlib.suppress(DeviceError):
            self._updates.drop_leases()
        self._processor.finish()
        self._processor.forget_uses()
        self._pager.drop_leases(kept)


def _has_modes() -> bool:
    """Return True if modes are active that other threads would not have."""
    return innermost_transform() is not None or dispatch_modes() > 0
