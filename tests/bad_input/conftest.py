"""What the tests of bad input share: twins, the check that nothing leaks, and filesystems that refuse."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from e2e.conftest import seed, twins
from e2e.leaks import watch_for_leaks

__all__ = ["seed", "twins", "watch_for_leaks"]


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
        subprocess.run(["umount", str(point)], check=True)


@pytest.fixture
def small_drive(mount: Callable[..., Path]) -> Callable[[int], Path]:
    """Makes a filesystem of so many bytes."""
    return lambda nbytes: mount("-t", "tmpfs", "-o", f"size={nbytes}", "swapper-test")
