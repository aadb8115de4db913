"""Free memory: what the system and this process's control groups still grant, and what the C library's heap keeps.

[Note: free memory] glibc takes even tensors of megabytes from its heap, once one of that size was freed, and keeps what is freed
below something that lives on: gradients and temporaries that come and go leave holes of up to half their sum. Giving free memory
back at once, and taking it again, costs up to a tenth of a step with long computing: most of it is where activations were, and
the next forward needs it. So it is given back only where the process has more memory than was in use at the peak (as when a
backward begins) and a share of that: what is beyond are holes; or where the system or a control group is close to its limit.
That is checked where a backward begins, as activations are all there and the first gradients and temporaries, often the largest,
fit few holes; and each time that gradients of some megabytes have been freed.

[Note: who gives back] glibc also gives back by itself, with each free that leaves enough of the heap's end free: gradients that
were freed one after the other in a forward went back so, and the next backward took them again, 80,000 pages in a step of 2.6 s.
So while a run is open glibc leaves that to the checks here, and takes all that it can from the heap.

[Note: temporaries of an update] An optimizer that updates a matrix as a whole (Muon) takes several times its bytes in passing, and
leaves them free where a check finds them, as holes. The next update takes the same again. What went back in between came
back page by page: 15,000 faults a matrix of 4 Mi elements. So what such updates were seen to take counts as in use.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from swapper.runtime.process import is_off, naming_limits

UNLIMITED = 1 << 62
"""Control groups of version 1 report a number beyond this where there is no limit."""
_MAX_KERNEL_FILE_BYTES = 1 << 16
"""Of a file that the kernel writes when it is read, which it gives in one read."""

FREE_SHARE = 16
"""One part in this many of the budget: after this much was freed, free and remaining memory are checked."""
MIN_CHECK_BYTES, MAX_CHECK_BYTES = 4 << 20, 64 << 20
"""Bounds of that."""
SHORTAGE_CHECKS = 4
"""Memory is short if a check ever found less headroom than this many times the bytes between checks."""
SHORTAGE_RATE = 4
"""Checks are this many times as frequent while memory is short."""
HOLES_SHARE = 2
"""One part in this many may lie in holes, of the bytes freed between checks or, if that is more, of what the run has in use at its
peak: activations and temporaries of all sizes always leave gaps, and what goes back of these is taken again by the next forward."""
HEAP_TENSOR_BYTES = 32 << 20
"""glibc maps larger ones and unmaps them when freed: the maximum of M_MMAP_THRESHOLD, mallopt(3)."""
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
NEVER = -1
"""A trim threshold that nothing reaches."""
HEAP_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")
"""If the environment has any of these, the user has tuned the heap, and it stays as it is."""

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_libc = ctypes.CDLL(None)


class _MallocInfo(ctypes.Structure):
    """mallinfo2(3). `uordblks` is in use in heaps, `hblkhd` in mappings of their own."""

    _NAMES = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _NAMES.split()]


class _Heap:
    """State of the process's heap.

    Attributes:
        watches: how many runs are open.
        freed_bytes: since the last check.
        check_bytes: freed bytes after which the next check comes.
        min_headroom_bytes: the smallest headroom that a check found.
        peak_bytes: the most that a check found in use.
        other_bytes: what the process has besides its heap.
        temporary_bytes: the most that an update was seen to take. [Note: temporaries of an update]
    """

    watches = 0
    freed_bytes = 0
    check_bytes = MAX_CHECK_BYTES
    min_headroom_bytes = UNLIMITED
    began_bytes = 0
    peak_bytes = 0
    other_bytes = 0
    temporary_bytes = 0


class Watch:
    """One run's watch over the heap, from `watch_free_memory` until `end`, or until nobody has it. [Note: who gives back]"""

    def __init__(self) -> None:
        _Heap.watches += 1
        _set_thresholds(NEVER)
        self._end = weakref.finalize(self, _end_watch)
        self._end.atexit = False  # the process ends

    def end(self) -> None:
        """End the watch. The last one returns all free memory, and lets glibc do that by itself again."""
        self._end()


def _end_watch() -> None:
    _Heap.watches -= 1
    if not _Heap.watches:
        _set_thresholds(2 * HEAP_TENSOR_BYTES)  # as glibc comes to do where tensors of that size come and go
        return_free_memory()


def kept_free_bytes(budget_bytes: int) -> int:
    """Return how much free memory the heap may keep with this budget before it is checked."""
    return min(max(budget_bytes // FREE_SHARE, MIN_CHECK_BYTES), MAX_CHECK_BYTES)


def watch_free_memory(budget_bytes: int) -> Watch:
    """Begin the watch of a run with this budget. The newest run counts: a process has one heap."""
    watch = Watch()
    return_free_memory()
    _Heap.check_bytes = kept_free_bytes(budget_bytes)
    _Heap.min_headroom_bytes = UNLIMITED
    _Heap.began_bytes = _Heap.peak_bytes = _used_bytes()
    _Heap.other_bytes = max(anonymous_bytes() - _Heap.began_bytes, 0)
    _Heap.temporary_bytes = 0
    return watch


def note_used() -> None:
    """Note what is in use now, at a likely peak, and return what is free beyond: a forward has left all to its backward."""
    _Heap.peak_bytes = max(_Heap.peak_bytes, _used_bytes())
    _return_holes()


@contextmanager
def note_temporaries() -> Iterator[None]:
    """Note what is taken in the context, which leaves it free and will take it again. [Note: temporaries of an update]"""
    before_bytes = anonymous_bytes()
    yield
    _Heap.temporary_bytes = max(_Heap.temporary_bytes, anonymous_bytes() - before_bytes)


def note_freed(nbytes: int) -> None:
    """Note that a tensor of `nbytes` is about to be freed, and return free memory if there is too much. [Note: free memory]"""
    if nbytes < HEAP_TENSOR_BYTES:
        _Heap.freed_bytes += nbytes
    is_short = _Heap.min_headroom_bytes < SHORTAGE_CHECKS * _Heap.check_bytes
    if _Heap.freed_bytes < _Heap.check_bytes // (SHORTAGE_RATE if is_short else 1):
        return
    _Heap.freed_bytes = 0
    _Heap.min_headroom_bytes = min(_Heap.min_headroom_bytes, headroom_bytes())
    note_used()


def _return_holes() -> None:
    """Return free memory, if memory is short or there is more of it than HOLES_SHARE allows."""
    holes_bytes = anonymous_bytes() - _Heap.other_bytes - _Heap.peak_bytes
    max_holes_bytes = max(_Heap.check_bytes, _Heap.peak_bytes - _Heap.began_bytes) // HOLES_SHARE
    max_holes_bytes += _Heap.temporary_bytes
    if holes_bytes > max_holes_bytes or _Heap.min_headroom_bytes < SHORTAGE_CHECKS * _Heap.check_bytes:
        return_free_memory()


def return_free_memory() -> None:
    """Have glibc give freed heap memory, hundreds of MB, back to the system. Other C libraries cannot."""
    trim = getattr(_libc, "malloc_trim", None)
    if trim is not None:
        trim(0)


def _set_thresholds(trim_bytes: int) -> None:
    """Have glibc keep up to `trim_bytes` at the heap's end, and map only what the heap may not serve. [Note: who gives back]"""
    set_option = getattr(_libc, "mallopt", None)
    if set_option is not None and not is_off("mallopt") and not any(name in os.environ for name in HEAP_SETTINGS):
        set_option(M_MMAP_THRESHOLD, HEAP_TENSOR_BYTES)
        set_option(M_TRIM_THRESHOLD, trim_bytes)


def _used_bytes() -> int:
    """Return what the C library has given out. 0 where it does not say: then all that the process took since counts as holes."""
    describe = getattr(_libc, "mallinfo2", None)
    if describe is None:
        return 0
    describe.restype = _MallocInfo
    found = describe()
    return int(found.uordblks + found.hblkhd)


def anonymous_bytes() -> int:
    """Return how much memory of the process is neither shared nor of a file."""
    resident, shared = read_kernel("/proc/self/statm").split()[1:3]
    return (int(resident) - int(shared)) * _PAGE_BYTES


def peak_resident_bytes(reset: bool = False) -> int | None:
    """Return the most memory that was resident since a call with `reset`, proc_pid_status(5).

    None if the system does not say, or does not let a process reset it.
    """
    try:
        if reset:
            Path("/proc/self/clear_refs").write_text("5")
        _, found, rest = read_kernel("/proc/self/status").partition(b"VmHWM:")
    except OSError:
        return None
    return int(rest.split(None, 1)[0]) << 10 if found else None  # it says kB


# --- what the system grants ---------------------------------------------------------------------------------------------


def headroom_bytes() -> int:
    """Return how many bytes may still be taken. Page cache counts as free: the kernel drops it when memory is needed.

    It is called many times a step while the optimizer waits: so files are read by plain system calls.
    """
    return min(_available(), *map(_left_in, _groups()), UNLIMITED)


def read_kernel(path: str) -> bytes:
    """Return the content of a file of /proc or /sys, up to 64 KiB."""
    with naming_limits("open", path):
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(file, _MAX_KERNEL_FILE_BYTES)
    finally:
        os.close(file)


def _available() -> int:
    _, found, rest = read_kernel("/proc/meminfo").partition(b"MemAvailable:")
    return int(rest.split(None, 1)[0]) << 10 if found else UNLIMITED  # it says kB


def _groups() -> Iterator[tuple[str, str, str, bytes]]:
    """Yield (folder, name of the limit, of what is used, prefix in memory.stat) of each control group that this process is in."""
    for line in os.fsdecode(read_kernel("/proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = "/sys/fs/cgroup", ("memory.max", "memory.current", b"")
        elif "memory" in controllers.split(","):
            root, names = "/sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", b"total_")
        else:
            continue
        parts = path.strip("/").split("/") if path.strip("/") else []
        for depth in range(len(parts), -1, -1):
            yield "/".join([root, *parts[:depth]]), *names


def group_limit() -> int | None:
    """Return the smallest limit of memory of this process's control groups, in bytes; None without one."""
    limits = [limit for group in _groups() if (limit := _limit_of(group)) is not None]
    return min(limits, default=None)


def _limit_of(group: tuple[str, str, str, bytes]) -> int | None:
    folder, limit_name, *_ = group
    try:
        limit = int(read_kernel(f"{folder}/{limit_name}"))
    except (OSError, ValueError):  # not mounted here, or "max"
        return None
    return None if limit >= UNLIMITED else limit


def _left_in(group: tuple[str, str, str, bytes]) -> int:
    folder, _, used_name, prefix = group
    if (limit := _limit_of(group)) is None:
        return UNLIMITED
    try:
        used = int(read_kernel(f"{folder}/{used_name}"))
        stat = dict(line.split() for line in read_kernel(f"{folder}/memory.stat").splitlines())
        cache = int(stat[prefix + b"active_file"]) + int(stat[prefix + b"inactive_file"])
    except (OSError, ValueError, KeyError):  # not mounted here, or the root, which has no limit
        return UNLIMITED
    return max(limit - used + cache, 0)
