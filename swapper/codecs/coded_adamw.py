"""AdamW over coded state, in one pass: swapper's own, and torch.optim's Adam and AdamW with torch's order and bits.

The arithmetic is that of `swapper.device.kernels`, each operation rounded by itself in a fixed order, so that plain torch
and the kernels give the same bits. That is not torch.optim.AdamW's order: from its results these differ in the last bits.

[Note: torch's arithmetic] Its loop of operations on whole tensors rounds after each, but for fused multiply-adds
where the processor has them (`lerp`, `addcmul`, `add` with alpha). Its square root on a CPU is MKL's, which is not
correctly rounded. Both depend on how torch was built and on the processor, so callers find out by a trial which of
`arithmetics` gives torch's bits (train/updates/one_pass.py). A NaN is a NaN: which one it is depends on the position
of an element in torch too.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from swapper.codecs.codec import (
    DTYPE_NAMES,
    StateCodec,
    native_adamw_,
    native_torch_adam_,
)
from swapper.device.kernels import AdamWStep
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
    return native_adamw_(parameter, gradient, named, step, factor, threads)


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
            names = " or ".join(DTYPE_NAMES[dtype] for dtype in dtypes)
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
        if state.codec.needs_parameter:
            state.codec.check_parameter(parameter.dtype)


@dataclass(frozen=True, slots=True)
class TorchArithmetic:
    """How torch computes on this processor.

    Attributes:
        uses_fma: products are added before they are rounded.
        roots: address of MKL's vmsSqrt; 0 for correctly rounded roots.
    """

    uses_fma: bool
    roots: int


@dataclass(frozen=True, slots=True)
class TorchAdamStep:
    """The numbers of one step, as torch.optim has them in a parameter group; `step` counts from 1.

    Attributes:
        is_decoupled: weight decay is AdamW's, of the parameters; else Adam's, by way of the gradients.
    """

    step: float
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    is_decoupled: bool
    maximize: bool = False

    @property
    def numbers(self) -> tuple[float | bool, ...]:
        """See `_C.codec_torch_adam`. Computed as torch does."""
        beta1, beta2 = self.betas
        decay = 1 - self.lr * self.weight_decay if self.is_decoupled else 1.0
        l2 = 0.0 if self.is_decoupled else self.weight_decay
        root_scale = (1 - beta2**self.step) ** 0.5
        step_size = self.lr / (1 - beta1**self.step)
        return decay, l2, 1 - beta1, beta2, 1 - beta2, root_scale, self.eps, -step_size, self.maximize


def arithmetics() -> Iterator[TorchArithmetic]:
    """Yield what torch's arithmetic may be."""
    roots = _roots()
    if roots is not None:
        yield TorchArithmetic(True, roots)
        yield TorchArithmetic(False, roots)


def torch_adam_(
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    master: CodedState | None,
    exp_avg: CodedState,
    exp_avg_sq: CodedState,
    step: TorchAdamStep,
    arithmetic: TorchArithmetic,
    *,
    threads: int = 1,
) -> int:
    """Update state and parameters in place; return how many elements the codes cannot hold, 0 where all is well.

    Args:
        parameter: of one dimension, contiguous, in host memory; bf16 or fp16 with masters, fp32 without.
        gradient: bf16, fp16 or fp32, equally long.
        master: None where the parameters are their own masters.
        threads: that share the work; the result does not depend on it.

    Raises:
        ConfigError: dtypes or sizes do not fit. UnsupportedError: a codec needs bf16 parameters.
    """
    states = [state for state in (master, exp_avg, exp_avg_sq) if state is not None]
    check_operands(parameter, gradient, states, DTYPE_NAMES)
    named = [(state.codec.name, state.parts) for state in states]
    return native_torch_adam_(parameter, gradient, named, step.numbers, arithmetic.uses_fma, arithmetic.roots, threads)


def _roots() -> int | None:
    """Return the address of MKL's vmsSqrt, 0 if torch is built without MKL; None if it cannot be found."""
    if not torch.backends.mkl.is_available():
        return 0
    try:
        return ctypes.cast(_library().vmsSqrt, ctypes.c_void_p).value
    except (OSError, AttributeError):
        return None


def _library() -> ctypes.CDLL:
    """Return torch's library for the CPU, which is loaded already; symbols of those that it needs are found by it too."""
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
