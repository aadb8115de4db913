"""Where each family of tensors lives, and how the budget is divided. Pure: "auto" is decided here."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from swapper.device.device_placement import DeviceBudget, DevicePlacement, place_on_device
from swapper.device.downloads import MOST_BYTES
from swapper.device.image_layout import DEVICE_ALIGNMENT_BYTES, place_in_storage
from swapper.device.registered_frames import STAGING_BYTES
from swapper.errors import BudgetError, ConfigError
from swapper.io.alignment import round_up
from swapper.modules.groups import working_sets
from swapper.paging.planning.budget import SMALL_SECTION_BYTES, Budget, divide, resident_bytes
from swapper.paging.planning.layout import SectionPlan, Slot
from swapper.runtime.sizes import format_bytes
from swapper.train.layout.expected import StepKind, frames_needed
from swapper.train.layout.inventory import Inventory

PREFERENCES = (("host", "host"), ("host", "nvme"), ("nvme", "nvme"), ("nvme", "host"))
"""Places of (parameters, optimizer state), best first: what is used twice a step comes before what is used once.

Gradients are on the host unless the user says "nvme", which changes what can be done with `parameter.grad`.
"""

DOWN_SHARE = 16
"""Of a device's budget, for gradients on their way down."""


def choose_placement(
    inventory: Inventory,
    params: str,
    optimizer_state: str,
    gradients: str,
    host_bytes: int,
    page_bytes: int | None,
    step: StepKind,
) -> tuple[dict[str, str], Budget]:
    """Return where "param", "state" and "grad" live, and the division of the budget.

    Args:
        inventory: what is to be placed.
        params, optimizer_state, gradients: "host", "nvme" or "auto", which keeps in memory what the budget can hold.
        host_bytes: the budget.
        page_bytes: the size of a page where a run goes on; None to choose it.
        step: how it goes.

    Raises:
        BudgetError: the budget is too small; says the smallest that works.
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
        raise ConfigError(f"params={params!r} with optimizer_state={optimizer_state!r} cannot be had")
    raise error


def is_resident(plan: SectionPlan, places: dict[str, str]) -> bool:
    """What is placed on the host, and what is too small for a frame of its own, stays in memory."""
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
    if step.on_device:
        kept_bytes += STAGING_BYTES
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
    )


def place_on_accelerator(
    inventory: Inventory, budget: DeviceBudget, buffer_bytes: int, params: str, gradients: str, optimizer_state: str
) -> DevicePlacement:
    """Return which groups stay on a device from forward to backward, and of which gradients and optimizer state stay there.

    Parameters come first: with "auto", gradients and then state stay of as many groups as there is room for where all of them do.

    Args:
        inventory: of the model.
        budget: of the device.
        buffer_bytes: what else is on the device: the model's buffers, slices that are updated.
        params: "device" if all of them must stay.
        gradients, optimizer_state: "device" if all of it must stay, "auto" if it may, else nothing does.

    Raises:
        BudgetError: the budget is too small; says the smallest that works.
    """
    images = {g.index: place_in_storage(p.nbytes for _, p in g.parameters)[1] for g in inventory.groups}
    units = [sorted(groups) for groups in working_sets(inventory.units)]
    where = [unit.name or type(unit.module).__name__ for unit in inventory.units]
    wishes = [(gradients, _bytes_by_group(inventory.grad_plans)), (optimizer_state, state_bytes(inventory))]
    down_bytes = 0 if gradients == "device" else _down_bytes(inventory, budget)
    kept = [frozenset(sizes) if wish == "device" else frozenset[int]() for wish, sizes in wishes]
    kept_bytes = sum(sizes[group] for (_, sizes), groups in zip(wishes, kept, strict=True) for group in groups)
    other_bytes = buffer_bytes + down_bytes + kept_bytes
    fixed = "buffers, slices of an update, gradients and state"
    placement = place_on_device(budget.nbytes, other_bytes, images, units, where, budget.device, fixed)
    if params == "device" and len(placement.resident_set) < len(images):
        all_bytes = other_bytes + sum(images.values())
        raise BudgetError(
            f"params='device' needs all parameters on {budget.device} at one time: at least {format_bytes(all_bytes)} "
            f"({all_bytes} bytes); raise device_memory={format_bytes(budget.nbytes)}, or say params='auto'"
        )
    left = placement.image_bytes
    for number, (wish, sizes) in enumerate(wishes):
        if wish == "auto":
            kept[number] = _as_many_as_fit(sizes, left - sum(images.values()))
            left -= sum(sizes[group] for group in kept[number])
    return replace(placement, image_bytes=left, down_bytes=down_bytes, gradients=kept[0], state=kept[1])


def _down_bytes(inventory: Inventory, budget: DeviceBudget) -> int:
    """Return what is set aside for gradients on their way down: room for one, while another comes."""
    largest = max((slot.spec.nbytes for plan in inventory.grad_plans for slot in plan.slots), default=0)
    return max(2 * largest, min(MOST_BYTES, budget.nbytes // DOWN_SHARE))


def without_gradients(inventory: Inventory, groups: Collection[int]) -> Inventory:
    """Return what has a place in host memory or on the drive, where the gradients of these groups have not."""
    return replace(inventory, grad_plans=[plan for plan in inventory.grad_plans if plan.group not in groups])


def state_bytes(inventory: Inventory) -> dict[int, int]:
    """Return what the optimizer state of each group takes on a device, all that is of its parameter's shape."""
    shapes = {slot.spec.owner: slot.spec.shape for plan in inventory.grad_plans for slot in plan.slots}
    return _bytes_by_group(
        [plan for plan in inventory.plans if plan.family == "state"],
        lambda slot: slot.spec.shape == shapes[slot.spec.owner],
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
