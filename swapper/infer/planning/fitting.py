"""Which of a model's blueprints fits its budgets best, and how memory is divided for it. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from swapper.device.copies import COPIES_IN_FLIGHT
from swapper.device.device_placement import DevicePlacement, place_on_device
from swapper.errors import BudgetError, InvariantError
from swapper.infer.planning.infer_placement import AHEAD_BYTES, Demand, Placement, place
from swapper.infer.planning.streaming_plan import StreamingPlan, with_cuts, with_lookups, with_single_experts

PASSING_BYTES = 2 * AHEAD_BYTES
"""Frames for pages that go on to a device, where nothing need stay in host memory."""
LINK_SHARE = 8
"""A byte that is copied to a device counts as a part of one that is read from a drive."""


@dataclass(frozen=True, slots=True)
class Fit:
    """A blueprint, and its place in memory; `on_device` where kernels run on a device."""

    blueprint: StreamingPlan
    placement: Placement
    on_device: DevicePlacement | None = None

    @property
    def cost(self) -> int:
        """What a pass reads, in bytes, and about what its copies count beside that."""
        blueprint, placement = self.blueprint, self.placement
        cut_bytes = sum(linear.stored_bytes for linear in blueprint.cuts)
        cut_bytes += cut_bytes // 16  # little of them is read ahead
        if self.on_device is None:
            return placement.read_bytes(blueprint.runs_of_used) + cut_bytes
        resident_set = self.on_device.resident_set
        copied = sum(nbytes for group, nbytes in blueprint.images.items() if group not in resident_set)
        runs = [[] if index in resident_set else runs for index, runs in enumerate(blueprint.runs_of_used)]
        return placement.read_bytes(runs) + cut_bytes + copied // LINK_SHARE


def fit(blueprint: StreamingPlan, host_bytes: int) -> Fit:
    """Place a model whose kernels run on the CPU.

    Raises:
        BudgetError: with the smallest budget that works.
    """
    if blueprint.fixed_bytes + blueprint.staging_bytes + blueprint.streamed_bytes > host_bytes:
        blueprint = with_single_experts(with_lookups(blueprint))

    def placed(candidate: StreamingPlan) -> Fit:
        fixed_bytes = candidate.fixed_bytes + candidate.staging_bytes + candidate.cache_bytes(host_bytes)
        demand = Demand(candidate.runs_of_used, candidate.working_sets, candidate.unplanned_bytes)
        return Fit(candidate, place(host_bytes, fixed_bytes, demand, _names(candidate)))

    return _best(blueprint, placed)


def fit_on_device(
    blueprint: StreamingPlan, host_bytes: int, device_bytes: int, other_bytes: int, device: object
) -> Fit:
    """Place a model whose kernels run on a device.

    Args:
        blueprint: as drawn.
        host_bytes, device_bytes: the budgets.
        other_bytes: of what is moved to the device and not in the blueprint.
        device: for messages.

    Raises:
        BudgetError: with the smallest budget that works.
    """
    if blueprint.fixed_device_bytes + other_bytes + sum(blueprint.images.values()) > device_bytes:
        blueprint = with_single_experts(with_lookups(blueprint))

    def placed(candidate: StreamingPlan) -> Fit:
        names = _names(candidate)
        fixed_bytes = candidate.fixed_device_bytes + other_bytes
        on_device = place_on_device(device_bytes, fixed_bytes, candidate.images, candidate.working_sets, names, device)
        runs = candidate.runs_of_used
        streamed = [[] if index in on_device.resident_set else of_group for index, of_group in enumerate(runs)]
        host_fixed_bytes = candidate.stored_bytes + candidate.staging_bytes + candidate.cache_bytes(host_bytes)
        if any(streamed):
            demand = Demand(streamed, (), held=COPIES_IN_FLIGHT)
            return Fit(candidate, place(host_bytes, host_fixed_bytes, demand, names), on_device)
        enough = min(host_bytes, host_fixed_bytes + PASSING_BYTES)
        return Fit(
            candidate, place(enough, host_fixed_bytes, Demand(runs, (), held=COPIES_IN_FLIGHT), names), on_device
        )

    return _best(blueprint, placed)


def _best(blueprint: StreamingPlan, placed: Callable[[StreamingPlan], Fit]) -> Fit:
    """Linear maps are cut where it does not fit otherwise, largest first; and where less is read then.

    That is so of weights that are made from fewer bytes: the whole of a large one takes memory in which more could stay.
    """
    refusal: BudgetError | None = None
    best: Fit | None = None
    for candidate in (blueprint, *with_cuts(blueprint)):
        if best is not None and any(linear.weight.make is None for linear in candidate.cuts):
            break
        try:
            found = placed(candidate)
        except BudgetError as error:
            refusal = error
            continue
        if best is None or found.cost < best.cost:
            best = found
    if best is None:
        raise refusal or InvariantError("a model has no blueprint")
    return best


def _names(blueprint: StreamingPlan) -> list[str]:
    return [unit.name or type(unit.module).__name__ for unit in blueprint.units]
