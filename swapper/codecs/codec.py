"""Lists the codecs of optimizer state: what parts each has, what it needs, and how values become parts and back.

`native_...` call the kernels of csrc/codecs/ with the addresses of tensors, which the caller has checked and keeps.
`isa` is one of `_C.codec_isas()`, the fastest if empty: the bits are the same.

Runs begin at a multiple of 32 elements of their tensor, so that groups are the same however a tensor is cut. What is decoded
encodes to the same bits again: a state is the same whether it was coded once or between any steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from swapper import _C
from swapper.device.kernels import ACCELERATORS, AdamWStep, kernel, uses_kernel
from swapper.errors import ConfigError, UnsupportedError

Tensors = Sequence[torch.Tensor]
States = Sequence[tuple[str, Tensors]]
"""The name of each state's codec, and its parts."""
DTYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
"""Of parameters and gradients."""


def native_encode(
    codec: str, value: torch.Tensor, out: Tensors, parameter: torch.Tensor | None, threads: int = 1, isa: str = ""
) -> int:
    return _C.codec_encode(codec, value.data_ptr(), value.numel(), _addresses(out), _address(parameter), threads, isa)


def native_decode(
    codec: str, parts: Tensors, out: torch.Tensor, parameter: torch.Tensor | None, threads: int = 1, isa: str = ""
) -> None:
    _C.codec_decode(codec, _addresses(parts), out.numel(), out.data_ptr(), _address(parameter), threads, isa)


def native_adamw_(
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
    return _C.codec_adamw(*_operands(parameter, gradient, states), numbers, threads, isa)


def native_torch_adam_(
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    states: States,
    numbers: tuple[float | bool, ...],
    uses_fma: bool,
    roots: int,
    threads: int = 1,
    isa: str = "",
) -> int:
    return _C.codec_torch_adam(*_operands(parameter, gradient, states), numbers, uses_fma, roots, threads, isa)


Typed = tuple[int, str]
"""The address and the dtype of a tensor."""


def _operands(
    parameter: torch.Tensor, gradient: torch.Tensor, states: States
) -> tuple[int, Typed, Typed, list[tuple[str, list[int]]]]:
    """Return how many elements there are, and where they are. One call for all: each update of a slice makes it."""
    return (
        parameter.numel(),
        (parameter.data_ptr(), DTYPE_NAMES[parameter.dtype]),
        (gradient.data_ptr(), DTYPE_NAMES[gradient.dtype]),
        [(codec, [part.data_ptr() for part in parts]) for codec, parts in states],
    )


def _addresses(tensors: Tensors) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


GROUP = 32
"""Elements that share a scale, counted from the first element of a tensor."""
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of a code: `elements` values share one element of it."""

    suffix: str
    dtype: torch.dtype
    elements: int = 1


@dataclass(frozen=True, slots=True)
class StateCodec:
    """One way of coding fp32 values of one dimension.

    Attributes:
        needs_parameter: whether a bf16 parameter is half of the code: the value rounded to nearest, ties to even.
    """

    name: str
    layout: tuple[Part, ...]
    needs_parameter: bool = False

    def parts(self, numel: int) -> tuple[tuple[str, torch.dtype, int], ...]:
        """Return (suffix, dtype, elements) of each part of a code of `numel` values."""
        return tuple((part.suffix, part.dtype, -(-numel // part.elements)) for part in self.layout)

    def check_parameter(self, dtype: torch.dtype) -> None:
        """Refuse parameters of `dtype` that this code cannot be completed by.

        Raises:
            UnsupportedError: the parameter is not bf16. In fp16 all small values become 0, so 16 bits more do not tell them apart.
        """
        if self.needs_parameter and dtype != torch.bfloat16:
            raise UnsupportedError(
                f"the codec {self.name!r} completes bf16 parameters, not {dtype}: use bf16 ones, or no codec for their masters"
            )

    def encode(
        self,
        value: torch.Tensor,
        out: Sequence[torch.Tensor],
        parameter: torch.Tensor | None = None,
        *,
        threads: int = 1,
    ) -> int:
        """Code `value` into the tensors of `out`; return how many elements they cannot hold.

        That is a value that is not finite, or negative in `variance8` (its whole group decodes to NaN), one whose parameter is
        not its rounded value, and a finite one that would become infinite. The caller raises unless it is 0.

        On an accelerator a kernel of Triton encodes, and the count is waited for: see `encode_counting`.

        Args:
            value: fp32, contiguous, of one dimension. It begins at a multiple of 32 of its tensor.
            out: one tensor for each of `parts(value.numel())`.
            parameter: bf16, equally long, where `needs_parameter`.
            threads: that share the work; the result does not depend on it.

        Raises:
            ConfigError: dtypes or sizes do not fit. UnsupportedError: the parameter is not bf16.
        """
        self._check(value, out, parameter)
        if not value.numel():
            return 0
        if not uses_kernel(value.device):
            return native_encode(self.name, value, out, parameter, threads)
        unheld = torch.zeros(1, dtype=torch.int32, device=value.device)
        kernel("codecs").encode_(self.name, value, out, parameter, unheld)
        return int(unheld.item())

    def encode_counting(
        self, value: torch.Tensor, out: Sequence[torch.Tensor], parameter: torch.Tensor | None, unheld: torch.Tensor
    ) -> None:
        """Code `value` as `encode` does, and wait for no kernel.

        Args:
            value, out, parameter: as of `encode`.
            unheld: one int32 on their device; the count is added.
        """
        if not uses_kernel(value.device):
            unheld += self.encode(value, out, parameter, threads=torch.get_num_threads())
            return
        self._check(value, out, parameter)
        if value.numel():
            kernel("codecs").encode_(self.name, value, out, parameter, unheld)

    def decode(
        self,
        parts: Sequence[torch.Tensor],
        out: torch.Tensor,
        parameter: torch.Tensor | None = None,
        *,
        threads: int = 1,
    ) -> None:
        """Overwrite `out` with the values of a code.

        Args:
            parts: one tensor for each of `parts(out.numel())`.
            out: fp32, contiguous, of one dimension.
            parameter, threads: as of `encode`.

        Raises:
            ConfigError: dtypes or sizes do not fit. UnsupportedError: the parameter is not bf16.
        """
        self._check(out, parts, parameter)
        if not out.numel():
            return
        if uses_kernel(out.device):
            kernel("codecs").decode_(self.name, parts, out, parameter)
        else:
            native_decode(self.name, parts, out, parameter, threads)

    def check_parts(self, numel: int, parts: Sequence[torch.Tensor], device: torch.device = CPU) -> None:
        """Refuse tensors that are not the code of `numel` values on `device`.

        Args:
            numel: of the values.
            parts: to check, in the order of `layout`.
            device: where they must be. Default: the CPU.

        Raises:
            ConfigError: dtypes or sizes do not fit.
        """
        fit = len(parts) == len(self.layout)
        for part, of in zip(parts, self.layout, strict=False):
            fit = fit and part.dtype == of.dtype and part.shape == (-(-numel // of.elements),)
            fit = fit and part.is_contiguous() and part.device == device
        if not fit:
            wanted = tuple((dtype, count) for _, dtype, count in self.parts(numel))
            found = ", ".join(f"{part.dtype} {tuple(part.shape)}" for part in parts)
            raise ConfigError(
                f"{numel} values in the codec {self.name!r} are contiguous tensors of one dimension on {device}, {wanted}, "
                f"not {found}"
            )

    def _check(self, value: torch.Tensor, parts: Sequence[torch.Tensor], parameter: torch.Tensor | None) -> None:
        device = value.device
        if not (device.type == "cpu" or uses_kernel(device)):
            raise UnsupportedError(f"codecs are for host memory and {' and '.join(ACCELERATORS)}, not {device}")
        if value.dtype != torch.float32 or not _is_run(value, device):
            raise ConfigError(f"values are fp32, contiguous, of one dimension, not {value.dtype} {tuple(value.shape)}")
        self.check_parts(value.numel(), parts, device)
        if not self.needs_parameter:
            return
        if parameter is None:
            raise ConfigError(f"the codec {self.name!r} needs the parameter")
        self.check_parameter(parameter.dtype)
        if parameter.shape != value.shape or not _is_run(parameter, device):
            raise ConfigError(f"a parameter of shape {tuple(parameter.shape)} does not fit {value.numel()} values")


def _is_run(tensor: torch.Tensor, device: torch.device) -> bool:
    """Return whether a tensor lies on the device, contiguous and of one dimension."""
    return tensor.ndim == 1 and tensor.is_contiguous() and tensor.device == device


CODECS = {
    codec.name: codec
    for codec in (
        StateCodec("fp32", (Part("value", torch.float32),)),
        StateCodec("split", (Part("low", torch.int16), Part("ties", torch.uint8, 8)), needs_parameter=True),
        StateCodec("master24", (Part("rho", torch.int8),), needs_parameter=True),
        StateCodec("bf16", (Part("value", torch.bfloat16),)),
        StateCodec("moment8", (Part("code", torch.int8), Part("scale", torch.bfloat16, GROUP))),
        StateCodec("variance8", (Part("code", torch.uint8), Part("scale", torch.float32, GROUP))),
    )
}
"""By name."""
