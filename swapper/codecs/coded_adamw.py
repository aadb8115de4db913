"""AdamW over coded state: decodes masters and moments, updates them, writes the parameters, and encodes, in one pass.

The arithmetic is that of `swapper.device.kernels.adamw`, each operation rounded by itself in a fixed order, so that plain torch
and the kernels give the same bits. That is not torch.optim.AdamW's order: from its results these differ in the last bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from swapper.codecs import native
from swapper.codecs.codec import StateCodec
from swapper.device.kernels.adamw import AdamWStep
from swapper.errors import ConfigError

DTYPES = (torch.bfloat16, torch.float32)
"""Of parameters and gradients."""


@dataclass(frozen=True, slots=True)
class CodedState:
    """The code of one state of a slice of parameters, in host memory."""

    codec: StateCodec
    parts: tuple[torch.Tensor, ...]


def adamw_(
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    master: CodedState | None,
    exp_avg: CodedState,
    exp_avg_sq: CodedState,
    step: AdamWStep,
    *,
    factor: float = 1.0,
    threads: int = 1,
) -> int:
    """Update coded state and parameters in place; return how many elements the codes cannot hold, 0 where all is well.

    Args:
        parameter: of one dimension, contiguous; bf16 with masters, fp32 without.
        gradient: bf16 or fp32, equally long.
        master: None where the parameters are their own masters.
        step: one with a seed is refused: parameters are rounded to nearest.
        factor: gradients are multiplied by it first: -1 maximizes.
        threads: that share the work; the result does not depend on it.

    Raises:
        ConfigError: dtypes or sizes do not fit. UnsupportedError: a codec needs bf16 parameters.
    """
    states = [state for state in (master, exp_avg, exp_avg_sq) if state is not None]
    if any(state.codec.needs_parameter for state in states[-2:]):
        raise ConfigError("only masters can be completed by the parameters: choose another codec for the moments")
    if step.seed is not None:
        raise ConfigError("parameters of coded state are rounded to nearest: leave seed=None")
    check_operands(parameter, gradient, states, DTYPES)
    named = [(state.codec.name, state.parts) for state in states]
    return native.adamw_(parameter, gradient, named, step, factor, threads)


def check_operands(
    parameter: torch.Tensor, gradient: torch.Tensor, states: Sequence[CodedState], dtypes: Iterable[torch.dtype]
) -> None:
    """Raise ConfigError or UnsupportedError unless the three fit together.

    Args:
        parameter, gradient: of one dimension, contiguous, equally long.
        states: masters, if any, and two moments.
        dtypes: that the first two may have.
    """
    for tensor in (parameter, gradient):
        if tensor.ndim != 1 or not tensor.is_contiguous() or tensor.dtype not in dtypes or not tensor.is_cpu:
            names = " or ".join(native.DTYPES[dtype] for dtype in dtypes)
            raise ConfigError(
                f"parameters and gradients are {names}, contiguous, of one dimension, in host memory, "
                f"not {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
            )
    if gradient.shape != parameter.shape:
        raise ConfigError(f"{gradient.numel()} gradients do not fit {parameter.numel()} parameters")
    if (len(states) == 2) != (parameter.dtype == torch.float32):
        raise ConfigError(f"masters are for parameters of fewer bits than fp32, and these are {parameter.dtype}")
    for state in states:
        state.codec.check_parts(parameter.numel(), state.parts)
        state.codec.check_parameter(parameter.dtype)
