"""Has what a planned step consists of: placement, memory, space and the bytes that it moves. Writes nothing.

The bytes come from a dry run with the real pager (paging/dry_run.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from swapper.device.model_device import DevicePlacement
from swapper.formats.container import ContainerLayout
from swapper.io.drives import Tuning, assign_to_drives
from swapper.paging.dry_run import DryRun, Task
from swapper.paging.layout import Budget, SectionPlan, read_ahead_pages
from swapper.paging.schedule import Access
from swapper.paging.section import Section, pieces_of
from swapper.paging.virtual_drive import VirtualDrive
from swapper.runtime.free_memory import kept_free_bytes
from swapper.runtime.stats import StepStats
from swapper.train.gradients.grads import find_regions
from swapper.train.layout.inventory import Inventory, find_places, find_trainables, make_sections
from swapper.train.layout.slices import Trainable
from swapper.train.layout.train_placement import (
    ORDER_TOLERANCE,
    StepKind,
    groups_in_memory,
    is_resident,
    without_gradients,
)
from swapper.train.planning.request import Request
from swapper.train.steps.policies import POLICIES, StepProgram


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
    """What is known of a plan's step beforehand: its times, and why the plan was chosen.

    Attributes:
        step: None: not predicted.
        activation_bytes: the peak of what the model makes outside of swapper's memory; None: not known.
        why: in words; empty if the user chose.
    """

    step: StepStats | None = None
    activation_bytes: int | None = None
    why: str = ""


@dataclass(frozen=True)
class PlannedStep:
    """The placement of a model's parameters, gradients and optimizer state, and its costs.

    Attributes: see Plan.
    """

    request: Request
    inventory: Inventory
    step: StepKind
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
        return sections_of(self.inventory, self.places, self.budget, self.layout)

    def make_grad_sections(self, first_page: int) -> list[Section]:
        """Return the sections of gradients, without memory; paged ones follow each other in a scratch file."""
        plans = self.placed_grad_plans
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
    def placed_grad_plans(self) -> list[SectionPlan]:
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
    def slice_bytes(self) -> int:
        """Bytes of the largest state tensor of a slice that is updated together."""
        return self.step.slice_bytes(self.budget.page_bytes)

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
        policy = POLICIES[self.request.options.update]
        program = StepProgram(self.inventory, sections, trainables, self.slice_bytes, policy, stay)
        return program.tasks(passes)

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
        return Traffic(*self.dry_run(passes=passes).traffic())

    def dry_run(
        self, drive: VirtualDrive | None = None, seconds: Callable[[Task], float] = lambda task: 0.0, passes: int = 1
    ) -> DryRun:
        """Return a dry run of a step.

        Args:
            drive: moves its pages. Default: one that takes no time.
            seconds: returns how long a task computes. Default: no time.
            passes: forwards and backwards, whose gradients accumulate. Default: 1.

        Raises:
            BudgetError: the pool has too few frames for the step.
        """
        sections = self.make_sections()
        grad_sections = self.make_grad_sections(sum(len(section.pages) for section in sections))
        found = find_regions(sections, grad_sections) if self.request.device is None else {}
        rooms = {page: room.section.plan.group for page, room in found.items()}
        sections += grad_sections
        return DryRun(
            sections, self.budget.frame_count, self.tasks_of(passes), self.window_pages, self.lazy,
            self.max_deferred_writes, rooms, drive, seconds,
            self.commit_every == 1,
        )  # fmt: skip

    def tasks_of(self, passes: int = 1) -> list[Task]:
        """Return the tasks of a step of this many forwards and backwards, in the order of the run."""
        if passes not in self._known_tasks:  # of a large model they take longer than their simulation
            sections = self.make_sections()
            sections += self.make_grad_sections(sum(len(section.pages) for section in sections))
            trainables = find_trainables(self.inventory, find_places(sections))
            self._known_tasks[passes] = self._tasks(sections, trainables, passes)
        return self._known_tasks[passes]

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

        Activations are what `predict` has measured: what a forward and backward added to the process, with the heap's holes.
        Gradients that stay autograd's own come on top of these: they hardly fit where activations have been freed. The allocator's
        part is what swapper lets the heap keep free (runtime/free_memory.py) where gradients that were copied are freed.
        """
        budget = self.budget
        gradients = sum(plan.nbytes for plan in self.grad_plans if is_resident(plan, self.places))
        activations = self.found.activation_bytes or 0
        are_own = activations > 0 and not self.placed_grad_plans
        kept_bytes = 0 if are_own else kept_free_bytes(self.request.manager.host_bytes)
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


def sections_of(inventory: Inventory, places: dict[str, str], budget: Budget, layout: ContainerLayout) -> list[Section]:
    """Return the sections of parameters and optimizer state, without memory."""
    offsets = [place.offset for place in layout.records]
    return make_sections(inventory.plans, offsets, lambda plan: is_resident(plan, places), budget.page_bytes)
