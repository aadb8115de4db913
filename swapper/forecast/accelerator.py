"""Predicts a step on an accelerator: the plan's dry run, with clocks for what its kernels and the link do meanwhile.

[Note: a step on clocks] The dry run leases pages and waits for the drive, as the host does. Nothing on the device waits but for
what it needs, as streams order it (docs/decisions/a-step-on-a-device.md). Kernels, copies up and copies down each follow one
another in the order in which the program queues them. A slice of an update is copied up into one of the RING's slots, or early into
memory that the plan has left for that; its kernels wait for the gradient, and for all gradients if they are clipped; and what was
copied up early comes down last. Kernels of updates slow those of passes by their time. The host waits for updates on its own
processors, and, where pages are read, until a slot or the memory of an image is free.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from swapper.device.device import Device
from swapper.device.model_device import RING
from swapper.forecast.compute import ComputeTimes
from swapper.paging.dry_run import Task
from swapper.paging.virtual_drive import VirtualDrive
from swapper.train.layout.train_placement import state_bytes
from swapper.train.planning.planned_step import PlannedStep
from swapper.train.planning.update_place import copy_seconds, min_seconds

UPDATE_TOUCHES = 2
"""Times that a kernel of an update touches a byte of state: it is read and written."""
KEPT_STATE_BYTES = 12
"""Of an element, where state stays on the device: AdamW's, with masters."""
COPIED_BYTES = 256 << 20


@dataclass(frozen=True)
class DeviceRates:
    """What an accelerator reaches, in bytes a second: `link` each way while both copy, `memory` of its memory, read or written."""

    link: float = math.inf
    memory: float = math.inf

    @classmethod
    def measured(cls, device: Device) -> DeviceRates:
        """Measure the link both ways at once, and a copy within the device's memory."""
        source = device.empty(min(COPIED_BYTES, max(device.free_bytes() // 8, 1 << 20)))
        target = device.empty(source.numel())

        def copy() -> None:
            target.copy_(source)
            device.wait_for(device.record(device.current_stream()))

        copy()
        return cls(1 / copy_seconds(device), 2 * source.numel() / min_seconds(copy))


@dataclass
class _Lane:
    """A direction of the link: one copy after the other. `counted`: as which counter's seconds."""

    counted: str
    free_s: float = 0.0


class _Images:
    """Memory of the device for parameters that do not stay: what comes waits until what came before has left enough of it."""

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


class DeviceClocks:
    """What works besides the dry run. [Note: a step on clocks]

    Args:
        drive: of the dry run: its `now_s` is the host's time, and its `busy_until_s` the kernels'.
        passes: of a step.
        clipped: gradients are clipped by the norm of all: no update begins before the last of them is there.
    """

    def __init__(
        self,
        plan: PlannedStep,
        rates: DeviceRates,
        compute: ComputeTimes,
        drive: VirtualDrive,
        passes: int,
        clipped: bool,
    ) -> None:
        assert plan.on_device is not None
        self._plan, self._placed, self._rates, self._compute, self._drive = plan, plan.on_device, rates, compute, drive
        self._update_time, self._clipped = plan.request.options.update, clipped
        self._param_is_read, self._state_is_read = (plan.traffic.read_bytes.get(of, 0) > 0 for of in ("param", "state"))
        self._up, self._down = _Lane("upload_s"), _Lane("download_s")
        self._groups = _groups_of(plan)
        self._first_uses = self._uses_left = (passes - 1) * len(self._groups)  # in backwards before the last one
        self._ring: deque[float] = deque([0.0] * RING, maxlen=RING)
        kept_bytes = sum(group.nbytes for group in self._groups.values() if group.stays)
        self._images = _Images(plan.on_device.image_bytes - kept_bytes)
        self._late: list[tuple[_Group, float, float]] = []  # results that come down last: bytes, and since when

    def run(self, task: Task) -> None:
        """Queue what a task computes."""
        if not task.updated:
            self._use(task, self._groups[task.group])
        elif self._plan.request.updates_there:
            self._update_there(task, self._groups[task.group])
        else:
            self._update_here(task, self._groups[task.group])

    def end_step(self) -> None:
        """Bring down what was copied up early."""
        for group, nbytes, since_s in self._late:
            group.early_free_s = self._copy(self._down, nbytes, since_s)
        self._late.clear()
        self._uses_left = self._first_uses
        if self._state_is_read and self._update_time == "step":
            self._compute_until(self._down.free_s)  # results that lease frames are waited for

    def _compute_until(self, end_s: float) -> float:
        self._drive.busy_until_s = max(self._drive.clock_s, end_s)
        return self._drive.busy_until_s

    def _copy(self, lane: _Lane, nbytes: float, not_before_s: float) -> float:
        """Return when a copy is over that begins as soon as it can."""
        seconds = nbytes / self._rates.link
        lane.free_s = max(lane.free_s, not_before_s) + seconds
        counters = self._drive.counters
        setattr(counters, lane.counted, getattr(counters, lane.counted) + seconds)
        return lane.free_s

    def _begin_last_backward(self) -> None:
        """Copy state up before its gradients are there, of as many groups as the plan has memory for, first ones first."""
        left, now_s = 0.0 if self._state_is_read else float(self._placed.ahead_bytes), self._drive.clock_s
        order = sorted(self._groups) if self._update_time != "backward" else [min(self._groups)]
        for group in (self._groups[index] for index in order):
            nbytes = min(group.state_bytes * group.numel, left)
            if nbytes > 0:
                group.early_bytes = nbytes
                group.early_s = self._copy(self._up, nbytes, max(now_s, group.early_free_s))
                left -= nbytes

    def _use(self, task: Task, group: _Group) -> None:
        """Queue the kernels of a group's forward or backward."""
        if task.phase == "backward":
            if self._uses_left == 0:
                self._begin_last_backward()
            self._uses_left -= 1
        ready_s = group.ready_s
        if not group.stays:
            free_s = self._images.when_free(group.nbytes)
            if self._param_is_read:
                self._drive.wait_until(free_s)
            ready_s = self._copy(self._up, group.nbytes, max(ready_s, free_s, self._drive.now_s))
        end_s = self._compute_until(max(self._drive.clock_s, ready_s) + self._compute.of(task))
        if not group.stays:
            self._images.use(group.nbytes, end_s)
        if task.phase == "backward":
            group.gradient_s = end_s
            if group.gradient_bytes and (self._uses_left < 0 or not self._placed.sum_bytes):
                group.gradient_s = self._copy(self._down, group.gradient_bytes * group.numel, end_s)

    def _gradient_s(self, group: _Group) -> float:
        """Return when an update has what it needs of gradients."""
        return max(of.gradient_s for of in self._groups.values()) if self._clipped else group.gradient_s

    def _update_here(self, task: Task, group: _Group) -> None:
        """Update on the processors: the host queues nothing meanwhile."""
        seconds = self._compute.of(task)
        self._drive.wait_until(self._gradient_s(group))
        self._drive.compute(seconds)
        self._drive.counters.update_s += seconds
        group.ready_s = self._drive.now_s
        if group.stays:
            group.ready_s = self._copy(self._up, task.updated * group.nbytes / group.numel, self._drive.now_s)

    def _update_there(self, task: Task, group: _Group) -> None:
        """Queue an update of a slice on the accelerator."""
        gradient_s, here_s = self._gradient_s(group), self._drive.now_s
        up_bytes = task.updated * (group.state_bytes + group.gradient_bytes)
        down_bytes = task.updated * (group.state_bytes + (0 if group.stays else group.nbytes / group.numel))
        copied_s, is_early = group.early_s, group.early_bytes >= task.updated * group.state_bytes > 0
        if is_early:
            group.early_bytes -= task.updated * group.state_bytes
        elif up_bytes:
            if self._state_is_read:
                self._drive.wait_until(self._ring[0])
            copied_s = self._copy(
                self._up, up_bytes, max(self._ring[0], here_s, gradient_s if group.gradient_bytes else 0.0)
            )
        seconds = UPDATE_TOUCHES * task.updated * (group.state_bytes or KEPT_STATE_BYTES) / self._rates.memory
        self._drive.counters.update_s += seconds
        self._compute_until(self._drive.clock_s + seconds)
        group.ready_s = done_s = max(copied_s, gradient_s) + seconds
        if is_early:
            self._late.append((group, down_bytes, done_s))
        elif down_bytes:
            done_s = self._copy(self._down, down_bytes, done_s)
            self._ring.append(done_s)
            if not group.stays:
                group.ready_s = done_s


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
