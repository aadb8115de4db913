"""How much memory the system and this process's control groups still grant.

It is asked for many times a step, while the optimizer waits: files are read by the system's calls, without what Python puts
around them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

UNLIMITED = 1 << 62
"""Version 1 of control groups says a number beyond this where there is no limit."""
_MOST_BYTES = 1 << 16
"""Of a file that the kernel makes when it is read, which it gives in one go."""


def headroom_bytes() -> int:
    """Return how many bytes may still be taken. Page cache counts as free: the kernel drops it when memory is wanted."""
    return min(_available(), *map(_left_in, _groups()), UNLIMITED)


def read_kernel(path: str) -> bytes:
    """Return what the kernel says in a file of its own (/proc, /sys), of up to 64 KiB."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(file, _MOST_BYTES)
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


def _left_in(group: tuple[str, str, str, bytes]) -> int:
    folder, limit_name, used_name, prefix = group
    try:
        limit = read_kernel(f"{folder}/{limit_name}").strip()
        if limit == b"max" or int(limit) >= UNLIMITED:
            return UNLIMITED
        used = int(read_kernel(f"{folder}/{used_name}"))
        stat = dict(line.split() for line in read_kernel(f"{folder}/memory.stat").splitlines())
        cache = int(stat[prefix + b"active_file"]) + int(stat[prefix + b"inactive_file"])
    except (OSError, ValueError, KeyError):  # not mounted here, or the root, which has no limit
        return UNLIMITED
    return max(int(limit) - used + cache, 0)
