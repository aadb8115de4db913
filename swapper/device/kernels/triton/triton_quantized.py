"""Rows of codes and scales to values and back: a program takes some blocks of one row, of both halves of it in 4 bits.

Every step is rounded as in checkpoint/quantization.py: scales to bf16 (up, in 8 bits), quotients to the nearest whole number,
ties to even, products once.
"""

import torch
import triton
import triton.language as tl

from swapper.device.kernels.triton.triton_words import narrow, nearest_word, widen, words_of

ELEMENTS = 2048


def dequantise_(stored: torch.Tensor, out: torch.Tensor, bits: int, block: int) -> None:
    _launch(_dequantise, stored, out, bits, block)


def quantise_(values: torch.Tensor, stored: torch.Tensor, overflown: torch.Tensor, bits: int, block: int) -> None:
    _launch(_quantise, stored, values, bits, block, overflown)


def _launch(kernel, stored: torch.Tensor, values: torch.Tensor, bits: int, block: int, *more: torch.Tensor) -> None:
    rows, columns = values.shape
    halves = 2 if bits == 4 else 1
    blocks = columns // block // halves  # that have a byte for each column
    together = min(triton.next_power_of_2(blocks), max(ELEMENTS // block, 1))
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
