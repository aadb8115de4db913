"""Measures kernels against the device's memory bandwidth: bytes that a kernel must move a second, against a copy's."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from gpu.bench import Bench, Row, each, ratio
from swapper.device import kernels

COPY = "a copy on the device"
ADAMW = ("AdamW, one pass", "AdamW, one pass, stochastic rounding", "torch's fused AdamW, fp32")
QUANTISED_BAR = 0.8
QUANTISED = tuple(f"{verb} {bits} bits" for bits in (8, 4) for verb in ("quantise", "dequantise"))


def copy_bandwidth(bench: Bench) -> float:
    """Return bytes read and written a second."""
    nbytes = bench.size(2 << 30, 1 << 20)
    source, target = (torch.ones(nbytes, dtype=torch.uint8, device=bench.device) for _ in range(2))
    return 2 * nbytes / bench.queued_seconds(lambda: target.copy_(source))


def adamw_kernel(bench: Bench) -> Iterator[Row]:
    limit, count = copy_bandwidth(bench), bench.size(1 << 28, 4096)
    state = [torch.rand(count, device=bench.device) for _ in range(3)]
    gradient = torch.randn(count, device=bench.device, dtype=torch.bfloat16)
    part = kernels.AdamWSlice(*state, gradient, parameter=torch.zeros_like(gradient))
    factor, skip = torch.ones(1, device=bench.device), torch.zeros(1, device=bench.device)

    def by_us(figure: str, seed: int | None, bar: float | None) -> Iterator[Row]:
        step = kernels.AdamWStep(1, seed=seed)
        taken = bench.queued_seconds(partial(kernels.update_, part, step, factor, skip))
        yield ratio(figure, part.bytes_moved, taken, limit, COPY, bar)

    def by_torch() -> Iterator[Row]:
        parameter = torch.nn.Parameter(state[0])
        parameter.grad = state[1]
        optimizer = torch.optim.AdamW([parameter], fused=True)
        yield ratio(ADAMW[2], count * 28, bench.queued_seconds(optimizer.step), limit, COPY, None)

    rows = (partial(by_us, ADAMW[0], None, 0.85), partial(by_us, ADAMW[1], 1, None), by_torch)
    yield from each(*(((figure,), row) for figure, row in zip(ADAMW, rows, strict=True)))


def quantised_kernels(bench: Bench) -> Iterator[Row]:
    limit, columns = copy_bandwidth(bench), bench.size(8192, 256)
    rows = torch.randn(bench.size(1 << 16, 4), columns, device=bench.device, dtype=torch.bfloat16)
    out = torch.empty_like(rows)

    def row(figure: str, bits: int, block: int) -> Iterator[Row]:
        stored, overflown = kernels.quantise(rows, bits, block)
        if overflown.item() != 0:
            raise AssertionError("finite values were taken for non-finite ones")
        act = partial(kernels.quantise, rows, bits, block)
        if figure.startswith("dequantise"):
            act = partial(kernels.dequantise_, stored, out, bits, block)
        nbytes = kernels.bytes_moved(bits, block, columns, rows.shape[0], rows.dtype)
        yield ratio(figure, nbytes, bench.queued_seconds(act), limit, COPY, QUANTISED_BAR)

    formats = ((8, 128), (8, 128), (4, 64), (4, 64))
    yield from each(*(((f,), partial(row, f, *of)) for f, of in zip(QUANTISED, formats, strict=True)))
