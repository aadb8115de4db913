"""Files in memory: where several threads fill absent pages at once (`csrc/io/filler.h`), and wherever that cannot be."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path

import pytest

from swapper import _C
from swapper.errors import IoError

PAGE = 4096
MIB = 1 << 20


def new_file(directory: Path, nbytes: int, name: str = "file") -> _C.File:
    file = _C.File(directory / name, create=True)
    file.truncate(nbytes)
    return file


def put(engine: _C.Engine, arena: _C.Arena, file: _C.File, offset: int, data: bytes, shift: int = 0) -> None:
    memoryview(arena.view(shift, len(data)))[:] = data
    engine.write(file, offset, arena.address + shift, len(data)).wait()


@pytest.mark.parametrize(
    ("offset", "nbytes", "shift"),
    [
        (0, MIB, 0),
        (0, MIB, 17),
        (PAGE, MIB + 1, 0),
        (77, MIB, 0),
        (3 * PAGE, 65 * 1024, 512),
        (0, 100, 1),
        (MIB - 1, 2, 0),
    ],
)
def test_any_place_in_a_new_file(
    engine: _C.Engine, arena: _C.Arena, small_tmpfs: Path, offset: int, nbytes: int, shift: int
) -> None:
    file = new_file(small_tmpfs, 2 * MIB)
    data = random.randbytes(nbytes)
    put(engine, arena, file, offset, data, shift)
    assert Path(file.path).read_bytes() == bytes(offset) + data + bytes(2 * MIB - offset - nbytes)


def test_pages_that_are_there_are_written_over(engine: _C.Engine, arena: _C.Arena, small_tmpfs: Path) -> None:
    file = new_file(small_tmpfs, 2 * MIB)
    put(engine, arena, file, MIB // 2, random.randbytes(100_000))
    first, second = random.randbytes(2 * MIB), random.randbytes(2 * MIB)
    put(engine, arena, file, 0, first)
    assert Path(file.path).read_bytes() == first
    put(engine, arena, file, 0, second)
    assert Path(file.path).read_bytes() == second


def test_space_that_was_allocated_is_written(engine: _C.Engine, arena: _C.Arena, small_tmpfs: Path) -> None:
    file = _C.File(small_tmpfs / "file", create=True)
    file.allocate(2 * MIB)
    data = random.randbytes(2 * MIB)
    put(engine, arena, file, 0, data)
    assert Path(file.path).read_bytes() == data


def test_a_file_that_is_too_short_grows(engine: _C.Engine, arena: _C.Arena, small_tmpfs: Path) -> None:
    file = new_file(small_tmpfs, MIB + 100)
    data = random.randbytes(3 * MIB)
    put(engine, arena, file, 0, data)
    assert Path(file.path).read_bytes() == data


def test_a_full_filesystem_fails_the_write(engine: _C.Engine, arena: _C.Arena, small_tmpfs: Path) -> None:
    """The file can be made longer than there is room for; what fits in is there, and the rest is an error, not silence."""
    room = os.statvfs(small_tmpfs).f_bavail * PAGE
    file = new_file(small_tmpfs, room + MIB)
    data = random.randbytes(room + MIB)
    memoryview(arena.view(0, len(data)))[:] = data
    ticket = engine.write(file, 0, arena.address, len(data))
    with pytest.raises(IoError) as caught:
        ticket.wait()
    assert caught.value.errno == errno.ENOSPC


def test_memory_that_cannot_be_read_fails_the_write(engine: _C.Engine, small_tmpfs: Path) -> None:
    file = new_file(small_tmpfs, MIB)
    ticket = engine.write(file, 0, PAGE, MIB, keep="nothing: there is no memory")
    with pytest.raises(IoError) as caught:
        ticket.wait()
    assert caught.value.errno == errno.EFAULT


def test_many_pieces_of_many_files_at_once(engine: _C.Engine, arena: _C.Arena, small_tmpfs: Path) -> None:
    parts = [random.randbytes(MIB // 4) for _ in range(8)]
    files = [new_file(small_tmpfs, MIB // 2, f"file{n}") for n in range(4)]
    for n, part in enumerate(parts):
        memoryview(arena.view(n * len(part), len(part)))[:] = part
    tickets = [
        engine.write(file, half * len(parts[0]), arena.address + (2 * n + half) * len(parts[0]), len(parts[0]))
        for n, file in enumerate(files)
        for half in (1, 0)
    ]
    for ticket in tickets:
        ticket.wait()
    for n, file in enumerate(files):
        assert Path(file.path).read_bytes() == parts[2 * n] + parts[2 * n + 1]
