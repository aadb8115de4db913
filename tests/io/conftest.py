"""What the tests of the handles share: a handle and a path."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from swapper import AioHandle


@pytest.fixture(params=["uring", "threads"])
def handle(request: pytest.FixtureRequest) -> Iterator[AioHandle]:
    handle = AioHandle(block_size=64 << 10, queue_depth=8, backend=request.param)
    yield handle
    handle.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "file"
