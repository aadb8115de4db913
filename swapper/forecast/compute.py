"""Says how long a model and its optimizer compute if they wait for nothing: measured in one step, or counted from its matrices."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from swapper.device.device import open_device
from swapper.errors import StateError
from swapper.forecast.measured_pass import MeasuredPass, measure_pass
from swapper.forecast.trials import checking_seconds, mapping_seconds, measure_updates
from swapper.modules.cold import is_cold
from swapper.modules.groups import Group
from swapper.modules.guarded import is_guarded
from swapper.paging.dry_run import Task
from swapper.train.planning.planned_step import PlannedStep
from swapper.train.planning.update_place import min_seconds
from swapper.train.sharded.sharded_model import ShardedModel
from swapper.train.sharded.shards import Shards, shard_count

log = logging.getLogger("swapper")

GATHERED_BYTES = 16 << 20
"""Of a trial's collective, in all ranks together."""
PRODUCT_ROWS = 4096
"""Rows of the products of matrices whose rate is measured, at most."""


@dataclass(frozen=True)
class ComputeTimes:
    """Seconds of computing.

    Attributes:
        forward_s, backward_s: by group of parameters.
        update_s: of the optimizer, for one element, by group.
        access_s: of the pager's, for one access.
        mapped_byte_s: of a byte that comes, until it can be used.
        checked_byte_s: of the checksum of a byte that moves.
        activation_bytes: the peak of what the model makes outside of swapper's memory; None: not known.
    """

    forward_s: Mapping[int, float]
    backward_s: Mapping[int, float]
    update_s: Mapping[int, float] = field(default_factory=dict)
    access_s: float = 0.0
    mapped_byte_s: float = 0.0
    checked_byte_s: float = 0.0
    activation_bytes: int | None = None

    def of(self, task: Task) -> float:
        """Return the seconds of one task of a step."""
        if task.updated:
            return task.updated * self.update_s.get(task.group, 0.0)
        return (self.forward_s if task.phase == "forward" else self.backward_s).get(task.group, 0.0)


def measure_step(
    plan: PlannedStep, tokens: int, example: Sequence[Any] | Mapping[str, Any] | None = None
) -> ComputeTimes:
    """Measure on this machine how long a step computes, wherever its content lies: a forward and backward, an update, pages.

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

    def count() -> ComputeTimes:
        groups = {id(parameter): group.index for group in inventory.groups for _, parameter in group.parameters}
        paged = {id(parameter): groups[id(request.model.paged(parameter))] for parameter in model.parameters()}
        return count_products(model, paged, tokens)

    measure = partial(measure_pass, model, inventory.units, args, kwargs, bool(inventory.forms), dtypes, device)
    found = measure_or_count(measure, count)
    if isinstance(request.model, ShardedModel):
        found = _with_gathers(found, request.model.shards, inventory.groups)
    if request.updates_there:
        return found
    checked_byte_s = checking_seconds() if request.manager.check_reads else 0.0
    return with_updates(replace(found, mapped_byte_s=mapping_seconds(), checked_byte_s=checked_byte_s), plan)


def with_updates(compute: ComputeTimes, plan: PlannedStep) -> ComputeTimes:
    """Return the seconds of the same passes, with the update of a plan, measured, and with its pager's."""
    if plan.request.updates_there:
        return compute
    update_s = measure_updates(plan.inventory, plan.request.optimizers, plan.slice_bytes)
    return with_pager(replace(compute, update_s=update_s), plan)


def with_pager(compute: ComputeTimes, plan: PlannedStep) -> ComputeTimes:
    """Return the same seconds, with those of a plan's pager."""
    return replace(compute, access_s=plan.dry_run().access_seconds())


def _compute_dtypes(shards: Shards) -> dict[int, torch.dtype]:
    """Return the dtype that each parameter has while it is gathered, by the id of the user's."""
    return {id(of.parameter): of.fsdp_param.param_dtype or of.fsdp_param.orig_dtype for of in shards.all}


def _with_gathers(compute: ComputeTimes, shards: Shards, groups: list[Group]) -> ComputeTimes:
    """Return the seconds with those of gathers of parameters from all ranks, who all call this at the same time.

    A backward gathers too, and sums gradients over ranks, which takes as long.
    """
    param_group = shards.by_group[0][0]
    ranks = shard_count(param_group)
    if ranks == 1:
        return compute
    device, process_group = shards.all[0].fsdp_param.device, param_group.mesh_info.shard_process_group
    parts = [torch.zeros(GATHERED_BYTES // ranks, dtype=torch.uint8, device=device) for _ in range(ranks)]

    def gather() -> None:
        torch.distributed.all_gather(parts, parts[0].clone(), group=process_group)
        parts[0][0].item()  # on an accelerator it is over then

    byte_s = min_seconds(gather, times=3) / GATHERED_BYTES
    dtypes = _compute_dtypes(shards)
    of = {id(shard.local): shard.parameter.numel() * dtypes[id(shard.parameter)].itemsize for shard in shards.all}
    gathers = {group.index: byte_s * sum(of[id(parameter)] for _, parameter in group.parameters) for group in groups}
    forward, backward = (
        {group: had.get(group, 0.0) + times * seconds for group, seconds in gathers.items()}
        for had, times in ((compute.forward_s, 1), (compute.backward_s, 2))
    )
    return replace(compute, forward_s=forward, backward_s=backward)


def measure_or_count(measure: Callable[[], MeasuredPass], count: Callable[[], ComputeTimes]) -> ComputeTimes:
    """Return what was measured; of a model that cannot run so what was counted, with a warning."""
    try:
        measured = measure()
    except Exception as error:  # of the user's model: what it needs is not known
        log.warning(
            "the model did not run with the example (%s: %s): a prediction counts products of matrices only. Give "
            "predict(..., example=(tensors,)), the arguments of a forward",
            type(error).__name__, str(error).strip().split("\n")[0][:200],
        )  # fmt: skip
        return count()
    forward, backward = (
        {group: seconds for (of, group), seconds in measured.seconds.items() if of == phase}
        for phase in ("forward", "backward")
    )
    return ComputeTimes(forward, backward, activation_bytes=measured.peak_bytes)


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
