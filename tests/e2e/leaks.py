"""Finds swapper's resources in a process: open files, threads, and memory. After each test there are none left."""

from __future__ import annotations

import contextlib
import gc
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from swapper.io.engines import open_for, shared_engine


def open_files() -> dict[Path, str]:
    """Return what each file descriptor of this process refers to."""
    found = {}
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the listing's own descriptor
            found[link] = str(link.readlink())
    return found


_ENDING, _KERNELS = 0x4, 0x10  # PF_EXITING and PF_IO_WORKER, of what /proc/PID/stat has as flags


def live_threads() -> list[str]:
    """Return the names of this process's threads.

    Not those that are ending: one that was joined is listed a moment longer. Nor the kernel's workers of io_uring, which end when
    they are idle, and until they first run have the name of the thread that they work for.
    """
    names = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            name, _, fields = (task / "stat").read_text().partition("(")[2].rpartition(") ")
            if not int(fields.split(" ")[6]) & (_ENDING | _KERNELS):
                names.append(name)
    return names


def held_by_swapper() -> list[str]:
    """Return the swap files, rings, threads and mappings that this process has."""
    found = []
    for target in open_files().values():
        endings = (".swap", ".swap (deleted)", "/lock", ".partial")
        if target.endswith(endings) or "io_uring" in target or "swapper-arena" in target:
            found.append(f"file {target}")
    found += [f"thread {name}" for name in live_threads() if name.startswith("swapper-")]
    mappings = Path("/proc/self/maps").read_bytes()
    if b"swapper-arena" in mappings:
        found += [f"mapping {line!r}" for line in mappings.splitlines() if b"swapper-arena" in line]
    return found


def held_since(before: list[str]) -> list[str]:
    """Return what this process has of swapper's beyond `before`: one more of a kind counts, as of threads of one name."""
    return sorted((Counter(held_by_swapper()) - Counter(before)).elements())


@pytest.fixture(scope="session", autouse=True)
def engine_of_the_process(tmp_path_factory: pytest.TempPathFactory) -> None:
    """`swapper.checkpoint` keeps one engine, and its memory for addresses that the drive cannot use: no leak of a test."""
    path = tmp_path_factory.mktemp("any") / "file"
    path.write_bytes(bytes(8192))
    unaligned = torch.empty(8193, dtype=torch.uint8, device="cpu")[1:]
    shared_engine(path).read(open_for(path, read_only=True), 0, unaligned.data_ptr(), 8192, keep=unaligned).wait()


@pytest.fixture(autouse=True)
def watch_for_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails the test if anything of swapper's is left when everything of the test's own is gone."""
    failed_before, held_before = request.session.testsfailed, held_by_swapper()
    gc.freeze()  # what is there now need not be looked through after each test
    yield
    if request.session.testsfailed > failed_before:
        return  # its traceback keeps what it had
    gc.collect()
    left = held_since(held_before)
    assert not left, left
