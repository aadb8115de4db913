"""Says which groups are to be updated at which event of a step. Pure: the plan and the run take the order from here.

A policy is asked with an event and the states of the groups that have a part in it. The run asks at real events
(executor.py), the plan at those of a step as it expects it: from module order, until the first observed step replaces that.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import ClassVar, Protocol

from swapper.device.model_device import page_access
from swapper.paging.dry_run import Task
from swapper.paging.schedule import Access
from swapper.paging.section import Section
from swapper.train.groups.group_state import CURRENT, DUE, READY, SEALED, GroupState
from swapper.train.layout.inventory import Inventory
from swapper.train.layout.slices import TensorLocation, Trainable

States = Mapping[int, GroupState]
"""The states of the groups whose updates a step has fixed and not finished, or of the event's group, by index, in order."""


@dataclass(frozen=True, slots=True)
class Stepped:
    """`optimizer.step()` was called, which fixes the updates of `groups`.

    Attributes:
        may_wait: nothing would show that they are done later.
    """

    groups: Sequence[int]
    may_wait: bool


@dataclass(frozen=True, slots=True)
class Reached:
    """A forward calls a module that uses `groups`; `passed` were expected before it."""

    groups: Collection[int]
    passed: Sequence[int]


@dataclass(frozen=True, slots=True)
class Wanted:
    """Somebody leases `group`.

    Attributes:
        ahead: groups whose update pays to be begun with it.
    """

    group: int
    ahead: int = 0


@dataclass(frozen=True, slots=True)
class Completed:
    """A backward is over with `group`: its gradients are complete, and nothing will use its parameters.

    Attributes:
        has_arrived: the gradients are there; else kernels that compute them are queued.
    """

    group: int
    has_arrived: bool


@dataclass(frozen=True, slots=True)
class Read:
    """Something outside of the order of a step uses parameters, gradients or state, or a backward adds to a gradient."""


Event = Stepped | Reached | Wanted | Completed | Read


class UpdatePolicy(Protocol):
    """Says when groups are updated.

    Attributes:
        in_forward: `optimizer.step()` leaves updates to the next forward.
        in_backward: a backward updates before `optimizer.step()` is called.
    """

    in_forward: ClassVar[bool]
    in_backward: ClassVar[bool]

    def due(self, event: Event, states: States) -> Sequence[int]:
        """Return the groups to be updated now, in order."""


class AtStep:
    """Updates all groups in `optimizer.step()`."""

    in_forward: ClassVar[bool] = False
    in_backward: ClassVar[bool] = False

    def due(self, event: Event, states: States) -> Sequence[int]:
        return event.groups if isinstance(event, Stepped) else ()


class InForward:
    """Updates each group when the forward after the step needs it, or has passed it over."""

    in_forward: ClassVar[bool] = True
    in_backward: ClassVar[bool] = False

    def due(self, event: Event, states: States) -> Sequence[int]:
        match event:
            case Stepped(groups, may_wait):
                return () if may_wait else groups
            case Reached(groups, passed):
                return [group for group in dict.fromkeys(passed) if group in states and group not in groups]
            case Wanted(group, ahead) if group in states:
                order = list(states)
                at = order.index(group)
                return [index for index in order[at : at + 1 + ahead] if states[index] is DUE]
            case Read():
                return list(states)
        return ()


class InBackward:
    """Updates each group when the last backward of the step is over with it, and the rest in `optimizer.step()`.

    [Note: one module behind] On an accelerator a gradient arrives when its kernels have run, long after they were queued. An
    immediate wait would idle the device while the CPU updates. So a group whose gradients are in flight is READY, and is
    updated when the backward is one module further, whose kernels are queued by then.
    """

    in_forward: ClassVar[bool] = False
    in_backward: ClassVar[bool] = True

    def due(self, event: Event, states: States) -> Sequence[int]:
        match event:
            case Stepped(groups):
                return groups
            case Completed(group, has_arrived) if has_arrived or states[group] is READY:
                return [group]
        return ()


POLICIES: Mapping[str, UpdatePolicy] = {"step": AtStep(), "deferred": InForward(), "backward": InBackward()}
"""By the option `update`."""


# --- the step that a plan expects -----------------------------------------------------------------------------------------

UPDATED_BEHIND = 2
"""Groups that a backward on a device loads before it updates an earlier one: the next one computes its gradients, and
the one after that is in flight."""


class StepProgram:
    """The tasks of a step, in the order that a policy gives them.

    Args:
        sections: all.
        slice_bytes: of the slices: see `slice_bytes_of`.
        policy: says when groups are updated.
        resident_set: the groups that stay on a device, if there is one: pages of parameters are used one by one there,
            and those of these groups for the first use after an update.
    """

    def __init__(
        self,
        inventory: Inventory,
        sections: Sequence[Section],
        trainables: Sequence[Trainable],
        slice_bytes: int,
        policy: UpdatePolicy,
        resident_set: Collection[int] | None = None,
    ) -> None:
        self._ranges = inventory.ranges
        self._slice_bytes = slice_bytes
        self._policy = policy
        self._resident_set = resident_set
        self._updated = {trainable.group: trainable for trainable in trainables}
        self._pages: dict[int, list[int]] = {group.index: [] for group in inventory.groups}
        for section in sections:
            if section.plan.family == "param":
                self._pages[section.plan.group] += [page.index for page in section.pages]
        self._states: dict[int, GroupState] = {}
        self._with_gradient: set[int] = set()  # pages that have an earlier pass's gradient; the next one's is added

    def tasks(self, passes: int = 1) -> list[Task]:
        """Return the tasks of a step of this many forwards and backwards, whose gradients accumulate."""
        self._with_gradient.clear()
        self._states = dict.fromkeys(sorted(self._updated), DUE if self._policy.in_forward else CURRENT)
        tasks: list[Task] = []
        for number in range(passes):
            for group in self._pages:
                tasks += self._updates(Wanted(group), "forward")
                tasks.append(Task("forward", group, self._uses_in_forward(group)))
            tasks += self._backward(is_last=number == passes - 1)
        for groups in self._ranges:
            tasks += self._step(groups)
        return tasks

    def _backward(self, is_last: bool) -> Iterator[Task]:
        behind = 0 if self._resident_set is None else UPDATED_BEHIND
        order: list[int | None] = [*sorted(self._pages, reverse=True)]
        for group, complete in zip_longest(order, [None] * behind + order):
            if group is not None:
                yield Task("backward", group, self._uses_in_backward(group))
            if is_last and complete is not None and complete in self._updated:
                yield from self._updates(Completed(complete, has_arrived=True), "backward")

    def _step(self, groups: range) -> Iterator[Task]:
        """Yield the tasks of a step of the optimizer that has these groups."""
        active = {index: tuple(at in groups for at in of.settings) for index, of in self._updated.items()}
        fixed = [index for index, of in active.items() if any(of) and self._states[index] is not SEALED]
        for index in self._policy.due(Stepped(fixed, may_wait=True), self._states):
            yield from self._slices(index, active[index], "step")

    def _updates(self, event: Event, phase: str) -> Iterator[Task]:
        for group in self._policy.due(event, self._states):
            self._states[group] = SEALED if self._policy.in_backward else CURRENT
            trainable = self._updated[group]
            yield from self._slices(group, (True,) * len(trainable.places), phase)

    def _slices(self, group: int, active: tuple[bool, ...], phase: str) -> list[Task]:
        slices = self._updated[group].slices(active, self._slice_bytes)
        return [Task(phase, group, [part.access], part.numel) for part in slices]

    def _uses_in_forward(self, group: int) -> list[Access]:
        is_kept = self._resident_set is not None and group in self._resident_set
        return [] if is_kept and group not in self._updated else self._uses(group)

    def _uses_in_backward(self, group: int) -> list[Access]:
        is_kept = self._resident_set is not None and group in self._resident_set
        uses = [] if is_kept else self._uses(group)
        for places in reversed(self._updated[group].places if group in self._updated else ()):
            if places.grad is not None:
                uses += gradient_accesses(places.name, places.grad, self._with_gradient)
        return uses

    def _uses(self, group: int) -> list[Access]:
        """Return the uses of a group's parameters."""
        pages = self._pages[group]
        if not pages:
            return []
        if self._resident_set is not None:
            return [page_access(group, page) for page in pages]
        return [Access(("param", group), tuple(pages))]


def gradient_accesses(name: str, place: TensorLocation, seen: set[int]) -> list[Access]:
    """Return the accesses that write a gradient to its pages, page by page.

    Args:
        name: the parameter's.
        place: the gradient's.
        seen: pages that have another gradient already; these are added.
    """
    accesses = []
    for number, index in enumerate(place.pages(0, place.slot.spec.numel)):
        only = frozenset({index})
        fresh = frozenset() if index in seen else only
        seen.add(index)
        accesses.append(Access(("grad", name, number), (index,), fresh=fresh, writes=only))
    return accesses
