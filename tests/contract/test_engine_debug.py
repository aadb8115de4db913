"""Debug mode: an operation whose memory somebody touched while it was in flight fails; the others are as ever."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from swapper import _C
from swapper.errors import IoError

MIB = 1 << 20
PAGE = 4096

MakeFile = Callable[..., _C.File]


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[_C.Ticket]:
    """Something that engines wait for, and that is not done before the test says so by leaving it alone long enough."""
    arena = _C.Arena(64 * MIB, lock=False, huge_pages=False)
    path = tmp_path / "slow"
    with path.open("wb") as stream:
        stream.truncate(arena.nbytes)
    file = _C.File(path, direct=False)
    engine = _C.Engine(backend="threads", depth=1, piece_bytes=PAGE)
    yield engine.read(file, 0, arena.address, arena.nbytes)
    engine.close()


@pytest.fixture
def watched(make_engine: Callable[..., _C.Engine]) -> _C.Engine:
    """One piece at a time, so that there is time to interfere."""
    return make_engine(debug=True, depth=1, piece_bytes=PAGE)


@pytest.mark.parametrize("direct", [None, False])
@pytest.mark.parametrize("shift", [0, 1])
def test_a_source_changed_in_flight_fails_the_write(
    watched: _C.Engine, arena: _C.Arena, make_file: MakeFile, direct: bool | None, shift: int
) -> None:
    file = make_file(16 * MIB, direct=direct)
    memory = memoryview(arena.view(shift, 16 * MIB))
    ticket = watched.write(file, shift, arena.address + shift, 16 * MIB)
    memory[-1] = 1
    assert not ticket.done, "the write was over too early for this test to mean anything"
    error = ticket.exception()
    assert isinstance(error, IoError)
    assert (error.errno, error.op, error.nbytes) == (0, "write", 16 * MIB)
    assert error.detail == "debug: the memory was changed while it was being written out"
    assert watched.write(file, shift, arena.address + shift, 16 * MIB, checksum=True).wait()


@pytest.mark.parametrize("place", [0, -1])
def test_a_target_written_in_flight_fails_the_read(
    watched: _C.Engine, arena: _C.Arena, make_file: MakeFile, place: int
) -> None:
    file = make_file(b"\5" * (16 * MIB))
    memory = memoryview(arena.view(0, 16 * MIB))
    ticket = watched.read(file, 0, arena.address, 16 * MIB)
    memory[place] = 7
    assert not ticket.done, "the read was over too early for this test to mean anything"
    error = ticket.exception()
    assert isinstance(error, IoError)
    assert error.detail == "debug: the memory was written to while it was being read into"
    assert watched.read(file, 0, arena.address, 16 * MIB).wait()


def test_whoever_looks_too_early_sees_the_pattern(watched: _C.Engine, arena: _C.Arena, make_file: MakeFile) -> None:
    content = os.urandom(16 * MIB)
    file = make_file(content)
    memory = memoryview(arena.view(0, 16 * MIB))
    memory[:] = content
    ticket = watched.read(file, 0, arena.address, 16 * MIB)
    early = bytes(memory[-PAGE:])
    assert not ticket.done, "the read was over too early for this test to mean anything"
    assert early == b"\xa5" * PAGE
    assert ticket.wait()
    assert memory == content


def test_until_what_it_waits_for_is_over_the_memory_is_free(
    watched: _C.Engine, arena: _C.Arena, make_file: MakeFile, slow: _C.Ticket
) -> None:
    """As the pager does: a frame is written out, and the next page is read into it, without Python in between."""
    file = make_file(b"\3" * MIB)
    memory = memoryview(arena.view(0, MIB))
    write = watched.write(file, 0, arena.address, MIB, after=slow)
    read = watched.read(file, 0, arena.address, MIB, after=write)
    again = watched.write(file, 0, arena.address, MIB, after=read, checksum=True)
    memory[:] = b"\4" * MIB
    assert not slow.done, "the wait was over too early for this test to mean anything"
    assert again.wait()
    assert memory == b"\4" * MIB == Path(file.path).read_bytes()
