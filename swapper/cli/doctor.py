"""Implements `swapper doctor`: checks which features of swapper work on this machine, and gives remedies.

What drives, PCIe links, NUMA nodes and control groups are is read from /sys and /proc.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import psutil
import torch
import typer
from rich.markup import escape
from rich.table import Table

from swapper import _C
from swapper.cli.command import make_console
from swapper.errors import SwapperError, UnsupportedError
from swapper.io.drives import find_tuning, read_record, tuning_path
from swapper.io.engines import is_in_memory, shared_engine
from swapper.io.handle.cufile import open_cufile
from swapper.options import parse_host_memory
from swapper.runtime.free_memory import group_limit
from swapper.runtime.sizes import format_bytes

GOOD, SLOW, BAD = "good", "slow", "bad"
LOCK_BYTES = 64 << 20  # tried: more than the usual limit of 8 MiB
MARKS = {GOOD: "[green]good[/green]", SLOW: "[yellow]slow[/yellow]", BAD: "[red]bad[/red]"}


@dataclass(frozen=True)
class Finding:
    """One check. `state`: good; slow (works, another way or slower); bad (swapper does not work)."""

    what: str
    state: str
    found: str
    remedy: str = ""


def doctor(
    directory: Annotated[Path, typer.Argument(help="A directory on the drive to check.")] = Path(),
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Check kernel, memory, drive and GPU, and give remedies."""
    findings = list(look(directory))
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        console, table = make_console(), Table(show_header=False)
        new_line = "\n" if console.is_terminal else " "
        for finding in findings:
            text = escape(finding.found) + (
                f"{new_line}[bold]→ {escape(finding.remedy)}[/bold]" if finding.remedy else ""
            )
            table.add_row(finding.what, MARKS[finding.state], text)
        console.print(table)
    if any(finding.state == BAD for finding in findings):
        raise typer.Exit(1)


def look(directory: Path) -> Iterator[Finding]:
    """Yield every finding. A failing check is a bad finding, and the others continue."""
    looks: list[tuple[str, Callable[[], Iterator[Finding]]]] = [
        ("Versions", _versions),
        ("Kernel calls", _backends),
        ("Locked memory", _locked_memory),
        ("Mappings", _mappings),
        ("Memory", _memory),
        ("Directory", lambda: _directory(directory)),
        ("Drive", lambda: _drive(directory)),
        ("Run", lambda: _runs(directory)),
        ("CUDA", _cuda),
        ("Peers", _peers),
    ]
    for what, act in looks:
        try:
            yield from act()
        except Exception as error:
            yield Finding(what, BAD, f"{type(error).__name__}: {error}")


def _versions() -> Iterator[Finding]:
    python = sys.version.split()[0]
    yield Finding(
        "Versions",
        GOOD,
        f"swapper {importlib.metadata.version('torch-swapper')}, torch {torch.__version__}, Python {python}, "
        f"Linux {platform.release()} on {platform.machine()}, {os.cpu_count()} processors",
    )


def _backends() -> Iterator[Finding]:
    remedies = {
        "uring": "allow io_uring: in Docker --security-opt seccomp=unconfined, or sysctl kernel.io_uring_disabled=0",
        "aio": "raise fs.aio-max-nr if other programs use all of it",
        "threads": "raise the limit on threads (ulimit -u)",
    }
    works = {}
    for name, remedy in remedies.items():
        try:
            engine = _C.Engine(backend=name)
        except SwapperError as error:
            yield Finding(f"Backend {name}", SLOW, str(error), remedy)
            continue
        works[name] = engine.reason.removeprefix(f"{name} (requested): ")
        engine.close()
    if works:
        yield Finding("Backends", GOOD, "; ".join(f"{name}: {reason}" for name, reason in works.items()))
    else:
        yield Finding("Backends", BAD, "none works", remedies["threads"])


def _locked_memory() -> Iterator[Finding]:
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    said = "no limit" if limit == resource.RLIM_INFINITY else f"limit {format_bytes(limit)}"
    arena = _C.Arena(LOCK_BYTES)
    locked, reason = arena.locked, arena.lock_reason
    arena.close()
    if locked:
        yield Finding(
            "Locked memory", GOOD, f"{format_bytes(LOCK_BYTES)} were locked; {said} for unprivileged processes"
        )
    else:
        yield Finding(
            "Locked memory",
            SLOW,
            f"{reason}; {said}",
            "ulimit -l unlimited, memlock in /etc/security/limits.conf, LimitMEMLOCK=infinity in a systemd unit, or "
            "docker --ulimit memlock=-1",
        )
    with suppress(OSError):
        pages = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled").read_text()
        chosen = pages.split("[")[-1].split("]")[0]
        if chosen in ("never", "deny"):
            advice = "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled spares some processor time"
            yield Finding("Huge pages", SLOW, f"{chosen} for shared memory", advice)
        else:
            yield Finding("Huge pages", GOOD, f"{chosen} for shared memory")


def _mappings() -> Iterator[Finding]:
    most = int(Path("/proc/sys/vm/max_map_count").read_text())
    state, remedy = (GOOD, "") if most >= 65530 else (SLOW, "sysctl vm.max_map_count=262144")
    yield Finding("Mappings", state, f"{most} for a process", remedy)


def _memory() -> Iterator[Finding]:
    free = parse_host_memory("auto")
    state, remedy = (GOOD, "") if free >= 512 << 20 else (SLOW, "free memory, or raise the control group's limit")
    of = f"{format_bytes(psutil.virtual_memory().total)} in all"
    if (limit := group_limit()) is not None:
        of = f"a control group allows {format_bytes(limit)}"
    yield Finding("Memory", state, f'{of}; host_memory="auto" would be {format_bytes(free)}', remedy)
    if len(nodes := numa_nodes()) > 1:
        text = f"{len(nodes)} NUMA nodes: memory of another one than the GPU's and the drive's is slower"
        advice = "numactl --cpunodebind=N --membind=N, N being the node of the drive (below) or of the GPU"
        yield Finding("NUMA", SLOW, text, advice)


def _directory(directory: Path) -> Iterator[Finding]:
    if not directory.is_dir() or not os.access(directory, os.W_OK | os.X_OK):
        yield Finding(
            "Directory", BAD, f"{directory} is not a directory that can be written", "make it, or name another"
        )
        return
    kind = filesystem_of(directory)
    free = format_bytes(shutil.disk_usage(directory).free)
    if kind == "overlay":
        text = f"{directory.resolve()} is a container's own layer (overlayfs), {free} free"
        yield Finding("Directory", SLOW, text, "mount a directory of the drive: docker run -v /mnt/nvme/runs:/runs")
    elif is_in_memory(directory / "file"):
        yield Finding("Directory", SLOW, f"{directory.resolve()} is memory ({kind})", "name a directory on a drive")
    else:
        yield Finding("Directory", GOOD, f"{directory.resolve()}, {kind or 'unknown filesystem'}, {free} free")
    with tempfile.TemporaryDirectory(prefix="swapper-doctor-", dir=directory) as scratch:
        file = _C.File(Path(scratch) / "file", create=True)
        file.allocate(1 << 20)
        if file.direct:
            text = f"offsets in multiples of {file.alignment}, addresses of {file.memory_alignment}"
            yield Finding("Direct I/O", GOOD, f"{file.reason}; {text}")
        else:
            remedy = "use ext4, xfs or btrfs on a local drive; everything goes through the page cache here"
            yield Finding("Direct I/O", SLOW, file.reason, remedy)
        file.close()


def filesystem_of(directory: Path) -> str:
    """Return the type of the filesystem of `directory`: "ext4", "tmpfs"; "" if unknown."""
    resolved = directory.resolve()
    mounts = [m for m in psutil.disk_partitions(all=True) if resolved.is_relative_to(m.mountpoint)]
    return max(mounts, key=lambda m: len(m.mountpoint)).fstype if mounts else ""


def _drive(directory: Path) -> Iterator[Finding]:
    if not directory.is_dir():
        return  # which is said of the directory
    disk = disk_of(directory)
    if disk is None:
        found = "the filesystem is on no drive of this machine (network, memory, or stacked)"
        yield Finding("Drive", SLOW, found, "name a directory on a drive of this machine")
        return

    def said(name: str) -> str:
        return read_text(disk / name) or "?"

    text = (
        f"{' '.join((disk.name, said('device/model').replace('?', ''))).strip()}, sectors of {said('queue/logical_block_size')}, "
        f"scheduler {said('queue/scheduler').split('[')[-1].split(']')[0]}, {said('queue/nr_requests')} requests"
    )
    if said("queue/rotational") == "1":
        text += ", which says it is rotational, as virtual drives do; swapper is for NVMe"
    if (node := numa_node_of(disk)) is not None:
        text += f", at NUMA node {node}"
    yield _with_link("Drive", text, disk / "device")
    written, a_day = written_a_day(disk)
    text = f"{format_bytes(written)} were written since the machine was started, {format_bytes(a_day)} a day"
    yield Finding("Endurance", GOOD, f"{text}: compare with the TBW of its data sheet; print(plan) has a step's bytes")
    tuning = find_tuning(directory)
    if tuning is None:
        yield Finding("Tuning", GOOD, f"none stored: the defaults are in force (swapper tune {directory})")
    else:
        engine = shared_engine(directory / "file")
        in_force = f"in force: {format_bytes(engine.piece_bytes)} x {engine.depth} by {engine.backend}"
        yield Finding("Tuning", GOOD, f"kept in {tuning_path()}; {in_force}")


def _with_link(what: str, text: str, device: Path) -> Finding:
    """Return the finding of a device, with its PCIe link if it has one."""
    link = PcieLink.of(device.resolve())
    if link is None:
        return Finding(what, GOOD, text)
    remedy = "put it into a slot with all its lanes, or see the BIOS's bifurcation" if link.is_narrow else ""
    return Finding(what, SLOW if link.is_narrow else GOOD, f"{text}, {link}", remedy)


def _runs(directory: Path) -> Iterator[Finding]:
    """Check runs over several drives that have a part here."""
    for path in sorted(directory.resolve().glob("rank-*-of-*")):
        record = read_record(path)
        if record is None:
            continue
        weights, directories = record.drives.weights, record.drives.directories
        parts = [f"{part} ({weight / sum(weights):.0%})" for part, weight in zip(directories, weights, strict=True)]
        away = [str(part) for part in directories if not part.is_dir()]
        text = f"{path.name} lies over {len(parts)} drives: {', '.join(parts)}"
        if away:
            yield Finding("Run", BAD, f"{text}; {', '.join(away)} is missing", "mount that drive before you resume it")
        else:
            yield Finding("Run", GOOD, text)


def _cuda() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        built = "this build of torch is without it" if torch.version.cuda is None else "no device or driver is found"
        yield Finding("CUDA", GOOD, f"none: {built}. Tensors on the CPU work")
        return
    found = torch.cuda.get_device_properties(0)
    parts = [getattr(found, f"pci_{name}_id", 0) for name in ("domain", "bus", "device")]  # newer versions of torch
    address = "{:04x}:{:02x}:{:02x}.0".format(*parts)
    text = f"{found.name}, {format_bytes(found.total_memory)}, CUDA {torch.version.cuda}"
    yield _with_link("CUDA", text, Path("/sys/bus/pci/devices") / address)
    try:
        open_cufile()
        yield Finding("GPUDirect Storage", GOOD, "cuFile opens")
    except UnsupportedError as error:
        text = f"{error}. CUDA tensors go through host memory"
        yield Finding(
            "GPUDirect Storage", SLOW, text, "install NVIDIA's libcufile and, for direct transfers, nvidia-fs"
        )


def _peers() -> Iterator[Finding]:
    for name, package in (("DeepSpeed", "deepspeed"), ("transformers", "transformers")):
        with suppress(importlib.metadata.PackageNotFoundError):
            yield Finding(name, GOOD, importlib.metadata.version(package))
    if shutil.which("fio"):
        yield Finding("fio", GOOD, "installed; swapper bench compares with it")


# --- what the system says of a machine --------------------------------------------------------------------------------

SECTOR_BYTES = 512
"""Unit of /sys/block/*/stat, whatever the drive's sectors (Documentation/block/stat.rst of Linux)."""
SECTORS_WRITTEN = 6
"""Field of that file."""


def read_text(path: Path) -> str:
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
            lanes, most = read_text(folder / "current_link_width"), read_text(folder / "max_link_width")
            if lanes.isdigit() and most.isdigit() and int(lanes):
                rates = (read_text(folder / name).split(" ")[0] for name in ("current_link_speed", "max_link_speed"))
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
    fields = read_text(disk / "stat").split()
    written = int(fields[SECTORS_WRITTEN]) * SECTOR_BYTES if len(fields) > SECTORS_WRITTEN else 0
    return written, round(written * 86400 / max(time.time() - psutil.boot_time(), 1))


def numa_nodes(system: Path = Path("/sys/devices/system/node")) -> list[int]:
    """Return the numbers of the nodes that have memory."""
    found: list[int] = []
    for part in filter(None, read_text(system / "has_memory").split(",")):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def numa_node_of(disk: Path) -> int | None:
    """Return the node that a drive is attached to; None if that is not known."""
    for folder in (disk / "device", *disk.resolve().parents):
        number = read_text(folder / "numa_node")
        if number.isdigit():  # not -1
            return int(number)
    return None
