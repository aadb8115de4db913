"""Places each family of tensors, and divides the budget. Pure: resolves "auto"."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import nlargest

from swapper.device.copies import COPIES_IN_FLIGHT, MAX_DOWNLOAD_BYTES
from swapper.device.device_memory import DEVICE_ALIGNMENT_BYTES, place_in_storage
from swapper.device.model_device import (
    EARLIER_SHARE,
    MAX_EARLIER_BYTES,
    PAGES_ON_THEIR_WAY,
    RING,
    DeviceBudget,
    DevicePlacement,
    place_on_device,
)
from swapper.errors import BudgetError, ConfigError
from swapper.io.tensor_bytes import round_up
from swapper.modules.groups import largest_working_set, working_sets
from swapper.paging.layout import SMALL_SECTION_BYTES, Budget, SectionPlan, Slot, divide, resident_bytes
from swapper.runtime.sizes import format_bytes
from swapper.train.layout.inventory import Inventory, find_places, find_trainables, make_sections
from swapper.train.layout.slices import Trainable, decoded_bytes, largest_slice_pages, slice_bytes_of
from swapper.train.layout.state_codecs import coded_kind

PREFERENCES = (("host", "host"), ("host", "nvme"), ("nvme", "nvme"), ("nvme", "host"))
"""Places of (parameters, optimizer state), best first: tensors used twice a step come before those used once.

Gradients are on the host unless the user chooses "nvme", which limits operations on `parameter.grad`.
"""

DOWN_SHARE = 16
"""The divisor of a device's budget for gradients in flight to the host: 1/16, a choice."""

ORDER_TOLERANCE = 4
"""On a device an expected access may come up to 1 / ORDER_TOLERANCE of a step early: a choice."""


@dataclass(frozen=True)
class StepKind:
    """The variant of a step.

    Attributes:
        update: when parameters are updated.
        on_device: parameters are copied to an accelerator for forwards and backwards.
        updates_there: updates run on one.
        max_slice_bytes: of the largest state tensor of a slice that is updated there.
    """

    update: str = "step"
    on_device: bool = False
    updates_there: bool = False
    max_slice_bytes: int = sys.maxsize

    def slice_bytes(self, page_bytes: int) -> int:
        """Return how many bytes a slice has of its largest state tensor, with pages of this size."""
        return slice_bytes_of(page_bytes, self.max_slice_bytes)


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
    ahead_bytes: Mapping[int, int],
    has_images: bool = True,
) -> DevicePlacement:
    """Return the groups that stay on a device from forward to backward, and those whose gradients and state stay there.

    Parameters have priority: with "auto", gradients and then state stay for as many groups as fit after all of the
    former. What is left then is for gradients that are added up there, and then for state that goes up early.

    Args:
        budget: of the device.
        buffer_bytes: other bytes on the device: the model's buffers, slices that are updated.
        params: "device" if all of them must stay.
        gradients, optimizer_state: "device" if all must stay, "auto" if they may, else none does.
        ahead_bytes: by group, of the state that may go up early.
        has_images: parameters are copied there for forwards and backwards; else FSDP2 gathers them.

    Raises:
        BudgetError: the budget is too small; names the smallest that works.
    """
    there = inventory.groups if has_images else ()
    images = {g.index: place_in_storage(p.nbytes for _, p in g.parameters)[1] for g in there}
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
    earlier_bytes = min(down_bytes // EARLIER_SHARE, MAX_EARLIER_BYTES)
    other_bytes = buffer_bytes + down_bytes + earlier_bytes + kept_bytes
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
    max_ahead_bytes = sum(nbytes for group, nbytes in ahead_bytes.items() if group not in kept[1])
    ahead = min(max(left - sum(images.values()), 0), max_ahead_bytes)
    return replace(
        placement, image_bytes=left - ahead, down_bytes=down_bytes, sum_bytes=sum_bytes, gradients=kept[0],
        state=kept[1], ahead_bytes=ahead, max_sum_bytes=summed, max_ahead_bytes=max_ahead_bytes,
    )  # fmt: skip


def _down_bytes(inventory: Inventory, budget: DeviceBudget) -> int:
    """Return the bytes reserved for gradients in flight to the host: one in flight, while another arrives."""
    sizes = [slot.spec.nbytes for plan in inventory.grad_plans for slot in plan.slots]
    return max(sum(nlargest(2, sizes)), min(MAX_DOWNLOAD_BYTES, budget.nbytes // DOWN_SHARE))


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
        sizes = {page_bytes, step.slice_bytes(page_bytes)}
        pages = max(largest_slice_pages(trainable.places, size) for size in sizes)
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
    elif step.updates_there:
        leaving *= PAGES_ON_THEIR_WAY
    meanwhile = leaving * (step.on_device or step.updates_there)
    return most + leaving, 0 if step.update == "step" else most + meanwhile
