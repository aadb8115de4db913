"""Predicts a step on an accelerator: the step program's tasks, in order, on clocks of kernels, link, drive and processors.

[Note: a step on clocks] Nothing waits but for what it needs, as streams order it (docs/decisions/a-step-on-a-device.md). Kernels,
copies up and copies down each follow one another in the order in which the program queues them. A slice of an update is copied up
into one of the RING's slots, or early into memory that the plan has left for that; its kernels wait for the gradient, and for all
gradients if they are clipped; and what was copied up early comes down last. Kernels of updates slow those of passes by their time.
Of what lies on NVMe, each use reads and writes the part that the plan's dry run says does not stay in the pool. A step is at least
as long as the link's, the drive's and the processors' own work in it.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, replace

from swapper.device.device import Device
from swapper.device.model_device import RING
from swapper.forecast.compute import ComputeTimes
from swapper.paging.dry_run import Task
from swapper.paging.virtual_drive import DriveRates
from swapper.runtime.stats import PHASES, PhaseStats, StepStats
from swapper.train.layout.train_placement import state_bytes
from swapper.train.planning.planned_step import PlannedStep, Traffic
from swapper.train.planning.update_place import copy_seconds, min_seconds

STEPS, SETTLED = 4, 1e-4
"""The last step counts: what is copied in one may be for the next. Fewer, if one takes as long as the one before it."""
UPDATE_TOUCHES = 2
"""Times that a kernel of an update touches a byte of state: it is read and written."""
KEPT_STATE_BYTES = 12
"""Of an element, where state stays on the device: AdamW's, with masters."""
COPIED_BYTES = 256 << 20


@dataclass(frozen=True)
class DeviceRates:
    """What an accelerator and its link reach, in bytes a second.

    Attributes:
        link: of a direction that copies alone.
        link_both: of each direction while both copy.
        memory: of its memory, read or written.
    """

    link: float = math.inf
    link_both: float = math.inf
    memory: float = math.inf

    def with_faster_link(self, times: float) -> DeviceRates:
        """Return the rates with a link that is `times` as fast."""
        return replace(self, link=self.link * times, link_both=self.link_both * times)

    @classmethod
    def measured(cls, device: Device) -> DeviceRates:
        """Measure the link both ways at once, and a copy within the device's memory."""
        source = device.empty(min(COPIED_BYTES, max(device.free_bytes() // 8, 1 << 20)))
        target = device.empty(source.numel())

        def copy() -> None:
            target.copy_(source)
            device.wait_for(device.record(device.current_stream()))

        copy()
        both = 1 / copy_seconds(device)
        return cls(both, both, 2 * source.numel() / min_seconds(copy))


@dataclass
class _Queue:
    """What does one thing after the other."""

    free_s: float = 0.0
    busy_s: float = 0.0

    def take(self, seconds: float, not_before_s: float = 0.0) -> float:
        """Return when this is over, if it begins as soon as it can."""
        self.free_s = max(self.free_s, not_before_s) + seconds
        self.busy_s += seconds
        return self.free_s


class _ReusedMemory:
    """Memory that is used again: what comes waits until what came before has left enough of it."""

    def __init__(self, nbytes: float) -> None:
        self._free_bytes = nbytes
        self._used: deque[tuple[float, float]] = deque()  # until when, and bytes

    def when_free(self, nbytes: float) -> float:
        """Return when there is room for these bytes."""
        free_s = 0.0
        while self._used and nbytes > self._free_bytes:
            free_s, left = self._used.popleft()
            self._free_bytes += left
        return free_s

    def use(self, nbytes: float, until_s: float) -> None:
        self._used.append((until_s, nbytes))
        self._free_bytes -= nbytes


@dataclass
class _Group:
    """A group of parameters on the clocks.

    Attributes:
        stays: its parameters are on the device from step to step.
        state_bytes: of an element, that an update copies up, and down.
        gradient_bytes: of an element, that are copied to host memory.
        ready_s: when its parameters can be used.
        gradient_s: when its gradient is there.
        early_s, early_bytes: when state that went up early is there, and how much has not been updated.
        early_free_s: when its memory is free again.
    """

    nbytes: int
    numel: int
    stays: bool
    state_bytes: float
    gradient_bytes: float
    ready_s: float = 0.0
    gradient_s: float = 0.0
    early_s: float = 0.0
    early_bytes: float = 0.0
    early_free_s: float = 0.0


class _Step:
    """The clocks. [Note: a step on clocks]"""

    def __init__(
        self,
        plan: PlannedStep,
        rates: DeviceRates,
        compute: ComputeTimes,
        drive: DriveRates,
        passes: int,
        clipped: bool,
    ) -> None:
        self._plan, self._rates, self._compute, self._drive, self._clipped = plan, rates, compute, drive, clipped
        self.kernels, self.up, self.down, self.processors = _Queue(), _Queue(), _Queue(), _Queue()
        self.reads, self.writes = _Queue(), _Queue()
        self.update_s = 0.0
        self.read_wait_s = dict.fromkeys(PHASES, 0.0)
        self._groups = _groups_of(plan)
        is_on_drive = "nvme" in plan.places.values()
        self._traffic = plan.traffic_of(passes) if is_on_drive else Traffic({}, {})
        self._read_share, self._written_share = self._shares(passes)
        self._ring: deque[float] = deque([0.0] * RING, maxlen=RING)
        assert plan.on_device is not None
        self._placed, self._is_last = plan.on_device, False
        kept_bytes = sum(group.nbytes for group in self._groups.values() if group.stays)
        self._images = _ReusedMemory(plan.on_device.image_bytes - kept_bytes)
        slices = [task.updated * self._groups[task.group].state_bytes for task in plan.tasks_of(passes)]
        window_bytes = plan.window_pages * plan.budget.page_bytes
        self._pool = _ReusedMemory(
            max(window_bytes, RING * max(slices))
        )  # one is read, one is updated, one is written at least
        self._late: list[tuple[_Group, float, float]] = []  # results that come down last: bytes, and since when

    @property
    def others(self) -> tuple[_Queue, ...]:
        """What works besides the kernels."""
        return self.up, self.down, self.processors, self.reads, self.writes

    @property
    def drive_s(self) -> float:
        """The least seconds that the drive needs for a step."""
        return self._drive.seconds_for(self._traffic.total_read_bytes, self._traffic.total_written_bytes)

    def _shares(self, passes: int) -> tuple[dict[str, float], dict[str, float]]:
        """Return, by family, which part of the bytes that uses need is read from the drive, and written to it."""
        groups, traffic = self._groups.values(), self._traffic
        updated = {
            "param": float(sum(group.nbytes for group in groups)),
            "state": sum(group.state_bytes * group.numel for group in groups),
            "grad": sum(group.gradient_bytes * group.numel for group in groups),
        }
        used = {**updated, "param": 2.0 * passes * sum(group.nbytes for group in groups if not group.stays)}
        written = {**updated, "grad": passes * updated["grad"]}
        return (
            {family: traffic.read_bytes.get(family, 0) / max(nbytes, 1.0) for family, nbytes in used.items()},
            {family: traffic.written_bytes.get(family, 0) / max(nbytes, 1.0) for family, nbytes in written.items()},
        )

    def _read(self, family: str, nbytes: float, not_before_s: float = 0.0) -> float:
        """Return when these bytes are in host memory."""
        share = self._read_share[family]
        return self.reads.take(share * nbytes / self._drive.read, not_before_s) if share else 0.0

    def _write(self, family: str, nbytes: float, not_before_s: float) -> float:
        """Return when these bytes are on the drive, and their frames are free."""
        share = self._written_share[family]
        return self.writes.take(share * nbytes / self._drive.write, not_before_s) if share else not_before_s

    def _copy(self, lane: _Queue, nbytes: float, not_before_s: float) -> float:
        other = self.down if lane is self.up else self.up
        begin_s = max(lane.free_s, not_before_s)
        rate = self._rates.link_both if other.free_s > begin_s else self._rates.link
        return lane.take(nbytes / rate, not_before_s)

    def begin_last_backward(self) -> None:
        """Copy state up before its gradients are there, of as many groups as the plan has memory for, first ones first."""
        self._is_last = True
        left, now_s = float(self._placed.ahead_bytes), self.kernels.free_s
        order = sorted(self._groups) if self._plan.request.options.update != "backward" else [min(self._groups)]
        for group in (self._groups[index] for index in order):
            nbytes = min(group.state_bytes * group.numel, left)
            if not self._read_share["state"] and nbytes > 0:
                group.early_bytes = nbytes
                group.early_s = self._copy(self.up, nbytes, max(now_s, group.early_free_s))
                left -= nbytes

    def use(self, task: Task) -> None:
        """Queue the kernels of a group's forward or backward."""
        group = self._groups[task.group]
        ready_s = group.ready_s
        if not group.stays:
            not_before_s = max(ready_s, self._images.when_free(group.nbytes), self._read("param", group.nbytes))
            ready_s = self._copy(self.up, group.nbytes, not_before_s)
        end_s = self.kernels.take(self._compute.of(task), ready_s)
        if not group.stays:
            self._images.use(group.nbytes, end_s)
        if task.phase == "backward":
            group.gradient_s = end_s
            if group.gradient_bytes and (self._is_last or not self._placed.sum_bytes):
                gradient_bytes = group.gradient_bytes * group.numel
                group.gradient_s = self._copy(self.down, gradient_bytes, end_s)
                self._write("grad", gradient_bytes, group.gradient_s)

    def update(self, task: Task) -> None:
        """Queue the update of a slice."""
        group = self._groups[task.group]
        state_bytes, gradient_bytes = task.updated * group.state_bytes, task.updated * group.gradient_bytes
        gradient_s = max(of.gradient_s for of in self._groups.values()) if self._clipped else group.gradient_s
        paged_bytes = self._read_share["state"] * state_bytes
        read_s = max(
            self._read("state", state_bytes, self._pool.when_free(paged_bytes)), self._read("grad", gradient_bytes)
        )
        self.read_wait_s[task.phase] += max(read_s - max(self.kernels.free_s, gradient_s), 0.0)
        update = self._update_there if self._plan.request.updates_there else self._update_here
        done_s = update(task, group, gradient_s, read_s)
        self._pool.use(paged_bytes, self._write("state", state_bytes, done_s))
        self.kernels.free_s = max(self.kernels.free_s, read_s)  # the host waits for pages, and queues nothing meanwhile
        self._write("param", task.updated * group.nbytes / group.numel, done_s)

    def _update_here(self, task: Task, group: _Group, gradient_s: float, read_s: float) -> float:
        """Update on the processors: the host queues nothing meanwhile. Returns when its results are in host memory."""
        seconds = self._compute.of(task)
        self.update_s += seconds
        group.ready_s = done_s = self.processors.take(seconds, max(gradient_s, read_s))
        self.kernels.free_s = max(self.kernels.free_s, done_s)
        if group.stays:
            group.ready_s = self._copy(self.up, task.updated * group.nbytes / group.numel, done_s)
        return done_s

    def _update_there(self, task: Task, group: _Group, gradient_s: float, read_s: float) -> float:
        """Queue an update on the accelerator. Returns when its results are in host memory."""
        up_bytes = task.updated * (group.state_bytes + group.gradient_bytes)
        down_bytes = task.updated * (group.state_bytes + (0 if group.stays else group.nbytes / group.numel))
        copied_s, is_early = group.early_s, group.early_bytes >= task.updated * group.state_bytes > 0
        if is_early:
            group.early_bytes -= task.updated * group.state_bytes
        elif up_bytes:
            copied_s = self._copy(
                self.up, up_bytes, max(self._ring[0], read_s, gradient_s if group.gradient_bytes else 0.0)
            )
        seconds = UPDATE_TOUCHES * task.updated * (group.state_bytes or KEPT_STATE_BYTES) / self._rates.memory
        self.update_s += seconds
        self.kernels.free_s += seconds
        group.ready_s = done_s = max(copied_s, gradient_s) + seconds
        if is_early:
            self._late.append((group, down_bytes, done_s))
        elif down_bytes:
            done_s = self._copy(self.down, down_bytes, done_s)
            self._ring.append(done_s)
            if not group.stays:
                group.ready_s = done_s
        return done_s

    def end_updates(self) -> None:
        """Bring down what was copied up early."""
        for group, nbytes, since_s in self._late:
            group.early_free_s = self._copy(self.down, nbytes, since_s)
        self._late.clear()
        self._is_last = False
        if self._read_share["state"] and self._plan.request.options.update == "step":
            self.kernels.free_s = max(self.kernels.free_s, self.down.free_s)  # results that lease frames are waited for


def _groups_of(plan: PlannedStep) -> dict[int, _Group]:
    placed, device = plan.on_device, plan.request.device
    assert placed is not None and device is not None
    updated = state_bytes(plan.inventory)
    found = {}
    for group in plan.inventory.groups:
        numel = max(sum(parameter.numel() for _, parameter in group.parameters), 1)
        nbytes = sum(parameter.nbytes for _, parameter in group.parameters)
        state = 0 if group.index in placed.state else updated.get(group.index, 0)
        found[group.index] = _Group(
            nbytes=nbytes,
            numel=numel,
            stays=group.index in placed.resident_set,
            state_bytes=state / numel,
            gradient_bytes=nbytes / numel if group.index in updated and group.index not in placed.gradients else 0.0,
        )
    return found


def simulate(
    plan: PlannedStep,
    rates: DeviceRates,
    compute: ComputeTimes,
    drive: DriveRates,
    passes: int = 1,
    clipped: bool = False,
) -> StepStats:
    """Return how a step goes on the plan's accelerator. [Note: a step on clocks]

    Args:
        rates: of the accelerator.
        compute: seconds of its kernels for one forward and backward, and of updates on the CPU.
        drive: rates of the drive, which state on NVMe needs.
        passes: forwards and backwards in a step, whose gradients accumulate.
        clipped: gradients are clipped by the norm of all: no update begins before the last of them is there.
    """
    tasks, clocks = plan.tasks_of(passes), _Step(plan, rates, compute, drive, passes, clipped)
    uses = [number for number, task in enumerate(tasks) if task.phase == "backward" and not task.updated]
    first_of_last = uses[-(len(uses) // passes)]
    wall_s, last_s = 0.0, -1.0
    for _ in range(STEPS):
        if math.isclose(wall_s, last_s, rel_tol=SETTLED):
            break
        last_s = wall_s
        phases, clocks.read_wait_s = dict.fromkeys(PHASES, 0.0), dict.fromkeys(PHASES, 0.0)
        before_s, update_s = [queue.busy_s for queue in clocks.others], clocks.update_s
        for number, task in enumerate(tasks):
            since_s = clocks.kernels.free_s
            if number == first_of_last:
                clocks.begin_last_backward()
            if task.updated:
                clocks.update(task)
            else:
                clocks.use(task)
            phases[task.phase] += clocks.kernels.free_s - since_s
        clocks.end_updates()
        wall_s = sum(phases.values())
    busy_s = [queue.busy_s - before for queue, before in zip(clocks.others, before_s, strict=True)]
    waited_s = max(max(*busy_s, clocks.drive_s) - wall_s, 0.0)
    phases["step"] += waited_s
    waits_s = clocks.read_wait_s
    stats = {name: PhaseStats(wall_s=of, read_wait_s=min(waits_s[name], of)) for name, of in phases.items()}
    is_for_drive = waited_s > 0 and max(*busy_s, clocks.drive_s) in (*busy_s[3:], clocks.drive_s)
    stats["step"] = replace(
        stats["step"], update_s=clocks.update_s - update_s, frame_wait_s=waited_s if is_for_drive else 0.0
    )
    return StepStats(0, stats, upload_s=busy_s[0], download_s=busy_s[1])
