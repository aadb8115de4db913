"""Plans a session and predicts its steps. Writes nothing.

`SwapManager.offload` carries out the plan, so the two cannot differ.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from swapper.device.model_device import DevicePlacement
from swapper.durability.committer import steps_between_commits
from swapper.errors import BudgetError
from swapper.formats.container import ContainerLayout
from swapper.io.drives import Tuning
from swapper.paging.layout import Budget
from swapper.paging.store.swap_files import TURNS
from swapper.runtime.stats import StepStats
from swapper.train.layout.inventory import Inventory, find_places, find_trainables
from swapper.train.layout.slices import MIN_SLICE_BYTES
from swapper.train.layout.train_placement import (
    StepKind,
    choose_placement,
    place_on_accelerator,
    state_bytes,
    without_gradients,
)
from swapper.train.planning.plan_text import describe
from swapper.train.planning.planned_step import PlannedStep, sections_of
from swapper.train.planning.request import Request
from swapper.train.state.conditions import check_averaging
from swapper.train.updates.device_slots import group_ahead_bytes, ring_bytes

SLICE_SHARE = 256
"""A slice that is updated on a device has at most a 256th of device_memory of its largest state tensor: a choice. Three slices with
all that they need take some 5 % of it, and 14 % with encoded state, which is decoded there. Where that is too much slices are
smaller."""


@dataclass(frozen=True)
class Plan(PlannedStep):
    """The placement of a model's parameters, gradients and optimizer state, and its costs. Print it, or pass it to `offload`.

    Attributes:
        request: the user's model, optimizer and options.
        inventory: contents of the model and the optimizer.
        step: the variant of its step.
        places: "host" or "nvme" for "param", "state" and "grad".
        budget: the division of host memory.
        layout: of a swap file.
        turns: number of swap files, which alternate.
        commit_every: steps from commit to commit; None: no commits.
        tuning: the drive's measurements by `swapper tune`, if any.
        on_device: the division of an accelerator's memory, if any.
        found: what `predict` has found so far.
    """

    def predict(
        self,
        tokens: int,
        *,
        example: Sequence[Any] | Mapping[str, Any] | None = None,
        drive_read: int | str | None = None,
        drive_write: int | str | None = None,
    ) -> StepStats:
        """Predict how long a step takes, by phase, and what it waits for: by the dry run, on a drive that is simulated.

        One step's computing is measured here and now, with the model's own code and without its weights (forecast/compute.py):
        that takes the memory of its activations, and the time of some steps. With an accelerator the step's copies and kernels
        are put on clocks (forecast/accelerator.py). Once the plan is carried out, `manager.stats()` shows this with what came.

        Args:
            tokens: of a step, of all samples together.
            example: arguments of the model, of a step: a tuple, or a dictionary by name; its result is, or has, the loss. Its
                tensors may be on the meta device. Default: integers of shape (1, tokens), as of a language model; the sum of the
                result counts as its loss. If the model takes something else, only its products of matrices are counted.
            drive_read, drive_write: bytes a second, or strings such as "7GB/s". Default: what `swapper tune` measured.

        Raises:
            ConfigError: the drive's speed is not known, or a value is not positive.
            StateError: the model is offloaded already.
        """
        from swapper.forecast.step import predict

        self.found.step, self.found.activation_bytes = predict(self, tokens, example, (drive_read, drive_write))
        return self.found.step

    def __str__(self) -> str:
        return describe(self)


def plan_run(
    request: Request,
    inventory: Inventory,
    places: tuple[str, str] | None = None,
    *,
    tuning: Tuning | None = None,
    page_bytes: int | None = None,
    existing_files: Collection[int] = (),
) -> Plan:
    """Plan a session.

    Args:
        request: the user's model, optimizer and options.
        inventory: contents of the model and the optimizer.
        places: of parameters and optimizer state, if not the requested ones.
        tuning: measurements of the drive.
        page_bytes, existing_files: of a resumed run.

    Raises:
        BudgetError: the budget is too small; names the smallest that works.
    """
    device, there = request.device, request.updates_there
    step = StepKind(request.options.update, device is not None and not request.model.is_sharded, there)
    of = partial(_plan_step, request, inventory, places, tuning, page_bytes, existing_files)
    if device is None or not there:
        return of(step)
    max_bytes = device.nbytes // SLICE_SHARE
    while True:
        try:
            return of(replace(step, max_slice_bytes=max_bytes))
        except BudgetError as error:
            if error.option != "device_memory" or max_bytes <= MIN_SLICE_BYTES:
                raise
            max_bytes //= 4


def _plan_step(
    request: Request,
    inventory: Inventory,
    places: tuple[str, str] | None,
    tuning: Tuning | None,
    page_bytes: int | None,
    existing_files: Collection[int],
    step: StepKind,
) -> Plan:
    """Return the plan with this variant of the step. Arguments and errors: of `plan_run`."""
    options, device = request.options, request.device
    params, state = places or (options.params, options.optimizer_state)
    # Content on a device has a place in memory or on NVMe too.
    wishes = "auto" if params == "device" else params, "nvme" if state == "device" else state, options.gradients
    stays = _stays_on_device(request)

    def divide(on_device: DevicePlacement, page_bytes: int | None) -> tuple[dict[str, str], Budget]:
        left = without_gradients(inventory, on_device.gradients).with_state_staying(on_device.state)
        return choose_placement(left, *wishes, request.manager.host_bytes, page_bytes, step)

    always = DevicePlacement(
        0,
        frozenset(),
        gradients=frozenset(plan.group for plan in inventory.grad_plans if stays[0] == "device"),
        state=frozenset(state_bytes(inventory)) if stays[1] == "device" else frozenset(),
    )
    found, budget = divide(always, page_bytes)
    layout = ContainerLayout.plan([plan.nbytes for plan in inventory.plans])
    inventory = inventory.with_state_staying(always.state)
    sections = sections_of(inventory, found, budget, layout)
    on_device = None
    if device is not None:
        other_bytes = sum(buffer.nbytes for buffer in request.model.module.buffers())
        ahead_bytes: dict[int, int] = {}
        if request.updates_there:
            trainables = find_trainables(inventory, find_places(sections))
            slice_bytes = step.slice_bytes(budget.page_bytes)
            other_bytes += ring_bytes(trainables, max(slice_bytes, MIN_SLICE_BYTES))  # the smallest, whatever pages are
            only_state = step.on_device and stays[0] != "host"
            ahead_bytes = {of.group: group_ahead_bytes(of, slice_bytes, only_state) for of in trainables}
        on_device = place_on_accelerator(
            inventory, device, other_bytes, options.params, *stays, ahead_bytes, has_images=step.on_device
        )
        if (on_device.gradients, on_device.state) != (always.gradients, always.state):
            found, budget = divide(on_device, budget.page_bytes)  # with the memory that they release
        if step.on_device:  # FSDP2's gradients are averaged before they leave
            leave = bool(without_gradients(inventory, on_device.gradients).grad_plans)
            check_averaging(request.model.given, options.update, leave)
        inventory = inventory.with_state_staying(on_device.state)
        sections = sections_of(inventory, found, budget, layout)
    every = steps_between_commits(request.manager.commit_every, sections, bool(inventory.staying_state))
    turns = TURNS if every or existing_files else 1
    return Plan(
        request=request, inventory=inventory, step=step, places=found, budget=budget, layout=layout, turns=turns,
        commit_every=every, tuning=tuning, on_device=on_device,
    )  # fmt: skip


def _stays_on_device(request: Request) -> tuple[str, str]:
    """Return which gradients and which state stay on the device: "device" for all, "auto" for those that fit, else none."""
    options, there = request.options, request.updates_there
    gradients = "host" if request.model.is_sharded else options.gradients
    return (gradients, options.optimizer_state) if there else ("host", "host")
