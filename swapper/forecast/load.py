"""Predicts the passes of a loaded model: the first one, over a prompt, which reads every weight, and later ones of one token.

A pass is the dry run of paging/dry_run.py: the real pager on a simulated drive, between computing that is measured here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from swapper.errors import ConfigError
from swapper.forecast.compute import count_products, measure_or_count
from swapper.forecast.measured_pass import measure_pass
from swapper.forecast.trials import TRIALS, mapping_seconds
from swapper.infer.experts import are_experts
from swapper.infer.matching import Weight
from swapper.infer.planning.planned_load import ExpertUse, LoadPrediction, PlannedLoad
from swapper.infer.streaming import paged_sections
from swapper.infer.weight_rows import PARTS_IN_MEMORY
from swapper.infer.weights import MadeMemory
from swapper.modules.groups import by_module
from swapper.paging.dry_run import DryRun, Task
from swapper.paging.schedule import Access
from swapper.paging.virtual_drive import DriveRates, VirtualDrive
from swapper.runtime.stats import StepStats
from swapper.train.planning.update_place import min_seconds

TRIAL_ELEMENTS = 1 << 22
"""Of a quantized weight that is computed in a trial; of a larger one some rows are."""


def predict_load(
    plan: PlannedLoad,
    drive: DriveRates,
    tokens: int,
    *,
    batch: int = 1,
    example: Sequence[Any] | None = None,
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
    making = _making_seconds(plan)
    (first_s, activation_bytes), (token_s, _) = (
        _computing(plan, args, making, rows, experts)
        for rows, args in (
            (batch * tokens, (_tokens(batch, tokens),) if example is None else tuple(example)),
            (batch, (_tokens(batch, 1),)),
        )
    )
    first = _simulate(plan, drive, first_s, None, _on_demand(plan, experts, batch * tokens))
    token = _simulate(plan, drive, token_s, plan.fitting.placement.streamed, _on_demand(plan, experts, batch))
    return LoadPrediction(first, token, activation_bytes)


def _computing(
    plan: PlannedLoad, args: Sequence[Any], making: dict[int, float], rows: int, experts: ExpertUse | None
) -> tuple[dict[int, float], int]:
    """Return the seconds of a pass, by group, and the peak bytes of its results.

    Args:
        making: seconds of weights that are stored otherwise, by the parameter's id.
        rows: tokens of the pass.
    """
    streaming, counts = plan.fitting.plan, _experts_of(plan)

    def used(parameter: nn.Parameter, tokens: int) -> float:
        """Return the part of a weight that these tokens use: some of the experts."""
        count = counts.get(id(parameter))
        return 1.0 if count is None or experts is None else min(experts.experts * tokens / count, 1.0)

    group_of = {id(weight.parameter): group.index for group in streaming.groups for weight in group.weights}
    found: dict[int, float] = defaultdict(float)
    for weight in (weight for group in streaming.groups for weight in group.weights):
        found[group_of[id(weight.parameter)]] += making.get(id(weight.parameter), 0.0) * used(weight.parameter, rows)
    dtypes = {id(weight.parameter): weight.recipe.dtype for weight in plan.matched.weights}
    passed = measure_or_count(
        partial(measure_pass, plan.model, by_module(plan.model)[1], args, {}, False, dtypes),
        partial(count_products, plan.model, group_of, rows, share=lambda parameter: used(parameter, 1)),
    )
    for group, seconds in passed.forward_s.items():
        found[group] += seconds
    return found, passed.activation_bytes or 0


def _making_seconds(plan: PlannedLoad) -> dict[int, float]:
    """Return what weights that are stored otherwise take in addition to their products, by the parameter's id.

    Of tables whose rows are looked up only those rows are made, which takes next to nothing.
    """
    known: dict[object, float] = {}
    found: dict[int, float] = {}
    looked_up = {id(weight.parameter) for weight in plan.fitting.plan.lookups}
    for weight in (weight for group in plan.fitting.plan.groups for weight in group.weights):
        if weight.recipe.make is not None and id(weight.parameter) not in looked_up:
            kind = tuple((part.dtype, tuple(part.shape)) for part in weight.recipe.parts), weight.recipe.dtype
            known[kind] = known.get(kind) or _made_seconds(weight)
            found[id(weight.parameter)] = known[kind]
    return found


def _experts_of(plan: PlannedLoad) -> dict[int, int]:
    """Return, of each weight that is read by experts, how many experts its layer has."""
    streaming = plan.fitting.plan
    lists = sum(are_experts(name, module) for name, module in plan.model.named_modules())
    each = len(streaming.demanded) // max(lists, 1)  # of experts that are modules of their own: as many in each layer
    groups = (streaming.groups[group] for expert in streaming.demanded for group in expert)
    found = {id(weight.parameter): each for group in groups for weight in group.weights}
    return found | {id(of.parameter): len(of.recipes) for layer in streaming.experts for of in layer}


def _on_demand(plan: PlannedLoad, experts: ExpertUse | None, tokens: int) -> float:
    """Return the bytes of experts that a pass waits for."""
    if experts is None:
        return 0.0
    counts, nbytes = _experts_of(plan), 0.0
    for weight in plan.matched.weights:
        if (count := counts.get(id(weight.parameter))) is not None:
            nbytes += min(experts.experts * tokens / count, 1.0) * weight.recipe.stored_bytes
    return nbytes * (1 - experts.hit_rate)


def _dry_run(
    load: PlannedLoad, drive: VirtualDrive, computing: Mapping[int, float], streamed: int | None
) -> tuple[DryRun, int]:
    """Return passes that read `streamed` pages of each group at most, and the bytes of one. None: all, as the first one does."""
    plan, placement = load.fitting.plan, load.fitting.placement
    sections = paged_sections(plan, placement.page_bytes)
    part_bytes = {id(linear.weight.parameter): linear.part_bytes for linear in plan.cuts}
    tasks, moved_bytes, kept = [], 0, 0
    for group, of_group in enumerate(sections):
        pages = [page for section in of_group for page in section.pages] if group in plan.used_groups else []
        staying = 0 if streamed is None else max(len(pages) - streamed, 0)
        kept += staying
        leased = pages[staying:]
        parts = [size for weight in plan.groups[group].weights for size in part_bytes.get(id(weight.parameter), ())]
        moved_bytes += sum(page.nbytes for page in leased) + sum(parts)
        accesses = [Access(("param", group), tuple(page.index for page in leased))] if leased else []
        tasks.append(Task("forward", group, accesses, parts=parts))
    everything, frame_count = [section for of_group in sections for section in of_group], placement.frame_count - kept

    def seconds(task: Task) -> float:
        return computing.get(task.group, 0.0)

    dry = DryRun(everything, frame_count, tasks, None, True, 0, {}, drive, seconds, parts_ahead=PARTS_IN_MEMORY)
    return dry, moved_bytes


def _simulate(
    load: PlannedLoad, rates: DriveRates, computing: Mapping[int, float], streamed: int | None, demanded_bytes: float
) -> StepStats:
    """Predict a pass: with the bytes that it needs, not those read for the next one; and with a wait that no page has.

    Args:
        computing: seconds by group.
        streamed: see `_dry_run`.
        demanded_bytes: of experts that it waits for.
    """
    access_s = _dry_run(load, VirtualDrive(), {}, streamed)[0].access_seconds()
    dry, moved_bytes = _dry_run(load, VirtualDrive(rates, access_s, mapping_seconds()), computing, streamed)
    if streamed is None:
        dry.step()
    step = dry.clock.stats() if streamed is None else dry.time()
    forward, wait_s = step.phases["forward"], demanded_bytes / rates.read
    forward = replace(
        forward,
        wall_s=forward.wall_s + wait_s,
        read_wait_s=forward.read_wait_s + wait_s,
        read_bytes={"param": int(moved_bytes + demanded_bytes)},
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
        seconds = min_seconds(lambda: rows.from_parts(parts, made.empty), TRIALS)
    return seconds / numel * weight.parameter.numel()
