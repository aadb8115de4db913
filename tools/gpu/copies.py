"""Measures copies between page-locked memory and the device: swapper's registered arena against CUDA's own memory."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from gpu.bench import Bench, Row, check_equal, ratio
from swapper import _C
from swapper.io.registered import CudaRegistrar, Registration, slabs

UP, DOWN = "arena -> device", "device -> arena"
BAR = 0.95


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


def link_rates(bench: Bench) -> tuple[float, float]:
    """Return bytes a second from page-locked memory to the device, and back: the limit of a transfer through it."""
    nbytes = bench.size(512 << 20, 1 << 20)
    host, on_device = pinned(bench, nbytes), torch.zeros(nbytes, dtype=torch.uint8, device=bench.device)
    up = bench.seconds(lambda: on_device.copy_(host, non_blocking=True), rounds=5)
    down = bench.seconds(lambda: host.copy_(on_device, non_blocking=True), rounds=5)
    return nbytes / up, nbytes / down
