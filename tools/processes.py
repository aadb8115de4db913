"""Runs the processes of a benchmark: in the project's environment, and under tools/capped; counts the bytes of its drives.

The tools are scripts in this folder, so they import this module by its name alone.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def enter_environment() -> None:
    """Run this script again in the project's .venv, which tools/setup makes, unless it runs there. Raises SystemExit."""
    if Path(sys.prefix).resolve() == (ROOT / ".venv").resolve():
        return
    if subprocess.run([ROOT / "tools" / "setup"]).returncode != 0:
        raise SystemExit(1)
    python = str(ROOT / ".venv" / "bin" / "python")
    os.execv(python, [python, *sys.argv])


PEERS_PYTHON = ROOT / ".venv-peers" / "bin" / "python"
"""Of the environment with DeepSpeed, which `tools/setup peers` makes."""


def capped(limits: Mapping[str, str | None], directories: Sequence[Path], command: Sequence[str]) -> list[str]:
    """Return `command` under tools/capped, if there is a limit; `limits` are capped's options: "--read": "500MB"."""
    words = [word for name, size in limits.items() if size for word in (name, size)]
    if not words:
        return list(command)
    words += [word for directory in directories for word in ("--directory", str(directory))]
    return [str(ROOT / "tools" / "capped"), *words, "--", *command]


def run_process(
    command: Sequence[str],
    figures: Path,
    limits: Mapping[str, str | None],
    directories: Sequence[Path],
    environment: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Run `command` under `limits`, as `capped` does, and return what it writes to `figures` as JSON.

    Under limits the result has "capped" too: the figures of tools/capped. Raises SystemExit with the code of a failure.
    """
    counts = figures.with_suffix(".capped")
    options = {**limits, "--json": str(counts)} if any(limits.values()) else {}
    child = subprocess.Popen(capped(options, directories, command), stdin=subprocess.DEVNULL, env=environment)
    signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    try:
        code = child.wait()
    except KeyboardInterrupt:  # the terminal sent it to the child too, which cleans up
        child.wait()
        raise
    if code != 0:
        raise SystemExit(code)
    answer: dict[str, Any] = json.loads(figures.read_text())
    if counts.exists():
        answer["capped"] = json.loads(counts.read_text())
    return answer


def group_bytes() -> tuple[int, int] | None:
    """Return the bytes (read, written) by our control group on its devices so far; None if this is not under a cap."""
    counters = os.environ.get("CAPPED_IO_COUNTERS")
    if counters is None:
        return None
    devices = os.environ["CAPPED_DEVICE"].split(",")
    moved = dict.fromkeys(("rbytes", "Read", "wbytes", "Write"), 0)  # the words of control groups v2 and v1
    for line in Path(counters).read_text().splitlines():
        device, *words = line.split()
        pairs = [word.split("=") for word in words if "=" in word] or [words]
        for pair in pairs if device in devices else ():
            if len(pair) == 2 and pair[0] in moved:
                moved[pair[0]] += int(pair[1])
    return moved["rbytes"] + moved["Read"], moved["wbytes"] + moved["Write"]


def device_bytes(directories: Sequence[Path]) -> tuple[int, int]:
    """Return `group_bytes`, or without a cap the bytes (read, written) of the whole drives so far."""
    if (moved := group_bytes()) is not None:
        return moved
    read = written = 0
    devices = {path.stat().st_dev for path in directories}
    numbers = {(str(os.major(device)), str(os.minor(device))) for device in devices}
    for line in Path("/proc/diskstats").read_text().splitlines():
        major, minor, _, *counts = line.split()
        if (major, minor) in numbers:
            read, written = read + int(counts[2]) * 512, written + int(counts[6]) * 512
    return read, written
