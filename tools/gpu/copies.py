"""Measures copies between page-locked memory and the device: swapper's registered arena against CUDA's own memory."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from unittest.mock import MagicMock

import torch

from gpu.bench import Bench, Row, check_equal, each, ratio
from swapper import _C
from swapper.device.device import Device, open_device
from swapper.device.device_memory import DeviceStorage, Span, spans_of_page
from swapper.io.registered import CudaRegistrar, Registration, slabs

UP, DOWN = "arena -> device", "device -> arena"
BAR = 0.95
QUEUEING, NEIGHBORS = "Python's time for a copied tensor", "Python's time for one of neighbors on both sides"
QUEUEING_BAR_US = 10
TENSORS, PITCH = 64, 4096
"""Tensors of a page, and bytes from one to the next: a device copies them in less time than it takes to queue them."""


def pinned(bench: Bench, nbytes: int) -> torch.Tensor:
    """Allocate memory locked by CUDA, which copies fastest."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=not bench.on_cpu)


def arena_copies(bench: Bench) -> Iterator[Row]:
    nbytes = bench.size(1 << 30, 1 << 20)
    arena = _C.Arena(nbytes)
    registration = Registration(CudaRegistrar(), arena, slabs(0, nbytes, nbytes))  # one slab: the copy is one
    registration.wait()
    if not bench.on_cpu and registration.describe() != "registered":
        reason = registration.describe()
        yield from (Row(figure, f"{BAR} of the best pinned copy", reason=reason) for figure in (UP, DOWN))
        return
    ours, theirs = torch.frombuffer(arena.view(0, nbytes), dtype=torch.uint8), pinned(bench, nbytes)
    on_device = torch.empty(nbytes, dtype=torch.uint8, device=bench.device).random_(0, 256)

    def up() -> Iterator[Row]:
        ours.copy_(on_device)
        theirs.zero_()
        times = bench.seconds_by_turns(
            [lambda: on_device.copy_(theirs, non_blocking=True), lambda: on_device.copy_(ours, non_blocking=True)]
        )
        check_equal(on_device, ours, UP)
        yield ratio(UP, nbytes, times[1], nbytes / times[0], "the best pinned copy", BAR)

    def down() -> Iterator[Row]:
        wanted = on_device.cpu()
        ours.zero_()
        times = bench.seconds_by_turns(
            [lambda: theirs.copy_(on_device, non_blocking=True), lambda: ours.copy_(on_device, non_blocking=True)]
        )
        check_equal(ours, wanted, DOWN)
        yield ratio(DOWN, nbytes, times[1], nbytes / times[0], "the best pinned copy", BAR)

    yield from each(((UP,), up), ((DOWN,), down))
    registration.close()


def measurements(bench: Bench) -> Iterator[Row]:
    """Yield all of these rows; a failure loses only its own."""
    yield from each(((UP, DOWN), lambda: arena_copies(bench)), ((QUEUEING, NEIGHBORS), lambda: queueing(bench)))


def queueing(bench: Bench) -> Iterator[Row]:
    """Measure how long a page's copies keep the processor of Python's thread: of tensors with gaps, and of neighbors."""
    device = open_device(bench.device) or Device(bench.device, MagicMock())  # in a rehearsal streams do nothing
    arena = _C.Arena(TENSORS * PITCH)
    registration = Registration(CudaRegistrar(), arena, slabs(0, TENSORS * PITCH, PITCH))
    registration.wait()
    frame = torch.frombuffer(arena.view(0, TENSORS * PITCH), dtype=torch.uint8)
    for figure, nbytes in ((QUEUEING, PITCH - 96), (NEIGHBORS, PITCH)):
        spans = spans_of_page([Span(at, nbytes, at) for at in range(0, frame.numel(), PITCH)], 0, frame.numel())
        taken_us, own_us = queueing_us(bench, device, frame.random_(0, 256), spans)
        told = f"{taken_us:.1f} us ({len(spans)} copies of {TENSORS} tensors; torch's own calls take {own_us:.1f})"
        yield Row(figure, f"{QUEUEING_BAR_US} us", told, taken_us <= QUEUEING_BAR_US)
    registration.close()


def queueing_us(bench: Bench, device: Device, frame: torch.Tensor, spans: Sequence[Span]) -> tuple[float, float]:
    """Return the least microseconds of processor time for a tensor of a page, and those of `copy_` alone for the same copies."""
    storage, stream, best = DeviceStorage(device, frame.numel()), device.new_stream(), [float("inf")] * 2
    for n in range(3 if bench.is_rehearsal else 200):
        if n:
            storage.invalidate()
        bench.synchronize()
        begin = time.thread_time()
        storage.fill([(s.target, frame[s.begin : s.begin + s.nbytes]) for s in spans], stream)
        storage.all_is_queued()
        middle = time.thread_time()
        storage.wait_for_copies()
        own = [(storage.read(s.target, s.nbytes), frame[s.begin : s.begin + s.nbytes]) for s in spans]
        with device.on(stream):
            last = time.thread_time()
            for target, source in own:
                target.copy_(source, non_blocking=True)
            best = [min(best[0], middle - begin), min(best[1], time.thread_time() - last)]
        bench.synchronize()
    for target, source in own:
        check_equal(target, source, QUEUEING)
    return best[0] / TENSORS * 1e6, best[1] / TENSORS * 1e6


def link_rates(bench: Bench) -> tuple[float, float]:
    """Return bytes a second from page-locked memory to the device, and back: the limit of a transfer through it."""
    nbytes = bench.size(512 << 20, 1 << 20)
    host, on_device = pinned(bench, nbytes), torch.zeros(nbytes, dtype=torch.uint8, device=bench.device)
    up = bench.seconds(lambda: on_device.copy_(host, non_blocking=True), rounds=5)
    down = bench.seconds(lambda: host.copy_(on_device, non_blocking=True), rounds=5)
    return nbytes / up, nbytes / down
