"""For all tests: processes of their own, a small drive, and one thread for torch, here and in the processes that tests start.

The models are tiny, the machines of CI are small, and threads that wait for each other by spinning make everything slow.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ["XDG_CONFIG_HOME"] = "/nonexistent"  # what somebody tuned on this machine is not under test
if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
    sys.dont_write_bytecode = False  # each of many processes would compile all of swapper, and the tests
if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # a shell that starts this in the background has it so, and what tests start
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of tests that are marked `large_table`, leave a quarter of the cases where everything is run: see tools/test."""
    if "SWAPPER_TEST_SAMPLE" not in os.environ or "SWAPPER_TEST_ALL" in os.environ:
        return
    kept: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    seen: set[tuple[object, ...]] = set()
    for item in items:
        test = (item.path, getattr(item, "originalname", item.name))
        in_sample = item.get_closest_marker("large_table") is None or zlib.crc32(item.name.encode()) % 4 == 0
        (kept if in_sample or test not in seen else left_out).append(item)
        seen.add(test)
    items[:] = kept
    config.hook.pytest_deselected(items=left_out)


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
        return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)

    return run


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Mounts something at a new directory; skips where that is not permitted."""
    mounted: list[Path] = []

    def do(*options: str) -> Path:
        point = tmp_path / f"mounted-{len(mounted)}"
        point.mkdir()
        try:
            done = subprocess.run(["mount", *options, str(point)], capture_output=True, text=True, check=False)
        except FileNotFoundError:
            pytest.skip("there is no mount command here")
        if done.returncode != 0:
            pytest.skip(f"mounting is not permitted here: {done.stderr.strip()}")
        mounted.append(point)
        return point

    yield do
    for point in reversed(mounted):
        subprocess.run(["umount", "--lazy", str(point)], check=True)  # lazily: a failed test keeps files open


@pytest.fixture
def small_tmpfs(mount: Callable[..., Path]) -> Path:
    """A filesystem of 4 MiB; skips where mounting is not permitted."""
    return mount("-t", "tmpfs", "-o", "size=4m", "swapper-test")
