"""Checks and launches the kernels that convert weights to and from 8 or 4 bits, in the format of checkpoint/quantization.py.

That module defines the result, in plain torch; the kernels are bit-equal.
"""

from __future__ import annotations

import torch

from swapper.device.kernels.compiler import kernel
from swapper.errors import ConfigError

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
    _check(out, stored, bits, block)
    if out.numel():
        kernel("quantized").dequantise_(stored, out, bits, block)


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
    _check(rows, stored, bits, block)
    overflown = torch.zeros(1, dtype=torch.int32, device=rows.device)
    if rows.numel():
        kernel("quantized").quantise_(rows, stored, overflown, bits, block)
    return stored, overflown


def _check_form(values: torch.Tensor, bits: int, block: int) -> None:
    if bits not in (4, 8) or block < 2 or block & (block - 1):
        raise ConfigError(f"bits={bits!r} is 8 or 4, block={block!r} a power of two from 2")
    if values.ndim != 2 or values.dtype not in FLOATS:
        raise ConfigError(f"values are a matrix of floats, not {values.ndim}-dimensional of {values.dtype}")
    columns = values.shape[1]
    if columns % (block * (2 if bits == 4 else 1)):
        raise ConfigError(f"{columns} columns do not come in whole blocks of {block} in {bits} bits")


def _check(values: torch.Tensor, stored: torch.Tensor, bits: int, block: int) -> None:
    _check_form(values, bits, block)
    rows, columns = values.shape
    is_fitting = stored.dtype == torch.uint8 and stored.shape == (rows, row_bytes(bits, block, columns))
    if not is_fitting or stored.device != values.device:
        raise ConfigError(
            f"{stored.dtype} of shape {tuple(stored.shape)} are not {rows} quantised rows of {columns} columns on {values.device}"
        )
    if not values.is_contiguous() or not stored.is_contiguous():
        raise ConfigError("quantised rows and their values are contiguous")
