"""Host memory: the arenas, and which part of them each section has."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from swapper import _C
from swapper.core.budget import resident_bytes
from swapper.core.layout import SECTOR_BYTES, round_up
from swapper.core.section import NoWindow, Section

FREE_SHARE = 16
"""Of the budget: that much may be freed before free memory is given back, which takes 2 to 4 ms."""
LEAST_FREE_BYTES, MOST_FREE_BYTES = 4 << 20, 64 << 20
HEAP_TENSOR_BYTES = 32 << 20
"""glibc takes larger ones from the system, and gives them back (mallopt(3), M_MMAP_THRESHOLD)."""


class HostMemory:
    """Owns the arenas of one run. Tensors that alias one keep its memory alive after `close`."""

    def __init__(self) -> None:
        self._arenas: list[Any] = []

    def attach(
        self, sections: Sequence[Section], pool_bytes: int, head_bytes: int | None = None, windows: bool = True
    ) -> tuple[Any, int]:
        """Make an arena: resident sections one after the other, then a pool. The other sections get a window each.

        Without `windows` they get none: what is in their frames goes on to somewhere else. Of the pool `head_bytes` are
        taken from the system now, and the rest by threads from now on; None: all of it now.

        Returns the arena and where in it the pool begins.
        """
        kept_bytes = resident_bytes([section.plan.nbytes for section in sections if section.resident])
        nbytes = max(kept_bytes + pool_bytes, SECTOR_BYTES)
        arena = _C.Arena(nbytes, head_bytes=None if head_bytes is None else kept_bytes + head_bytes)
        self._arenas.append(arena)
        arena.take_the_rest()
        cursor = 0
        for section in sections:
            nbytes = section.plan.nbytes
            if section.resident:
                section.attach(torch.frombuffer(arena.view(cursor, nbytes), dtype=torch.uint8), None)
                cursor += round_up(nbytes, SECTOR_BYTES)
            elif not windows:
                section.attach(torch.empty(0, dtype=torch.uint8), NoWindow())
            else:
                window = arena.window(nbytes)
                section.attach(torch.frombuffer(window, dtype=torch.uint8)[:nbytes], window)
        return arena, kept_bytes

    def take(self, nbytes: int) -> torch.Tensor:
        """Return memory of its own, which is good for transfers: uint8 of shape (nbytes,)."""
        arena = _C.Arena(nbytes)
        self._arenas.append(arena)
        return torch.frombuffer(arena.view(0, nbytes), dtype=torch.uint8)

    def describe(self) -> str:
        """Return "page-locked", or why it is not."""
        for arena in self._arenas:
            if not arena.locked:
                return f"not page-locked ({arena.lock_reason})"
        return "page-locked"

    def close(self) -> None:
        for arena in self._arenas:
            arena.close()
        self._arenas.clear()


class _Heap:
    """The process's heap: how much of it was freed since free memory was given back, and how much may be."""

    freed_bytes = 0
    limit_bytes = MOST_FREE_BYTES


def bound_free_memory(budget_bytes: int) -> None:
    """From now on have no more freed memory lie about than fits this budget. The newest run's counts: a process has one heap."""
    _Heap.limit_bytes = min(max(budget_bytes // FREE_SHARE, LEAST_FREE_BYTES), MOST_FREE_BYTES)


def note_freed(nbytes: int) -> None:
    """A tensor of so many bytes is about to be freed: every so many, give what is free back to the system.

    glibc takes even tensors of megabytes from its heap, once one of that size was freed, and keeps what is freed below something
    that lives on: gradients and temporaries that come and go would leave holes of half their sum.
    """
    if nbytes < HEAP_TENSOR_BYTES:
        _Heap.freed_bytes += nbytes
    if _Heap.freed_bytes >= _Heap.limit_bytes:
        _Heap.freed_bytes = 0
        return_free_memory()


def return_free_memory() -> None:
    """Have the C library give freed heap memory back to the system, where it can (glibc): it keeps hundreds of MB otherwise."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
