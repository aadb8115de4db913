"""Shared by the tests of bad input: twins, the check that nothing leaks, and filesystems that refuse."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from e2e.conftest import seed, twins
from e2e.leaks import engine_of_the_process, watch_for_leaks

__all__ = ["engine_of_the_process", "seed", "twins", "watch_for_leaks"]


@pytest.fixture
def small_drive(mount: Callable[..., Path]) -> Callable[[int], Path]:
    """Makes a filesystem of so many bytes."""
    return lambda nbytes: mount("-t", "tmpfs", "-o", f"size={nbytes}", "swapper-test")
