"""Predicts a step before one was seen: its order of accesses, and how many frames it leases at once. Pure."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from swapper.device.copies import COPIES_IN_FLIGHT
from swapper.modules.groups import largest_working_set
from swapper.modules.model_device import page_access
from swapper.paging.planning.layout import SectionPlan
from swapper.paging.planning.schedule import Access
from swapper.paging.section import Section
from swapper.train.device.train_device import PAGES_ON_THEIR_WAY, RING
from swapper.train.layout.inventory import Inventory, find_places, find_trainables, make_sections
from swapper.train.layout.slices import TensorLocation, plan_slices
from swapper.train.updates.sweep import Trainable

ORDER_TOLERANCE = 4
"""With a device an expected access may come up to 1 / ORDER_TOLERANCE of a step before its turn: a choice.
"""
UPDATED_BEHIND = 2
"""Groups that a backward on a device loads before it updates an earlier one: the next one computes its gradients, and
the one after that is in flight."""


@dataclass(frozen=True)
class StepKind:
    """The variant of a step.

    Attributes:
        update: when parameters are updated.
        on_device: forwards and backwards run on an accelerator.
        updates_there: so do updates.
    """

    update: str = "step"
    on_device: bool = False
    updates_there: bool = False


def frames_needed(
    inventory: Inventory, resident: Callable[[SectionPlan], bool], page_bytes: int, step: StepKind
) -> int:
    """Return the maximum of frames that a step leases at once, plus two so that I/O can overlap.

    With updates "deferred" or in "backward" the optimizer's sweep runs in the middle of a forward or backward. On a
    device, parameters only pass through their frames, and gradients through others; slices that are updated there are
    leased while they are in flight.

    Args:
        inventory: of the model.
        resident: tells if a section stays in memory.
        page_bytes: the size of a page.
        step: its variant.
    """
    plans = [*inventory.plans, *inventory.grad_plans]
    sections = make_sections(plans, [0] * len(plans), resident, page_bytes)
    group_pages = [0] * len(inventory.groups)
    for section in sections:
        if section.plan.family == "param":
            group_pages[section.plan.group] += len(section.pages)
    most, _ = largest_working_set(inventory.units, group_pages)
    leaving = int(
        any(section.transient and section.pages for section in sections)
    )  # a page through which a gradient is written
    if step.on_device:
        most = COPIES_IN_FLIGHT + PAGES_ON_THEIR_WAY - 1
    meanwhile = 0 if step.update == "step" else most + leaving * step.on_device
    most += leaving
    for trainable in find_trainables(inventory, find_places(inventory, sections)):
        everything = [True] * len(trainable.places)
        for part in plan_slices(trainable.group, trainable.places, everything, page_bytes):
            # Several slices are leased at once: any, as parameters without gradients are skipped.
            most = max(most, meanwhile + (RING + 1 if step.updates_there else 2) * len(part.access.pages))
    return most + 2


ByGroup = Mapping[int, Sequence[Access]]


def expected_cycle(
    inventory: Inventory,
    sections: Sequence[Section],
    trainables: Sequence[Trainable],
    page_bytes: int,
    update: str,
    resident_set: Collection[int] | None = None,
) -> list[Access]:
    """Predict a step from module order: forward, backward, optimizer. The first observed step replaces the prediction.

    Args:
        inventory: of the model.
        sections: all.
        trainables: the updated parameters.
        page_bytes: the size of a page.
        update: when.
        resident_set: the groups that stay on a device, if there is one: pages of parameters are used one by one there,
            and those of these groups for the first use after an update.
    """
    pages: dict[int, list[int]] = {group.index: [] for group in inventory.groups}
    for section in sections:
        if section.plan.family == "param":
            pages[section.plan.group] += [page.index for page in section.pages]
    updated = {trainable.group: trainable for trainable in trainables}
    uses = {group: _uses(group, indices, resident_set is not None) for group, indices in pages.items() if indices}
    kept = resident_set or ()
    forward = {group: of for group, of in uses.items() if group not in kept or group in updated}
    backward: dict[int, list[Access]] = {}
    seen: set[int] = set()
    for group in sorted(pages, reverse=True):
        backward[group] = list(uses.get(group, ()) if group not in kept else ())
        for places in reversed(updated[group].places if group in updated else ()):
            backward[group] += gradient_accesses(places.name, places.grad, seen) if places.grad is not None else []
    updates = {group: [part.access for part in of.all_slices(page_bytes)] for group, of in updated.items()}
    if update == "deferred":
        return list(_updating_in_forward(forward, backward, updates))
    if update == "backward":
        return list(_updating_in_backward(forward, backward, updates, 0 if resident_set is None else UPDATED_BEHIND))
    return [access for by_group in (forward, backward, updates) for of in by_group.values() for access in of]


def _updating_in_forward(forward: ByGroup, backward: ByGroup, updates: ByGroup) -> Iterator[Access]:
    for group in sorted(backward):
        yield from updates.get(group, ())
        yield from forward.get(group, ())
    yield from itertools.chain.from_iterable(backward.values())


def _updating_in_backward(forward: ByGroup, backward: ByGroup, updates: ByGroup, behind: int) -> Iterator[Access]:
    yield from itertools.chain.from_iterable(forward.values())
    waiting: deque[Sequence[Access]] = deque()  # slices of groups whose gradients are in flight
    for group, of in backward.items():
        yield from of
        waiting.append(updates.get(group, ()))
        yield from waiting.popleft() if len(waiting) > behind else ()
    yield from itertools.chain.from_iterable(waiting)


def _uses(group: int, pages: Sequence[int], on_device: bool) -> list[Access]:
    """Return the uses of a group's parameters."""
    if on_device:
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
