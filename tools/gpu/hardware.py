"""Names the hardware of the figures: without it they mean nothing."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

import torch

from gpu.install import ROOT


def hardware(directory: Path) -> dict[str, str]:
    """Return names of the GPU, its driver and link, the processor, memory, the drive and the versions."""
    return {
        **_gpu(),
        "CPU": f"{_processor()}, {os.cpu_count()} cores",
        "memory": f"{kilobytes('MemTotal') / 1e6:.0f} GB",
        "drive": _drive(directory),
        "kernel": platform.release(),
        "code": _output(["git", "-C", str(ROOT), "log", "-1", "--format=%h of %cs"]) or "not a checkout",
        "versions": f"Python {platform.python_version()}, torch {torch.__version__}, Triton {_triton()}",
    }


def no_cuda() -> str:
    """Return why nothing can be measured here; empty if it can."""
    if torch.cuda.is_available():
        return ""
    if torch.version.cuda is None:
        return f"this torch ({torch.__version__}) is built without CUDA"
    return f"torch {torch.__version__} is built for CUDA {torch.version.cuda} and finds no device or driver"


def _gpu() -> dict[str, str]:
    if not torch.cuda.is_available():
        return {"GPU": f"none: {no_cuda()}"}
    about = torch.cuda.get_device_properties(0)
    query = "driver_version,pcie.link.gen.current,pcie.link.width.current"
    told = _output(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader", "-i", "0"]).split(", ")
    driver, generation, width = told if len(told) == 3 else ("?", "?", "?")
    return {
        "GPU": f"{about.name}, {about.total_memory / 1e9:.0f} GB, {torch.cuda.device_count()} in all",
        "driver": f"{driver}, CUDA {torch.version.cuda}, PCIe generation {generation} x{width} as it idles",
    }


def _processor() -> str:
    found = re.search(r"model name\s*: (.*)", _text("/proc/cpuinfo"))
    return found[1] if found else platform.machine()


def kilobytes(name: str) -> int:
    """Return a line of /proc/meminfo."""
    found = re.search(rf"{name}:\s*(\d+) kB", _text("/proc/meminfo"))
    return int(found[1]) if found else 0


def _drive(directory: Path) -> str:
    told = _output(["findmnt", "-n", "-o", "SOURCE,FSTYPE", "-T", str(directory)]).split()
    source, filesystem = told if len(told) == 2 else ("?", "?")
    name = re.sub(r"(?<=\d)p\d+$|(?<=[a-z])\d+$", "", Path(source).name)
    model = _text(f"/sys/block/{name}/device/model").strip()
    free = shutil.disk_usage(directory).free
    return f"{source} ({model or 'no model named'}), {filesystem}, {free / 1e9:.0f} GB free at {directory}"


def _triton() -> str:
    try:
        import triton
    except ImportError:
        return "not installed"
    return str(triton.__version__)


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
