"""For the tests of save, load, export and torch.distributed.checkpoint."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.utils.serialization import config

os.environ["TORCH_SERIALIZATION_DEBUG"] = "1"  # torch then checks that calculated offsets are the real ones


@pytest.fixture(autouse=True)
def settings_as_before() -> Iterator[None]:
    with config.patch({}):
        yield


@pytest.fixture(params=["drive", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A directory on a drive and one in memory."""
    if request.param == "drive":
        yield tmp_path
        return
    directory = Path("/dev/shm") / f"swapper-test-{os.getpid()}"
    if not Path("/dev/shm").is_dir():
        pytest.skip("there is no /dev/shm here")
    directory.mkdir()
    try:
        yield directory
    finally:
        for path in directory.iterdir():
            path.unlink()
        directory.rmdir()
