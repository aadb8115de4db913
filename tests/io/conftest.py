"""Shared by the tests of the handles: a handle, a path, and a stand-in for NVIDIA's libcufile."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from e2e import processes

from swapper import AioHandle


@pytest.fixture
def run_python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """As in all tests, with torch imported already."""
    return lambda script, *arguments: processes.run_python("-c", textwrap.dedent(script), *arguments)


@pytest.fixture(params=["uring", "threads"])
def handle(request: pytest.FixtureRequest) -> Iterator[AioHandle]:
    handle = AioHandle(block_size=64 << 10, queue_depth=8, backend=request.param)
    yield handle
    handle.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "file"


@pytest.fixture(scope="session")
def built_stand_in(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler here, with which to build what stands in for libcufile")
    library = tmp_path_factory.mktemp("cufile") / "libcufile.so"
    source = Path(__file__).parent / "cufile_stand_in.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-pthread", "-o", library, source], check=True, capture_output=True)
    return ctypes.CDLL(str(library), use_errno=True)


@pytest.fixture
def library(built_stand_in: ctypes.CDLL) -> Iterator[ctypes.CDLL]:
    """What stands in for libcufile, as it is at first. Whatever a test registers it must take back."""
    built_stand_in.set_mode(0)
    yield built_stand_in
    built_stand_in.set_mode(0)
    assert (built_stand_in.registered_buffers(), built_stand_in.registered_files()) == (0, 0), "left registered"
