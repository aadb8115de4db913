"""Measures copies between page-locked memory and the device: swapper's registered arena against CUDA's own memory."""

from __future__ import annotations

import time
from collections.abc import Iterator
from unittest.mock import MagicMock

import torch

from gpu.bench import Bench, Row, check_equal, each, ratio
from swapper import _C
from swapper.device.device import Device, open_device
from swapper.device.device_storage import DeviceStorage
from swapper.io.registered import CudaRegistrar, Registration, slabs

UP, DOWN = "arena -> device", "device -> arena"
BAR = 0.95
QUEUEING = "Python's time for a copied tensor"
QUEUEING_BAR_US = 10
TENSORS = 64  # of a page


def pinned(bench: Bench, nbytes: int) -> torch.Tensor:
    """Allocate memory locked by CUDA, which copies fastest."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=not bench.is_rehearsal)


def arena_copies(bench: Bench) -> Iterator[Row]:
    nbytes = bench.size(1 << 30, 1 << 20)
    arena = _C.Arena(nbytes)
    registration = Registration(CudaRegistrar(), arena, slabs(0, nbytes, nbytes))  # one slab: the copy is one
    registration.wait()
    if not bench.is_rehearsal and registration.describe() != "registered":
        reason = registration.describe()
        yield from (Row(figure, f"{BAR} of the best pinned copy", reason=reason) for figure in (UP, DOWN))
        return
    ours, theirs = torch.frombuffer(arena.view(0, nbytes), dtype=torch.uint8), pinned(bench, nbytes)
    on_device = torch.empty(nbytes, dtype=torch.uint8, device=bench.device).random_(0, 256)
    ours.copy_(on_device)
    theirs.zero_()
    up = bench.seconds_by_turns(
        [lambda: on_device.copy_(theirs, non_blocking=True), lambda: on_device.copy_(ours, non_blocking=True)]
    )
    check_equal(on_device, ours, UP)
    yield ratio(UP, nbytes, up[1], nbytes / up[0], "the best pinned copy", BAR)
    wanted = ours.clone()
    ours.zero_()
    down = bench.seconds_by_turns(
        [lambda: theirs.copy_(on_device, non_blocking=True), lambda: ours.copy_(on_device, non_blocking=True)]
    )
    check_equal(ours, wanted, DOWN)
    yield ratio(DOWN, nbytes, down[1], nbytes / down[0], "the best pinned copy", BAR)
    registration.close()


def measurements(bench: Bench) -> Iterator[Row]:
    """Yield all of these rows; a failure loses only its own."""
    yield from each(((UP, DOWN), lambda: arena_copies(bench)), ((QUEUEING,), lambda: queueing(bench)))


def queueing(bench: Bench) -> Iterator[Row]:
    """Measure how long a page's copies keep Python's thread: tensors of 4 KiB, which a device copies in less time."""
    device = open_device(bench.device) or Device(bench.device, MagicMock())  # in a rehearsal streams do nothing
    storage, host = DeviceStorage(device, TENSORS * 4096), torch.arange(TENSORS * 4096).to(torch.uint8)
    pieces = [(at, host[at : at + 4096]) for at in range(0, host.numel(), 4096)]
    stream, best = device.new_stream(), float("inf")
    for _ in range(3 if bench.is_rehearsal else 200):
        bench.synchronize()
        begin = time.perf_counter()
        storage.fill(pieces, stream)
        storage.all_is_queued()
        best = min(best, time.perf_counter() - begin)
        storage.wait_for_copies()
        storage.invalidate()
    storage.fill(pieces, stream)
    storage.all_is_queued()
    storage.wait_for_copies()
    check_equal(storage.read(0, host.numel()), host, QUEUEING)
    microseconds = best / TENSORS * 1e6
    yield Row(QUEUEING, f"{QUEUEING_BAR_US} us", f"{microseconds:.1f} us", microseconds <= QUEUEING_BAR_US)


def link_rates(bench: Bench) -> tuple[float, float]:
    """Return bytes a second from page-locked memory to the device, and back: the limit of a transfer through it."""
    nbytes = bench.size(512 << 20, 1 << 20)
    host, on_device = pinned(bench, nbytes), torch.zeros(nbytes, dtype=torch.uint8, device=bench.device)
    up = bench.seconds(lambda: on_device.copy_(host, non_blocking=True), rounds=5)
    down = bench.seconds(lambda: host.copy_(on_device, non_blocking=True), rounds=5)
    return nbytes / up, nbytes / down
