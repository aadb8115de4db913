"""Measures if the optimizer's update is faster on the CPU, or on an accelerator with state copied both ways.

Both use scratch tensors, in fp32: the user's own optimizer updates some millions of elements on the CPU; and as many
bytes as its state has are copied to the device and back. Those copies limit an update on a device, not its kernels.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch.optim import Optimizer

from swapper.device.device import Device
from swapper.train.optimizer.optimizer_probe import copy_for_trial
from swapper.train.optimizer.optimizer_proxy import OptimizerProxy, Work

ELEMENTS = 1 << 22  # of the trial: 16 MiB in fp32, more than a cache


def faster_place(optimizer: Optimizer, device: Device) -> str:
    """Return "cpu" or "device". An optimizer without parameters, or one that cannot be tried, stays on the CPU."""
    if not optimizer.param_groups or not any(group["params"] for group in optimizer.param_groups):
        return "cpu"
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
        return "cpu"
    on_cpu_s = _seconds(update)
    kept = [v for v in work.state.values() if isinstance(v, torch.Tensor) and v.shape == tensor.shape]
    nbytes = tensor.nbytes * (1 + len(kept))
    host, there = torch.zeros(nbytes, dtype=torch.uint8), device.empty(nbytes)
    stream = device.new_stream()

    def copy() -> None:
        device.let_wait(stream, device.record(device.current_stream()))
        device.copy(host, there, stream)
        device.wait_for(device.record(stream))

    copy()
    return "device" if _seconds(copy) < on_cpu_s else "cpu"


def _seconds(act: Callable[[], None]) -> float:
    best = float("inf")
    for _ in range(2):
        started = time.monotonic()
        act()
        best = min(best, time.monotonic() - started)
    return best
