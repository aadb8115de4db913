"""Plans a session, predicts its steps, and says the plan in words. Writes nothing.

`SwapManager.offload` carries out the plan, so the two cannot differ. The words: what is where, what a step moves and
takes, and at the start what was chosen and why.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from swapper.device.model_device import DevicePlacement
from swapper.durability.committer import steps_between_commits
from swapper.errors import BudgetError
from swapper.formats.container import ContainerLayout
from swapper.io.drives import Tuning
from swapper.paging.layout import Budget, SectionPlan
from swapper.paging.store.swap_files import TURNS
from swapper.runtime.sizes import format_bytes
from swapper.runtime.stats import StepStats, by_family
from swapper.train.layout.inventory import Inventory, find_places, find_trainables
from swapper.train.layout.slices import MIN_SLICE_BYTES
from swapper.train.layout.train_placement import (
    StepKind,
    choose_placement,
    place_on_accelerator,
    state_bytes,
    without_gradients,
)
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
        example: Sequence[object] | Mapping[str, object] | None = None,
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

    always = assumed = _assumed(inventory, stays, ("device",))
    too_small: BudgetError | None = None
    try:
        found, budget = divide(assumed, page_bytes)
    except BudgetError as error:  # unless what may stay on the device does
        too_small, assumed = error, _assumed(inventory, stays, ("device", "auto"))
        try:
            found, budget = divide(assumed, page_bytes)
        except BudgetError:
            raise too_small from None
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
        if (on_device.gradients, on_device.state) != (assumed.gradients, assumed.state):
            try:
                found, budget = divide(on_device, budget.page_bytes)  # with the memory that they release
            except BudgetError as error:
                raise too_small or error from None
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


def _assumed(inventory: Inventory, stays: tuple[str, str], kinds: Collection[str]) -> DevicePlacement:
    """Return a placement before memory is divided: all gradients and all state stay whose place is one of `kinds`."""
    gradients, state = stays
    return DevicePlacement(
        0,
        frozenset(),
        gradients=frozenset(plan.group for plan in inventory.grad_plans if gradients in kinds),
        state=frozenset(state_bytes(inventory)) if state in kinds else frozenset(),
    )


def _stays_on_device(request: Request) -> tuple[str, str]:
    """Return which gradients and which state stay on the device: "device" for all, "auto" for those that fit, else none."""
    options, there = request.options, request.updates_there
    gradients = "host" if request.model.is_sharded else options.gradients
    return (gradients, options.optimizer_state) if there else ("host", "host")


# --- a plan in words --------------------------------------------------------------------------------------------------

_WHOLE = {"param": "params", "state": "optimizer_state", "grad": "gradients"}
_SAID_OTHERWISE = ("parameters", "optimizer state", "gradients", "device memory", "updates")
_WHEN = {"step": "in optimizer.step()", "deferred": "in the next forward", "backward": "in backward"}


def summary(plan: PlannedStep) -> str:
    """Return one line of what was chosen."""
    sizes = ((family, option, plan.inventory.family_bytes(family)) for family, option in _WHOLE.items())
    places = [f"{option} on {plan.places[family]}" for family, option, size in sizes if size]
    used = plan.budget.resident_bytes + plan.budget.pool_bytes
    memory = f"{format_bytes(used)} of {format_bytes(plan.request.manager.host_bytes)} of host memory"
    there = [_chosen_there(plan)] if plan.on_device is not None else []
    return "; ".join([f"{describe_models(plan)}: {', '.join(places)}", *there, memory, f"commits: {_commits(plan)}"])


def chosen(plan: PlannedStep, resources: str) -> list[tuple[str, str]]:
    """Return (what, choice and reason), for the log at the start."""
    found = []
    for family, option in _WHOLE.items():
        if size := plan.inventory.family_bytes(family):
            found.append((option, f"{format_bytes(size)} on {plan.places[family]}, {_why(plan, family, option)}"))
    found += [line for line in placement_lines(plan) if line[0] not in _SAID_OTHERWISE]
    if plan.on_device is not None:
        found.append(("device", _chosen_there(plan)))
    return [*found, ("commits", _commits(plan)), ("drive", _drive(plan)), ("resources", resources)]


def describe_models(plan: PlannedStep) -> str:
    """Return the kinds of models and optimizers, and the bytes of parameters."""
    given, optimizers = plan.request.given[0], plan.request.given_optimizers
    models = given.values() if isinstance(given, dict) else given if isinstance(given, list | tuple) else [given]
    kinds = ", ".join(type(model).__name__ for model in models)
    steppers = ", ".join(type(one).__name__ for one in optimizers) if plan.inventory.forms else "no optimizer"
    return f"{kinds}, {format_bytes(plan.inventory.family_bytes('param'))} of parameters, {steppers}"


def _why(plan: PlannedStep, family: str, option: str) -> str:
    wish, options = getattr(plan.request.options, option), plan.request.options
    if wish == plan.places[family]:
        return f"as {option}={wish!r} says"
    if wish == "device":
        return f"and on the device, as {option}={wish!r} says"
    if family == "grad":
        by_default = options.update == "step"
        return "by default, and where the update needs them" if by_default else f"for update={options.update!r}"
    fits = plan.places[family] == "host"
    return "since it fits host_memory" if fits else "since it does not fit host_memory with the rest"


def _chosen_there(plan: PlannedStep) -> str:
    """Return what stays on a device, its memory, and where and when updates are."""
    device, stays = plan.request.device, plan.on_device
    if device is None or stays is None:
        return "none"
    inventory, whole = plan.inventory, plan.inventory.family_bytes
    params = sum(p.nbytes for g in inventory.groups if g.index in stays.resident_set for _, p in g.parameters)
    gradients = sum(section.nbytes for section in inventory.grad_plans if section.group in stays.gradients)
    state = sum(section.nbytes for section in plan.state_plans if section.group in stays.state)
    parts = {
        "parameters": (params, whole("param")),
        "gradients": (gradients, sum(section.nbytes for section in inventory.grad_plans)),
        "optimizer state": (state, whole("state")),
    }
    kept = [f"{format_bytes(part)} of {format_bytes(all)} of {name}" for name, (part, all) in parts.items() if all]
    size = f"{format_bytes(device.nbytes)}, {'half of what is free' if device.is_auto else 'as asked'}"
    return f"{device.device}: {', '.join(kept)} stay; device_memory is {size}; updates {_updates(plan)}"


def _commits(plan: PlannedStep) -> str:
    if plan.commit_every is None:
        is_free = plan.request.manager.commit_every == "free"
        why = "some of what a step changes stays in memory" if is_free else "as asked"
        return f"none, {why}: a killed run resumes from its last snapshot"
    return "each step" if plan.commit_every == 1 else f"every {plan.commit_every} steps"


def _drive(plan: PlannedStep) -> str:
    if plan.tuning is None:
        return "its speed is not known, so no step can be compared with its limit: run `swapper tune DIR` once"
    read, write = plan.tuning.read_bytes_per_s, plan.tuning.write_bytes_per_s
    most = max(plan.request.manager.drives.ranks, default=1)
    of = "" if most == 1 else f", divided by the {most} ranks that share it"
    return f"reads {format_bytes(read)} and writes {format_bytes(write)} a second, as `swapper tune` measured{of}"


# --- a plan ---------------------------------------------------------------------------------------------------------


def describe(plan: PlannedStep) -> str:
    """Return what `print(plan)` shows."""
    return "\n".join(f"{name:<18}{text}" for name, text in _lines(plan))


def placement_lines(plan: PlannedStep) -> list[tuple[str, str]]:
    """Return (name, text) of what is where, for people."""
    size, resident_set, budget = plan.inventory.family_bytes, plan.inventory.staying_state, plan.budget
    return [
        ("parameters", f"{format_bytes(size('param'))} on {plan.places['param']}"),
        *([("frozen", _frozen(plan))] if plan.external_bytes else []),
        ("optimizer state", _where(plan, "state", [p for p in plan.state_plans if p.group not in resident_set])),
        ("gradients", _where(plan, "grad", plan.grad_plans)),
        (
            "host memory",
            f"{format_bytes(budget.resident_bytes + budget.pool_bytes)} of {format_bytes(plan.request.manager.host_bytes)}: "
            f"{format_bytes(budget.resident_bytes)} stay, {format_bytes(budget.pool_bytes)} are "
            f"{budget.frame_count} frames of {format_bytes(budget.page_bytes)}",
        ),
        *([(plan.request.model.buffers[0], _buffers(plan))] if plan.buffer_bytes is not None else []),
        *(
            [("device memory", _on_device(plan)), ("updates", _updates(plan))]
            if plan.request.device is not None
            else []
        ),
    ]


def _lines(plan: PlannedStep) -> list[tuple[str, str]]:
    lines = [
        *placement_lines(plan),
        (
            "drive space",
            f"{format_bytes(plan.space_bytes)} in {plan.turns} file{'s' * (plan.turns > 1)}{_scratch(plan)}"
            f"{_by_drive(plan)}",
        ),
        ("a step reads", by_family(plan.traffic.read_bytes)),
        ("a step writes", by_family(plan.traffic.written_bytes)),
        ("commits", _commit_words(plan)),
    ]
    if plan.drive_seconds is not None:
        lines.append(("drive time", f"{plan.drive_seconds:.2f} s a step at least, by what `swapper tune` measured"))
    else:
        lines.append(("drive time", "not known: `swapper tune DIR` measures the drive"))
    if plan.found.step is not None:
        lines.append(("predicted", f"{plan.found.step.wall_s:.3f} s a step, bound by {plan.found.step.bound}"))
        memory = ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in plan.memory.items())
        lines.append(("peak memory", f"{format_bytes(sum(plan.memory.values()))}: {memory}"))
    if plan.found.why:
        lines.append(("chosen", plan.found.why))
    daily = plan.traffic.total_written_bytes + plan.commit_bytes / (plan.commit_every or 1)
    lines.append(("wear", f"{format_bytes(1000 * daily)} written in 1000 steps"))
    return lines


def _where(plan: PlannedStep, family: str, elsewhere: Sequence[SectionPlan]) -> str:
    nbytes = sum(section.nbytes for section in elsewhere)
    kept = plan.inventory.family_bytes(family) - nbytes
    where = [f"{format_bytes(nbytes)} on {plan.places[family]}"] if nbytes or not kept else []
    return ", ".join([*([f"{format_bytes(kept)} on the device"] if kept else []), *where])


def _on_device(plan: PlannedStep) -> str:
    device = plan.request.device
    if device is None or plan.on_device is None:
        return "none"
    count, resident_set = len(plan.inventory.groups), len(plan.on_device.resident_set)
    size = f"{format_bytes(device.nbytes)} on {device.device}"
    return f"{size}: {resident_set} of {count} groups stay from forward to backward"


def _updates(plan: PlannedStep) -> str:
    where, when = "device" if plan.request.updates_there else "cpu", _WHEN[plan.request.options.update]
    return f"on the {where}{', by AdamW as one kernel' if plan.request.kernel else ''}, {when}"


def _buffers(plan: PlannedStep) -> str:
    return f"{format_bytes(plan.buffer_bytes or 0)} at most, in addition: {plan.request.model.buffers[1]}"


def _scratch(plan: PlannedStep) -> str:
    return f", and {format_bytes(plan.scratch_bytes)} for gradients" if plan.scratch_bytes else ""


def _frozen(plan: PlannedStep) -> str:
    frozen = plan.inventory.frozen
    return f"{format_bytes(plan.external_bytes)} of the parameters read from {frozen.source.path}" if frozen else ""


def _by_drive(plan: PlannedStep) -> str:
    if len(plan.request.manager.drives.weights) == 1:
        return ""
    return f"; on {len(plan.request.manager.drives.weights)} drives: " + ", ".join(
        map(format_bytes, plan.space_by_drive())
    )


def _commit_words(plan: PlannedStep) -> str:
    if plan.commit_every is None:
        why = ": what changes stays in memory" if plan.request.manager.commit_every == "free" else ""
        return f"none{why}; a killed run resumes from its last snapshot"
    every = "each step" if plan.commit_every == 1 else f"every {plan.commit_every} steps"
    extra = f"{format_bytes(plan.commit_bytes)} written for it" if plan.commit_bytes >= 1 << 20 else "at no extra write"
    return f"{every}, {extra}"
