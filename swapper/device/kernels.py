"""Arithmetic on an accelerator in one pass: AdamW over a slice, which plain torch defines, and rows of quantized weights.

On a GPU the kernels run; on a CPU plain torch does, unless TRITON_INTERPRET=1 has Triton's interpreter run the
kernels there, as the tests do. Triton reads the variable when it is first imported.

Each operation of AdamW is rounded by itself, in the order of `reference_`, so that plain torch and the kernel give
the same bits on every device: the kernel is compiled without contraction into fused multiply-adds, and with correctly
rounded division and root. That is not torch.optim.AdamW's order: from its results these differ in the last bits.

checkpoint/quantization.py defines quantization, in plain torch, and its format; the kernels are bit-equal.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
import os
from dataclasses import dataclass
from types import ModuleType

import torch

from swapper.errors import ConfigError, UnsupportedError

ACCELERATORS = ("cuda", "xpu")
"""Device types for which Triton compiles. ROCm's is "cuda" too."""


@functools.cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def uses_kernel(device: torch.device) -> bool:
    """Return whether kernels, and not plain torch, compute on `device`."""
    return device.type in ACCELERATORS or os.environ.get("TRITON_INTERPRET") == "1"


def kernel(name: str) -> ModuleType:
    """Return the Triton module `swapper.device.triton_{name}`.

    Raises:
        UnsupportedError: Triton is not installed, or too old.
    """
    try:
        return importlib.import_module(f"swapper.device.triton_{name}")
    except ImportError as error:
        if error.name is None or error.name.partition(".")[0] != "triton":
            raise
        raise UnsupportedError(
            f"swapper's kernels need Triton 3.3 or newer, which is not to be had ({error}): pip install 'torch-swapper[triton]'"
        ) from error


_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF

GRADIENTS = (torch.bfloat16, torch.float16, torch.float32)
PARAMETERS = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class AdamWStep:
    """The numbers of one step, as torch.optim.AdamW has them in a parameter group; `step` counts from 1.

    Attributes:
        seed: of stochastic rounding of parameters, unbiased on average; None rounds to nearest. An element's random word depends
            on the seed, the step and the element's number alone.
    """

    step: int
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2
    seed: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.step < 1 << 31:
            raise ConfigError(f"step={self.step!r} must be from 1 to {(1 << 31) - 1}")
        if self.seed is not None and not 0 <= self.seed < 1 << 63:
            raise ConfigError(f"seed={self.seed!r} must be from 0 to {(1 << 63) - 1}")

    @property
    def decay(self) -> float:
        """Factor of the masters."""
        return 1 - self.lr * self.weight_decay

    @property
    def step_size(self) -> float:
        return self.lr / (1 - self.betas[0] ** self.step)

    @property
    def root_scale(self) -> float:
        """Factor of the second moment's root."""
        return 1 / math.sqrt(1 - self.betas[1] ** self.step)


@dataclass(frozen=True, slots=True)
class AdamWSlice:
    """Equally long, contiguous tensors of one dimension, on one device.

    Attributes:
        parameter: bf16 or fp16, overwritten; None where the masters are the parameters.
        first: the number of its first element within what it is a slice of; a multiple of 4.
    """

    master: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    gradient: torch.Tensor
    parameter: torch.Tensor | None = None
    first: int = 0

    @property
    def bytes_moved(self) -> int:
        """What one update has to read and write: 28 bytes an element with gradients and parameters of 16 bits."""
        written = self.parameter.element_size() if self.parameter is not None else 0
        return self.master.numel() * (2 * 3 * 4 + self.gradient.element_size() + written)


def update_(
    part: AdamWSlice, step: AdamWStep, factor: torch.Tensor | None = None, skip: torch.Tensor | None = None
) -> None:
    """Update a slice in place, by one kernel on a GPU.

    Args:
        factor: one fp32 element on the device by which gradients are multiplied: for unscaling, clipping or both.
        skip: one fp32 element on the device; unless it is 0 nothing changes: for gradients that overflowed.

    Raises:
        ConfigError: dtypes, shapes or devices do not fit together, or stochastic rounding is asked for other than bf16.
    """
    _check(part, step, factor, skip)
    if part.master.numel() == 0:
        return
    if uses_kernel(part.master.device):
        kernel("arithmetic").update_(part, step, factor, skip)
    else:
        reference_(part, step, factor, skip)


def reference_(part: AdamWSlice, step: AdamWStep, factor: torch.Tensor | None, skip: torch.Tensor | None) -> None:
    """Define the result of `update_`, whose arguments it has, in plain torch."""
    if skip is not None and skip.item() != 0:
        return
    beta1, beta2 = step.betas
    gradient = part.gradient.float()
    if factor is not None:
        gradient = gradient * factor
    part.exp_avg.copy_(part.exp_avg * beta1 + gradient * (1 - beta1))
    part.exp_avg_sq.copy_(part.exp_avg_sq * beta2 + gradient * gradient * (1 - beta2))
    root = part.exp_avg_sq.double().sqrt().float()  # correctly rounded, which torch's for fp32 on a CPU is not
    denominator = root * step.root_scale + step.eps
    part.master.copy_(part.master * step.decay - part.exp_avg / denominator * step.step_size)
    if part.parameter is not None and step.seed is not None:
        words = random_words(step.seed, step.step, part.first, part.master.numel(), part.master.device)
        part.parameter.copy_(stochastically_rounded(part.master, words))
    elif part.parameter is not None:
        part.parameter.copy_(part.master)


def stochastically_rounded(values: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """Round fp32 to bf16, away from zero with the probability of the part that is cut off; by 16 bits of a random word each."""
    moved = (values.view(torch.int32) + (words & 0xFFFF).int()) & -0x10000
    return torch.where(values.isfinite(), moved.view(torch.float32), values).bfloat16()


def _check(part: AdamWSlice, step: AdamWStep, factor: torch.Tensor | None, skip: torch.Tensor | None) -> None:
    state = (part.master, part.exp_avg, part.exp_avg_sq)
    tensors = [*state, part.gradient, *([part.parameter] if part.parameter is not None else [])]
    if any(tensor.shape != (part.master.numel(),) or not tensor.is_contiguous() for tensor in tensors):
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
        raise ConfigError(f"the tensors of a slice are contiguous, of one dimension and equally long, not {shapes}")
    for name, scalar in (("factor", factor), ("skip", skip)):
        if scalar is not None and (scalar.numel() != 1 or scalar.dtype != torch.float32):
            raise ConfigError(f"{name} is one fp32 element, not {tuple(scalar.shape)} of {scalar.dtype}")
    tensors += [scalar for scalar in (factor, skip) if scalar is not None]
    if len({tensor.device for tensor in tensors}) > 1:
        raise ConfigError(f"a slice lies on one device, not {sorted({str(t.device) for t in tensors})}")
    if any(tensor.dtype != torch.float32 for tensor in state) or part.gradient.dtype not in GRADIENTS:
        raise ConfigError("masters and moments are fp32, gradients bf16, fp16 or fp32")
    if part.parameter is not None and part.parameter.dtype not in PARAMETERS:
        raise ConfigError(f"parameters are bf16 or fp16, not {part.parameter.dtype}; fp32 ones are masters themselves")
    if step.seed is not None and part.parameter is not None and part.parameter.dtype != torch.bfloat16:
        raise ConfigError("stochastic rounding is for bf16 parameters: leave seed=None for fp16")
    if part.first % 4 or part.first < 0:
        raise ConfigError(f"first={part.first} must be a multiple of 4")


# --- random words for stochastic rounding -----------------------------------------------------------------------------


def random_words(seed: int, step: int, first: int, count: int, device: torch.device) -> torch.Tensor:
    """Return words first to first + count, from 0 to 2**32 - 1, as int64.

    Philox 4x32 with 10 rounds (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011), in plain torch;
    Triton has the same generator. Word i depends on the seed, the step and i alone, so it does not matter how a tensor is cut into
    slices. Four words come from one counter: (i // 4, 0 to 63), step, 0.

    Args:
        seed: of 64 bits.
        step: number of the step.
        first, count: of the words; `first` is a multiple of 4.
        device: of the result.
    """
    counters = torch.arange(first // 4, (first + count + 3) // 4, dtype=torch.int64, device=device)
    zero = torch.zeros_like(counters)
    words = philox(seed, counters & _WORD, counters >> 32, zero + step, zero)
    return torch.stack(words, dim=1).flatten()[:count]


def philox(
    seed: int, c0: torch.Tensor, c1: torch.Tensor, c2: torch.Tensor, c3: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ten rounds over four counters of 32 bits, each as int64. Returns four words of each.

    Args:
        seed: of 64 bits, the key.
        c0, c1, c2, c3: the counters.
    """
    k0, k1 = seed & _WORD, seed >> 32 & _WORD
    for _ in range(10):
        high0, low0 = _product(_MULTIPLIERS[0], c0)
        high2, low2 = _product(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high2 ^ c1 ^ k0, low2, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3


def _product(factor: int, words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The high and the low word of 64; by halves, since int64 has no room for the whole."""
    low_part = factor * (words & 0xFFFF)
    high_part = factor * (words >> 16) + (low_part >> 16)
    return high_part >> 16, (high_part << 16 | low_part & 0xFFFF) & _WORD


FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def row_bytes(bits: int, block: int, columns: int) -> int:
    """Return the bytes of a quantised row: its codes, then a scale in bf16 for each block of columns.

    Args:
        bits: of a code, 8 or 4.
        block: columns that share a scale.
        columns: of the matrix.
    """
    return columns * bits // 8 + columns // block * 2


def bytes_moved(bits: int, block: int, columns: int, rows: int, dtype: torch.dtype) -> int:
    """Return the bytes that quantising or dequantising reads and writes.

    Args:
        bits, block, columns: as of `row_bytes`.
        rows, dtype: of the values.
    """
    return rows * (row_bytes(bits, block, columns) + columns * dtype.itemsize)


def dequantise_(stored: torch.Tensor, out: torch.Tensor, bits: int, block: int) -> None:
    """Overwrite `out` with the values of `stored`.

    Args:
        stored: bytes of shape (rows, row_bytes).
        out: floats of shape (rows, columns).
        bits, block: as of `row_bytes`.

    Raises:
        ConfigError: shapes, dtypes or devices do not fit. UnsupportedError: Triton is not there.
    """
    _check_rows(out, stored, bits, block)
    if out.numel():
        kernel("arithmetic").dequantise_(stored, out, bits, block)


def quantise(rows: torch.Tensor, bits: int, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (stored, overflown): bytes of shape (rows, row_bytes), and an int32 that is 0 where all values were finite.

    Where it is not 0 the bytes mean nothing. Does not wait for the device.

    Args:
        rows: floats of shape (rows, columns).
        bits, block: as of `row_bytes`.

    Raises:
        ConfigError: shapes or dtypes do not fit. UnsupportedError: Triton is not there.
    """
    _check_form(rows, bits, block)
    size = row_bytes(bits, block, rows.shape[-1])
    stored = torch.empty(rows.shape[0], size, dtype=torch.uint8, device=rows.device)
    _check_rows(rows, stored, bits, block)
    overflown = torch.zeros(1, dtype=torch.int32, device=rows.device)
    if rows.numel():
        kernel("arithmetic").quantise_(rows, stored, overflown, bits, block)
    return stored, overflown


def _check_form(values: torch.Tensor, bits: int, block: int) -> None:
    if bits not in (4, 8) or block < 2 or block & (block - 1):
        raise ConfigError(f"bits={bits!r} is 8 or 4, block={block!r} a power of two from 2")
    if values.ndim != 2 or values.dtype not in FLOATS:
        raise ConfigError(f"values are a matrix of floats, not {values.ndim}-dimensional of {values.dtype}")
    columns = values.shape[1]
    if columns % (block * (2 if bits == 4 else 1)):
        raise ConfigError(f"{columns} columns do not come in whole blocks of {block} in {bits} bits")


def _check_rows(values: torch.Tensor, stored: torch.Tensor, bits: int, block: int) -> None:
    _check_form(values, bits, block)
    rows, columns = values.shape
    is_fitting = stored.dtype == torch.uint8 and stored.shape == (rows, row_bytes(bits, block, columns))
    if not is_fitting or stored.device != values.device:
        raise ConfigError(
            f"{stored.dtype} of shape {tuple(stored.shape)} are not {rows} quantised rows of {columns} columns on {values.device}"
        )
    if not values.is_contiguous() or not stored.is_contiguous():
        raise ConfigError("quantised rows and their values are contiguous")
