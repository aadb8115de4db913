"""Moves a model's parameters and its optimizer's state to their sections, and answers accesses to them there."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from swapper.errors import StateError
from swapper.modules.cold import follow, leave_view
from swapper.modules.groups import Group, changes_itself
from swapper.paging.pager import Pager
from swapper.paging.section import Section
from swapper.runtime.interrupts import close_all, forget
from swapper.runtime.notices import tracked
from swapper.train.groups.parameter_group import GroupParameters
from swapper.train.groups.processor import Processor
from swapper.train.groups.session_guard import SessionEvents, SessionGuard
from swapper.train.layout.content import SectionSource, fill
from swapper.train.layout.inventory import find_places, find_trainables
from swapper.train.layout.model_checks import find_shared_attributes
from swapper.train.passes.fault_handler import ModelInUse, ParameterFaultHandler
from swapper.train.planning.plan import Plan
from swapper.train.state.conditions import Membership
from swapper.train.state.mapped_state import leave_expired
from swapper.train.state.optimizer_state import OptimizerState
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
        follows = not self.processor.is_device and not self.plan.request.model.is_sharded
        attributes = find_shared_attributes(self.plan.request.model.module) if follows else []
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
        for shared in attributes:
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
        self.rollback.restore_settings(settings)
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
