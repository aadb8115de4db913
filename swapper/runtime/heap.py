"""What the C library's heap keeps of freed memory, and when that goes back to the system.

[Note: free memory] glibc takes even tensors of megabytes from its heap, once one of that size was freed, and keeps what is freed
below something that lives on: gradients and temporaries that come and go leave holes of up to half their sum. To give free memory
back whenever there is some, and to take it again, costs up to a tenth of a step whose computing is long: most of it is where
activations were, and the next forward needs it. So it goes back only where the process has more memory than what was in use at one
time (as when a backward begins) and a share of that: what is beyond are holes; or where the system or a control group has come
close to its limit.

[Note: who gives back] glibc gives back by itself too, with each free that leaves enough of the heap's end free: gradients that go
one after the other in a forward went back so, and the next backward took them anew, 80,000 pages in a step of 2.6 s.
So while there is a run glibc leaves that to the looks here, and has all that it can from the heap.
"""

from __future__ import annotations

import ctypes
import os
from typing import ClassVar

from swapper.runtime.headroom import UNLIMITED, headroom_bytes, read_kernel
from swapper.runtime.process import is_off

FREE_SHARE = 16
"""Of the budget: after so much was freed there is a look at how much memory is free, and how much is left."""
LEAST_FREE_BYTES, MOST_FREE_BYTES = 4 << 20, 64 << 20
SHORT = 4
"""Memory is short if at some time there was room for less than so many times that."""
OFTEN = 4
"""So many times as often there is a look where memory is short."""
HOLES_SHARE = 2
"""One so-many-th of what is freed between looks may lie in holes, or, if that is more, of what the run has in use at one time:
activations and temporaries of all sizes never lie without gaps, and what goes back of these is taken again by the next forward."""
HEAP_TENSOR_BYTES = 32 << 20
"""glibc takes larger ones from the system, and gives them back: the most that M_MMAP_THRESHOLD of mallopt(3) may be."""
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
NEVER = -1
"""A threshold of trimming that nothing reaches."""
USERS_OWN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")
"""Who has any of these in the environment has set the heap up, and it stays as it is."""

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_libc = ctypes.CDLL(None)


class _MallocInfo(ctypes.Structure):
    """mallinfo2(3). `uordblks` is in use in heaps, `hblkhd` in mappings of their own."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


class _Heap:
    """The process's.

    Attributes:
        freed_bytes: since the last look.
        look_bytes: after so much there is one.
        least_room_bytes: the least that a look found.
        began_bytes: in use when the run began.
        most_used_bytes: the most that was found in use.
        other_bytes: what the process has besides its heap.
        watches: of the runs that there are.
    """

    watches: ClassVar[list[Watch]] = []
    freed_bytes = 0
    look_bytes = MOST_FREE_BYTES
    least_room_bytes = UNLIMITED
    began_bytes = 0
    most_used_bytes = 0
    other_bytes = 0


class Watch:
    """A run's, from `watch_free_memory` until it is closed: what is free goes back by looks. [Note: who gives back]"""

    def __init__(self) -> None:
        _Heap.watches.append(self)
        _set_thresholds(NEVER)

    def end(self) -> None:
        """The run is closed. The last one has all free memory given back, and glibc does that by itself again."""
        if self in _Heap.watches:
            _Heap.watches.remove(self)
            if not _Heap.watches:
                _set_thresholds(2 * HEAP_TENSOR_BYTES)  # as glibc comes to do where tensors of that size come and go
                return_free_memory()


def watch_free_memory(budget_bytes: int) -> Watch:
    """A run with this budget begins. The newest run's counts: a process has one heap."""
    watch = Watch()
    return_free_memory()
    _Heap.look_bytes = min(max(budget_bytes // FREE_SHARE, LEAST_FREE_BYTES), MOST_FREE_BYTES)
    _Heap.least_room_bytes = UNLIMITED
    _Heap.began_bytes = _Heap.most_used_bytes = _used_bytes()
    _Heap.other_bytes = max(_anonymous_bytes() - _Heap.began_bytes, 0)
    return watch


def note_used() -> None:
    """As much is in use now as in few other moments: all that a forward leaves to its backward."""
    _Heap.most_used_bytes = max(_Heap.most_used_bytes, _used_bytes())


def note_freed(nbytes: int) -> None:
    """A tensor of so many bytes is about to be freed: have free memory go back where there is too much of it.

    [Note: free memory]
    """
    if nbytes < HEAP_TENSOR_BYTES:
        _Heap.freed_bytes += nbytes
    is_short = _Heap.least_room_bytes < SHORT * _Heap.look_bytes
    if _Heap.freed_bytes < _Heap.look_bytes // (OFTEN if is_short else 1):
        return
    _Heap.freed_bytes = 0
    note_used()
    _Heap.least_room_bytes = min(_Heap.least_room_bytes, headroom_bytes())
    holes_bytes = _anonymous_bytes() - _Heap.other_bytes - _Heap.most_used_bytes
    most_holes_bytes = max(_Heap.look_bytes, _Heap.most_used_bytes - _Heap.began_bytes) // HOLES_SHARE
    if holes_bytes > most_holes_bytes or _Heap.least_room_bytes < SHORT * _Heap.look_bytes:
        return_free_memory()


def return_free_memory() -> None:
    """Have the C library give freed heap memory back to the system, where it can (glibc): it keeps hundreds of MB otherwise."""
    trim = getattr(_libc, "malloc_trim", None)
    if trim is not None:
        trim(0)


def _set_thresholds(trim_bytes: int) -> None:
    """Have glibc keep so much at the heap's end, and take no memory elsewhere that it can have there. [Note: who gives back]"""
    set_option = getattr(_libc, "mallopt", None)
    if set_option is not None and not is_off("mallopt") and not any(name in os.environ for name in USERS_OWN):
        set_option(M_MMAP_THRESHOLD, HEAP_TENSOR_BYTES)
        set_option(M_TRIM_THRESHOLD, trim_bytes)


def _used_bytes() -> int:
    """What the C library has given out. 0 where it does not say: then all that the process took since counts as holes."""
    describe = getattr(_libc, "mallinfo2", None)
    if describe is None:
        return 0
    describe.restype = _MallocInfo
    found = describe()
    return int(found.uordblks + found.hblkhd)


def _anonymous_bytes() -> int:
    """What the process has of memory that is neither shared nor of a file."""
    resident, shared = read_kernel("/proc/self/statm").split()[1:3]
    return (int(resident) - int(shared)) * _PAGE_BYTES
