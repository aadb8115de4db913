"""AdamW over a slice: one program for each 1024 elements, which are read and written once."""

import torch
import triton
import triton.language as tl

from swapper.device.kernels.adamw import AdamWSlice, AdamWStep
from swapper.device.kernels.triton.triton_words import narrow, random_word, widen, words_of

ELEMENTS = 1024


def update_(part: AdamWSlice, step: AdamWStep, factor: torch.Tensor | None, skip: torch.Tensor | None) -> None:
    count = part.master.numel()
    parameter = part.master if part.parameter is None else part.parameter
    beta1, beta2 = step.betas
    with torch.cuda.device_of(part.master):  # Triton launches on the current device
        _update[(triton.cdiv(count, ELEMENTS),)](
            part.master,
            part.exp_avg,
            part.exp_avg_sq,
            words_of(part.gradient),
            words_of(parameter),
            part.master if factor is None else factor,
            part.master if skip is None else skip,
            count,
            step.decay,
            beta1,
            1 - beta1,
            beta2,
            1 - beta2,
            step.root_scale,
            step.eps,
            step.step_size,
            step.seed or 0,
            step.step,
            part.first // 4,
            has_factor=factor is not None,
            has_skip=skip is not None,
            has_parameter=part.parameter is not None,
            is_stochastic=step.seed is not None and part.parameter is not None,
            ELEMENTS=ELEMENTS,
            enable_fp_fusion=False,
        )


@triton.jit(do_not_specialize=["seed", "step", "first_counter"])
def _update(
    master,
    exp_avg,
    exp_avg_sq,
    gradient,
    parameter,
    factor,
    skip,
    count,
    decay,
    beta1,
    rest1,
    beta2,
    rest2,
    root_scale,
    eps,
    step_size,
    seed,
    step,
    first_counter,
    has_factor: tl.constexpr,
    has_skip: tl.constexpr,
    has_parameter: tl.constexpr,
    is_stochastic: tl.constexpr,
    ELEMENTS: tl.constexpr,
):
    begin = tl.program_id(0).to(tl.int64) * ELEMENTS
    at = begin + tl.arange(0, ELEMENTS)
    if has_skip:
        count = tl.where(tl.load(skip) == 0, count, 0)
    here = at < count
    g = widen(tl.load(gradient + at, mask=here, other=0))
    if has_factor:
        g = g * tl.load(factor)
    m = tl.load(exp_avg + at, mask=here, other=0) * beta1 + g * rest1
    v = tl.load(exp_avg_sq + at, mask=here, other=0) * beta2 + g * g * rest2
    denominator = tl.sqrt_rn(v) * root_scale + eps
    value = tl.load(master + at, mask=here, other=0) * decay - tl.div_rn(m, denominator) * step_size
    tl.store(exp_avg + at, m, mask=here)
    tl.store(exp_avg_sq + at, v, mask=here)
    tl.store(master + at, value, mask=here)
    if is_stochastic:
        tl.store(
            parameter + at, random_word(value, _words(seed, step, first_counter + begin // 4, ELEMENTS)), mask=here
        )
    elif has_parameter:
        tl.store(parameter + at, narrow(value, parameter.dtype.element_ty), mask=here)


@triton.jit
def _words(seed, step, counter, ELEMENTS: tl.constexpr):
    """Random words for ELEMENTS neighbours, four from each counter from `counter` on: as `random_words` in adamw.py."""
    counters = counter + tl.arange(0, ELEMENTS // 4).to(tl.int64)
    low = (counters & 0xFFFFFFFF).to(tl.uint32)
    zero = low * 0
    high = (counters >> 32).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, low, high, zero + step.to(tl.uint32), zero)
    return tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
