"""The codecs of optimizer state, bit-equal to tests/codec_reference.py: a program takes some groups of 32 elements."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from swapper.device.triton_arithmetic import nearest_word, widen, words_of

GROUPS = 64


def encode_(
    codec: str, value: torch.Tensor, parts: Sequence[torch.Tensor], parameter: torch.Tensor | None, unheld: torch.Tensor
) -> None:
    """Write the parts, and add how many elements they cannot hold to `unheld`, one int32 on the device."""
    words = [words_of(part) for part in parts]
    kernel, _, fixed = _KERNELS[codec]
    _launch(kernel, value, [*words, *_given(parameter, kernel), unheld], fixed)


def decode_(codec: str, parts: Sequence[torch.Tensor], value: torch.Tensor, parameter: torch.Tensor | None) -> None:
    _, kernel, fixed = _KERNELS[codec]
    _launch(kernel, value, [*(words_of(part) for part in parts), *_given(parameter, kernel)], fixed)


def _given(parameter: torch.Tensor | None, kernel) -> list[torch.Tensor]:
    return [words_of(parameter)] if parameter is not None and "parameter" in kernel.arg_names else []


def _launch(kernel, value: torch.Tensor, others: list[torch.Tensor], fixed: dict[str, bool]) -> None:
    count = value.numel()
    with torch.cuda.device_of(value):
        kernel[(triton.cdiv(count, GROUPS * 32),)](
            value, *others, count, **fixed, GROUPS=GROUPS, enable_fp_fusion=False
        )


@triton.jit
def _elements(GROUPS: tl.constexpr, WIDTH: tl.constexpr):
    """Numbers of a program's elements, in rows of WIDTH."""
    rows: tl.constexpr = GROUPS * 32 // WIDTH
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    return row, row[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]


@triton.jit
def _copy(source, target, at, here):
    tl.store(target + at, tl.load(source + at, mask=here, other=0), mask=here)


@triton.jit
def _encode_plain(value, out, unheld, count, is_bf16: tl.constexpr, GROUPS: tl.constexpr):
    _row, at = _elements(GROUPS, 32)
    here = at < count
    if is_bf16:
        found = tl.load(value + at, mask=here, other=0)
        words = nearest_word(found)
        tl.store(out + at, words, mask=here)
        is_infinite = (words.to(tl.int32) & 0x7FFF) == 0x7F80
        _count(is_infinite & ((found.to(tl.int32, bitcast=True) & 0x7FFFFFFF) < 0x7F800000), unheld)
    else:
        _copy(value, out, at, here)


@triton.jit
def _decode_plain(value, parts, count, is_bf16: tl.constexpr, GROUPS: tl.constexpr):
    _row, at = _elements(GROUPS, 32)
    here = at < count
    if is_bf16:
        tl.store(value + at, widen(tl.load(parts + at, mask=here, other=0)), mask=here)
    else:
        _copy(parts, value, at, here)


@triton.jit
def _count(flags, unheld):
    found = tl.sum(flags.to(tl.int32))
    if found != 0:
        tl.atomic_add(unheld, found)


# --- the parameter and what is missing to the master ------------------------------------------------------------------


@triton.jit
def _high(parameter, at, here):
    return tl.load(parameter + at, mask=here, other=0).to(tl.int32) << 16


@triton.jit
def _is_unheld(bits, high):
    """Whether the parameter is not the rounded value, nor both NaN."""
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return tl.where(is_nan, (high & 0x7FFFFFFF) <= 0x7F800000, rounded != high)


@triton.jit
def _encode_split(value, low, ties, parameter, unheld, count, GROUPS: tl.constexpr):
    byte, at = _elements(GROUPS, 8)
    here = at < count
    bits = tl.load(value + at, mask=here, other=0).to(tl.int32, bitcast=True)
    high = _high(parameter, at, here)
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    kept = tl.where(is_nan, 0, bits).to(tl.int16)
    is_cut_tie = ((bits ^ high) == 0x8000) & (is_nan == 0)
    tl.store(low + at, kept, mask=here)
    packed = tl.sum(is_cut_tie.to(tl.int32) << tl.arange(0, 8)[None, :], axis=1)
    tl.store(ties + byte, packed.to(tl.uint8), mask=byte * 8 < count)
    _count(_is_unheld(bits, high) & here, unheld)


@triton.jit
def _decode_split(value, low, ties, parameter, count, GROUPS: tl.constexpr):
    byte, at = _elements(GROUPS, 8)
    here = at < count
    packed = tl.load(ties + byte, mask=byte * 8 < count, other=0).to(tl.int32)
    flags = (packed[:, None] >> tl.arange(0, 8)[None, :]) & 1
    bits = _high(parameter, at, here) + tl.load(low + at, mask=here, other=0).to(tl.int32) + (flags << 16)
    tl.store(value + at, bits.to(tl.float32, bitcast=True), mask=here)


@triton.jit
def _encode_master24(value, rho, parameter, unheld, count, GROUPS: tl.constexpr):
    _row, at = _elements(GROUPS, 32)
    here = at < count
    bits = tl.load(value + at, mask=here, other=0).to(tl.int32, bitcast=True)
    high = _high(parameter, at, here)
    below = bits - high
    steps = (below + 127 + ((below >> 8) & 1)) >> 8
    magnitude = bits & 0x7FFFFFFF
    steps = tl.where(magnitude > 0x7F800000, 0, tl.minimum(tl.maximum(steps, -127), 127))
    tl.store(rho + at, steps.to(tl.int8), mask=here)
    becomes_infinite = (magnitude < 0x7F800000) & (((high + steps * 256) & 0x7FFFFFFF) == 0x7F800000)
    _count((_is_unheld(bits, high) | becomes_infinite) & here, unheld)


@triton.jit
def _decode_master24(value, rho, parameter, count, GROUPS: tl.constexpr):
    _row, at = _elements(GROUPS, 32)
    here = at < count
    bits = _high(parameter, at, here) + tl.load(rho + at, mask=here, other=0).to(tl.int32) * 256
    tl.store(value + at, bits.to(tl.float32, bitcast=True), mask=here)


# --- 8 bits and a scale -----------------------------------------------------------------------------------------------


@triton.jit
def _encode_groups(value, code, scale, unheld, count, is_variance: tl.constexpr, GROUPS: tl.constexpr):
    group, at = _elements(GROUPS, 32)
    here = at < count
    found = tl.load(value + at, mask=here, other=0)
    bits = found.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    is_bad = magnitude >= 0x7F800000
    if is_variance:
        is_bad = is_bad | ((bits < 0) & (magnitude != 0))
    _count(is_bad, unheld)
    found = tl.where(is_bad, 0.0, found)
    if is_variance:
        found = tl.sqrt_rn(tl.abs(found))
        magnitude = found.to(tl.int32, bitcast=True)
    largest = tl.max(tl.where(is_bad, 0, magnitude), axis=1)
    has_bad = tl.max(is_bad.to(tl.int32), axis=1) != 0
    if is_variance:
        is_zero = largest == 0
        even = (largest + 0x3F + ((largest >> 7) & 1)) & -0x80
        scale_bits = tl.minimum(tl.maximum(even, 0x24000000), 0x5F7FFF80)
    else:
        is_zero = largest < 0x8000
        word = (largest + 0x7FFF + ((largest >> 16) & 1)) >> 16
        scale_bits = tl.minimum(tl.maximum(word, 0x0080), 0x7F7F) << 16
    divisor = tl.where(is_zero | has_bad, 1.0, scale_bits.to(tl.float32, bitcast=True))
    if is_variance:
        z = found * tl.div_rn(tl.where(is_zero, 255.0, 255.0), divisor)[:, None]
        codes = (z + 12582912.0) - 12582912.0
        codes = tl.where(found > 0.0, tl.maximum(codes, 1.0), codes)
    else:
        x = found * tl.div_rn(tl.where(is_zero, 1.0, 1.0), divisor)[:, None]
        codes = (tl.div_rn(x * 254.0, tl.abs(x) + 1.0) + 12582912.0) - 12582912.0
    codes = tl.where(has_bad[:, None], 0.0, codes)
    scale_bits = tl.where(has_bad, 0x7FC00000, tl.where(is_zero, 0, scale_bits))
    tl.store(code + at, codes.to(tl.int32).to(code.dtype.element_ty), mask=here)
    if is_variance:
        tl.store(scale + group, scale_bits.to(tl.float32, bitcast=True), mask=group * 32 < count)
    else:
        tl.store(scale + group, (scale_bits >> 16).to(tl.int16), mask=group * 32 < count)


@triton.jit
def _decode_groups(value, code, scale, count, is_variance: tl.constexpr, GROUPS: tl.constexpr):
    group, at = _elements(GROUPS, 32)
    here = at < count
    codes = tl.load(code + at, mask=here, other=0).to(tl.float32)
    stored = tl.load(scale + group, mask=group * 32 < count, other=0)
    scales = stored if is_variance else widen(stored)
    if is_variance:
        divisor = tl.where(scales == 0.0, 255.0, 255.0)  # no constant: that would become a product with its reciprocal
        roots = codes * tl.div_rn(scales, divisor)[:, None]
        found = roots * roots
    else:
        found = tl.div_rn(codes, 254.0 - tl.abs(codes)) * scales[:, None]
    tl.store(value + at, found, mask=here)


_KERNELS = {
    "fp32": (_encode_plain, _decode_plain, {"is_bf16": False}),
    "bf16": (_encode_plain, _decode_plain, {"is_bf16": True}),
    "split": (_encode_split, _decode_split, {}),
    "master24": (_encode_master24, _decode_master24, {}),
    "moment8": (_encode_groups, _decode_groups, {"is_variance": False}),
    "variance8": (_encode_groups, _decode_groups, {"is_variance": True}),
}
"""By codec: what encodes, what decodes, and the constants of both."""
