"""Sums of squares and counts of what is not finite: one program for each part of the tensor."""

import torch
import triton
import triton.language as tl

from swapper.device.kernels.gradients import PART_ELEMENTS
from swapper.device.kernels.triton.triton_words import widen, words_of

ELEMENTS = 2048


def partials(gradient: torch.Tensor) -> torch.Tensor:
    count = gradient.numel()
    parts = triton.cdiv(count, PART_ELEMENTS)
    found = torch.empty(parts, 2, dtype=torch.float32, device=gradient.device)
    with torch.cuda.device_of(gradient):
        _partials[(parts,)](
            words_of(gradient), found, count, ELEMENTS=ELEMENTS, STEPS=PART_ELEMENTS // ELEMENTS, num_warps=8
        )
    return found


@triton.jit
def _partials(gradient, found, count, ELEMENTS: tl.constexpr, STEPS: tl.constexpr):
    part = tl.program_id(0).to(tl.int64)
    squares = tl.zeros([ELEMENTS], dtype=tl.float32)
    overflown = tl.zeros([ELEMENTS], dtype=tl.float32)
    for step in tl.static_range(STEPS):
        at = (part * STEPS + step) * ELEMENTS + tl.arange(0, ELEMENTS)
        values = widen(tl.load(gradient + at, mask=at < count, other=0))
        squares += values * values
        exponent = values.to(tl.int32, bitcast=True) & 0x7F800000
        overflown += tl.where(exponent == 0x7F800000, 1.0, 0.0)
    tl.store(found + part * 2, tl.sum(squares))
    tl.store(found + part * 2 + 1, tl.sum(overflown))
