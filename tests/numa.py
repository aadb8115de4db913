"""Asks the system itself whether this process may choose the NUMA node of its memory: some containers refuse it."""

from __future__ import annotations

import ctypes
import mmap
import platform
from pathlib import Path

MBIND = {"x86_64": 237, "aarch64": 235}
PREFERRED = 1


def may_choose_nodes() -> bool:
    """Return True if memory of a mapping can be taken from the first node."""
    page, mask = mmap.mmap(-1, mmap.PAGESIZE), ctypes.c_ulong(1)
    first = ctypes.c_char.from_buffer(page)
    try:
        call = ctypes.CDLL(None).syscall
        address = ctypes.c_void_p(ctypes.addressof(first))
        bits = ctypes.c_ulong(8 * ctypes.sizeof(mask))
        size, none = ctypes.c_ulong(mmap.PAGESIZE), ctypes.c_ulong(0)
        return call(MBIND[platform.machine()], address, size, PREFERRED, ctypes.byref(mask), bits, none) == 0
    finally:
        del first
        page.close()


def policies() -> dict[int, str]:
    """Return the kernel's line about each mapping of this process, by its address; nothing if the kernel has no nodes."""
    path = Path("/proc/self/numa_maps")
    return {int(line.split()[0], 16): line for line in path.read_text().splitlines()} if path.exists() else {}
