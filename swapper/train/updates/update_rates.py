"""Measures if the optimizer's update is faster on the CPU, or on an accelerator with state copied both ways.

Both use scratch tensors, in fp32: the user's own optimizer updates some millions of elements on the CPU; and as many
bytes as its state has are copied to the device and back. Those copies limit an update on a device, not its kernels.
"""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from swapper.device.device import Device
from swapper.modules.operations import least_seconds
from swapper.train.optimizer.optimizer_probe import copy_for_trial
from swapper.train.optimizer.optimizer_proxy import OptimizerProxy, Work

ELEMENTS = 1 << 22  # of the trial: 16 MiB in fp32, more than a cache


def faster_place(optimizer: Optimizer, device: Device) -> str:
    """Return "cpu" or "device". An optimizer without parameters, or one that cannot be tried, stays on the CPU."""
    trial = _try(optimizer)
    if trial is None:
        return "cpu"
    on_cpu_s, state_bytes = trial
    nbytes = 4 * ELEMENTS + state_bytes
    host, there = torch.zeros(nbytes, dtype=torch.uint8), device.empty(nbytes)
    stream = device.new_stream()

    def copy() -> None:
        device.let_wait(stream, device.record(device.current_stream()))
        device.copy(host, there, stream)
        device.wait_for(device.record(stream))

    copy()
    return "device" if least_seconds(copy) < on_cpu_s else "cpu"


def update_seconds(optimizer: Optimizer) -> float | None:
    """Return how long the optimizer takes to update one element on the CPU; None if it cannot be tried."""
    trial = _try(optimizer)
    return None if trial is None else trial[0] / ELEMENTS


def _try(optimizer: Optimizer) -> tuple[float, int] | None:
    """Return the seconds of an update of ELEMENTS, and the bytes of their state; None if the optimizer does not take them."""
    if not optimizer.param_groups or not any(group["params"] for group in optimizer.param_groups):
        return None
    proxy = OptimizerProxy(copy_for_trial(optimizer))
    tensor = torch.zeros(ELEMENTS)
    work = Work(0, tensor, torch.ones(ELEMENTS), {})

    def update() -> None:
        work.gradient = torch.ones(ELEMENTS)
        with torch.no_grad():
            proxy.update([work])

    try:
        update()  # makes the state
    except Exception:  # it does not take such a tensor (Muon needs matrices); the probe reports unsupported optimizers
        return None
    kept = [v for v in work.state.values() if isinstance(v, torch.Tensor) and v.shape == tensor.shape]
    return least_seconds(update), tensor.nbytes * len(kept)
