"""Chooses where updates run: compares one on the CPU with one on an accelerator, with state copied both ways.

The user's own optimizer updates some millions of fp32 elements on the CPU; and registered memory is copied to the device and back
at once, as in an update there. Those copies limit it, not its kernels.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch
from torch.optim import Optimizer

from swapper import _C
from swapper.codecs import CODECS, CodedState
from swapper.device.device import OUT_OF_MEMORY, Device
from swapper.device.device_memory import DeviceStorage
from swapper.errors import UnsupportedError
from swapper.io.registered import Registration, slabs
from swapper.io.tensor_bytes import SECTOR_BYTES, round_up
from swapper.train.optimizer.optimizer_proxy import OptimizerProxy, Work
from swapper.train.optimizer.optimizer_set import copy_for_trial, kind_of
from swapper.train.updates.one_pass import MOMENTS, find_torchs_pass

log = logging.getLogger("swapper")

SIDE = 8
"""Elements of each dimension of a tensor with which an optimizer is tried on a device."""
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


def check_updates_there(optimizer: Optimizer, device: Device) -> None:
    """Raise UnsupportedError if the optimizer updates a small tensor on the CPU, and fails with one on the device."""
    if not device.is_there or not optimizer.param_groups or not optimizer.param_groups[0]["params"]:
        return
    shape = (SIDE,) * optimizer.param_groups[0]["params"][0].dim()
    error = _failure(optimizer, shape, device.device)
    if error is not None and _failure(optimizer, shape, torch.device("cpu")) is None:
        raise UnsupportedError(
            f"{kind_of(optimizer)} updates tensors of the CPU, and not of {device} ({type(error).__name__}: {error}): say "
            "accelerator=swapper.Accelerator(update_on='cpu')"
        )


def _failure(optimizer: Optimizer, shape: tuple[int, ...], where: torch.device) -> Exception | None:
    """Return the error of an update of such a tensor there; None if it succeeds."""
    value, gradient = (torch.ones(shape, dtype=torch.float32, device=where) for _ in range(2))
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            OptimizerProxy(copy_for_trial(optimizer)).update([Work(0, value, gradient, {})])
    except OUT_OF_MEMORY:
        raise
    except Exception as error:  # of anybody's code
        return error
    return None


def copy_seconds(device: Device) -> float:
    """Return the seconds of a byte that is copied to the device while another one is copied from it, in registered memory."""
    nbytes = min(COPIED_BYTES, max(round_up(device.free_bytes() // 8, SECTOR_BYTES), SECTOR_BYTES))
    arena = _C.Arena(2 * nbytes, node=device.node)
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
        device.wait_for(device.copy([(target, there)], down).over)
        storage.wait_for_copies()

    try:
        copy()
        return min_seconds(copy) / nbytes
    finally:
        device.wait_for(device.record(down))
        storage.wait_for_copies()
        storage.free()
        registration.close()
        arena.close()


def _try(optimizer: Optimizer) -> tuple[float, int] | None:
    """Return the seconds of an update of ELEMENTS, and the bytes of their state; None if the optimizer does not take them."""
    if not optimizer.param_groups or not any(group["params"] for group in optimizer.param_groups):
        return None
    proxy = OptimizerProxy(copy_for_trial(optimizer))
    tensor = torch.zeros(ELEMENTS, dtype=torch.float32, device="cpu")
    work = Work(0, tensor, torch.ones(ELEMENTS, dtype=torch.float32, device="cpu"), {})
    in_one_pass = find_torchs_pass(kind_of(optimizer), optimizer.param_groups[0])

    def update() -> None:
        gradient = torch.ones(ELEMENTS, dtype=torch.float32, device="cpu")
        if in_one_pass is not None and work.state:
            states = {key: CodedState(CODECS["fp32"], (work.state[key],)) for key in MOMENTS}
            in_one_pass(tensor, gradient, states, 1.0)
            return
        work.gradient = gradient
        with torch.no_grad():
            proxy.update([work])

    try:
        update()  # makes the state
    except Exception:  # it does not take such a tensor (Muon needs matrices); the probe reports unsupported optimizers
        return None
    kept = [v for v in work.state.values() if isinstance(v, torch.Tensor) and v.shape == tensor.shape]
    return min_seconds(update), tensor.nbytes * len(kept)


def min_seconds(act: Callable[[], object], times: int = 2) -> float:
    """Return the seconds of the fastest of several calls."""

    def seconds() -> float:
        began_s = time.perf_counter()
        act()
        return time.perf_counter() - began_s

    return min(seconds() for _ in range(times))
