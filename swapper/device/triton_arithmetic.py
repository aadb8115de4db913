"""AdamW over a slice, and rows of codes and scales to values and back, in Triton; bf16 as the 16-bit words that it is.

Triton's interpreter rounds bf16 otherwise than a GPU (half away from zero, and without a carry), so kernels never convert it.

Every step of quantization is rounded as in checkpoint/quantization.py: scales to bf16 (up, in 8 bits), quotients to
the nearest whole number, ties to even, products once.
"""

import torch
import triton
import triton.language as tl

from swapper.device.kernels import AdamWSlice, AdamWStep


def words_of(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` as a kernel takes it: bf16 as words."""
    return tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor


@triton.jit
def widen(values):
    """bf16 words, fp16 or fp32 to fp32, exactly."""
    if values.dtype == tl.int16:
        return (values.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return values.to(tl.float32)


@triton.jit
def nearest_word(values):
    """fp32 to words of bf16, to nearest, ties to even."""
    bits = values.to(tl.uint32, bitcast=True)
    bits = tl.where(values != values, 0x7FC00000, bits)  # what is added must not carry out of a NaN
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.uint16).to(tl.int16, bitcast=True)


@triton.jit
def random_word(values, chance):
    """fp32 to words of bf16, up in magnitude with the probability of what is cut off, by 16 random bits."""
    bits = values.to(tl.uint32, bitcast=True)
    is_finite = (bits & 0x7F800000) != 0x7F800000
    moved = ((bits + (chance & 0xFFFF)) >> 16).to(tl.uint16).to(tl.int16, bitcast=True)
    return tl.where(is_finite, moved, nearest_word(values))


@triton.jit
def narrow(values, like: tl.constexpr):
    """fp32 to what a pointer to `like` stores: words of bf16, fp16 or fp32, to nearest."""
    if like == tl.int16:
        return nearest_word(values)
    return values.to(like)


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


ROW_ELEMENTS = 2048


def dequantise_(stored: torch.Tensor, out: torch.Tensor, bits: int, block: int) -> None:
    _launch(_dequantise, stored, out, bits, block)


def quantise_(values: torch.Tensor, stored: torch.Tensor, overflown: torch.Tensor, bits: int, block: int) -> None:
    _launch(_quantise, stored, values, bits, block, overflown)


def _launch(kernel, stored: torch.Tensor, values: torch.Tensor, bits: int, block: int, *more: torch.Tensor) -> None:
    rows, columns = values.shape
    halves = 2 if bits == 4 else 1
    blocks = columns // block // halves  # that have a byte for each column
    together = min(triton.next_power_of_2(blocks), max(ROW_ELEMENTS // block, 1))
    with torch.cuda.device_of(values):
        kernel[(rows, triton.cdiv(blocks, together))](
            stored.view(torch.int8),
            stored.view(torch.int16),
            words_of(values),
            *more,
            columns,
            stored.shape[1],
            blocks,
            bits=bits,
            BLOCK=block,
            TOGETHER=together,
            enable_fp_fusion=False,
        )


@triton.jit
def _dequantise(
    codes, scales, out, columns, row_bytes, blocks, bits: tl.constexpr, BLOCK: tl.constexpr, TOGETHER: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * TOGETHER + tl.arange(0, TOGETHER)
    at = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    here = (block < blocks)[:, None] & (at >= 0)
    found = tl.load(codes + row * row_bytes + at, mask=here, other=0)
    first_scale = scales + (row * row_bytes + row_bytes) // 2 - columns // BLOCK + block
    row_out = out + row * columns + at
    if bits == 8:
        tl.store(row_out, _value(found, first_scale, block < blocks, out.dtype.element_ty), mask=here)
    else:
        low = ((found.to(tl.int32) << 28) >> 24).to(tl.int8)  # the low four bits, times 16, with their sign
        high = found & -16
        tl.store(row_out, _value(low, first_scale, block < blocks, out.dtype.element_ty), mask=here)
        second = _value(high, first_scale + blocks, block < blocks, out.dtype.element_ty)
        tl.store(row_out + columns // 2, second, mask=here)


@triton.jit
def _value(codes, scale_place, is_block, like: tl.constexpr):
    """Codes times their block's scale, which is rounded to the dtype of the values first."""
    scale = widen(tl.load(scale_place, mask=is_block, other=0))
    if like == tl.float16:
        scale = scale.to(tl.float16).to(tl.float32)
    return narrow(codes.to(tl.float32) * scale[:, None], like)


@triton.jit
def _quantise(
    codes,
    scales,
    values,
    overflown,
    columns,
    row_bytes,
    blocks,
    bits: tl.constexpr,
    BLOCK: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * TOGETHER + tl.arange(0, TOGETHER)
    column = tl.arange(0, BLOCK)[None, :]
    at = block[:, None] * BLOCK + column
    here = (block < blocks)[:, None] & (at >= 0)
    first_scale = scales + (row * row_bytes + row_bytes) // 2 - columns // BLOCK + block
    place = codes + row * row_bytes + at
    found = widen(tl.load(values + row * columns + at, mask=here, other=0))
    is_bad = tl.max(_is_overflown(found))
    if bits == 8:
        scale = _rounded_up(tl.div_rn(tl.max(tl.abs(found), axis=1), 127.0))
        tl.store(first_scale, nearest_word(scale), mask=block < blocks)
        tl.store(place, _codes(found, scale, -127.0, 127.0).to(tl.int8), mask=here)
    else:
        other = widen(tl.load(values + row * columns + columns // 2 + at, mask=here, other=0))
        is_bad = tl.maximum(is_bad, tl.max(_is_overflown(other)))
        scale, other_scale = _signed_scale(found, column, BLOCK), _signed_scale(other, column, BLOCK)
        tl.store(first_scale, nearest_word(scale * 0.0625), mask=block < blocks)
        tl.store(first_scale + blocks, nearest_word(other_scale * 0.0625), mask=block < blocks)
        low = _codes(found, scale, -8.0, 7.0).to(tl.int32) & 15
        high = _codes(other, other_scale, -8.0, 7.0).to(tl.int32) << 4
        tl.store(place, (low | high).to(tl.int8), mask=here)
    if is_bad != 0:
        tl.store(overflown, 1)


@triton.jit
def _is_overflown(values):
    return ((values.to(tl.int32, bitcast=True) & 0x7F800000) == 0x7F800000).to(tl.int32)


@triton.jit
def _rounded_up(scale):
    """To bf16, never down: codes must reach every value."""
    bits = (scale.to(tl.uint32, bitcast=True) + 0xFFFF) & 0xFFFF0000
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _signed_scale(values, column, BLOCK: tl.constexpr):
    """The first value that is farthest from 0 becomes -8; taken by its bits, as a zero has a sign."""
    size = tl.abs(values)
    first = tl.min(tl.where(size == tl.max(size, axis=1)[:, None], column, BLOCK), axis=1)
    bits = tl.sum(tl.where(column == first[:, None], values.to(tl.int32, bitcast=True), 0), axis=1)
    extreme = bits.to(tl.int32).to(tl.float32, bitcast=True)
    return widen(nearest_word(extreme * -0.125))


@triton.jit
def _codes(values, scale, least, most):
    scale = tl.where(scale == 0.0, 1.0, scale)
    quotient = tl.div_rn(values, tl.broadcast_to(scale[:, None], values.shape))
    clamped = tl.minimum(tl.maximum(quotient, least), most)
    return (clamped + 12582912.0) - 12582912.0  # 1.5 * 2**23: what is added to leaves whole numbers, ties to even
