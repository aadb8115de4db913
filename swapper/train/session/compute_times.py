"""Seconds that a model and its optimizer compute if they wait for nothing: an input of the prediction of a step."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import Optimizer

from swapper.paging.dry_run import Task
from swapper.train.layout.inventory import Inventory
from swapper.train.updates.update_rates import least_seconds, update_seconds

LARGEST_ROWS, LARGEST_SIDE = 1024, 2048
"""A trial's largest matrices; larger ones take longer in proportion: then they are far beyond a cache anyway."""


@dataclass(frozen=True)
class ComputeTimes:
    """Seconds of computing.

    Attributes:
        forward_s, backward_s: by group of parameters.
        update_s: of the optimizer, for one element.
    """

    forward_s: Mapping[int, float]
    backward_s: Mapping[int, float]
    update_s: float

    def of(self, task: Task) -> float:
        """Return the seconds of one task of a step."""
        if task.updated:
            return task.updated * self.update_s
        return (self.forward_s if task.phase == "forward" else self.backward_s)[task.group]


def find_compute(
    model: nn.Module,
    inventory: Inventory,
    optimizer: Optimizer | None,
    tokens: int,
    flops: float | None = None,
    update_s: float | None = None,
) -> ComputeTimes:
    """Return how long a step computes. What is not given is measured on this processor, in a second or so.

    Counted are the products of matrices, of the shapes and dtypes of the model's weights with `tokens` rows, one in forward
    and two in backward, and the optimizer's update. What else a model computes (attention, norms, the loss) is not in it.

    Args:
        tokens: rows that pass through each matrix in a step, of all samples together. Embedding tables count as no work.
        flops: floating-point operations a second in products of matrices.
        update_s: seconds in which the optimizer updates one element.
    """
    forward: dict[int, float] = {group.index: 0.0 for group in inventory.groups}
    backward = dict(forward)
    group_of = {id(parameter): group.index for group in inventory.groups for _, parameter in group.parameters}
    product_seconds = functools.cache(_product_seconds)
    for module in model.modules():
        for parameter in () if isinstance(module, nn.Embedding) else module._parameters.values():
            if parameter is not None and parameter.dim() >= 2:
                outputs, group = parameter.shape[0], group_of[id(parameter)]
                inputs = parameter.numel() // outputs
                if flops is None:
                    seconds = product_seconds(tokens, outputs, inputs, parameter.dtype)
                else:
                    seconds = 2 * tokens * outputs * inputs / flops
                forward[group] += seconds
                backward[group] += (2 if parameter.requires_grad else 1) * seconds
    if update_s is None:
        update_s = 0.0 if optimizer is None else update_seconds(optimizer) or 0.0
    return ComputeTimes(forward, backward, update_s)


def _product_seconds(rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> float:
    """Return the seconds of a product of (rows, inputs) and (outputs, inputs) matrices: of a part of it, if they are large."""
    part = min(rows, LARGEST_ROWS), min(outputs, LARGEST_SIDE), min(inputs, LARGEST_SIDE)
    x, weight = torch.ones(part[0], part[2], dtype=dtype), torch.ones(part[1], part[2], dtype=dtype)
    with torch.no_grad():
        seconds = least_seconds(lambda: F.linear(x, weight), times=3)
    return seconds * (rows * outputs * inputs) / math.prod(part)
