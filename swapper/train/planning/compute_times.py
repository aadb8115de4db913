"""Seconds that a model and its optimizer compute if they wait for nothing: an input of the prediction of a step."""

from __future__ import annotations

import logging
import math
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from swapper.errors import StateError
from swapper.modules.cold import is_cold
from swapper.modules.groups import Group
from swapper.modules.guarded import is_guarded
from swapper.modules.operations import ROUNDS, OperationTimes, Recording, middle, min_seconds, record
from swapper.modules.paging_costs import measure_paging_costs
from swapper.paging.dry_run import Task
from swapper.paging.layout import SectionPlan
from swapper.paging.virtual_drive import PagingCosts
from swapper.runtime.free_memory import HEAP_TENSOR_BYTES
from swapper.train.layout.inventory import Inventory
from swapper.train.optimizer.optimizer_set import OptimizerSet
from swapper.train.planning.update_times import find_update_times, update_seconds

log = logging.getLogger("swapper")

COPIED_BYTES = 32 << 20
"""Of a trial copy: more than most caches."""
TOUCHES = 3


@dataclass(frozen=True)
class ComputeTimes:
    """Seconds of computing.

    Attributes:
        forward_s, backward_s: by group of parameters.
        update_s: of the optimizer, for one element.
        group_update_s: the same by group, where it is known.
        piece_s, slice_s: of a piece of a parameter in a slice of the optimizer's, and of the slice, in addition.
        copied_byte_s: of a byte of a gradient that swapper copies to its slot.
        touched_byte_s: of a byte of a gradient that stays autograd's own, if its memory is new in each step.
        paging: what windows and checksums add.
        activation_bytes: the peak of what the model makes outside of swapper's memory; None: not known.
    """

    forward_s: Mapping[int, float]
    backward_s: Mapping[int, float]
    update_s: float
    group_update_s: Mapping[int, float] = field(default_factory=dict)
    piece_s: float = 0.0
    slice_s: float = 0.0
    copied_byte_s: float = 0.0
    touched_byte_s: float = 0.0
    paging: PagingCosts = field(default_factory=PagingCosts)
    activation_bytes: int | None = None

    def of(self, task: Task) -> float:
        """Return the seconds of one task of a step."""
        if task.updated:
            fixed_s = self.slice_s + task.pieces * self.piece_s
            return task.updated * self.group_update_s.get(task.group, self.update_s) + fixed_s
        return (self.forward_s if task.phase == "forward" else self.backward_s)[task.group]

    def faster(self, times: float) -> ComputeTimes:
        """Return the seconds on a processor that is `times` as fast."""
        forward, backward, update = (
            {group: seconds / times for group, seconds in of.items()}
            for of in (self.forward_s, self.backward_s, self.group_update_s)
        )
        return replace(
            self, forward_s=forward, backward_s=backward, update_s=self.update_s / times, group_update_s=update,
            piece_s=self.piece_s / times, slice_s=self.slice_s / times, copied_byte_s=self.copied_byte_s / times,
            touched_byte_s=self.touched_byte_s / times, paging=self.paging.faster(times),
        )  # fmt: skip

    def regrouped(self, groups: Sequence[Group], larger: Sequence[Group]) -> ComputeTimes:
        """Return the seconds by `larger` groups, of which each has the parameters of one or more of `groups`."""
        if groups is larger:
            return self
        of = {id(parameter): group.index for group in larger for _, parameter in group.parameters}
        forward, backward = (dict.fromkeys((group.index for group in larger), 0.0) for _ in range(2))
        for group in groups:
            index = of[id(group.parameters[0][1])]
            forward[index] += self.forward_s[group.index]
            backward[index] += self.backward_s[group.index]
        return replace(self, forward_s=forward, backward_s=backward)

    def with_gradients(self, copied: Sequence[SectionPlan], own: Sequence[SectionPlan]) -> ComputeTimes:
        """Return the seconds with those in which backward copies gradients to sections, and first touches autograd's own.

        Only what the C library takes from the system is new in each step: the heap's memory stays (runtime/free_memory.py).
        """
        backward = dict(self.backward_s)
        for plan in copied:
            backward[plan.group] += plan.nbytes * self.copied_byte_s
        for plan in own:
            new = [slot.spec.nbytes for slot in plan.slots if slot.spec.nbytes > HEAP_TENSOR_BYTES]
            backward[plan.group] += sum(new) * self.touched_byte_s
        return replace(self, backward_s=backward)


def calibrate(
    model: nn.Module,
    inventory: Inventory,
    optimizers: OptimizerSet,
    page_bytes: int,
    tokens: int,
    example: Sequence[Any] | Mapping[str, Any] | None,
    has_checksums: bool,
) -> ComputeTimes:
    """Measure on this processor how long a step computes: each operation of forward and backward, and the update as it is done.

    Args:
        model: not offloaded yet.
        page_bytes: of the plan.
        tokens: of a step; if there is no `example`, the model is tried with integers of shape (1, tokens).
        example: arguments of the model, of a step, as they are or by name; its result is, or has, the loss.
        has_checksums: the engine takes checksums of what moves.

    Raises:
        StateError: the model is offloaded.
    """
    if any(is_cold(parameter) or is_guarded(parameter) for parameter in model.parameters()):
        raise StateError("the model is offloaded already: predict its step before manager.offload")
    given: Any = (torch.zeros(1, tokens, dtype=torch.long, device="meta"),) if example is None else example
    args, kwargs = ((), given) if isinstance(given, Mapping) else (tuple(given), {})
    recording = None
    try:
        recording = record(model, inventory.units, args, kwargs, bool(inventory.forms))
    except Exception as error:  # of the user's model: what it needs is not known
        log.warning(
            "the model's operations could not be recorded (%s: %s): a prediction counts products of matrices only. Give "
            "predict(..., example=(tensors,)), the arguments of a forward",
            type(error).__name__, str(error).strip().split("\n")[0][:200],
        )  # fmt: skip
    rounds: list[ComputeTimes] = []
    for _ in range(ROUNDS):
        update = find_update_times(inventory, optimizers, page_bytes)
        if recording is None:
            found = find_compute(model, inventory, None, tokens, update_s=0.0)
        else:
            found = _recorded_times(recording, inventory)
        found = replace(
            found, group_update_s=update.element_s, piece_s=update.piece_s, slice_s=update.slice_s,
            copied_byte_s=_copying_seconds(), touched_byte_s=_touching_seconds(),
            paging=measure_paging_costs(page_bytes, has_checksums),
        )  # fmt: skip
        rounds.append(found)
    return middle(rounds)


def _recorded_times(recording: Recording, inventory: Inventory) -> ComputeTimes:
    times = OperationTimes()
    forward, backward = (
        {group.index: times.of(phase, recording.counts.get((phase, group.index), {})) for group in inventory.groups}
        for phase in ("forward", "backward")
    )
    return ComputeTimes(forward, backward, 0.0, activation_bytes=times.peak_bytes(recording.live_bytes))


def _copying_seconds() -> float:
    """Return how long it takes to copy a byte of a gradient."""
    source = torch.zeros(COPIED_BYTES, dtype=torch.uint8, device="cpu")
    target = torch.zeros_like(source)
    return min_seconds(lambda: target.copy_(source), times=5) / COPIED_BYTES


def _touching_seconds() -> float:
    """Return how long the first touch of a byte takes, more than a later one."""

    def fill(memory: mmap.mmap) -> float:
        tensor = torch.frombuffer(memory, dtype=torch.uint8)
        return min_seconds(lambda: tensor.fill_(1), times=1)

    found = []
    for _ in range(TOUCHES):
        memory = mmap.mmap(-1, COPIED_BYTES)
        found.append(max(fill(memory) - fill(memory), 0.0))
    return min(found) / COPIED_BYTES


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
    times = OperationTimes() if flops is None else None
    for module in model.modules():
        for parameter in () if isinstance(module, nn.Embedding) else module._parameters.values():
            if parameter is not None and parameter.dim() >= 2:
                outputs, group = parameter.shape[0], group_of[id(parameter)]
                inputs = parameter.numel() // outputs
                if times is not None:
                    seconds = times.product(tokens, outputs, inputs, parameter.dtype)
                else:
                    seconds = 2 * tokens * outputs * inputs / (flops or math.inf)
                forward[group] += seconds
                backward[group] += (2 if parameter.requires_grad else 1) * seconds
    if update_s is None:
        update_s = 0.0 if optimizer is None else update_seconds(optimizer) or 0.0
    return ComputeTimes(forward, backward, update_s)
