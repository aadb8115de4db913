"""Tensors as bytes: their alignment in memory and files, and their elements in row-major order, however they lie.

Decides whether a tensor is one run of host memory, which the engine can use directly, or must be staged piece by piece;
and yields the pieces. A file holds exactly `numel * itemsize` bytes either way. A device's error while its elements are
copied becomes an error of swapper's own here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod

import torch

from swapper.errors import DeviceError, SwapperError, UnsupportedError

SECTOR_BYTES = 4096  # suits direct I/O on every drive
TENSOR_ALIGNMENT_BYTES = 64
"""Every tensor starts at a multiple of this: kernels give other bits at addresses that cut a cache line."""
LARGE_TENSOR_BYTES = 1 << 16
"""Tensors of at least this size start at a sector, to be transferred alone. 64 KiB bounds the padding at 6 %."""


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def check_tensor(tensor: torch.Tensor, writes_into: bool) -> None:
    """Raise UnsupportedError for a tensor that has no plain bytes or, if `writes_into`, cannot receive any."""
    if not isinstance(tensor, torch.Tensor):
        raise UnsupportedError(f"a tensor is needed, not {type(tensor).__name__}")
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized:
        kind = "a nested" if tensor.is_nested else "a quantized" if tensor.is_quantized else f"a {tensor.layout}"
        raise UnsupportedError(f"{kind} tensor has no single run of elements; transfer its parts")
    device = tensor.device
    if device.type == "meta":
        raise UnsupportedError("a meta tensor has no memory; make a real one (torch.empty_like(..., device='cpu'))")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UnsupportedError(f"a tensor on {device} cannot be transferred: torch finds no CUDA device here")
    if device.type not in ("cpu", "cuda"):
        raise UnsupportedError(f"tensors on {device} cannot be transferred; copy to the CPU first")
    if device.type == "cpu" and not _has_memory(tensor):
        raise UnsupportedError("this tensor has no memory: it is a fake one, or its storage was freed")
    if writes_into and has_overlap(tensor):
        raise UnsupportedError("an expanded tensor cannot be read into: several elements share one address")


def has_overlap(tensor: torch.Tensor) -> bool:
    """Return True if several elements of a dimension share one address, as `expand` makes them."""
    return any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _has_memory(tensor: torch.Tensor) -> bool:
    """Return True if the storage is as long as the elements need: a resized one would be read beyond its end."""
    if tensor.numel() == 0:
        return True
    last = tensor.storage_offset() + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size() <= tensor.untyped_storage().nbytes() and tensor.data_ptr() != 0


def run_address(tensor: torch.Tensor) -> int | None:
    """Return the address of a tensor whose bytes lie in host memory in row-major order; None of any other."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return None
    return tensor.data_ptr()


def byte_count(tensor: torch.Tensor) -> int:
    """Return the bytes of the elements, also of an expanded or strided view."""
    return tensor.numel() * tensor.element_size()


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor in row-major order, flat: its own memory if they lie there so, else a copy.

    torch calls one element contiguous whatever its stride, and shows bytes only of elements with stride 1.
    """
    run = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return run.as_strided((run.numel(),), (1,)).view(torch.uint8)


def has_same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have the same shape, dtype and device, and the same bits; NaNs are alike if their bits are."""
    alike = (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
    return alike and torch.equal(flat_bytes(one), flat_bytes(other))


def views_of_range(tensor: torch.Tensor, start: int, stop: int) -> Iterator[torch.Tensor]:
    """Yield views that together are the elements [start, stop) in row-major order; at most 2 * dimensions + 1.

    Args:
        tensor: of any shape and strides.
        start, stop: of the range, in elements.
    """
    if start >= stop:
        return
    if tensor.ndim == 0:
        yield tensor
        return
    if tensor.ndim == 1:
        yield tensor.narrow(0, start, stop - start)
        return
    row = prod(tensor.shape[1:])
    first, skipped = divmod(start, row)
    last, kept = divmod(stop, row)
    if first == last:
        yield from views_of_range(tensor.select(0, first), skipped, kept)
        return
    if skipped:
        yield from views_of_range(tensor.select(0, first), skipped, row)
        first += 1
    if first < last:
        yield tensor.narrow(0, first, last - first)
    if kept:
        yield from views_of_range(tensor.select(0, last), 0, kept)


def copy_out(tensor: torch.Tensor, start: int, stop: int, flat: torch.Tensor) -> None:
    """Copy the elements [start, stop) of `tensor` to `flat`, a run of as many elements.

    Args:
        tensor: of any shape and strides.
        start, stop: of the range, in elements.
        flat: of one dimension, stop - start elements.
    """
    at = 0
    for view in views_of_range(tensor, start, stop):
        flat.narrow(0, at, view.numel()).view(view.shape).copy_(view)
        at += view.numel()


def copy_in(tensor: torch.Tensor, start: int, stop: int, flat: torch.Tensor) -> None:
    """Copy `flat` to the elements [start, stop) of `tensor`.

    Args: as of `copy_out`.
    """
    at = 0
    for view in views_of_range(tensor, start, stop):
        view.copy_(flat.narrow(0, at, view.numel()).view(view.shape))
        at += view.numel()


@contextmanager
def device_errors(device: torch.device, what: str) -> Iterator[None]:
    """Convert errors of `device` in this context to a DeviceError that names it; out of memory stays as it is."""
    try:
        yield
    except (SwapperError, torch.OutOfMemoryError):
        raise
    except RuntimeError as error:
        raise DeviceError.at(device, what, error) from error
