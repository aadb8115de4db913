"""Reads what /sys and /proc say of drives, PCIe links, NUMA nodes and control groups, for `swapper doctor`."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

SECTOR_BYTES = 512
"""Unit of /sys/block/*/stat, whatever the drive's sectors (Documentation/block/stat.rst of Linux)."""
SECTORS_WRITTEN = 6
"""Field of that file."""


def read(path: Path) -> str:
    """Return the text of a file of the kernel; "" if there is none."""
    with suppress(OSError):
        return path.read_text().strip()
    return ""


def disk_of(directory: Path) -> Path | None:
    """Return the directory of /sys of the drive that has `directory`; None if it is on no drive of this machine."""
    device = directory.stat().st_dev
    entry = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    if not entry.exists():
        return None
    entry = entry.resolve()
    return entry.parent if (entry / "partition").exists() else entry


@dataclass(frozen=True)
class PcieLink:
    """A PCIe link: its lanes and GT/s of each as they are, and as both ends could.

    A device at rest may lower the rate, not the number of lanes.
    """

    lanes: int
    max_lanes: int
    rate: str
    max_rate: str

    @staticmethod
    def of(device: Path) -> PcieLink | None:
        """Return the link of a device of /sys, or of what it is behind; None if there is no PCIe."""
        for folder in (device, *device.parents):
            lanes, most = read(folder / "current_link_width"), read(folder / "max_link_width")
            if lanes.isdigit() and most.isdigit() and int(lanes):
                rates = (read(folder / name).split(" ")[0] for name in ("current_link_speed", "max_link_speed"))
                return PcieLink(int(lanes), int(most), *rates)
        return None

    @property
    def is_narrow(self) -> bool:
        return self.lanes < self.max_lanes

    def __str__(self) -> str:
        of = f" of {self.max_lanes}" if self.is_narrow else ""
        return f"PCIe with {self.lanes}{of} lanes of at most {self.max_rate} GT/s"


def written_a_day(disk: Path) -> tuple[int, int]:
    """Return the bytes that were written to a drive since the machine was started, and those of a day at that rate."""
    fields = read(disk / "stat").split()
    written = int(fields[SECTORS_WRITTEN]) * SECTOR_BYTES if len(fields) > SECTORS_WRITTEN else 0
    return written, round(written * 86400 / max(time.time() - psutil.boot_time(), 1))


def numa_nodes(system: Path = Path("/sys/devices/system/node")) -> list[int]:
    """Return the numbers of the nodes that have memory."""
    found: list[int] = []
    for part in filter(None, read(system / "has_memory").split(",")):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def numa_node_of(disk: Path) -> int | None:
    """Return the node that a drive is attached to; None if that is not known."""
    for folder in (disk / "device", *disk.resolve().parents):
        number = read(folder / "numa_node")
        if number.isdigit():  # not -1
            return int(number)
    return None
