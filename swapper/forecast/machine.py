"""Forecasts a training step: of one model, on a machine that need not be there, with given settings, by the plan and its dry run.

[Note: what is assumed] Host memory, drives and the rate of updates are a node's, shared by its ranks alike; flops, device, link and
network are a rank's. Several ranks have the shards of `fully_shard` with a mixed-precision policy: a part of the rows of each
parameter, in fp32, without other masters. Parameters are gathered in 16 bits for each forward and backward, and gradients reduced,
while others compute; without `network` that takes no time. Activations are outside.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from swapper.device.device import Device
from swapper.errors import BudgetError
from swapper.forecast.accelerator import DeviceRates
from swapper.forecast.compute import ComputeTimes, count_products
from swapper.forecast.measured_update import measure_updates
from swapper.forecast.model_source import shard_of
from swapper.forecast.step import simulate
from swapper.io.drives import Drives
from swapper.options import Accelerator
from swapper.paging.virtual_drive import DriveRates
from swapper.runtime.stats import StepStats
from swapper.train.layout.train_placement import frames_needed, is_resident
from swapper.train.planning.plan import Plan, plan_run
from swapper.train.planning.request import ManagerOptions, OffloadOptions, Request
from swapper.train.state.conditions import check_update

T = TypeVar("T")
EXACT_PAGES = 8192
"""A plan with more pages than this is simulated with coarser ones: some seconds."""
ROUGH_PAGES = 400
"""Pages of a simulation that is only compared with others."""
COARSE_PAGES = 2000
"""Pages that it gets then."""
COARSER = 1.25
"""Coarser pages may have a pool larger by this: one of few large frames needs more. A choice."""
ROUNDING = 1e-9
GATHERED_BYTES = 2  # of an element: bf16 or fp16


OPTIMIZERS: dict[str, Callable[[nn.Module], object]] = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), fused=True),
    "adam": lambda model: torch.optim.Adam(model.parameters()),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), momentum=0.9),
}


class PlannedDevice(Device):
    """An accelerator that need not be there, of which nothing but the memory is asked."""

    is_there = False

    def __init__(self) -> None:
        super().__init__(torch.device("meta"), module=())


@dataclass(frozen=True)
class Machine:
    """What a step is predicted for. [Note: what is assumed]

    Attributes:
        host_bytes: host memory for swapper, of a node.
        drive: rates of a node's drives together.
        flops: floating-point operations a second of a rank, in products of matrices; None: measured on this processor.
        updates: parameters a second that a node's processors update; None: measured.
        device_bytes: an accelerator's memory for swapper, of a rank; None: no accelerator.
        device: rates of its memory and its link.
        network: bytes a second of a rank each way to other ranks.
        ranks: of all nodes.
        is_from_data_sheet: rates of the accelerator are shares of its data sheet's.
    """

    host_bytes: int
    drive: DriveRates
    drives: int = 1
    flops: float | None = None
    updates: float | None = None
    device_bytes: int | None = None
    device: DeviceRates = field(default_factory=DeviceRates)
    network: float = math.inf
    ranks: int = 1
    nodes: int = 1
    is_from_data_sheet: bool = False

    @property
    def of_node(self) -> int:
        """Ranks of a node."""
        return self.ranks // self.nodes

    @property
    def rank_drive(self) -> DriveRates:
        return DriveRates(self.drive.read / self.of_node, self.drive.write / self.of_node)


@dataclass(frozen=True)
class Setting:
    """Options of `offload`, the optimizer, and the passes of a step.

    Attributes:
        update_on: where an accelerator's updates run.
        recompute: activations are checkpointed, so that a backward repeats its forward.
    """

    optimizer: str = "adamw"
    codec: str = "exact"
    update: str = "step"
    params: str = "auto"
    optimizer_state: str = "auto"
    gradients: str = "auto"
    passes: int = 1
    update_on: str = "device"
    recompute: bool = False


@dataclass(frozen=True)
class Forecast:
    """A plan of one rank, and its step.

    Attributes:
        read_bytes, written_bytes: of a step: those that the plan states, if it is `exact`.
        memory_bytes: host memory that the rank's plan takes.
        exact: the plan has its own pages, not larger ones.
    """

    plan: Plan
    step: StepStats
    read_bytes: int
    written_bytes: int
    memory_bytes: int
    exact: bool


@dataclass
class Forecaster:
    """Forecasts steps of one model.

    Args:
        model: on the meta device; of ranks the whole one.
        tokens: of a step, of all ranks and passes together.
    """

    model: nn.Module
    tokens: int
    _known: dict[object, Any] = field(default_factory=dict)

    def _once(self, key: object, make: Callable[[], T]) -> T:
        """Return what `make` returned for this key."""
        if key not in self._known:
            self._known[key] = make()
        found: T = self._known[key]
        return found

    def of_rank(self, ranks: int) -> nn.Module:
        """Return the model whose parameters one of the ranks pages."""
        return self._once(ranks, lambda: self.model if ranks == 1 else shard_of(self.model, ranks))

    def plan(self, machine: Machine, setting: Setting) -> Plan:
        """Return the plan of one rank.

        Raises:
            BudgetError: the model does not fit the memory; names the smallest that works.
            ConfigError, UnsupportedError: options do not go together.
        """
        of = machine.host_bytes // machine.of_node, machine.device_bytes, machine.ranks, replace(setting, passes=1)
        return self._once(of, lambda: self._plan(machine, setting))  # the same for other drives

    def _plan(self, machine: Machine, setting: Setting) -> Plan:
        model, count = self.of_rank(machine.ranks), machine.of_node
        optimizer = self._once((machine.ranks, setting.optimizer), lambda: OPTIMIZERS[setting.optimizer](model))
        there: dict[str, Any] = {}
        if machine.device_bytes is not None:
            accelerator = Accelerator(update_on=setting.update_on)
            there = {"device": PlannedDevice(), "device_memory": machine.device_bytes, "accelerator": accelerator}
        chosen = OffloadOptions(
            params=setting.params, optimizer_state=setting.optimizer_state, gradients=setting.gradients,
            master_weights=None if next(model.parameters()).dtype == torch.float32 else torch.float32,
            update=setting.update, state_codec=setting.codec, **there,
        )  # fmt: skip
        manager = ManagerOptions(
            host_bytes=machine.host_bytes // count, commit_every="free", fsync=False, drives=Drives((Path(),)),
            backend="auto", check_reads=True, operates=True, stall_s=None,
        )  # fmt: skip
        request = Request.of(model, optimizer, chosen, manager)
        key = machine.ranks, setting.optimizer, setting.codec, machine.device_bytes is None, setting.update_on
        inventory = self._once(key, lambda: request.inventory(may_be_meta=True))
        check_update(setting.update, inventory.forms.values(), request.optimizers.name)
        try:
            return plan_run(request, inventory)
        except BudgetError as error:
            if count == 1:
                raise
            text = f"{error}. This is of each of a node's {count} ranks, which share its memory"
            raise BudgetError(text, option=error.option, smallest_bytes=error.smallest_bytes) from error

    def forecast(self, machine: Machine, setting: Setting, pages: int = EXACT_PAGES) -> Forecast:
        """Return the plan and the predicted step of one rank.

        Args:
            pages: simulate a plan of more pages than this with coarser ones, about this number.
        """
        exact = self.plan(machine, setting)
        plan = self._once((id(exact), pages), lambda: coarser(exact, pages))
        step = simulate(plan, machine.rank_drive, self.compute(exact, machine, setting), setting.passes, machine.device)
        read_bytes, written_bytes = step.read_bytes, step.written_bytes
        if plan is exact and pages == EXACT_PAGES:
            traffic = exact.traffic_of(setting.passes)
            read_bytes, written_bytes = traffic.total_read_bytes, traffic.total_written_bytes
        memory_bytes = exact.budget.resident_bytes + exact.budget.pool_bytes
        return Forecast(plan, step, read_bytes, written_bytes, memory_bytes, plan is exact)

    def lower_bounds(self, machine: Machine, setting: Setting) -> tuple[float, int]:
        """Return seconds and written bytes that no step is below: it computes, and has state in the pool, or moves it."""
        plan = self.plan(machine, setting)
        compute, staying = self.compute(plan, machine, setting), plan.inventory.staying_state
        seconds = setting.passes * sum((*compute.forward_s.values(), *compute.backward_s.values()))
        if machine.device_bytes is None:
            seconds += sum(compute.update_s[group] * numel for group, numel in _numel(plan).items())
        state = [of for of in plan.state_plans if of.group not in staying and not is_resident(of, plan.places)]
        pooled_bytes = int(COARSER * plan.budget.frame_count * plan.budget.page_bytes)
        nbytes = max(sum(of.nbytes for of in state) - pooled_bytes, 0)
        return max(seconds * (1 - ROUNDING), machine.rank_drive.seconds_for(nbytes, nbytes)), nbytes

    def compute(self, plan: Plan, machine: Machine, setting: Setting) -> ComputeTimes:
        """Return what one pass, and the update, compute; and the network while it is slower than that."""
        tokens = max(self.tokens // setting.passes, 1)  # the shards have 1/ranks of the work for all tokens
        key = machine.ranks, machine.flops, machine.updates, setting.optimizer, setting.update_on, tokens
        found = self._once(key, lambda: self._computing(plan, machine, setting, tokens))
        element_s = (machine.ranks - 1) * GATHERED_BYTES / machine.network  # of the shard
        forward_s, backward_s = {}, {}
        for group, numel in _numel(plan).items():
            again_s = found.forward_s[group] if setting.recompute else 0.0
            forward_s[group] = max(found.forward_s[group], numel * element_s)
            backward_s[group] = max(found.backward_s[group] + again_s, 2 * numel * element_s)
        return replace(found, forward_s=forward_s, backward_s=backward_s)

    def _computing(self, plan: Plan, machine: Machine, setting: Setting, tokens: int) -> ComputeTimes:
        model, of_node = self.of_rank(machine.ranks), machine.of_node
        updates = dict.fromkeys(_numel(plan), 0.0 if machine.updates is None else 1 / machine.updates)
        if machine.updates is None and (machine.device_bytes is None or setting.update_on == "cpu"):
            updates |= measure_updates(plan.inventory, plan.request.optimizers, plan.slice_bytes)
        update_s = {group: of * of_node for group, of in updates.items()}
        group_of = {id(p): group.index for group in plan.inventory.groups for _, p in group.parameters}
        return replace(count_products(model, group_of, tokens, machine.flops), update_s=update_s)


def _numel(plan: Plan) -> dict[int, int]:
    return {group.index: sum(p.numel() for _, p in group.parameters) for group in plan.inventory.groups}


def coarser(plan: Plan, pages: int) -> Plan:
    """Return a plan of more pages than `pages` with pages of several: its bytes are those of the plan but for a few pages.

    A pool with few frames stays finer.
    """
    grad_sections = plan.make_grad_sections(0)
    count = sum(section.page_count for section in (*plan.make_sections(), *grad_sections))
    if count <= pages:
        return plan
    budget, times = plan.budget, -(-count // min(pages, COARSE_PAGES))
    while times > 1 and budget.frame_count:
        size = budget.page_bytes * times
        needed = frames_needed(plan.inventory, lambda section: is_resident(section, plan.places), size, plan.step)
        if needed * times <= budget.frame_count * COARSER:
            frames = max(budget.frame_count // times, needed)
            return replace(plan, budget=replace(budget, page_bytes=size, frame_count=frames))
        times = times * 3 // 4
    return plan


@dataclass(frozen=True)
class KnownDevice:
    """An accelerator as its data sheet says: bytes, and a second dense operations in bf16, bytes of its memory and of its link."""

    nbytes: float
    flops: float
    memory: float
    link: float

    @property
    def rates(self) -> DeviceRates:
        """Return what one model reached of them."""
        return DeviceRates(self.link * REACHED_LINK, self.memory * REACHED_MEMORY)


PCIE_4, PCIE_5, C2C = 32e9, 64e9, 450e9
"""Of x16, and of NVLink between the chips of one board: bytes a second of one direction."""
KNOWN = {
    "A100": KnownDevice(80e9, 312e12, 2.0e12, PCIE_4),
    "H100": KnownDevice(80e9, 989e12, 3.35e12, PCIE_5),
    "H200": KnownDevice(141e9, 989e12, 4.8e12, PCIE_5),
    "GH200": KnownDevice(96e9, 989e12, 4.0e12, C2C),
    "B200": KnownDevice(180e9, 2250e12, 8.0e12, PCIE_5),
    "L4": KnownDevice(24e9, 121e12, 0.3e12, PCIE_4),
    "L40S": KnownDevice(48e9, 362e12, 0.864e12, PCIE_4),
    "RTX4090": KnownDevice(24e9, 165e12, 1.008e12, PCIE_4),
    "RTX5090": KnownDevice(32e9, 210e12, 1.792e12, PCIE_5),
    "MI300X": KnownDevice(192e9, 1307e12, 5.3e12, PCIE_5),
}
REACHED_FLOPS, REACHED_LINK, REACHED_MEMORY = 0.44, 0.78, 0.75
"""Parts of these that a Llama of 1.24 G parameters reached on an H200: forwards and backwards with their recomputing, copies both
ways at once, and AdamW. See docs/decisions/a-step-on-a-device.md."""
AUTO_SHARE = 2
"""Swapper takes one part in this many of a device's memory by itself, and leaves the rest to activations."""
