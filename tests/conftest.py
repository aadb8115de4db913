"""For all tests: processes of their own, a small drive, and one thread for torch, here and in the processes that tests start.

The models are tiny, the machines of CI are small, and threads that wait for each other by spinning make everything slow.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # a shell that starts this in the background has it so, and what tests start
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is None:
        return
    import torch

    if not torch.cuda.is_available():
        built = (
            "this build of torch is without CUDA" if torch.version.cuda is None else "torch finds no device or driver"
        )
        pytest.skip(f"needs a CUDA device: {built}")


@pytest.fixture
def run_python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a script in a process of its own: for what a test must not do to pytest's."""

    def run(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    return run


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 4 MiB; skips where mounting is not permitted."""
    mount_point = tmp_path / "small"
    mount_point.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "swapper-test", str(mount_point)]
    try:
        mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("no mount command here")
    if mounted.returncode != 0:
        pytest.skip(f"mounting a tmpfs is not permitted here: {mounted.stderr.strip()}")
    yield mount_point
    subprocess.run(["umount", "--lazy", str(mount_point)], check=True)  # lazily: a failed test keeps files open
