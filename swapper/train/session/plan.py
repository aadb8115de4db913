"""Plans a session: placement, memory, space and the bytes of a step. Writes nothing.

`SwapManager.offload` carries out the plan, so the two cannot differ. The bytes of a step come from a dry run with the
real pager (paging/dry_run.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from swapper.device.device_placement import DevicePlacement
from swapper.durability.committer import steps_between_commits
from swapper.errors import ConfigError, UnsupportedError
from swapper.formats.torch_zip.container import ContainerLayout
from swapper.io.drives import assign_to_drives
from swapper.io.tuning import Tuning
from swapper.paging.capped_drive import open_drive
from swapper.paging.dry_run import DryRun, Task
from swapper.paging.planning.budget import Budget, read_ahead_pages
from swapper.paging.planning.layout import SectionPlan
from swapper.paging.planning.schedule import Access
from swapper.paging.section import Section, pieces_of
from swapper.paging.store.swap_files import TURNS
from swapper.paging.virtual_drive import DriveRates, VirtualDrive
from swapper.runtime.free_memory import HOLES_SHARE, kept_free_bytes
from swapper.runtime.sizes import parse_bytes_a_second
from swapper.runtime.stats import StepStats
from swapper.train.device.slice_parts import ring_bytes
from swapper.train.gradients.victim_cache import find_regions
from swapper.train.layout.inventory import Inventory, find_places, find_trainables, make_sections
from swapper.train.layout.train_placement import (
    ORDER_TOLERANCE,
    StepKind,
    choose_placement,
    expected_tasks,
    groups_in_memory,
    is_resident,
    place_on_accelerator,
    state_bytes,
    without_gradients,
)
from swapper.train.parameters.preparation import check_averaging
from swapper.train.session.compute_times import ComputeTimes, calibrate
from swapper.train.session.overview import describe
from swapper.train.session.request import Request
from swapper.train.updates.sweep import Trainable


@dataclass(frozen=True)
class Traffic:
    """Bytes that one step moves, by family ("param", "state").

    `pooled_bytes` are in the pool: a commit after the step writes them in addition.
    """

    read_bytes: dict[str, int]
    written_bytes: dict[str, int]
    pooled_bytes: int = 0

    @property
    def total_read_bytes(self) -> int:
        return sum(self.read_bytes.values())

    @property
    def total_written_bytes(self) -> int:
        return sum(self.written_bytes.values())


@dataclass
class Prediction:
    """What is known of a plan's step beforehand: its times, its computing, and why the plan was chosen."""

    step: StepStats | None = None
    compute: ComputeTimes | None = None
    why: str = ""


@dataclass(frozen=True)
class Plan:
    """The placement of a model's parameters, gradients and optimizer state, and its costs. Print it, or pass it to `offload`.

    Attributes:
        request: the user's model, optimizer and options.
        inventory: contents of the model and the optimizer.
        places: "host" or "nvme" for "param", "state" and "grad".
        budget: the division of host memory.
        layout: of a swap file.
        turns: number of swap files, which alternate.
        commit_every: steps from commit to commit; None: no commits.
        tuning: the drive's measurements by `swapper tune`, if any.
        on_device: the division of an accelerator's memory, if any.
        found: what `predict` has found so far.
    """

    request: Request
    inventory: Inventory
    places: dict[str, str]
    budget: Budget
    layout: ContainerLayout
    turns: int
    commit_every: int | None
    tuning: Tuning | None
    on_device: DevicePlacement | None
    found: Prediction = field(default_factory=Prediction, compare=False, repr=False)

    def make_sections(self) -> list[Section]:
        """Return the sections of parameters and optimizer state, without memory."""
        return _make_sections(self.inventory, self.places, self.budget, self.layout)

    def make_grad_sections(self, first_page: int) -> list[Section]:
        """Return the sections of gradients, without memory; paged ones follow each other in a scratch file."""
        plans = self._placed_grad_plans
        offsets = [0, *itertools.accumulate(self._scratch_bytes_of(plan) for plan in plans)][:-1]
        return make_sections(
            plans,
            offsets,
            lambda plan: is_resident(plan, self.places),
            self.budget.page_bytes,
            first_page,
        )

    @property
    def _weights(self) -> tuple[float, ...]:
        """Shares of the drives."""
        return self.request.manager.drives.weights

    def _scratch_bytes_of(self, plan: SectionPlan) -> int:
        return 0 if is_resident(plan, self.places) else plan.nbytes

    @property
    def scratch_bytes(self) -> int:
        """Bytes of gradients on the drive."""
        return sum(self._scratch_bytes_of(plan) for plan in self.grad_plans)

    @property
    def grad_plans(self) -> list[SectionPlan]:
        """Sections of the gradients that do not stay on an accelerator."""
        kept = self.on_device.gradients if self.on_device is not None else ()
        return without_gradients(self.inventory, kept).grad_plans

    @property
    def _placed_grad_plans(self) -> list[SectionPlan]:
        """Those of them that have sections. Others stay autograd's own (train/gradients/autograd_grads.py)."""
        if self.request.device is not None or self.places["grad"] == "nvme":
            return self.grad_plans
        always_there = groups_in_memory(self.inventory, self.places)
        return [plan for plan in self.grad_plans if plan.group not in always_there]

    @property
    def lazy(self) -> bool:
        """True if changed pages are written at eviction only: not every step is committed."""
        return self.commit_every != 1

    @property
    def window_pages(self) -> int:
        return read_ahead_pages(self.budget)

    @property
    def max_deferred_writes(self) -> int:
        """Maximum pages of parameters written in backward instead of forward. [Note: deferred writes], paging/frames.py

        These are the pages that do not fit the pool (with a pool for all parameters the drive is busy after forward
        anyway), and at most 3/4 of the frames, so that others stay usable: a choice.
        """
        if self.request.options.update != "deferred":
            return 0
        pages = sum(len(section.pages) for section in self.make_sections() if section.plan.family == "param")
        frames = self.budget.frame_count
        return max(min(pages - frames, frames * 3 // 4), 0)

    @property
    def space_bytes(self) -> int:
        """Bytes on the drives. A kept snapshot takes as much as one swap file, with the external parameters."""
        return self.turns * (self.layout.tail_offset - self.external_bytes) + self.scratch_bytes

    @property
    def external_bytes(self) -> int:
        """Bytes of parameters in the user's files, which take no space in the swap files."""
        return sum(plan.nbytes for plan in self.inventory.plans if plan.external is not None)

    def space_by_drive(self, files: int | None = None) -> list[int]:
        """Return the bytes of this many swap files (default: all) and of the gradients, on each drive."""
        files = self.turns if files is None else files
        pages = [page for section in self.make_sections() for page in pieces_of(section)]
        gradients = [page for section in self.make_grad_sections(0) for page in section.pages]
        taken = [0] * len(self._weights)
        for pieces, times in ((pages, files), (gradients, 1)):
            for page, drive in zip(
                pieces, assign_to_drives([page.nbytes for page in pieces], self._weights), strict=True
            ):
                taken[drive] += page.nbytes * times if page.section.plan.external is None else 0
        taken[0] += files * (self.layout.tail_offset - sum(page.nbytes for page in pages))  # headers
        return taken

    def cycle(self, sections: Sequence[Section], trainables: Sequence[Trainable]) -> list[Access]:
        """Return the expected accesses of a step, in order."""
        return [access for task in self._tasks(sections, trainables) for access in task.accesses]

    def _tasks(self, sections: Sequence[Section], trainables: Sequence[Trainable], passes: int = 1) -> list[Task]:
        stay = None if self.on_device is None else self.on_device.resident_set
        return expected_tasks(
            self.inventory, sections, trainables, self.budget.page_bytes, self.request.options.update, stay, passes
        )

    @property
    def order_tolerance(self) -> int | None:
        """See Schedule: copies to a device run concurrently with updates, so their order varies."""
        return None if self.request.device is None else ORDER_TOLERANCE

    @cached_property
    def traffic(self) -> Traffic:
        """The bytes of a step, found by a dry run. Commits of content in memory add `commit_bytes`."""
        return self.traffic_of(1)

    def traffic_of(self, passes: int) -> Traffic:
        """Return the bytes of a step of several forwards and backwards, whose gradients accumulate."""
        return Traffic(*self._dry_run(passes=passes).traffic())

    def predict(
        self,
        tokens: int,
        *,
        example: Sequence[Any] | Mapping[str, Any] | None = None,
        drive_read: int | str | None = None,
        drive_write: int | str | None = None,
    ) -> StepStats:
        """Predict how long a step takes, by phase, and what it waits for: by the dry run, on a drive that is simulated.

        The computing is measured here and now, in some seconds (train/session/compute_times.py): each operation of the model, on
        tensors without its weights, and the update as the sweep does it. Once the plan is carried out, `manager.stats()` shows
        this with what was achieved.

        Args:
            tokens: of a step, of all samples together.
            example: arguments of the model, of a step: a tuple, or a dictionary by name; its result is, or has, the loss. Its
                tensors may be on the meta device. Default: integers of shape (1, tokens), as of a language model; the sum of the
                result counts as its loss. If the model takes something else, only its products of matrices are counted.
            drive_read, drive_write: bytes a second, or strings such as "7GB/s". Default: what `swapper tune` measured.

        Raises:
            ConfigError: the drive's speed is not known, or a value is not positive.
            StateError: the model is offloaded already.
            UnsupportedError: the model is on an accelerator or sharded.
        """
        if type(tokens) is not int or tokens < 1:
            raise ConfigError(
                f"predict(tokens={tokens!r}): give the number of tokens of a step, of all samples together"
            )
        drive = self.drive_rates(drive_read, drive_write)
        return self.predict_on(drive, self.with_gradients(self.measure_compute(tokens, example)))

    def predict_on(self, drive: DriveRates, compute: ComputeTimes) -> StepStats:
        """Predict a step, as `predict`, on a drive with these rates and with this computing."""
        step = self.simulate(drive, compute)
        self.found.step = replace(step, savings=self._savings(drive, compute, step.wall_s))
        self.found.compute = compute
        return self.found.step

    def measure_compute(self, tokens: int, example: Sequence[Any] | Mapping[str, Any] | None = None) -> ComputeTimes:
        """Measure what a step computes on this processor: an input of `simulate`. Args and Raises: see `predict`."""
        unmeasured = {
            "a model on an accelerator": self.request.device is not None,
            "a sharded model": self.request.model.is_sharded,
        }
        for what in (what for what, is_so in unmeasured.items() if is_so):
            raise UnsupportedError(
                f"predict does not go with {what} so far, whose computing it does not measure: print the plan for its bytes"
            )
        request = self.request
        return calibrate(
            request.model.module, self.inventory, request.optimizers, self.budget.page_bytes, tokens, example,
            request.manager.check_reads,
        )  # fmt: skip

    def with_gradients(self, compute: ComputeTimes) -> ComputeTimes:
        """Return what is computed with this placement: copies of gradients, or memory for autograd's own."""
        copied = self._placed_grad_plans
        placed = {id(plan) for plan in copied}
        return compute.with_gradients(copied, [plan for plan in self.grad_plans if id(plan) not in placed])

    def _savings(self, drive: DriveRates, compute: ComputeTimes, step_s: float) -> dict[str, float]:
        """Return the seconds of a step that a better machine would save, by what is better: by simulation."""
        budget = replace(self.budget, frame_count=2 * self.budget.frame_count)
        better = {
            "a drive twice as fast": self.simulate(drive.faster(2), compute),
            "a processor twice as fast": self.simulate(drive, compute.faster(2)),
            "twice the pool": replace(self, budget=budget).simulate(drive, compute),
        }
        return {what: step_s - step.wall_s for what, step in better.items()}

    def drive_rates(self, drive_read: int | str | None = None, drive_write: int | str | None = None) -> DriveRates:
        """Return the rates of the drive, given or measured by `swapper tune`. Raises ConfigError if they are not known."""
        if self.tuning is not None and drive_read is None and drive_write is None:
            return DriveRates.measured(self.tuning)
        rates = self._drive_rate("read", drive_read), self._drive_rate("write", drive_write)
        slowing_byte_s = 0.0 if self.tuning is None else self.tuning.slowing_byte_s
        return DriveRates(*rates, sum(rates), slowing_byte_s=slowing_byte_s)

    def _drive_rate(self, name: str, given: int | str | None) -> float:
        if given is not None:
            rate: float = parse_bytes_a_second(given, f"drive_{name}")
        elif self.tuning is not None:
            rate = getattr(self.tuning, f"{name}_bytes_per_s")
        else:
            raise ConfigError(
                f"the drive's speed is not known: run `swapper tune DIR`, or give predict(..., drive_{name}='7GB'), "
                "its bytes a second"
            )
        return rate

    def simulate(self, drive: DriveRates | VirtualDrive, compute: ComputeTimes, passes: int = 1) -> StepStats:
        """Return how a step goes. See `predict`.

        Args:
            drive: its rates, or a virtual drive of the caller's.
            compute: the seconds of one forward and backward, and of updates.
            passes: forwards and backwards in a step, whose gradients accumulate.

        Raises:
            BudgetError: the pool has too few frames for the step.
        """
        virtual = drive if isinstance(drive, VirtualDrive) else open_drive(drive, compute.paging)
        return self._dry_run(virtual, compute.of, passes).time()

    def _dry_run(
        self, drive: VirtualDrive | None = None, seconds: Callable[[Task], float] = lambda task: 0.0, passes: int = 1
    ) -> DryRun:
        sections = self.make_sections()
        grad_sections = self.make_grad_sections(sum(len(section.pages) for section in sections))
        found = find_regions(sections, grad_sections) if self.request.device is None else {}
        rooms = {page: room.section.plan.group for page, room in found.items()}
        sections += grad_sections
        if passes not in self._known_tasks:  # of a large model they take longer than their simulation
            trainables = find_trainables(self.inventory, find_places(sections))
            self._known_tasks[passes] = self._tasks(sections, trainables, passes)
        return DryRun(
            sections, self.budget.frame_count, self._known_tasks[passes], self.window_pages, self.lazy,
            self.max_deferred_writes, rooms, drive, seconds,
            self.commit_every == 1,
        )  # fmt: skip

    @cached_property
    def _known_tasks(self) -> dict[int, list[Task]]:
        """Tasks of a step by its number of passes, of those that a dry run has had."""
        return {}

    @property
    def commit_bytes(self) -> int:
        """Bytes that a commit writes in addition to the step's: resident sections, and changed pages in the pool."""
        if self.commit_every is None:
            return 0
        kept = {id(plan) for plan in self.state_plans if plan.group in self.inventory.staying_state}
        own = [plan for plan in self.inventory.plans if plan.external is None]
        resident = sum(p.nbytes for p in own if is_resident(p, self.places) or id(p) in kept)
        return resident + self.traffic.pooled_bytes

    @cached_property
    def buffer_bytes(self) -> int | None:
        """Peak of FSDP2's own buffers in a step on this rank, or of DDP's, outside of `host_memory`; None without them."""
        return self.request.model.buffer_bytes()

    @property
    def memory(self) -> dict[str, int]:
        """The peak of host memory by part, in bytes, beyond the imported libraries.

        Activations are what `predict` has recorded: the model's results, temporary tensors, gradients on their way, and what an
        operation takes while it runs. Gradients that stay autograd's own come on top of these: they hardly fit where activations
        have been freed. The allocator's part is what swapper lets the heap keep free: holes, of which checks allow one part in
        HOLES_SHARE of what is in use (runtime/free_memory.py), where gradients that were copied are freed.
        """
        budget, compute = self.budget, self.found.compute
        gradients = sum(plan.nbytes for plan in self.grad_plans if is_resident(plan, self.places))
        activations = (compute.activation_bytes or 0) if compute is not None else 0
        are_own = activations > 0 and not self._placed_grad_plans
        kept_bytes = 0 if are_own else max(kept_free_bytes(self.request.manager.host_bytes), activations // HOLES_SHARE)
        parts = {
            "what stays": budget.resident_bytes - gradients,
            "gradients": gradients,
            "pool": budget.pool_bytes,
            "activations": activations,
            self.request.model.buffers[0]: self.buffer_bytes or 0,
            "allocator": kept_bytes,
        }
        return {name: nbytes for name, nbytes in parts.items() if nbytes}

    @property
    def drive_seconds(self) -> float | None:
        """Minimum seconds of the drive for a step; None if its speed is not known."""
        if self.tuning is None:
            return None
        return self.tuning.seconds_for(self.traffic.total_read_bytes, self.traffic.total_written_bytes)

    @property
    def state_plans(self) -> list[SectionPlan]:
        """Sections of the optimizer's state."""
        return [plan for plan in self.inventory.plans if plan.family == "state"]

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
    options, device = request.options, request.device
    params, state = places or (options.params, options.optimizer_state)
    # Content on a device has a place in memory or on NVMe too.
    wishes = "auto" if params == "device" else params, "nvme" if state == "device" else state, options.gradients
    step = StepKind(options.update, device is not None, request.updates_there)
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
    sections = _make_sections(inventory, found, budget, layout)
    on_device = None
    if device is not None:
        other_bytes = sum(buffer.nbytes for buffer in request.model.module.buffers())
        if request.updates_there:
            other_bytes += ring_bytes(find_trainables(inventory, find_places(sections)), budget.page_bytes)
        on_device = place_on_accelerator(inventory, device, other_bytes, options.params, *stays)
        if (on_device.gradients, on_device.state) != (always.gradients, always.state):
            found, budget = divide(on_device, budget.page_bytes)  # with the memory that they release
        check_averaging(
            request.model.given, options.update, bool(without_gradients(inventory, on_device.gradients).grad_plans)
        )
        inventory = inventory.with_state_staying(on_device.state)
        sections = _make_sections(inventory, found, budget, layout)
    every = steps_between_commits(request.manager.commit_every, sections, bool(inventory.staying_state))
    turns = TURNS if every or existing_files else 1
    return Plan(
        request=request, inventory=inventory, places=found, budget=budget, layout=layout, turns=turns, commit_every=every,
        tuning=tuning, on_device=on_device,
    )  # fmt: skip


def _stays_on_device(request: Request) -> tuple[str, str]:
    """Return which gradients and which state stay on the device: "device" for all, "auto" for those that fit, else none."""
    options, there = request.options, request.updates_there
    state = options.optimizer_state if there and options.update == "step" else "host"
    return options.gradients if there else "host", state


def _make_sections(
    inventory: Inventory, places: dict[str, str], budget: Budget, layout: ContainerLayout
) -> list[Section]:
    offsets = [place.offset for place in layout.records]
    return make_sections(inventory.plans, offsets, lambda plan: is_resident(plan, places), budget.page_bytes)
