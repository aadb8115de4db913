"""What the tests of the handles share: a handle, a path, a small drive, and processes of their own."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from swapper import AioHandle

RunPython = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(params=["uring", "threads"])
def handle(request: pytest.FixtureRequest) -> Iterator[AioHandle]:
    handle = AioHandle(block_size=64 << 10, queue_depth=8, backend=request.param)
    yield handle
    handle.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "file"


@pytest.fixture
def run_python() -> RunPython:
    """Runs a script in a process of its own: for what must not happen to pytest's."""

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
    subprocess.run(["umount", "--lazy", str(mount_point)], check=True)
