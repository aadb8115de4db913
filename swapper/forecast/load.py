"""Predicts the passes of a loaded model: the first one, over a prompt, which reads every weight, and later ones of one token.

A pass is the dry run of paging/dry_run.py: the real pager on a simulated drive, between computing that is measured here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median

import torch

from swapper import _C
from swapper.errors import ConfigError
from swapper.forecast.compute import count_products, paging_costs, warn_of_products
from swapper.forecast.measured_pass import measure_pass
from swapper.infer.experts import are_experts
from swapper.infer.matching import Weight
from swapper.infer.planning.planned_load import ExpertUse, LoadPrediction, PlannedLoad
from swapper.infer.streaming import paged_sections
from swapper.infer.weight_rows import PARTS_IN_MEMORY
from swapper.infer.weights import MadeMemory
from swapper.modules.groups import by_module
from swapper.paging.dry_run import DryRun, Task
from swapper.paging.schedule import Access
from swapper.paging.virtual_drive import DriveRates, PagingCosts
from swapper.runtime.stats import StepStats
from swapper.train.planning.update_place import min_seconds

TRIALS = 5
MUCH_BYTES = 64 << 20
"""More than a cache: weights that have just been read are in none."""
TRIAL_ELEMENTS = 1 << 22
"""Of a quantized weight that is computed in a trial; of a larger one some rows are."""


def predict_load(
    plan: PlannedLoad,
    drive: DriveRates,
    tokens: int,
    *,
    batch: int = 1,
    example: Sequence[object] | None = None,
    experts: ExpertUse | None = None,
) -> LoadPrediction:
    """Predict as `LoadPlan.predict`, on a drive with these rates.

    Args:
        plan: of the load.
        drive: bytes a second.
        tokens, batch, example, experts: see `LoadPlan.predict`.

    Raises:
        ConfigError: see `LoadPlan.predict`.
    """
    for name, value in (("tokens", tokens), ("batch", batch)):
        if type(value) is not int or value < 1:
            raise ConfigError(f"predict({name}={value!r}): give a positive number")
    streaming = plan.fitting.plan
    if (streaming.experts or streaming.demanded) and experts is None:
        raise ConfigError(
            "this model's experts are read one by one, and how many is not known: give predict(..., "
            "experts=swapper.ExpertUse(experts=2, hit_rate=0.5)), of a layer and token"
        )
    prompt = (_tokens(batch, tokens),) if example is None else tuple(example)
    making = _making_seconds(plan)
    (first_s, activation_bytes), (token_s, _) = (
        _computing(plan, args, making, experts) for args in (prompt, (_tokens(batch, 1),))
    )
    paging = paging_costs(has_checksums=False)
    first = _simulate(plan, drive, paging, first_s, None, _on_demand(plan, experts, batch * tokens))
    token = _simulate(plan, drive, paging, token_s, plan.fitting.placement.streamed, _on_demand(plan, experts, batch))
    return LoadPrediction(first, token, activation_bytes)


def _computing(
    plan: PlannedLoad, args: Sequence[object], making: dict[int, float], experts: ExpertUse | None
) -> tuple[dict[int, float], int]:
    """Return the seconds of a pass, by group, and the peak bytes of its results."""
    dtypes = {id(weight.parameter): weight.recipe.dtype for weight in plan.matched.weights}
    found = {group.index: making.get(group.index, 0.0) for group in plan.fitting.plan.groups}
    try:
        measured = measure_pass(plan.model, by_module(plan.model)[1], args, {}, False, dtypes)
    except Exception as error:  # of the user's model; a mixture's experts depend on values
        warn_of_products(error)
        rows = next((leaf.numel() for leaf in args if isinstance(leaf, torch.Tensor)), 1)
        for group, seconds in _products(plan, rows, experts).items():
            found[group] += seconds
        return found, 0
    for (_, group), seconds in measured.seconds.items():
        found[group] += seconds
    return found, measured.peak_bytes or 0


def _products(plan: PlannedLoad, rows: int, experts: ExpertUse | None) -> Mapping[int, float]:
    """Return the seconds of the products of matrices with this many rows, by group. Experts have their share of the rows."""
    streaming, used = plan.fitting.plan, 0 if experts is None else experts.experts
    counts = {id(of.parameter): len(of.recipes) for layer in streaming.experts for of in layer}
    for group in (group for groups in streaming.demanded for group in groups):
        counts |= {id(weight.parameter): _experts_a_layer(plan) for weight in streaming.groups[group].weights}
    group_of = {id(weight.parameter): group.index for group in streaming.groups for weight in group.weights}
    return count_products(
        plan.model, group_of, rows, share=lambda p: min(used / counts[id(p)], 1.0) if id(p) in counts else 1.0
    ).forward_s


def _making_seconds(plan: PlannedLoad) -> dict[int, float]:
    """Return what weights that are stored otherwise take in addition to their products, by group."""
    known: dict[object, float] = {}
    found: dict[int, float] = {}
    for group in plan.fitting.plan.groups:
        for weight in group.weights:
            if weight.recipe.make is not None:
                parts = tuple((part.dtype, tuple(part.shape)) for part in weight.recipe.parts)
                kind = parts, weight.recipe.dtype
                known[kind] = known.get(kind) or _made_seconds(weight)
                found[group.index] = found.get(group.index, 0.0) + known[kind]
    return found


def _experts_a_layer(plan: PlannedLoad) -> int:
    """Return the experts of a layer that are modules of their own: as many in each layer."""
    lists = sum(are_experts(name, module) for name, module in plan.model.named_modules())
    return len(plan.fitting.plan.demanded) // max(lists, 1)


def _on_demand(plan: PlannedLoad, experts: ExpertUse | None, tokens: int) -> float:
    """Return the bytes of experts that a pass waits for."""
    streaming = plan.fitting.plan
    if experts is None:
        return 0.0
    layers = [(sum(of.stored_bytes for of in layer), len(layer[0].recipes)) for layer in streaming.experts]
    if streaming.demanded:  # modules of their own
        runs = [run for expert in streaming.demanded for group in expert for run in streaming.groups[group].runs]
        layers.append((sum(run.nbytes for run in runs), _experts_a_layer(plan)))
    used = [min(experts.experts * tokens, count) / count * nbytes for nbytes, count in layers]
    return sum(used) * (1 - experts.hit_rate)


def _simulate(
    load: PlannedLoad,
    drive: DriveRates,
    paging: PagingCosts,
    computing: dict[int, float],
    streamed: int | None,
    demanded_bytes: float,
) -> StepStats:
    """Predict a pass that reads `streamed` pages of each group at most; None: all, as the first one does.

    Args:
        paging: what pages take of the processors.
        computing: seconds by group.
        demanded_bytes: of experts that it waits for.
    """
    plan, placement = load.fitting.plan, load.fitting.placement
    sections = paged_sections(plan, placement.page_bytes)
    cuts = {id(linear.weight.parameter): linear for linear in plan.cuts}
    tasks, moved, stay, kept = [], 0, set(), 0
    for group, of_group in enumerate(sections):
        pages = [page for section in of_group for page in section.pages] if group in plan.used_groups else []
        staying = 0 if streamed is None else max(len(pages) - streamed, 0)
        kept += staying
        leased = pages[staying:]
        if not leased and of_group and group in plan.used_groups:
            stay.add(group)
        parts = [
            nbytes
            for weight in plan.groups[group].weights
            if id(weight.parameter) in cuts
            for nbytes in cuts[id(weight.parameter)].part_bytes
        ]
        moved += sum(page.nbytes for page in leased) + sum(parts)
        accesses = [Access(("param", group), tuple(page.index for page in leased))] if leased else []
        tasks.append(Task("forward", group, accesses, parts=parts))
    dry = DryRun(
        [section for of_group in sections for section in of_group],
        placement.frame_count - kept,
        tasks,
        None,
        True,
        0,
        {},
        drive.open(paging),
        lambda task: computing[task.group] + paging.use_s * (task.group in stay),
        parts_ahead=PARTS_IN_MEMORY,
    )
    if streamed is None:
        dry.step()
    step = dry.clock.stats() if streamed is None else dry.time()
    forward, wait_s = step.phases["forward"], demanded_bytes / drive.read
    forward = (
        replace(  # with the bytes that it needs, not those read for the next one; and with a wait that no page has
            forward,
            wall_s=forward.wall_s + wait_s,
            read_wait_s=forward.read_wait_s + wait_s,
            read_bytes={"param": int(moved + demanded_bytes)},
        )
    )
    return replace(step, phases={**step.phases, "forward": forward})


def _tokens(batch: int, tokens: int) -> torch.Tensor:
    return torch.zeros(batch, tokens, dtype=torch.long, device="meta")


def _made_seconds(weight: Weight) -> float:
    """Return how long it takes to compute a weight from its parts."""
    shape = weight.parameter.shape
    rows = (
        weight.recipe.rows(0, min(-(-TRIAL_ELEMENTS * shape[0] // weight.parameter.numel()), shape[0])) or weight.recipe
    )
    parts = [torch.zeros(part.shape, dtype=part.dtype, device="cpu") for part in rows.parts]
    made = MadeMemory(weight.made_bytes)
    with torch.no_grad():
        numel = max(rows.from_parts(parts, made.empty).numel(), 1)
        return _cold_seconds(lambda: rows.from_parts(parts, made.empty)) / numel * weight.parameter.numel()


def _cold_seconds(act: Callable[[], object]) -> float:
    """Return the median of the seconds of several calls, before each of which nothing of it is in a cache."""
    other, found = torch.zeros(MUCH_BYTES, dtype=torch.uint8, device="cpu"), []
    for _ in range(TRIALS):
        _C.crc32_address(other.data_ptr(), other.nbytes)
        found.append(min_seconds(act, 1))
    return median(found)
