"""Calls the kernels of csrc/codecs/ with the addresses of tensors, which the caller has checked and keeps.

`isa` is one of `_C.codec_isas()`, the fastest if empty: the bits are the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from swapper import _C
from swapper.device.kernels import AdamWStep

Tensors = Sequence[torch.Tensor]
States = Sequence[tuple[str, Tensors]]
"""The name of each state's codec, and its parts."""
DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
"""Of parameters and gradients."""


def encode(
    codec: str, value: torch.Tensor, out: Tensors, parameter: torch.Tensor | None, threads: int = 1, isa: str = ""
) -> int:
    return _C.codec_encode(codec, value.data_ptr(), value.numel(), _addresses(out), _address(parameter), threads, isa)


def decode(
    codec: str, parts: Tensors, out: torch.Tensor, parameter: torch.Tensor | None, threads: int = 1, isa: str = ""
) -> None:
    _C.codec_decode(codec, _addresses(parts), out.numel(), out.data_ptr(), _address(parameter), threads, isa)


def adamw_(
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    states: States,
    step: AdamWStep,
    factor: float,
    threads: int = 1,
    isa: str = "",
) -> int:
    beta1, beta2 = step.betas
    numbers = (factor, step.decay, beta1, 1 - beta1, beta2, 1 - beta2, step.root_scale, step.eps, step.step_size)
    coded = [(codec, _addresses(parts)) for codec, parts in states]
    return _C.codec_adamw(parameter.numel(), _typed(parameter), _typed(gradient), coded, numbers, threads, isa)


def torch_adam_(
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    states: States,
    numbers: tuple[float | bool, ...],
    uses_fma: bool,
    roots: int,
    threads: int = 1,
    isa: str = "",
) -> int:
    coded = [(codec, _addresses(parts)) for codec, parts in states]
    return _C.codec_torch_adam(
        parameter.numel(), _typed(parameter), _typed(gradient), coded, numbers, uses_fma, roots, threads, isa
    )


def _addresses(tensors: Tensors) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


def _typed(tensor: torch.Tensor) -> tuple[int, str]:
    return tensor.data_ptr(), DTYPES[tensor.dtype]


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
