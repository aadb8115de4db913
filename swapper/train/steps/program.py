"""Predicts a step from module order: forward, backward, optimizer. Pure. The first observed step replaces the prediction."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import zip_longest

from swapper.device.model_device import page_access
from swapper.paging.dry_run import Task
from swapper.paging.schedule import Access
from swapper.paging.section import Section
from swapper.train.groups.group_state import CURRENT, DUE, SEALED, GroupState
from swapper.train.layout.inventory import Inventory
from swapper.train.layout.slices import TensorLocation, Trainable
from swapper.train.steps.policies import Completed, Event, Stepped, UpdatePolicy, Wanted

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
