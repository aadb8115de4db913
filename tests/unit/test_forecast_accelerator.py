"""Steps on an accelerator are predicted from rates alone, near what the product's own code takes on a device with virtual time.

The figures are those of docs/decisions/a-step-on-a-device.md: a Llama of 1.24 G parameters on an H200, bf16 with fp32 masters.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from sim.timed_device import Machine, Sizes
from torch import nn

import swapper
from swapper.forecast.accelerator import UPDATE_TOUCHES, DeviceRates
from swapper.forecast.compute import ComputeTimes
from swapper.forecast.machine import (
    KNOWN,
    REACHED_FLOPS,
    REACHED_LINK,
    REACHED_MEMORY,
    Forecaster,
    PlannedDevice,
    Setting,
)
from swapper.forecast.machine import Machine as ForecastMachine
from swapper.forecast.step import simulate
from swapper.io.drives import Drives
from swapper.paging.virtual_drive import DriveRates
from swapper.train.planning.plan import Plan, plan_run
from swapper.train.planning.request import ManagerOptions, OffloadOptions, Request

SIZES, MACHINE = Sizes(), Machine()
STATE_BYTES = {"exact": 12, "8bit": 3.2}
"""Of an element: what AdamW's kernels touch is known by their measured rate."""
CODED: dict[str, Any] = {"state_codec": "8bit"}
BACKWARD: dict[str, Any] = {"update": "backward"}


class Decoder(nn.Module):
    """The parameters of a Llama, without its code."""

    def __init__(self, sizes: Sizes = SIZES, is_tied: bool = True) -> None:
        super().__init__()
        width, keys, inner = sizes.width, sizes.keys, sizes.inner
        shapes = [
            (width, width),
            (width, keys),
            (width, keys),
            (width, width),
            (width, inner),
            (width, inner),
            (inner, width),
        ]
        self.embedding = nn.Embedding(sizes.vocabulary, width)
        self.layers = nn.ModuleList(
            nn.ModuleList([nn.LayerNorm(width), *(nn.Linear(a, b, bias=False) for a, b in shapes)])
            for _ in range(sizes.layers)
        )
        self.head = nn.Linear(width, sizes.vocabulary, bias=False)
        if is_tied:
            self.head.weight = self.embedding.weight


@cache
def decoder() -> tuple[nn.Module, torch.optim.Optimizer]:
    with torch.device("meta"):
        model = Decoder().to(torch.bfloat16)
    return model, torch.optim.AdamW(model.parameters(), fused=True)


def plan_of(bytes_an_element: float, options: dict[str, Any], host_bytes_an_element: int = 20) -> Plan:
    model, optimizer = decoder()
    numel = sum(parameter.numel() for parameter in model.parameters())
    defaults: dict[str, Any] = {
        "params": "device", "gradients": "device", "optimizer_state": "host", "master_weights": torch.float32,
        "device": PlannedDevice(), "device_memory": int(bytes_an_element * numel),
        "accelerator": swapper.Accelerator(update_on="device"),
    }  # fmt: skip
    manager = ManagerOptions(
        host_bytes=host_bytes_an_element * numel,
        commit_every=None,
        fsync=False,
        drives=Drives((Path(),)),
        backend="auto",
        check_reads=True,
        operates=True,
        stall_s=None,
    )
    request = Request.of(model, optimizer, OffloadOptions(**defaults | options), manager)
    return plan_run(request, request.inventory(may_be_meta=True))


def compute_of(plan: Plan) -> ComputeTimes:
    """Return the seconds that the simulated kernels take."""
    layer = sum(parameter.numel() for parameter in decoder()[0].get_submodule("layers.0").parameters())
    forward, backward = {}, {}
    for group in plan.inventory.groups:
        numel = sum(parameter.numel() for _, parameter in group.parameters)
        whole = [share * numel / layer for share in SIZES.layer_s] if "layers" in group.name else SIZES.head_s
        forward[group.index], backward[group.index] = whole
    return ComputeTimes(forward, backward)


@pytest.mark.parametrize(
    "batches, bytes_an_element, options, clipped, wanted_s",
    [
        (4, 24, {}, False, 1.537),
        (4, 5.5, {}, False, 1.738),
        (4, 9, {}, True, 1.638),
        (4, 24, {"update": "deferred"}, False, 1.537),
        (4, 24, BACKWARD, False, 1.547),
        (4, 5.5, BACKWARD, False, 1.607),
        (4, 24, {"optimizer_state": "device"}, False, 1.537),
        (4, 6, CODED, False, 1.597),
        (4, 7, CODED, True, 1.558),
        (4, 24, {**CODED, **BACKWARD}, False, 1.537),
        (1, 9, {}, True, 0.498),
        (1, 24, BACKWARD, False, 0.407),
        (1, 7, CODED, True, 0.418),
        (1, 24, {**CODED, **BACKWARD}, False, 0.397),
    ],
    ids=str,
)
def test_a_step_is_predicted_within_a_tenth(
    batches: int, bytes_an_element: float, options: dict[str, Any], clipped: bool, wanted_s: float
) -> None:
    plan = plan_of(bytes_an_element, options)
    memory = UPDATE_TOUCHES * STATE_BYTES[options.get("state_codec", "exact")] * MACHINE.update
    rates = DeviceRates(MACHINE.link_both, memory)
    step = simulate(plan, DriveRates(), compute_of(plan), batches, rates, clipped)
    assert step.wall_s == pytest.approx(wanted_s, rel=0.1)


def test_what_does_not_stay_in_the_pool_takes_the_drives_time_and_streamed_parameters_the_links() -> None:
    rates = DeviceRates(MACHINE.link_both, 24 * MACHINE.update)
    drive = DriveRates(2e9, 2e9, 4e9)
    in_pool = simulate(plan_of(24, {"optimizer_state": "nvme"}), drive, compute_of(plan_of(24, {})), device=rates)
    plan = plan_of(24, {"optimizer_state": "nvme"}, host_bytes_an_element=8)
    moved = plan.traffic.total_read_bytes, plan.traffic.total_written_bytes
    on_nvme = simulate(plan, drive, compute_of(plan), device=rates)
    assert (on_nvme.read_bytes, on_nvme.written_bytes) == pytest.approx(moved, rel=0.03)
    assert min(moved) > 4e9 and on_nvme.wall_s == pytest.approx(max(moved) / 2e9, rel=0.2)
    assert in_pool.wall_s < 0.2 * on_nvme.wall_s  # its pages stay in the pool
    everything = plan_of(2, {"params": "nvme", "gradients": "nvme", "optimizer_state": "nvme"}, host_bytes_an_element=4)
    assert everything.traffic.total_read_bytes > max(moved)
    assert (
        simulate(everything, drive, compute_of(plan), device=rates).wall_s
        >= everything.traffic.total_read_bytes / 2e9 * 0.95
    )
    streamed = simulate(
        plan_of(2, {"params": "auto", "gradients": "auto"}), drive, compute_of(plan), device=DeviceRates(1e9)
    )
    parameter_bytes = plan.inventory.family_bytes("param")
    assert streamed.wall_s >= 2 * parameter_bytes / 1e9  # up in forward and in backward


def test_a_step_of_7_b_in_4_gb_of_device_memory_takes_longer_than_its_products_and_less_than_with_hooks_that_wait() -> (
    None
):
    """4 micro-batches of 8,192 tokens, checkpointed, 8-bit state in host memory, updates in backward. An H200 took 5.42 s when
    hooks waited for memory."""
    sizes = Sizes(layers=32, width=4096, keys=4096, inner=11008, vocabulary=32000)
    with torch.device("meta"):
        model = Decoder(sizes, is_tied=False).to(torch.bfloat16)
    known = KNOWN["H200"]
    rates = DeviceRates(known.link * REACHED_LINK, known.memory * REACHED_MEMORY)
    machine = ForecastMachine(
        128 << 30, DriveRates(2e9, 2e9, 4e9), flops=known.flops * REACHED_FLOPS, device_bytes=4 * 10**9, device=rates
    )
    setting = Setting(codec="8bit", update="backward", params="host", passes=4, recompute=True)
    found = Forecaster(model, 4 * 8192).forecast(machine, setting)
    numel = sum(parameter.numel() for parameter in model.parameters())
    computing_s = 8 * (numel - 32000 * 4096) * 4 * 8192 / machine.flops  # the table of embeddings is no product
    assert computing_s < found.step.wall_s < 5.42
