"""bf16 as the 16-bit words that it is: cut and rounded by whole-number arithmetic, alike in the compiler and the interpreter.

Triton's interpreter rounds bf16 otherwise than a GPU (half away from zero, and without a carry), so kernels never convert it.
"""

import torch
import triton
import triton.language as tl


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
