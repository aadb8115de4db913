"""Values that are hard to code, and codes of them."""

from __future__ import annotations

import torch
from codec_reference import DECODE, ENCODE
from hypothesis import strategies as st

from swapper.codecs import CODECS, StateCodec

EDGES = (0, 1, 2, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x17FFF, 0x18000, 0x18001, 0x7FFFFF, 0x800000, 0x3F7FFFFF, 0x3F800000)
EDGES += (0x3F807FFF, 0x3F808000, 0x3F808001, 0x3F817FFF, 0x3F818000, 0x3F818001, 0x5F7F7FFF, 0x5F7F8000, 0x5F800000)
EDGES += (0x7F7EFFFF, 0x7F7F7FFF, 0x7F7F8000, 0x7F7F8001, 0x7F7FFF80, 0x7F7FFF81, 0x7F7FFFFF)
NOT_FINITE = (0x7F800000, 0x7F800001, 0x7FBFFFFF, 0x7FC00000, 0x7FC08000, 0x7FFFFFFF)
SPECIAL = [sign | word for word in EDGES + NOT_FINITE for sign in (0, 1 << 31)]
"""Bits of fp32: zeros, subnormals, ties of both kinds, what rounds to infinity, infinities and NaNs."""

NAMES = sorted(CODECS)
WITH_SCALES = ("moment8", "variance8")


def floats_of(bits: list[int]) -> torch.Tensor:
    return torch.tensor([word - (word >> 31 << 32) for word in bits], dtype=torch.int32).view(torch.float32)


def patterns(max_size: int = 100) -> st.SearchStrategy[torch.Tensor]:
    """fp32 of any bits; many of them special, and many of them near each other in size, as state is."""
    near = st.integers(0x38000000, 0x3C000000)
    word = st.one_of(near, near, st.integers(0, (1 << 32) - 1), st.sampled_from(SPECIAL))
    return st.lists(word, min_size=1, max_size=max_size).map(floats_of)


def noise(count: int, seed: int, spread: float) -> torch.Tensor:
    """Finite values of many sizes."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(count, generator=generator)
    return (values * torch.exp2(torch.randn(count, generator=generator) * spread)).clamp(-1e38, 1e38)


def values_for(name: str, kind: str, count: int) -> torch.Tensor:
    """Values of a kind that the codec is for, "any" aside."""
    generator = torch.Generator().manual_seed(count)
    if kind == "any":
        bits = torch.randint(-(1 << 31), 1 << 31, (count,), generator=generator).int().view(torch.float32)
        special = floats_of(SPECIAL)[torch.randint(len(SPECIAL), (count,), generator=generator)]
        return torch.where(torch.rand(count, generator=generator) < 0.3, special, bits)
    values = noise(count, 1, {"alike": 0.5, "spread": 20.0, "tiny": 2.0}[kind])
    values = values * 2.0**-130 if kind == "tiny" else values
    return values.abs() if name == "variance8" else values


def parts_for(codec: StateCodec, count: int, fill: int = 77) -> list[torch.Tensor]:
    """Memory for a code, full of something else."""
    return [torch.full((size,), fill, dtype=dtype) for _, dtype, size in codec.parts(count)]


def coded(codec: StateCodec, value: torch.Tensor, parameter: torch.Tensor) -> tuple[list[torch.Tensor], int]:
    """Return the code by the reference, and how many elements it cannot hold."""
    parts = parts_for(codec, value.numel())
    return parts, ENCODE[codec.name](value, parts, parameter)


def decoded(codec: StateCodec, parts: list[torch.Tensor], parameter: torch.Tensor) -> torch.Tensor:
    value = torch.empty(parameter.numel())
    DECODE[codec.name](parts, value, parameter)
    return value


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])


def same(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Equal in every bit."""
    assert found.dtype == wanted.dtype and found.shape == wanted.shape
    different = (bits_of(found) != bits_of(wanted)).nonzero().flatten().tolist()
    assert different == [], f"{len(different)} of {found.numel()} differ, the first at {different[0]}"
