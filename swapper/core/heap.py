"""What the C library's heap keeps of freed memory, and when that goes back to the system.

[Note: free memory] glibc takes even tensors of megabytes from its heap, once one of that size was freed, and keeps what is freed
below something that lives on: gradients and temporaries that come and go leave holes of up to half their sum. To give them back
and to take them again costs up to a tenth of a step whose computing is long, so it is done only where the system or a control
group has come close to its limit: what the peak of one step needed, the next one will need again.
"""

from __future__ import annotations

import ctypes

from swapper.headroom import UNLIMITED, headroom_bytes

FREE_SHARE = 16
"""Of the budget: after so much was freed there is a look at how much memory is left."""
LEAST_FREE_BYTES, MOST_FREE_BYTES = 4 << 20, 64 << 20
SHORT = 4
"""Memory is short if at some time there was room for less than so many times that."""
HEAP_TENSOR_BYTES = 32 << 20
"""glibc takes larger ones from the system, and gives them back (mallopt(3), M_MMAP_THRESHOLD)."""


class _Heap:
    """The process's: how much was freed since the last look, after how much there is one, and the least room that one found."""

    freed_bytes = 0
    look_bytes = MOST_FREE_BYTES
    least_room_bytes = UNLIMITED


def watch_free_memory(budget_bytes: int) -> None:
    """A run with this budget begins. The newest run's counts: a process has one heap."""
    _Heap.look_bytes = min(max(budget_bytes // FREE_SHARE, LEAST_FREE_BYTES), MOST_FREE_BYTES)
    _Heap.least_room_bytes = UNLIMITED


def note_freed(nbytes: int) -> None:
    """A tensor of so many bytes is about to be freed: where memory is short, have free memory go back now and then.

    [Note: free memory]
    """
    if nbytes < HEAP_TENSOR_BYTES:
        _Heap.freed_bytes += nbytes
    if _Heap.freed_bytes < _Heap.look_bytes:
        return
    _Heap.freed_bytes = 0
    _Heap.least_room_bytes = min(_Heap.least_room_bytes, headroom_bytes())
    if _Heap.least_room_bytes < SHORT * _Heap.look_bytes:
        return_free_memory()


def return_free_memory() -> None:
    """Have the C library give freed heap memory back to the system, where it can (glibc): it keeps hundreds of MB otherwise."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
