"""An arena's memory can be taken while its first part is in use."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest

from swapper import _C
from swapper.errors import IoError

MIB = 1 << 20


def descriptors() -> set[int]:
    entries = list(Path("/proc/self/fd").iterdir())
    return {int(entry.name) for entry in entries if "memfd:swapper-arena" in os.path.realpath(entry)}


@pytest.mark.parametrize("huge_pages", [True, False])
@pytest.mark.parametrize("lock", [True, False])
def test_the_head_is_there_at_once_and_the_rest_in_time(lock: bool, huge_pages: bool) -> None:
    nbytes = 50 * MIB + 4096
    others = descriptors()
    arena = _C.Arena(nbytes, head_bytes=3 * MIB, lock=lock, huge_pages=huge_pages)
    assert 3 * MIB <= arena.populated_bytes <= 4 * MIB
    arena.prefault_rest()
    arena.wait_populated(20 * MIB)
    assert arena.populated_bytes >= 20 * MIB
    arena.wait_populated(nbytes)
    assert arena.populated_bytes == nbytes
    assert not any(memoryview(arena.view(0, nbytes)).tobytes())
    if arena.locked:
        (descriptor,) = descriptors() - others
        assert os.fstat(descriptor).st_blocks * 512 == nbytes
    if not huge_pages:
        assert arena.huge_bytes == 0
    arena.close()


def test_what_is_not_taken_yet_can_be_read_into(tmp_path: Path) -> None:
    content = os.urandom(6 * MIB)
    path = tmp_path / "file"
    path.write_bytes(content)
    arena = _C.Arena(16 * MIB, head_bytes=2 * MIB)
    engine = _C.Engine(arena=arena, piece_bytes=MIB)
    engine.read(_C.File(str(path)), 0, arena.address + MIB, 6 * MIB).wait()
    arena.prefault_rest()
    arena.wait_populated(16 * MIB)
    assert memoryview(arena.view(MIB, 6 * MIB)) == content
    engine.close()


def test_memory_that_the_system_refuses_is_named_with_a_remedy() -> None:
    others = descriptors()
    arena = _C.Arena(40 * MIB, head_bytes=2 * MIB)
    (descriptor,) = descriptors() - others
    os.ftruncate(descriptor, 8 * MIB)  # from here on the kernel has no memory for it
    arena.prefault_rest()
    with pytest.raises(IoError, match=r"(?s)populate memory.*lower the budget \(host_memory=\)"):
        arena.wait_populated(40 * MIB)
    arena.wait_populated(2 * MIB)
    assert arena.populated_bytes < 40 * MIB


def test_an_arena_that_is_being_taken_can_be_let_go_and_forked() -> None:
    for _ in range(4):
        arena = _C.Arena(256 * MIB, head_bytes=2 * MIB)
        arena.prefault_rest()
        child = os.fork()
        if child == 0:
            del arena  # its threads do not exist here
            gc.collect()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        arena.close()
