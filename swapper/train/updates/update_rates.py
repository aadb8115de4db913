"""Measures if the optimizer's update is faster on the CPU, or on an accelerator with state copied both ways.

Both use scratch tensors, in fp32: the user's own optimizer updates some millions of elements on the CPU; and registered
memory is copied to the device and back at once, as in an update there. Those copies limit it, not its kernels.
"""

from __future__ import annotations

import logging

import torch
from torch.optim import Optimizer

from swapper import _C
from swapper.device.device import Device
from swapper.device.device_storage import DeviceStorage
from swapper.io.alignment import SECTOR_BYTES, round_up
from swapper.io.registered import Registration, slabs
from swapper.modules.operations import least_seconds
from swapper.train.optimizer.optimizer_probe import copy_for_trial
from swapper.train.optimizer.optimizer_proxy import OptimizerProxy, Work

log = logging.getLogger("swapper")

ELEMENTS = 1 << 22  # of the trial: 16 MiB in fp32, more than a cache
COPIED_BYTES = 256 << 20
"""Each way: enough for a link's full speed. A quarter of the free memory of a small device."""


def faster_place(optimizer: Optimizer, device: Device) -> str:
    """Return "cpu" or "device". An optimizer without parameters, or one that cannot be tried, stays on the CPU."""
    trial = _try(optimizer)
    if trial is None:
        return "cpu"
    on_cpu_s, state_bytes = trial
    copied_s = (4 * ELEMENTS + state_bytes) * copy_seconds(device)  # parameters and state, each way
    gradients_s = copied_s * 4 * ELEMENTS / (4 * ELEMENTS + state_bytes)  # stay on the device if they are used there
    place = "device" if copied_s < on_cpu_s + gradients_s else "cpu"
    log.info(
        "update_on='auto' chose %r: for a million elements an update on the CPU takes %.3g ms, after %.3g ms for gradients, and "
        "the copies of an update on %s take %.3g ms",
        place, on_cpu_s * 1e9 / ELEMENTS, gradients_s * 1e9 / ELEMENTS, device, copied_s * 1e9 / ELEMENTS,
    )  # fmt: skip
    return place


def copy_seconds(device: Device) -> float:
    """Return the seconds of a byte that is copied to the device while another one is copied from it, in registered memory."""
    nbytes = min(COPIED_BYTES, max(round_up(device.free_bytes() // 8, SECTOR_BYTES), SECTOR_BYTES))
    arena = _C.Arena(2 * nbytes)
    registration = Registration(device, arena, slabs(0, 2 * nbytes, SECTOR_BYTES))
    registration.wait()
    source, target = (torch.frombuffer(arena.view(at, nbytes), dtype=torch.uint8) for at in (0, nbytes))
    storage, there = DeviceStorage(device, nbytes), device.empty(nbytes)
    up, down = device.new_stream(), device.new_stream()

    def copy() -> None:
        storage.invalidate()
        storage.fill([(0, source)], up)
        storage.all_is_queued()
        device.let_wait(down, device.record(device.current_stream()))
        device.copy(target, there, down)
        device.wait_for(device.record(down))
        storage.wait_for_copies()

    try:
        copy()
        return least_seconds(copy) / nbytes
    finally:
        device.wait_for(device.record(down))
        storage.wait_for_copies()
        storage.free()
        registration.close()
        arena.close()


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
