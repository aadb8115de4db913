"""Checks of each kernel that take a device: the interpreter on a CPU and a GPU run the same ones.

As a program, `PYTHONPATH=tests python kernel_cases.py DEVICE`: runs all and prints {check: "" or what went wrong} as JSON. With
TRITON_INTERPRET=1 the device is "cpu".

Every bit is compared: each kernel is compiled without contraction and with correctly rounded division and root, so nothing is
left to a device.
"""

from __future__ import annotations

import json
import math
import sys
import traceback
from collections.abc import Callable

import torch
from codec_reference import DECODE, ENCODE

from swapper.checkpoint.quantization import QuantizedLayout
from swapper.codecs import CODECS
from swapper.device import kernels
from swapper.device.kernels import kernel

COUNT = 2 * 1024 + 1001  # two whole programs of a kernel and a part of one


def noise(count: int, seed: int, dtype: torch.dtype = torch.float32, spread: float = 1.0) -> torch.Tensor:
    """Of all sizes: the exponents of a normal distribution's values, spread further."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(count, generator=generator)
    return (values * torch.exp2(torch.randn(count, generator=generator) * 4 * spread)).to(dtype)


def same(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Equal in every bit."""
    assert found.dtype == wanted.dtype and found.shape == wanted.shape, (found.dtype, wanted.dtype, found.shape)
    as_bytes = [tensor.detach().cpu().reshape(-1).view(torch.uint8) for tensor in (found, wanted)]
    different = (as_bytes[0] != as_bytes[1]).nonzero()
    assert len(different) == 0, f"{len(different)} bytes differ, the first at {different[0].tolist()} of {found.dtype}"


def a_slice(device: str, gradient: torch.dtype, parameter: torch.dtype | None, first: int = 0) -> kernels.AdamWSlice:
    out = None if parameter is None else torch.zeros(COUNT, dtype=parameter, device=device)
    return kernels.AdamWSlice(
        master=noise(COUNT, 1).to(device),
        exp_avg=noise(COUNT, 2, spread=0.5).to(device),
        exp_avg_sq=noise(COUNT, 3, spread=0.5).abs().to(device),
        gradient=noise(COUNT, 4, gradient, spread=0.3).to(device),
        parameter=out,
        first=first,
    )


def tensors_of(part: kernels.AdamWSlice) -> list[torch.Tensor]:
    both = [part.master, part.exp_avg, part.exp_avg_sq]
    return [*both, part.parameter] if part.parameter is not None else both


def check_adamw(device: str, gradient: torch.dtype, parameter: torch.dtype | None, seed: int | None) -> None:
    found, wanted = a_slice(device, gradient, parameter, 4096), a_slice("cpu", gradient, parameter, 4096)
    factor = torch.tensor([0.37])
    for number in (1, 2, 17):
        step = kernels.AdamWStep(number, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1, seed=seed)
        kernel("arithmetic").update_(found, step, factor.to(device), torch.zeros(1, device=device))
        kernels.reference_(wanted, step, factor, torch.zeros(1))
    for one, other in zip(tensors_of(found), tensors_of(wanted), strict=True):
        same(one, other)


def adamw_bf16(device: str) -> None:
    check_adamw(device, torch.bfloat16, torch.bfloat16, None)


def adamw_fp16(device: str) -> None:
    check_adamw(device, torch.float16, torch.float16, None)


def adamw_fp32_gradients_and_no_parameter(device: str) -> None:
    check_adamw(device, torch.float32, None, None)


def adamw_stochastic(device: str) -> None:
    check_adamw(device, torch.bfloat16, torch.bfloat16, 0x123456789ABCDEF)


def adamw_does_nothing_after_an_overflow(device: str) -> None:
    part = a_slice(device, torch.bfloat16, torch.bfloat16)
    before = [tensor.clone() for tensor in tensors_of(part)]
    kernel("arithmetic").update_(part, kernels.AdamWStep(1), None, torch.ones(1, device=device))
    for tensor, old in zip(tensors_of(part), before, strict=True):
        same(tensor, old)


def adamw_in_slices_is_adamw_of_the_whole(device: str) -> None:
    whole, cut = (a_slice(device, torch.bfloat16, torch.bfloat16) for _ in range(2))
    step = kernels.AdamWStep(5, seed=7)
    kernel("arithmetic").update_(whole, step, None, None)
    for begin, end in ((0, 64), (64, 1664), (1664, COUNT)):
        parts = {
            name: getattr(cut, name)[begin:end] for name in ("master", "exp_avg", "exp_avg_sq", "gradient", "parameter")
        }
        kernel("arithmetic").update_(kernels.AdamWSlice(**parts, first=begin), step, None, None)
    for one, other in zip(tensors_of(whole), tensors_of(cut), strict=True):
        same(one, other)


def adamw_of_what_is_not_finite(device: str) -> None:
    found, wanted = a_slice(device, torch.bfloat16, torch.bfloat16), a_slice("cpu", torch.bfloat16, torch.bfloat16)
    for part in (found, wanted):
        part.gradient[3], part.gradient[5] = math.inf, math.nan
    for seed in (None, 3):
        kernel("arithmetic").update_(found, kernels.AdamWStep(1, seed=seed), None, None)
        kernels.reference_(wanted, kernels.AdamWStep(1, seed=seed), None, None)
        for one, other in zip(tensors_of(found), tensors_of(wanted), strict=True):
            assert torch.equal(one.cpu().isnan(), other.isnan())
            same(one.cpu().nan_to_num(), other.nan_to_num())


ROWS = 5
SHAPES = ((8, 256), (8, 96), (8, 4096 + 128), (4, 256), (4, 192), (4, 4096 + 256))


def values_of(columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of all sizes; with blocks of zeros of both signs, of ties, and of the smallest values there are."""
    rows = noise(ROWS * columns, columns, torch.float32).clamp(-6e4, 6e4).view(ROWS, columns).to(dtype)
    rows[1, :64], rows[1, 64:96] = 0.0, -0.0
    rows[2] = torch.arange(columns).remainder(31).sub(15).to(dtype) / 2
    rows[3] = rows[3] * torch.finfo(dtype).tiny * 2
    rows[4, ::2] *= -1
    return rows


def quantise_and_dequantise(device: str) -> None:
    for bits, columns in SHAPES:
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            layout = QuantizedLayout.of(bits, columns, dtype)
            assert layout is not None
            rows = values_of(columns, dtype)
            wanted = layout._quantise(rows)
            stored = layout.quantise(rows.to(device))
            same(stored, wanted)
            for out_dtype in (torch.bfloat16, torch.float16, torch.float32):
                expected = torch.empty(ROWS, columns, dtype=out_dtype)
                memory = torch.empty(ROWS, layout.code_bytes, dtype=torch.int8)
                layout._dequantise(wanted, expected, memory)
                same(layout.dequantise(stored, out_dtype), expected)


def quantise_says_what_is_not_finite(device: str) -> None:
    for bits in (8, 4):
        for column, value in ((0, math.nan), (255, math.inf), (100, -math.inf)):
            rows = torch.ones(2, 256, device=device)
            rows[1, column] = value
            assert kernels.quantise(rows, bits, 32)[1].item() != 0


def state_values() -> list[torch.Tensor]:
    """Of all sizes, subnormal ones too; ties of bf16; any bits, so infinities and NaNs too; of one group and less."""
    generator = torch.Generator().manual_seed(5)
    bits = torch.randint(-(1 << 31), 1 << 31, (COUNT,), generator=generator).int()
    edges = torch.tensor(
        [0, 1, 0x8000, 0x18000, 0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x7F7F8000, 0x7F800000, 0x7FC08000]
    )
    edges = torch.cat([edges.int(), edges.int() | -(1 << 31)]).view(torch.float32)
    return [noise(COUNT, 1, spread=5.0), noise(COUNT, 2) * 2.0**-135, bits.view(torch.float32), edges, edges[:1]]


def codecs_of_state(device: str) -> None:
    for name in CODECS:
        for value in state_values():
            for values in (value, value.abs()):
                check_codec(device, name, values, values.bfloat16())
    parameter = noise(COUNT, 3).bfloat16()
    for name in ("split", "master24"):
        check_codec(device, name, noise(COUNT, 1), parameter)


def check_codec(device: str, name: str, value: torch.Tensor, parameter: torch.Tensor) -> None:
    codec = CODECS[name]
    wanted = [torch.zeros(size, dtype=dtype) for _, dtype, size in codec.parts(value.numel())]
    parts = [part.to(device) + 1 for part in wanted]
    unheld = ENCODE[name](value, wanted, parameter)
    assert codec.encode(value.to(device), parts, parameter.to(device)) == unheld
    for part, other in zip(parts, wanted, strict=True):
        same(part, other)
    found, expected = torch.empty_like(value, device=device), torch.empty_like(value)
    codec.decode([part.to(device) for part in wanted], found, parameter.to(device))
    DECODE[name](wanted, expected, parameter)
    assert torch.equal(found.isnan().cpu(), expected.isnan())
    same(found.cpu()[~expected.isnan()], expected[~expected.isnan()])


CHECKS: list[Callable[[str], None]] = [
    adamw_bf16,
    adamw_fp16,
    adamw_fp32_gradients_and_no_parameter,
    adamw_stochastic,
    adamw_does_nothing_after_an_overflow,
    adamw_in_slices_is_adamw_of_the_whole,
    adamw_of_what_is_not_finite,
    quantise_and_dequantise,
    quantise_says_what_is_not_finite,
    codecs_of_state,
]
NAMES = [check.__name__ for check in CHECKS]


def run(device: str) -> dict[str, str]:
    outcomes = {}
    for check in CHECKS:
        try:
            check(device)
            outcomes[check.__name__] = ""
        except Exception:
            outcomes[check.__name__] = traceback.format_exc()
    return outcomes


if __name__ == "__main__":
    print(json.dumps(run(sys.argv[1])))
