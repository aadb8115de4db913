"""Defines the result of each codec, and of AdamW over coded state, in plain torch. swapper's kernels give the same bits.

docs/reference/codecs.md has the formulas.

Each `encode_*` takes the values as fp32 of one dimension, writes the parts of the code, and returns how many elements the code
cannot hold. Each `decode_*` is its reverse. Bits are handled as int32: torch's own conversion to bf16 gives NaNs of several kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from swapper.codecs import GROUP, CodedState
from swapper.device.kernels import AdamWSlice, AdamWStep, reference_

NAN = 0x7FC0
"""The upper half of the one NaN that is written: as a value and as the scale of a group that cannot be held."""
INFINITY = 0x7F800000
ZERO_MOMENT, MIN_MOMENT, MAX_MOMENT = 0x8000, 0x0080, 0x7F7F
"""Below 2**-134 (in fp32) a group is 0, as its largest code would be. Scales of moments are from 2**-126 to bf16's largest."""
MIN_ROOT, MAX_ROOT = 0x24000000, 0x5F7FFF80
"""Scales of roots are from 2**-55, whose first code is the root of a normal number, to the largest with a finite square."""
ROOT_UNIT = 0x80
"""Scales of roots have 16 bits behind the point: fine enough for a second moment that falls by a thousandth in a step, and
coarse enough that what code 255 decodes to rounds to the same scale again."""


def encode_fp32(value: torch.Tensor, out: Sequence[torch.Tensor], parameter: torch.Tensor | None) -> int:
    out[0].copy_(value)
    return 0


def decode_fp32(parts: Sequence[torch.Tensor], out: torch.Tensor, parameter: torch.Tensor | None) -> None:
    out.copy_(parts[0])


# --- the parameter and what is missing to the master ------------------------------------------------------------------


def encode_split(value: torch.Tensor, out: Sequence[torch.Tensor], parameter: torch.Tensor | None) -> int:
    bits, is_nan, is_held = _compared(value, parameter)
    low = (bits & 0xFFFF).masked_fill(is_nan, 0)
    is_cut_tie = (low == 0x8000) & ((bits >> 16) == _high_words(parameter) >> 16)
    out[0].copy_(_as_int16(low))
    out[1].copy_(_packed(is_cut_tie))
    return int((~is_held).sum())


def decode_split(parts: Sequence[torch.Tensor], out: torch.Tensor, parameter: torch.Tensor | None) -> None:
    low, ties = parts[0].int(), _unpacked(parts[1], out.numel())
    out.copy_((_high_words(parameter) + low + (ties << 16)).view(torch.float32))


def encode_master24(value: torch.Tensor, out: Sequence[torch.Tensor], parameter: torch.Tensor | None) -> int:
    bits, is_nan, is_held = _compared(value, parameter)
    high = _high_words(parameter)
    below = bits - high
    rho = ((below + 127 + (below >> 8 & 1)) >> 8).clamp(-127, 127).masked_fill(is_nan, 0)
    becomes_infinite = value.isfinite() & (_magnitude(high + rho * 256) == INFINITY)
    out[0].copy_(rho)
    return int((~is_held | becomes_infinite).sum())


def decode_master24(parts: Sequence[torch.Tensor], out: torch.Tensor, parameter: torch.Tensor | None) -> None:
    out.copy_((_high_words(parameter) + parts[0].int() * 256).view(torch.float32))


def _compared(value: torch.Tensor, parameter: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the bits of the values, where they are NaN, and where the parameter is the rounded value, or both are NaN."""
    bits, high = value.view(torch.int32), _high_words(parameter)
    is_nan = value.isnan()
    is_rounded = (_nearest(bits) << 16) == high
    return bits, is_nan, torch.where(is_nan, _magnitude(high) > INFINITY, is_rounded)


def _high_words(parameter: torch.Tensor | None) -> torch.Tensor:
    assert parameter is not None
    return parameter.view(torch.int16).int() << 16


# --- 16 and 8 bits ----------------------------------------------------------------------------------------------------


def encode_bf16(value: torch.Tensor, out: Sequence[torch.Tensor], parameter: torch.Tensor | None) -> int:
    bits = value.view(torch.int32)
    words = _nearest(bits).masked_fill(value.isnan(), NAN)
    out[0].view(torch.int16).copy_(_as_int16(words))
    return int((value.isfinite() & ((words & 0x7FFF) == INFINITY >> 16)).sum())


def decode_bf16(parts: Sequence[torch.Tensor], out: torch.Tensor, parameter: torch.Tensor | None) -> None:
    out.copy_(_high_words(parts[0]).view(torch.float32))


def encode_moment8(value: torch.Tensor, out: Sequence[torch.Tensor], parameter: torch.Tensor | None) -> int:
    groups = _grouped(value)
    sizes = _magnitude(groups.view(torch.int32))
    largest = sizes.amax(1, keepdim=True)
    is_bad = largest >= INFINITY
    scales = _nearest(largest).clamp(MIN_MOMENT, MAX_MOMENT) << 16
    scales, divisor = _scales(scales, is_bad, largest < ZERO_MOMENT)
    x = groups * torch.div(torch.ones_like(divisor), divisor)
    codes = torch.round(x * 254 / (x.abs() + 1)).masked_fill(is_bad, 0)
    out[0].copy_(codes.flatten()[: value.numel()])
    out[1].view(torch.int16).copy_((scales >> 16).flatten())
    return int((sizes >= INFINITY).sum())


def decode_moment8(parts: Sequence[torch.Tensor], out: torch.Tensor, parameter: torch.Tensor | None) -> None:
    codes = parts[0].float()
    scales = _high_words(parts[1]).view(torch.float32)
    out.copy_(codes / (254 - codes.abs()) * _of_groups(scales, out.numel()))


def encode_variance8(value: torch.Tensor, out: Sequence[torch.Tensor], parameter: torch.Tensor | None) -> int:
    groups = _grouped(value)
    is_bad = ~((groups >= 0) & (groups < torch.inf))
    roots = root(groups.masked_fill(is_bad, 0))
    largest = roots.view(torch.int32).amax(1, keepdim=True).clamp(min=0)
    has_bad = is_bad.any(1, keepdim=True)
    scales = (largest + (ROOT_UNIT // 2 - 1) + (largest // ROOT_UNIT & 1)) & -ROOT_UNIT  # ties to even
    scales, divisor = _scales(scales.clamp(MIN_ROOT, MAX_ROOT), has_bad, largest == 0)
    codes = torch.round(roots * torch.div(torch.full_like(divisor, 255), divisor))
    codes = torch.where(roots > 0, codes.clamp(min=1), codes).masked_fill(has_bad, 0)
    out[0].copy_(codes.flatten()[: value.numel()])
    out[1].view(torch.int32).copy_(scales.flatten())
    return int(is_bad.sum())


def decode_variance8(parts: Sequence[torch.Tensor], out: torch.Tensor, parameter: torch.Tensor | None) -> None:
    roots = parts[0].float() * _of_groups(parts[1] / 255, out.numel())
    out.copy_(roots * roots)


def root(value: torch.Tensor) -> torch.Tensor:
    """Return the correctly rounded square root, which torch's for fp32 on a CPU is not."""
    return value.double().sqrt().float()


def _scales(bits: torch.Tensor, is_bad: torch.Tensor, is_zero: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bits of scales with those of groups that are zero or cannot be held, and what to divide each group by."""
    bits = bits.masked_fill(is_zero, 0).masked_fill(is_bad, NAN << 16)
    return bits, bits.view(torch.float32).masked_fill(is_zero | is_bad, 1)


def _grouped(value: torch.Tensor) -> torch.Tensor:
    """Return the values in rows of a group each; the last one is filled with zeros."""
    return torch.nn.functional.pad(value, (0, -value.numel() % GROUP)).view(-1, GROUP)


def _of_groups(scales: torch.Tensor, numel: int) -> torch.Tensor:
    return scales.repeat_interleave(GROUP)[:numel]


# --- bits -------------------------------------------------------------------------------------------------------------


def _nearest(bits: torch.Tensor) -> torch.Tensor:
    """Return the upper 16 of the bits of fp32, rounded to nearest, ties to even, with a sign as int16 has; NaNs aside."""
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def _magnitude(bits: torch.Tensor) -> torch.Tensor:
    return bits & 0x7FFFFFFF


def _as_int16(words: torch.Tensor) -> torch.Tensor:
    """Return the lower 16 bits of int32."""
    return ((words & 0xFFFF) ^ 0x8000).sub(0x8000).to(torch.int16)


def _packed(flags: torch.Tensor) -> torch.Tensor:
    """Return one bit for each flag, the first in the lowest bit of a byte."""
    rows = torch.nn.functional.pad(flags.int(), (0, -flags.numel() % 8)).view(-1, 8)
    return (rows << torch.arange(8, dtype=torch.int32)).sum(1).to(torch.uint8)


def _unpacked(packed: torch.Tensor, numel: int) -> torch.Tensor:
    return (packed.int()[:, None] >> torch.arange(8, dtype=torch.int32) & 1).flatten()[:numel]


Encode = Callable[[torch.Tensor, Sequence[torch.Tensor], torch.Tensor | None], int]
Decode = Callable[[Sequence[torch.Tensor], torch.Tensor, torch.Tensor | None], None]
ENCODE: Mapping[str, Encode] = {
    "fp32": encode_fp32,
    "split": encode_split,
    "master24": encode_master24,
    "bf16": encode_bf16,
    "moment8": encode_moment8,
    "variance8": encode_variance8,
}
DECODE: Mapping[str, Decode] = {
    "fp32": decode_fp32,
    "split": decode_split,
    "master24": decode_master24,
    "bf16": decode_bf16,
    "moment8": decode_moment8,
    "variance8": decode_variance8,
}
"""By the codec's name."""


def decoded(state: CodedState, parameter: torch.Tensor) -> torch.Tensor:
    value = torch.empty(parameter.numel())
    DECODE[state.codec.name](state.parts, value, parameter)
    return value


def adamw_(
    parameter: torch.Tensor, gradient: torch.Tensor, states: list[CodedState], step: AdamWStep, factor: float
) -> int:
    """As `swapper.codecs.adamw_`; `states` has the masters first, if there are any."""
    values = [decoded(state, parameter) for state in states]
    has_masters = len(states) == 3
    master, exp_avg, exp_avg_sq = values if has_masters else (parameter, *values)
    reference_(AdamWSlice(master, exp_avg, exp_avg_sq, gradient), step, torch.tensor([factor]), None)
    if has_masters:
        encode_bf16(master, [parameter], None)
    return sum(
        ENCODE[state.codec.name](value, state.parts, parameter) for state, value in zip(states, values, strict=True)
    )
