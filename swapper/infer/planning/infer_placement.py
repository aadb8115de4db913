"""Divides the budget of inference, and chooses the plan of a model that reads least within it. Pure.

A pass uses every group once, always in the same order. On such a cycle the best use of memory is to keep a fixed set
and to stream the rest through the remaining frames. [Note: the kept set] The streamed part needs frames for the largest
unit's streamed pages and for some read-ahead; so the groups that would stream most keep most: every group streams at
most `streamed` pages, and that number is as small as the budget allows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from swapper.device.copies import COPIES_IN_FLIGHT
from swapper.device.model_device import DevicePlacement, place_on_device
from swapper.errors import BudgetError, InvariantError
from swapper.infer.planning.streaming_plan import StreamingPlan, with_cuts, with_lookups, with_single_experts
from swapper.io.tensor_bytes import SECTOR_BYTES, round_up
from swapper.paging.layout import PoolSize, divide_host_memory
from swapper.runtime.sizes import format_bytes

AHEAD_BYTES = 64 << 20
"""Bytes of read-ahead that keep the drive busy while a unit computes and holds its pages."""
PASSING_BYTES = 2 * AHEAD_BYTES
"""Bytes of frames for pages that are copied to a device, if nothing stays in host memory."""
LINK_SHARE = 8
"""A byte copied to a device costs 1/8 of one read from a drive: an estimate."""
HUGE_PAGE_BYTES = 2 << 20
MIN_PAGE_BYTES = 64 << 10
MAX_PAGE_BYTES = 16 << 20
MIN_FRAMES = 20
MAX_SIZES = 64
"""Page sizes that are tried at most."""
PAGE_COST_BYTES = 64 << 10
"""Bytes. A page costs this much more than its bytes, in Python and shorter transfers: about 30 us at 2 GB/s."""


@dataclass(frozen=True, slots=True)
class Placement(PoolSize):
    """The pool, and the number of pages that each group streams at most; its others stay once they were read."""

    streamed: int

    def read_bytes(self, groups: Sequence[Sequence[int]]) -> int:
        """Return the bytes that a pass over `groups` (see Demand) reads, in whole pages."""
        return sum(min(pages, self.streamed) for pages in _pages(groups, self.page_bytes)) * self.page_bytes


@dataclass(frozen=True, slots=True)
class Demand:
    """The model's part in the division.

    Attributes:
        groups: for each group, the sizes of its runs in bytes, multiples of SECTOR_BYTES.
        units: for each unit, the groups that are leased while it runs: its own and its ancestors'.
        unplanned: sizes in bytes of groups that are read by parts, and may still be used as a whole.
        held: pages that are leased at once whatever runs, if all pages are copied to a device one by one; else None.
    """

    groups: Sequence[Sequence[int]]
    units: Sequence[Sequence[int]]
    unplanned: Sequence[int] = ()
    held: int | None = None


def place(host_bytes: int, fixed_bytes: int, demand: Demand, where: Sequence[str]) -> Placement:
    """Return the placement that reads the fewest bytes a pass.

    Args:
        host_bytes: the budget.
        fixed_bytes: of small tensors, buffers, conversions, slots.
        demand: the model's.
        where: the units' names.

    Raises:
        BudgetError: with the smallest budget that works.
    """
    return divide_host_memory(
        host_bytes,
        fixed_bytes,
        lambda pool_bytes: _best(pool_bytes, demand),
        "this model needs",
        lambda: f"are small tensors, buffers and conversions, and {_largest(demand, where)}; raise host_memory",
    )


def _best(pool_bytes: int, demand: Demand) -> Placement | None:
    groups = demand.groups
    if not any(groups):
        return _for_unplanned(pool_bytes, demand) if pool_bytes >= 0 else None
    huge = _cheapest(_huge_sizes(pool_bytes), pool_bytes, demand)
    if huge is not None and (not huge.streamed or sum(map(sum, groups)) > pool_bytes):
        return huge
    fitting = _cheapest(_fitting_sizes(pool_bytes, groups), pool_bytes, demand)
    if huge is not None:  # it would all fit without the waste of whole huge pages; then nothing is mapped twice
        return fitting if fitting is not None and not fitting.streamed else huge
    return fitting or _cheapest([MIN_PAGE_BYTES], pool_bytes, demand)


def _for_unplanned(pool_bytes: int, demand: Demand) -> Placement:
    """Return the placement of a model of which nothing is used as a whole, as far as is known."""
    target = pool_bytes // MIN_FRAMES // SECTOR_BYTES * SECTOR_BYTES
    page_bytes = min(max(target, SECTOR_BYTES), MIN_PAGE_BYTES)
    frames = _unplanned_frames(demand, page_bytes, pool_bytes // page_bytes)
    return Placement(page_bytes, frames, frames)


def _unplanned_frames(demand: Demand, page_bytes: int, most: int) -> int:
    """Return the frames of the largest group that is read by parts and fits into `most`."""
    pages = [-(-nbytes // page_bytes) for nbytes in demand.unplanned]
    return max((count for count in pages if count <= most), default=0)


def _cheapest(sizes: Iterable[int], pool_bytes: int, demand: Demand) -> Placement | None:
    best, best_cost = None, 0
    for page_bytes in sizes:
        placement = _place_with(page_bytes, pool_bytes, demand)
        if placement is None:
            continue
        read = [min(pages, placement.streamed) for pages in _pages(demand.groups, page_bytes)]
        cost = sum(read) * (page_bytes + PAGE_COST_BYTES)
        if demand.held is not None:
            cost += (
                sum(_pages(demand.groups, page_bytes)) * PAGE_COST_BYTES
            )  # resident pages are copied in each pass too
        if best is None or cost < best_cost:
            best, best_cost = placement, cost
    return best


def _huge_sizes(pool_bytes: int) -> Iterable[int]:
    """Return sizes of whole huge pages, mapped by one entry for 2 MiB. Others cost 0.09 CPU s a GB in mapping."""
    most = min(pool_bytes // MIN_FRAMES, MAX_PAGE_BYTES)
    return range(HUGE_PAGE_BYTES, most + 1, HUGE_PAGE_BYTES)


def _fitting_sizes(pool_bytes: int, groups: Sequence[Sequence[int]]) -> Iterable[int]:
    """Return sizes that cut the runs with little waste: whole fractions of those that take most memory."""
    counts = Counter(nbytes for runs in groups for nbytes in runs)
    common = sorted(counts, key=lambda nbytes: -nbytes * counts[nbytes])[:8]
    target = min(max(pool_bytes // MIN_FRAMES, MIN_PAGE_BYTES), MAX_PAGE_BYTES)
    sizes = {
        round_up(-(-nbytes // parts), SECTOR_BYTES)
        for nbytes in common
        for parts in range(-(-nbytes // target), -(-nbytes // target) + 12)
    }
    return sorted((size for size in sizes if MIN_PAGE_BYTES < size <= target), reverse=True)[:MAX_SIZES]


def _pages(groups: Sequence[Sequence[int]], page_bytes: int) -> list[int]:
    return [sum(-(-nbytes // page_bytes) for nbytes in runs) for runs in groups]


def _place_with(page_bytes: int, pool_bytes: int, demand: Demand) -> Placement | None:
    """See [Note: the kept set]."""
    pages = _pages(demand.groups, page_bytes)
    frames = pool_bytes // page_bytes
    passing = 0 if demand.held is None else demand.held + 2
    if frames >= sum(pages) + passing:
        more = _unplanned_frames(demand, page_bytes, frames)
        return Placement(page_bytes, min(sum(pages) + passing + more, frames), 0)
    sizes = Counter(pages)  # many groups have one size, and many units are alike
    working_sets = {tuple(sorted(pages[g] for g in unit if pages[g])) for unit in demand.units}

    def fits(streamed: int, ahead: int) -> bool:
        kept = sum(max(count - streamed, 0) * number for count, number in sizes.items())
        if demand.held is not None:
            return kept + demand.held + max(min(sum(pages), ahead), 2) <= frames
        working = max(sum(min(count, streamed) for count in counts) for counts in working_sets)
        return kept + working + max(min(working, ahead), 2) <= frames

    most = max(pages)
    if not fits(most, 2):
        return None
    ahead = -(-AHEAD_BYTES // page_bytes)
    low, high = 0, most  # nothing streamed does not fit; `high` does
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle, ahead) else (middle, high)
    return Placement(page_bytes, frames, high)


def _largest(demand: Demand, where: Sequence[str]) -> str:
    """Name the most memory that is used at once, for a message."""
    if demand.held is not None:
        return f"the rest {demand.held} pages on their way to the device, and the next ones"
    sizes = [sum(sum(demand.groups[g]) for g in unit) for unit in demand.units]
    largest = max(range(len(sizes)), key=sizes.__getitem__)
    return f"{format_bytes(sizes[largest])} what is used at once in {where[largest]!r}"


# --- the plan that fits best ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fit:
    """A plan, and its placement in host memory, and on a device if kernels run there."""

    plan: StreamingPlan
    placement: Placement
    on_device: DevicePlacement | None = None

    @property
    def cost(self) -> int:
        """Bytes that a pass reads, plus an estimate for its copies to the device."""
        plan, placement = self.plan, self.placement
        cut_bytes = sum(linear.stored_bytes for linear in plan.cuts)
        cut_bytes += cut_bytes // 16  # little of it is read ahead
        if self.on_device is None:
            return placement.read_bytes(plan.runs_of_used) + cut_bytes
        resident_set = self.on_device.resident_set
        copied = sum(nbytes for group, nbytes in plan.images.items() if group not in resident_set)
        runs = [[] if index in resident_set else runs for index, runs in enumerate(plan.runs_of_used)]
        return placement.read_bytes(runs) + cut_bytes + copied // LINK_SHARE


def fit(plan: StreamingPlan, host_bytes: int) -> Fit:
    """Place a model whose kernels run on the CPU. Raises BudgetError: with the smallest budget that works."""

    def placed(candidate: StreamingPlan) -> Fit:
        fixed_bytes = candidate.fixed_bytes + candidate.staging_bytes + candidate.cache_bytes(host_bytes)
        demand = Demand(candidate.runs_of_used, candidate.working_sets, candidate.unplanned_bytes)
        return Fit(candidate, place(host_bytes, fixed_bytes, demand, _names(candidate)))

    return _fit(plan, plan.fixed_bytes + plan.staging_bytes + plan.streamed_bytes <= host_bytes, placed)


def fit_on_device(plan: StreamingPlan, host_bytes: int, device_bytes: int, other_bytes: int, device: object) -> Fit:
    """Place a model whose kernels run on a device.

    Args:
        plan: of `build_streaming_plan`.
        host_bytes, device_bytes: the budgets.
        other_bytes: of tensors that are moved to the device and not in the plan.
        device: for messages.

    Raises:
        BudgetError: with the smallest budget that works.
    """

    def placed(candidate: StreamingPlan) -> Fit:
        names = _names(candidate)
        fixed_bytes = candidate.fixed_device_bytes + other_bytes
        on_device = place_on_device(device_bytes, fixed_bytes, candidate.images, candidate.working_sets, names, device)
        runs = candidate.runs_of_used
        streamed = [[] if index in on_device.resident_set else of_group for index, of_group in enumerate(runs)]
        host_fixed_bytes = candidate.stored_bytes + candidate.staging_bytes + candidate.cache_bytes(host_bytes)
        enough = host_bytes if any(streamed) else min(host_bytes, host_fixed_bytes + PASSING_BYTES)
        demand = Demand(streamed if any(streamed) else runs, (), held=COPIES_IN_FLIGHT)
        return Fit(candidate, place(enough, host_fixed_bytes, demand, names), on_device)

    return _fit(plan, plan.fixed_device_bytes + other_bytes + sum(plan.images.values()) <= device_bytes, placed)


def _fit(plan: StreamingPlan, may_be_whole: bool, placed: Callable[[StreamingPlan], Fit]) -> Fit:
    """Return the cheapest fit. Unless the whole model fits, rows of embeddings are looked up, and experts are read one by one.

    Args:
        may_be_whole: the budget has the bytes of all weights; not necessarily of the pages that they are in.
    """
    if may_be_whole:
        with suppress(BudgetError):
            return _cheapest_plan(plan, placed)
    return _cheapest_plan(with_single_experts(with_lookups(plan)), placed)


def _cheapest_plan(plan: StreamingPlan, placed: Callable[[StreamingPlan], Fit]) -> Fit:
    """Return the cheapest fit. Linear maps are cut, largest first, if the model does not fit otherwise or reads less.

    Less is read if weights are computed from fewer bytes: a large one as a whole takes memory in which more could stay.
    """
    refusal: BudgetError | None = None
    best: Fit | None = None
    for candidate in (plan, *with_cuts(plan)):
        if best is not None and any(linear.weight.recipe.make is None for linear in candidate.cuts):
            break
        try:
            found = placed(candidate)
        except BudgetError as error:
            refusal = error
            continue
        if best is None or found.cost < best.cost:
            best = found
    if best is None:
        raise refusal or InvariantError("no plan was tried")
    return best


def _names(plan: StreamingPlan) -> list[str]:
    return [unit.name or type(unit.module).__name__ for unit in plan.units]
