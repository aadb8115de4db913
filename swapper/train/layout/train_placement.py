"""Places each family of tensors, divides the budget, and predicts a step before one was seen. Pure: resolves "auto"."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from swapper.device.copies import COPIES_IN_FLIGHT, MAX_DOWNLOAD_BYTES
from swapper.device.device_placement import (
    EARLIER_SHARE,
    PAGES_ON_THEIR_WAY,
    RING,
    DeviceBudget,
    DevicePlacement,
    place_on_device,
)
from swapper.device.device_storage import DEVICE_ALIGNMENT_BYTES, place_in_storage
from swapper.device.model_device import page_access
from swapper.errors import BudgetError, ConfigError
from swapper.io.alignment import round_up
from swapper.modules.groups import largest_working_set, working_sets
from swapper.paging.dry_run import Task
from swapper.paging.planning.budget import SMALL_SECTION_BYTES, Budget, divide, resident_bytes
from swapper.paging.planning.layout import SectionPlan, Slot
from swapper.paging.planning.schedule import Access
from swapper.paging.section import Section
from swapper.runtime.sizes import format_bytes
from swapper.train.layout.inventory import Inventory, find_places, find_trainables, make_sections
from swapper.train.layout.slices import TensorLocation, largest_slice_pages
from swapper.train.layout.state_codecs import coded_kind
from swapper.train.layout.trainable import Trainable, decoded_bytes

PREFERENCES = (("host", "host"), ("host", "nvme"), ("nvme", "nvme"), ("nvme", "host"))
"""Places of (parameters, optimizer state), best first: tensors used twice a step come before those used once.

Gradients are on the host unless the user chooses "nvme", which limits operations on `parameter.grad`.
"""

STATE_AHEAD_SHARE = 8
"""State that goes up early takes at most an 8th of a device's budget, but has room for the largest group's: a choice."""
DOWN_SHARE = 16
"""The divisor of a device's budget for gradients in flight to the host: 1/16, a choice."""

ORDER_TOLERANCE = 4
"""On a device an expected access may come up to 1 / ORDER_TOLERANCE of a step early: a choice."""
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


def choose_placement(
    inventory: Inventory,
    params: str,
    optimizer_state: str,
    gradients: str,
    host_bytes: int,
    page_bytes: int | None,
    step: StepKind,
) -> tuple[dict[str, str], Budget]:
    """Return the places of "param", "state" and "grad", and the division of the budget.

    Args:
        params, optimizer_state, gradients: "host", "nvme" or "auto", which keeps in memory as much as fits the budget.
        host_bytes: the budget.
        page_bytes: the size of a page of a resumed run; None to choose it.
        step: its variant.

    Raises:
        BudgetError: the budget is too small; names the smallest that works.
    """
    error: BudgetError | None = None
    for choice in PREFERENCES:
        if any(wish not in ("auto", place) for wish, place in zip((params, optimizer_state), choice, strict=True)):
            continue
        places = {"param": choice[0], "state": choice[1], "grad": "nvme" if gradients == "nvme" else "host"}
        try:
            return places, _divide(inventory, places, host_bytes, page_bytes, step)
        except BudgetError as too_small:
            error = error if choice == ("nvme", "host") and error is not None else too_small
    if error is None:
        raise ConfigError(f"params={params!r} with optimizer_state={optimizer_state!r} is not supported")
    raise error


def is_resident(plan: SectionPlan, places: dict[str, str]) -> bool:
    """Return True for sections on the host, and those too small for a frame, which stay in memory."""
    return places[plan.family] == "host" or plan.nbytes <= SMALL_SECTION_BYTES


def groups_in_memory(inventory: Inventory, places: dict[str, str]) -> frozenset[int]:
    """Return the groups whose parameters are always in memory, all of them."""
    paged = {plan.group for plan in inventory.plans if plan.family == "param" and not is_resident(plan, places)}
    return frozenset(group.index for group in inventory.groups if group.index not in paged)


def _divide(
    inventory: Inventory, places: dict[str, str], host_bytes: int, page_bytes: int | None, step: StepKind
) -> Budget:
    def resident(plan: SectionPlan) -> bool:
        return is_resident(plan, places)

    kept = [p for p in inventory.plans if resident(p)]
    kept_grads = [p for p in inventory.grad_plans if resident(p)]
    kept_bytes = resident_bytes([p.nbytes for p in kept]) + resident_bytes([p.nbytes for p in kept_grads])
    kept_bytes += _decoded_bytes(inventory)
    explain = ", ".join(
        f"{name} {format_bytes(sum(p.nbytes for p in (*kept, *kept_grads) if p.family == family))}"
        for family, name in (("grad", "gradients"), ("param", "parameters"), ("state", "optimizer state"))
    )
    return divide(
        host_bytes,
        kept_bytes,
        [p.nbytes for p in (*inventory.plans, *inventory.grad_plans) if not resident(p)],
        lambda size: frames_needed(inventory, resident, size, step),
        explain,
        page_bytes,
        lambda size: _frames_of_uses(inventory, resident, size, step)[0] + 2,
    )


def _decoded_bytes(inventory: Inventory) -> int:
    """Return the bytes of the scratch for encoded state."""
    if not any(inventory.codecs.values()):
        return 0
    return decoded_bytes(_of_each_kind(inventory, lambda plan: True, 0))


def _of_each_kind(inventory: Inventory, resident: Callable[[SectionPlan], bool], page_bytes: int) -> list[Trainable]:
    """Return the trainables of one group of each kind: what one needs at most, the others do."""
    kinds = inventory.kinds
    plans = [plan for plan in (*inventory.plans, *inventory.grad_plans) if plan.group in kinds]
    sections = make_sections(plans, [0] * len(plans), resident, page_bytes)
    some = replace(inventory, groups=[group for group in inventory.groups if group.index in kinds])
    return find_trainables(some, find_places(sections))


def place_on_accelerator(
    inventory: Inventory,
    budget: DeviceBudget,
    buffer_bytes: int,
    params: str,
    gradients: str,
    optimizer_state: str,
    largest_bytes: int = 0,
) -> DevicePlacement:
    """Return the groups that stay on a device from forward to backward, and those whose gradients and state stay there.

    Parameters have priority: with "auto", gradients and then state stay for as many groups as fit after all of the
    former. What is left then is for gradients that are added up there, and then for state that goes up early.

    Args:
        budget: of the device.
        buffer_bytes: other bytes on the device: the model's buffers, slices that are updated.
        params: "device" if all of them must stay.
        gradients, optimizer_state: "device" if all must stay, "auto" if they may, else none does.
        largest_bytes: of the state of one group, if updates run there.

    Raises:
        BudgetError: the budget is too small; names the smallest that works.
    """
    images = {g.index: place_in_storage(p.nbytes for _, p in g.parameters)[1] for g in inventory.groups}
    units = [sorted(groups) for groups in working_sets(inventory.units)]
    where = [unit.name or type(unit.module).__name__ for unit in inventory.units]
    may_stay = optimizer_state in ("device", "auto")
    wishes = [
        (gradients, _bytes_by_group(inventory.grad_plans)),
        (optimizer_state, state_bytes(inventory) if may_stay else {}),
    ]
    down_bytes = 0 if gradients == "device" else _down_bytes(inventory, budget)
    kept = [frozenset(sizes) if wish == "device" else frozenset[int]() for wish, sizes in wishes]
    kept_bytes = sum(sizes[group] for (_, sizes), groups in zip(wishes, kept, strict=True) for group in groups)
    other_bytes = buffer_bytes + down_bytes + down_bytes // EARLIER_SHARE + kept_bytes
    fixed = "buffers, slices of an update, gradients and state"
    placement = place_on_device(budget.nbytes, other_bytes, images, units, where, budget.device, fixed)
    if params == "device" and len(placement.resident_set) < len(images):
        all_bytes = other_bytes + sum(images.values())
        raise BudgetError(
            f"params='device' needs all parameters on {budget.device} at once: at least {format_bytes(all_bytes)} "
            f"({all_bytes} bytes); raise device_memory={format_bytes(budget.nbytes)}, or pass params='auto'",
            option="device_memory",
            smallest_bytes=all_bytes,
        )
    left = placement.image_bytes
    for number, (wish, sizes) in enumerate(wishes):
        if wish == "auto":
            kept[number] = _as_many_as_fit(sizes, left - sum(images.values()))
            left -= sum(sizes[group] for group in kept[number])
    summed = sum(nbytes for group, nbytes in wishes[0][1].items() if group not in kept[0])
    left -= (sum_bytes := min(max(left - sum(images.values()), 0), summed))
    max_ahead = max(budget.nbytes // STATE_AHEAD_SHARE, largest_bytes) if largest_bytes else 0
    ahead_bytes = min(max(left - sum(images.values()), 0), max_ahead)
    return replace(
        placement, image_bytes=left - ahead_bytes, down_bytes=down_bytes, sum_bytes=sum_bytes, gradients=kept[0],
        state=kept[1], ahead_bytes=ahead_bytes,
    )  # fmt: skip


def _down_bytes(inventory: Inventory, budget: DeviceBudget) -> int:
    """Return the bytes reserved for gradients in flight to the host: one in flight, while another arrives."""
    largest = max((slot.spec.nbytes for plan in inventory.grad_plans for slot in plan.slots), default=0)
    return max(2 * largest, min(MAX_DOWNLOAD_BYTES, budget.nbytes // DOWN_SHARE))


def without_gradients(inventory: Inventory, groups: Collection[int]) -> Inventory:
    """Return the inventory without these groups' gradients, which are neither in host memory nor on the drive."""
    if not groups:
        return inventory  # with what it has found out
    return replace(inventory, grad_plans=[plan for plan in inventory.grad_plans if plan.group not in groups])


def state_bytes(inventory: Inventory) -> dict[int, int]:
    """Return the bytes of each group's optimizer state on a device, for state of the parameter's shape, also encoded."""
    shapes = {slot.spec.owner: slot.spec.shape for plan in inventory.grad_plans for slot in plan.slots}
    coded = {
        (name, coded_kind(key, codec.name, part.suffix))
        for name, codecs in inventory.codecs.items()
        for key, codec in codecs.items()
        for part in codec.layout
    }
    return _bytes_by_group(
        [plan for plan in inventory.plans if plan.family == "state"],
        lambda slot: slot.spec.shape == shapes[slot.spec.owner] or (slot.spec.owner, slot.spec.kind) in coded,
    )


def _bytes_by_group(
    plans: Sequence[SectionPlan], is_there: Callable[[Slot], bool] = lambda slot: True
) -> dict[int, int]:
    found: dict[int, int] = {}
    for plan in plans:
        nbytes = sum(round_up(slot.spec.nbytes, DEVICE_ALIGNMENT_BYTES) for slot in plan.slots if is_there(slot))
        found[plan.group] = found.get(plan.group, 0) + nbytes
    return found


def _as_many_as_fit(sizes: dict[int, int], nbytes: int) -> frozenset[int]:
    fitting = []
    for group, size in sizes.items():
        if size <= nbytes:
            fitting.append(group)
            nbytes -= size
    return frozenset(fitting)


# --- a step before one was seen ---------------------------------------------------------------------------------------


def frames_needed(
    inventory: Inventory, resident: Callable[[SectionPlan], bool], page_bytes: int, step: StepKind
) -> int:
    """Return the maximum of frames that a step leases at once, plus two so that I/O can overlap.

    With updates "deferred" or in "backward" the optimizer's sweep runs in the middle of a forward or backward. On a
    device, parameters only pass through their frames, and gradients through others; slices that are updated there are
    leased while they are in flight.

    Args:
        resident: tells if a section stays in memory.
        step: its variant.
    """
    most, meanwhile = _frames_of_uses(inventory, resident, page_bytes, step)
    for trainable in _of_each_kind(inventory, resident, page_bytes):
        # Several slices are leased at once: any, as parameters without gradients are skipped.
        pages = largest_slice_pages(trainable.places, page_bytes)
        most = max(most, meanwhile + (RING + 1 if step.updates_there else 2) * pages)
    return most + 2


def _frames_of_uses(
    inventory: Inventory, resident: Callable[[SectionPlan], bool], page_bytes: int, step: StepKind
) -> tuple[int, int]:
    """Return the maximum of frames that a forward or backward leases at once, and of those that it leases during an update."""
    group_pages = [0] * len(inventory.groups)
    for plan in inventory.plans:
        if plan.family == "param" and not resident(plan):
            group_pages[plan.group] += -(-plan.nbytes // page_bytes)
    most, _ = largest_working_set(inventory.units, group_pages)
    leaving = int(not all(map(resident, inventory.grad_plans)))  # a page through which a gradient is written
    if step.on_device:
        most = COPIES_IN_FLIGHT + PAGES_ON_THEIR_WAY - 1
    return most + leaving, 0 if step.update == "step" else most + leaving * step.on_device


ByGroup = Mapping[int, Sequence[Task]]


def expected_tasks(
    inventory: Inventory,
    sections: Sequence[Section],
    trainables: Sequence[Trainable],
    page_bytes: int,
    update: str,
    resident_set: Collection[int] | None = None,
    passes: int = 1,
) -> list[Task]:
    """Predict a step from module order: forward, backward, optimizer. The first observed step replaces the prediction.

    Args:
        sections: all.
        update: when.
        resident_set: the groups that stay on a device, if there is one: pages of parameters are used one by one there,
            and those of these groups for the first use after an update.
        passes: forwards and backwards in a step, whose gradients accumulate.
    """
    pages: dict[int, list[int]] = {group.index: [] for group in inventory.groups}
    for section in sections:
        if section.plan.family == "param":
            pages[section.plan.group] += [page.index for page in section.pages]
    updated = {trainable.group: trainable for trainable in trainables}
    kept = resident_set or ()
    forward: dict[int, list[Task]] = {}
    backward: dict[int, list[Task]] = {}
    seen: set[int] = set()
    for group, indices in pages.items():
        uses = _uses(group, indices, resident_set is not None) if group not in kept or group in updated else []
        forward[group] = [Task("forward", group, uses)]
    accumulating = dict(backward)  # with gradients of an earlier pass
    for of_pass in (backward, accumulating):
        for group in sorted(pages, reverse=True):
            uses = _uses(group, pages[group], resident_set is not None) if group not in kept else []
            for places in reversed(updated[group].places if group in updated else ()):
                uses += gradient_accesses(places.name, places.grad, seen) if places.grad is not None else []
            of_pass[group] = [Task("backward", group, uses)]
    updates = {group: _updates_of(of, (True,) * len(of.places), page_bytes) for group, of in updated.items()}
    steps = [_step_of(updated, groups, page_bytes) for groups in inventory.ranges]
    later = [by_group for _ in range(passes - 1) for by_group in (forward, accumulating)]
    if update == "deferred":
        return [*_updating_in_forward(forward, backward, updates), *_in_order(later)]
    if update == "backward":
        *others, last = [backward, *later[1::2]]
        before = [by_group for of in others for by_group in (forward, of)]
        behind = 0 if resident_set is None else UPDATED_BEHIND
        return [*_in_order(before), *_updating_in_backward(forward, last, updates, behind)]
    return list(_in_order([forward, backward, *later, *steps]))


def _in_order(parts: Sequence[ByGroup]) -> Iterator[Task]:
    return (task for by_group in parts for of in by_group.values() for task in of)


def _step_of(updated: Mapping[int, Trainable], groups: range, page_bytes: int) -> ByGroup:
    """Return the tasks of a step of the optimizer that has these groups."""
    active = {index: tuple(at in groups for at in of.settings) for index, of in updated.items()}
    return {index: _updates_of(updated[index], of, page_bytes) for index, of in active.items() if any(of)}


def _updates_of(trainable: Trainable, active: tuple[bool, ...], page_bytes: int) -> list[Task]:
    slices = trainable.slices(active, page_bytes)
    return [Task("step", trainable.group, [part.access], part.numel, len(part.pieces)) for part in slices]


def _updating_in_forward(forward: ByGroup, backward: ByGroup, updates: ByGroup) -> Iterator[Task]:
    for group in sorted(backward):
        yield from (replace(task, phase="forward") for task in updates.get(group, ()))
        yield from forward.get(group, ())
    yield from itertools.chain.from_iterable(backward.values())


def _updating_in_backward(forward: ByGroup, backward: ByGroup, updates: ByGroup, behind: int) -> Iterator[Task]:
    yield from itertools.chain.from_iterable(forward.values())
    waiting: deque[Sequence[Task]] = deque()  # slices of groups whose gradients are in flight
    for group, of in backward.items():
        yield from of
        waiting.append([replace(task, phase="backward") for task in updates.get(group, ())])
        yield from waiting.popleft() if len(waiting) > behind else ()
    yield from itertools.chain.from_iterable(waiting)


def _uses(group: int, pages: Sequence[int], on_device: bool) -> list[Access]:
    """Return the uses of a group's parameters."""
    if not pages:
        return []
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
