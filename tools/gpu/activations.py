"""Measures the device memory that `swapper.offload_activations` saves, and its cost, on a compute-bound transformer.

Its blocks are wide: for each saved byte the forward has some ten thousand operations, in which the link can carry a
good part of the bytes, not all. The resident share is chosen for a little more than the bar.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from statistics import median
from typing import Any

import torch
from torch import nn

import swapper
from gpu.bench import Bench, Row, each
from gpu.hardware import kilobytes
from gpu.install import ROOT
from gpu.transformer import loss_of, transformer

SAVED, COST = "activations: peak device memory saved", "activations: step time"
LINK, EQUAL = "activations: of the link, both ways", "activations: gradients are plain torch's"
FIGURES = (SAVED, COST, LINK, EQUAL)
SAVED_BAR, COST_BAR, AIM = 0.30, 1.03, 0.34
STEPS = 5
H200_BYTES = 139 << 30


def activations(bench: Bench) -> Iterator[Row]:
    part = 1.0 if bench.is_rehearsal else min(torch.cuda.get_device_properties(0).total_memory / H200_BYTES, 1.0)
    layers, width = bench.size(3, 2), bench.size(12288, 64)
    rows = max(int(bench.size(16, 1) * part), 1)
    model = transformer(layers, width, torch.bfloat16, bench.device)
    value = torch.randn(rows, bench.size(2048, 32), width, device=bench.device, dtype=torch.bfloat16)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    plain_bytes = peak_bytes_of(bench, model, value, contextlib.nullcontext())
    with tempfile.TemporaryDirectory(dir=bench.directory) as place, swapper.SwapManager(place, 1 << 20) as manager:
        saved = saved_bytes(bench, manager, model, value)
        stays = saved // 2 if bench.is_rehearsal else max(saved - int(AIM * plain_bytes), 64 << 20)
        host = max(saved - stays + (1 << 30), 1 << 20) if not bench.is_rehearsal else 1 << 20
        if host > kilobytes("MemAvailable") * 1024 * 0.8:
            raise RuntimeError(f"this machine lacks {host / 1e9:.1f} GB of host memory for the activations")
        context = offload(bench, manager, host_memory=host, device_memory=stays)

        def memory() -> Iterator[Row]:
            peak_bytes = peak_bytes_of(bench, model, value, context)
            less = 1 - peak_bytes / plain_bytes
            peaks = f"{peak_bytes / 1e9:.1f} of {plain_bytes / 1e9:.1f} GB"
            number = f"{less:.1%} ({peaks}; of {saved / 1e9:.1f} GB that are saved {stays / 1e9:.1f} may stay)"
            yield Row(SAVED, f"{SAVED_BAR:.0%} of plain torch's", number, less >= SAVED_BAR)

        def cost() -> Iterator[Row]:
            if context._locked is not None:
                context._locked.wait()
            before = context.counters.down_bytes + context.counters.up_bytes
            plain_s, taken_s = steps_by_turns(bench, model, value, (contextlib.nullcontext(), context))
            moved = (context.counters.down_bytes + context.counters.up_bytes - before) / STEPS
            number = f"{taken_s / plain_s:.3f} ({taken_s * 1e3:.0f} of {plain_s * 1e3:.0f} ms, medians of {STEPS})"
            yield Row(COST, f"{COST_BAR} of plain torch's", number, taken_s / plain_s <= COST_BAR)
            slow = context.counters.unlocked_bytes
            told = f", {slow / 1e9:.1f} GB by memory that is not page-locked" if slow else ""
            yield Row(LINK, "", f"{moved / taken_s / 1e9:.1f} GB/s together ({moved / 1e9:.1f} GB a step){told}")

        def verdict() -> Iterator[Row]:
            wanted = gradients(bench, model, value, contextlib.nullcontext())
            found = gradients(bench, model, value, context)
            equal = all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
            yield Row(EQUAL, "equal", "equal" if equal else "DIFFERENT", equal, is_equal=equal)

        yield from each(((SAVED,), memory), ((COST, LINK), cost), ((EQUAL,), verdict))


def offload(bench: Bench, manager: swapper.SwapManager, **options: int) -> swapper.offload_activations:
    """Write nothing to the drive. A rehearsal on the CPU uses the test device of host memory, with late copies."""
    options |= {"min_bytes": 1} if bench.is_rehearsal else {}
    context = swapper.offload_activations(manager, to="host", **options)
    if bench.on_cpu:
        sys.path.insert(0, str(ROOT / "tests"))
        context._devices[bench.device] = importlib.import_module("e2e.late_device").LateDevice()
    return context


def run(model: nn.Module, value: torch.Tensor, context: AbstractContextManager[Any]) -> None:
    with context:
        loss_of(model, value).backward()


def peak_bytes_of(bench: Bench, model: nn.Module, value: torch.Tensor, context: AbstractContextManager[Any]) -> int:
    """Return the peak of tensors' bytes on the device in a step, after one that prepares it."""
    run(model, value, context)
    bench.synchronize()
    if bench.on_cpu:
        return 1 << 30
    torch.cuda.reset_peak_memory_stats()
    run(model, value, context)
    bench.synchronize()
    return torch.cuda.max_memory_allocated()


def steps_by_turns(
    bench: Bench, model: nn.Module, value: torch.Tensor, contexts: Sequence[AbstractContextManager[Any]]
) -> list[float]:
    """Return the median seconds of a step in each context: a device's clock changes by as much as the bar."""
    times: list[list[float]] = [[] for _ in contexts]
    for _ in range(STEPS):
        for own, context in zip(times, contexts, strict=True):
            begin = time.perf_counter()
            run(model, value, context)
            bench.synchronize()
            own.append(time.perf_counter() - begin)
    return [median(own) for own in times]


def gradients(
    bench: Bench, model: nn.Module, value: torch.Tensor, context: AbstractContextManager[Any]
) -> list[torch.Tensor]:
    """Return the gradients of one step of deterministic kernels, in host memory."""
    model.zero_grad(set_to_none=False)
    torch.use_deterministic_algorithms(True)
    try:
        run(model, value, context)
    finally:
        torch.use_deterministic_algorithms(False)
    return [p.grad.cpu() for p in model.parameters() if p.grad is not None]


def saved_bytes(bench: Bench, manager: swapper.SwapManager, model: nn.Module, value: torch.Tensor) -> int:
    """Return the movable bytes that a forward saves: nothing is moved, as all may stay."""
    context = offload(bench, manager, host_memory=1 << 20, device_memory=1 << 60)
    with context:
        loss = loss_of(model, value)
        held = context.counters.device_held_bytes
    del loss
    return held
