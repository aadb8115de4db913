"""How much memory the system and this process's control groups still grant."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

UNLIMITED = 1 << 62
"""Version 1 of control groups says a number beyond this where there is no limit."""


def headroom_bytes() -> int:
    """Return how many bytes may still be taken. Page cache counts as free: the kernel drops it when memory is wanted."""
    return min(_available(), *map(_left_in, _groups()), UNLIMITED)


def _available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10  # it says kB
    return UNLIMITED


def _groups() -> Iterator[tuple[Path, str, str, str]]:
    """Yield (folder, name of the limit, of what is used, prefix in memory.stat) of each control group that this process is in."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = Path("/sys/fs/cgroup"), ("memory.max", "memory.current", "")
        elif "memory" in controllers.split(","):
            root, names = Path("/sys/fs/cgroup/memory"), ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
        else:
            continue
        folder = root / path.lstrip("/")
        while folder != root.parent:
            yield folder, *names
            folder = folder.parent


def _left_in(group: tuple[Path, str, str, str]) -> int:
    folder, limit_name, used_name, prefix = group
    try:
        limit = (folder / limit_name).read_text().strip()
        if limit == "max" or int(limit) >= UNLIMITED:
            return UNLIMITED
        used = int((folder / used_name).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        cache = int(stat[f"{prefix}active_file"]) + int(stat[f"{prefix}inactive_file"])
    except (OSError, ValueError, KeyError):  # not mounted here, or the root, which has no limit
        return UNLIMITED
    return max(int(limit) - used + cache, 0)
