"""Debug mode: an operation whose memory somebody touched while it was in flight fails; the others are as ever."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from swapper import _C
from swapper.errors import IoError

MIB = 1 << 20
PAGE = 4096

MakeFile = Callable[..., _C.File]
MakeEngine = Callable[..., _C.Engine]
OpenGate = Callable[[], object]


@pytest.fixture
def watched(make_engine: MakeEngine, backend: str, gate_fd: int) -> _C.Engine:
    """No operation is over before the gate is open; one piece at a time, so that all but the first are to be transferred then."""
    troubles = dict.fromkeys(("short", "interrupt", "again", "delay", "reorder"), 0.1) if backend == "chaos" else {}
    return make_engine(debug=True, depth=1, piece_bytes=PAGE, chaos={"until": gate_fd, **troubles})


@pytest.mark.parametrize("direct", [None, False])
@pytest.mark.parametrize("shift", [0, 1])
def test_a_source_changed_in_flight_fails_the_write(
    watched: _C.Engine,
    arena: _C.Arena,
    make_file: MakeFile,
    open_gate: OpenGate,
    direct: bool | None,
    shift: int,
) -> None:
    file = make_file(MIB, direct=direct)
    memory = memoryview(arena.view(shift, MIB))
    ticket = watched.write(file, shift, arena.address + shift, MIB)
    memory[-1] = 1
    open_gate()
    error = ticket.exception()
    assert isinstance(error, IoError)
    assert (error.errno, error.op, error.nbytes) == (0, "write", MIB)
    assert error.detail == "debug: the memory was changed while it was being written out"
    assert watched.write(file, shift, arena.address + shift, MIB, checksum=True).wait()


@pytest.mark.parametrize("place", [0, -1])
def test_a_target_written_in_flight_fails_the_read(
    watched: _C.Engine, arena: _C.Arena, make_file: MakeFile, open_gate: OpenGate, place: int
) -> None:
    file = make_file(b"\5" * MIB)
    memory = memoryview(arena.view(0, MIB))
    ticket = watched.read(file, 0, arena.address, MIB)
    memory[place] = 7
    open_gate()
    error = ticket.exception()
    assert isinstance(error, IoError)
    assert error.detail == "debug: the memory was written to while it was being read into"
    assert watched.read(file, 0, arena.address, MIB).wait()


def test_whoever_looks_too_early_sees_the_pattern(
    watched: _C.Engine, arena: _C.Arena, make_file: MakeFile, open_gate: OpenGate
) -> None:
    content = os.urandom(MIB)
    file = make_file(content)
    memory = memoryview(arena.view(0, MIB))
    memory[:] = content
    ticket = watched.read(file, 0, arena.address, MIB)
    assert memory == b"\xa5" * MIB
    open_gate()
    assert ticket.wait()
    assert memory == content


def test_until_what_it_waits_for_is_over_the_memory_is_free(
    make_engine: MakeEngine, arena: _C.Arena, make_file: MakeFile, gate: _C.Ticket, open_gate: OpenGate
) -> None:
    """As the pager does: a frame is written out, and the next page is read into it, without Python in between."""
    watched = make_engine(debug=True, depth=1, piece_bytes=PAGE)
    file = make_file(b"\3" * MIB)
    memory = memoryview(arena.view(0, MIB))
    write = watched.write(file, 0, arena.address, MIB, after=gate)
    read = watched.read(file, 0, arena.address, MIB, after=write)
    again = watched.write(file, 0, arena.address, MIB, after=read, checksum=True)
    memory[:] = b"\4" * MIB
    open_gate()
    assert again.wait()
    assert memory == b"\4" * MIB == Path(file.path).read_bytes()
