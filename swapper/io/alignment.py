"""Defines alignments: of direct transfers, and of tensors in memory and files."""

from __future__ import annotations

SECTOR_BYTES = 4096  # suits direct I/O on every drive
TENSOR_ALIGNMENT_BYTES = 64
"""Every tensor starts at a multiple of this: kernels give other bits at addresses that cut a cache line."""
LARGE_TENSOR_BYTES = 1 << 16
"""Tensors of at least this size start at a sector, to be transferred alone. 64 KiB bounds the padding at 6 %."""


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
