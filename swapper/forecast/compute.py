"""Says how long a model and its optimizer compute if they wait for nothing: measured in one step, or counted from its matrices."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from swapper.device.device import open_device
from swapper.errors import StateError
from swapper.forecast.measured_pass import measure_pass
from swapper.forecast.measured_update import measure_updates
from swapper.modules.cold import is_cold
from swapper.modules.groups import Group
from swapper.modules.guarded import is_guarded
from swapper.paging.dry_run import Task
from swapper.paging.layout import SectionPlan
from swapper.paging.virtual_drive import PagingCosts
from swapper.train.planning.planned_step import PlannedStep
from swapper.train.planning.update_place import min_seconds
from swapper.train.sharded.sharded_model import ShardedModel
from swapper.train.sharded.shards import Shards, shard_count

log = logging.getLogger("swapper")

COPIED_BYTES = 32 << 20
"""Of a trial copy: more than most caches."""
GATHERED_BYTES = 16 << 20
"""Of a trial's collective, in all ranks together."""
PRODUCT_ROWS = 4096
"""Rows of the products of matrices whose rate is measured, at most."""
PAGING = PagingCosts(
    access_s=450e-6,
    page_s=80e-6,
    mapped_byte_s=65e-12,
    transfer_s=25e-6,
    checked_byte_s=47e-12,
    use_s=130e-6,
)
"""Of a loaded model whose layers touched each page and computed nothing, with caches filled by other data: two cores of an AMD
EPYC with AVX-512, 2026-11-30. Together they are some hundredths of a step."""


@dataclass(frozen=True)
class ComputeTimes:
    """Seconds of computing.

    Attributes:
        forward_s, backward_s: by group of parameters.
        update_s: of the optimizer, for one element, by group.
        copied_byte_s: of a byte of a gradient that swapper copies to its slot.
        paging: what windows and checksums add.
        activation_bytes: the peak of what the model makes outside of swapper's memory; None: not known.
    """

    forward_s: Mapping[int, float]
    backward_s: Mapping[int, float]
    update_s: Mapping[int, float] = field(default_factory=dict)
    copied_byte_s: float = 0.0
    paging: PagingCosts = field(default_factory=PagingCosts)
    activation_bytes: int | None = None

    def of(self, task: Task) -> float:
        """Return the seconds of one task of a step."""
        if task.updated:
            return task.updated * self.update_s.get(task.group, 0.0)
        return (self.forward_s if task.phase == "forward" else self.backward_s)[task.group]

    def faster(self, times: float) -> ComputeTimes:
        """Return the seconds on a processor that is `times` as fast."""
        forward, backward, update = (
            {group: seconds / times for group, seconds in of.items()}
            for of in (self.forward_s, self.backward_s, self.update_s)
        )
        copied_byte_s, paging = self.copied_byte_s / times, self.paging.faster(times)
        return ComputeTimes(forward, backward, update, copied_byte_s, paging)

    def longer(self, forward_s: Mapping[int, float], backward_s: Mapping[int, float]) -> ComputeTimes:
        """Return the seconds with more of them, by group."""
        pairs = ((self.forward_s, forward_s), (self.backward_s, backward_s))
        forward, backward = ({group: of + more.get(group, 0.0) for group, of in had.items()} for had, more in pairs)
        return replace(self, forward_s=forward, backward_s=backward)

    def with_copied(self, gradients: Sequence[SectionPlan]) -> ComputeTimes:
        """Return the seconds with those in which backward copies these gradients to sections."""
        backward = dict(self.backward_s)
        for plan in gradients:
            backward[plan.group] += plan.nbytes * self.copied_byte_s
        return replace(self, backward_s=backward)


def measure_step(
    plan: PlannedStep, tokens: int, example: Sequence[Any] | Mapping[str, Any] | None = None
) -> ComputeTimes:
    """Measure on this machine how long a step computes, wherever its content lies: one forward and backward, an update, pages.

    A model that cannot run so counts by its products of matrices, with a warning.

    Args:
        plan: of a model that is not offloaded yet.
        tokens, example: see `Plan.predict`.

    Raises:
        StateError: the model is offloaded.
    """
    request, inventory = plan.request, plan.inventory
    model = request.model.given
    if any(is_cold(parameter) or is_guarded(parameter) for parameter in request.model.module.parameters()):
        raise StateError("the model is offloaded already: predict its step before manager.offload")
    given: Any = (torch.zeros(1, tokens, dtype=torch.long, device="meta"),) if example is None else example
    args, kwargs = ((), given) if isinstance(given, Mapping) else (tuple(given), {})
    device = open_device(request.model.device or "cpu") if request.device is None else request.device.device
    dtypes = _compute_dtypes(request.model.shards) if isinstance(request.model, ShardedModel) else None
    try:
        measured = measure_pass(model, inventory.units, args, kwargs, bool(inventory.forms), dtypes, device)
    except Exception as error:  # of the user's model: what it needs is not known
        warn_of_products(error)
        groups = {id(parameter): group.index for group in inventory.groups for _, parameter in group.parameters}
        paged = {id(parameter): groups[id(request.model.paged(parameter))] for parameter in model.parameters()}
        found = count_products(model, paged, tokens)
    else:
        forward, backward = (
            {group.index: measured.seconds.get((phase, group.index), 0.0) for group in inventory.groups}
            for phase in ("forward", "backward")
        )
        found = ComputeTimes(forward, backward, activation_bytes=measured.peak_bytes)
    if isinstance(request.model, ShardedModel):
        gathers = _gathering_seconds(request.model.shards, inventory.groups)
        found = found.longer(gathers, {group: 2 * of for group, of in gathers.items()})  # a sum over ranks is as long
    if request.updates_there:
        return found
    paging = paging_costs(request.manager.check_reads)
    used_s = dict.fromkeys(found.forward_s, paging.use_s)
    paging = replace(paging, access_s=paging.access_s - paging.use_s)  # an update has no hooks
    return with_updates(replace(found.longer(used_s, used_s), copied_byte_s=_copying_seconds(), paging=paging), plan)


def paging_costs(has_checksums: bool) -> PagingCosts:
    """Return what pages take of this machine's processors, with or without the engine's checksums of what moves."""
    are_all_needed = torch.get_num_threads() >= len(os.sched_getaffinity(0))
    return replace(PAGING, checked_byte_s=PAGING.checked_byte_s * has_checksums, takes_turns=are_all_needed)


def with_updates(compute: ComputeTimes, plan: PlannedStep) -> ComputeTimes:
    """Return the seconds of the same passes, with the update of a plan, measured."""
    if plan.request.updates_there:
        return compute
    return replace(compute, update_s=measure_updates(plan.inventory, plan.request.optimizers, plan.slice_bytes))


def _compute_dtypes(shards: Shards) -> dict[int, torch.dtype]:
    """Return the dtype that each parameter has while it is gathered, by the id of the user's."""
    found = {}
    for shard in shards.all:
        found[id(shard.parameter)] = shard.fsdp_param.param_dtype or shard.fsdp_param.orig_dtype
    return found


def _gathering_seconds(shards: Shards, groups: list[Group]) -> Mapping[int, float]:
    """Return, by group, the seconds of a gather of its parameters from all ranks. All ranks call this at the same time."""
    param_group = shards.by_group[0][0]
    ranks = shard_count(param_group)
    if ranks == 1:
        return {group.index: 0.0 for group in groups}
    device, process_group = shards.all[0].fsdp_param.device, param_group.mesh_info.shard_process_group
    parts = [torch.zeros(GATHERED_BYTES // ranks, dtype=torch.uint8, device=device) for _ in range(ranks)]

    def gather() -> None:
        torch.distributed.all_gather(parts, parts[0].clone(), group=process_group)
        parts[0][0].item()  # on an accelerator it is over then

    byte_s = min_seconds(gather, times=3) / GATHERED_BYTES
    dtypes = _compute_dtypes(shards)
    of = {id(shard.local): shard.parameter.numel() * dtypes[id(shard.parameter)].itemsize for shard in shards.all}
    return {group.index: byte_s * sum(of[id(parameter)] for _, parameter in group.parameters) for group in groups}


def warn_of_products(error: Exception) -> None:
    """Say that a model could not run, and what counts then."""
    log.warning(
        "the model did not run with the example (%s: %s): a prediction counts products of matrices only. Give "
        "predict(..., example=(tensors,)), the arguments of a forward",
        type(error).__name__, str(error).strip().split("\n")[0][:200],
    )  # fmt: skip


def _copying_seconds() -> float:
    """Return how long it takes to copy a byte of a gradient."""
    source = torch.zeros(COPIED_BYTES, dtype=torch.uint8, device="cpu")
    target = torch.zeros_like(source)
    return min_seconds(lambda: target.copy_(source), times=5) / COPIED_BYTES


def count_products(
    model: nn.Module,
    group_of: Mapping[int, int],
    tokens: int,
    flops: float | None = None,
    share: Callable[[nn.Parameter], float] = lambda parameter: 1.0,
) -> ComputeTimes:
    """Return how long the products of matrices take, of the model's weights with `tokens` rows, one in forward, two in backward.

    What else a model computes (attention, norms, the loss) is not in it, and embedding tables count as no work.

    Args:
        group_of: groups of the model's parameters, by their ids.
        tokens: rows that pass through each matrix in a step, of all samples together.
        flops: floating-point operations a second. Default: measured on this processor, in a second or so.
        share: returns the part of the rows that passes through a weight.
    """
    forward = dict.fromkeys(group_of.values(), 0.0)
    backward = dict(forward)
    rates: dict[torch.dtype, float] = {}
    for module in model.modules():
        for parameter in () if isinstance(module, nn.Embedding) else module._parameters.values():
            if parameter is not None and parameter.dim() >= 2 and id(parameter) in group_of:
                if flops is None and parameter.dtype not in rates:
                    rates[parameter.dtype] = measure_products(tokens, parameter.dtype)
                seconds = 2 * tokens * share(parameter) * parameter.numel() / (flops or rates[parameter.dtype])
                group = group_of[id(parameter)]
                forward[group] += seconds
                backward[group] += (2 if parameter.requires_grad else 1) * seconds
    return ComputeTimes(forward, backward)


def measure_products(rows: int, dtype: torch.dtype, size: int = 2048) -> float:
    """Return the floating-point operations a second of a product of `rows` vectors with a matrix of `size` x `size`."""
    x = torch.zeros(min(rows, PRODUCT_ROWS), size, dtype=dtype, device="cpu")
    weight = torch.zeros(size, size, dtype=dtype, device="cpu")
    with torch.no_grad():
        return 2 * x.numel() * size / min_seconds(lambda: nn.functional.linear(x, weight), times=4)
