"""Memory of a transfer stays until the transfer is over, whatever becomes of its owner.

Each test drops everything that it has while a read is certain to be in flight (behind `gate`), and looks whether the memory is
still there: of an arena by the process's map of addresses, of any other by a weak reference to its owner.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest

from swapper import _C
from swapper.errors import ConfigError, IoError
from swapper.io.engines import all_over, wait_for_all

MIB = 1 << 20

MakeFile = Callable[..., _C.File]
OpenGate = Callable[[], object]


@pytest.fixture
def backend() -> str:
    return "auto"  # nothing here is a backend's affair


class Memory:
    """Memory that is freed with its owner, as a tensor's is."""

    def __init__(self, nbytes: int) -> None:
        self.bytes = (ctypes.c_char * nbytes)()
        self.address = ctypes.addressof(self.bytes)


def is_mapped(address: int) -> bool:
    ranges = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
    return any(int(begin, 16) <= address < int(end, 16) for begin, end in ranges)


def test_memory_outlives_a_ticket_that_is_dropped(
    engine: _C.Engine, make_file: MakeFile, gate: _C.Ticket, open_gate: OpenGate
) -> None:
    file = make_file(b"\1" * MIB)
    memory = Memory(MIB)
    owner = weakref.ref(memory)
    engine.read(file, 0, memory.address, MIB, keep=memory, after=gate)
    del memory
    kept = owner()
    assert kept is not None
    open_gate()
    engine.drain()
    assert kept.bytes.raw == b"\1" * MIB
    del kept
    assert owner() is None, "and goes when the transfer is over"


def test_memory_of_a_forgotten_transfer_goes_at_the_next_submission(
    engine: _C.Engine, arena: _C.Arena, make_file: MakeFile, gate: _C.Ticket, open_gate: OpenGate
) -> None:
    file = make_file(b"\1" * MIB)
    memories = [Memory(MIB) for _ in range(3)]
    owners = [weakref.ref(memory) for memory in memories]
    ticket = gate
    for memory in memories:  # one behind the other: when the last is over, so are all
        ticket = engine.read(file, 0, memory.address, MIB, keep=memory, after=ticket)
    last = engine.read(file, 0, arena.address, MIB, after=ticket)
    del memory, memories, ticket
    engine.read(file, 0, arena.address, MIB).wait()
    assert all(owner() is not None for owner in owners)
    open_gate()
    last.wait()
    engine.read(file, 0, arena.address, MIB).wait()
    assert [owner() for owner in owners] == [None] * 3


@pytest.mark.parametrize("look", ["wait", "exception", "done"])
def test_a_ticket_that_is_seen_to_be_done_lets_go_of_the_memory(
    engine: _C.Engine, make_file: MakeFile, look: str
) -> None:
    file = make_file(b"\1" * MIB)
    memory = Memory(MIB)
    owner = weakref.ref(memory)
    ticket = engine.read(file, 0, memory.address, MIB, keep=memory)
    del memory
    if look == "done":
        while not ticket.done:
            pass
    else:
        getattr(ticket, look)()
    assert owner() is None
    assert ticket.nbytes == MIB, "the ticket itself is still of use"


def test_a_failed_transfer_lets_go_of_the_memory_too(engine: _C.Engine, make_file: MakeFile) -> None:
    memory = Memory(MIB)
    owner = weakref.ref(memory)
    ticket = engine.read(make_file(b"short"), 0, memory.address, MIB, keep=memory)
    del memory
    with pytest.raises(IoError):
        ticket.wait()
    assert owner() is None


def test_an_arena_outlives_a_transfer_without_being_told(
    make_engine: Callable[..., _C.Engine], make_file: MakeFile, gate: _C.Ticket, open_gate: OpenGate
) -> None:
    engine = make_engine()  # which has not registered the arena
    file = make_file(b"\1" * MIB)
    arena = _C.Arena(MIB, lock=False, huge_pages=False)
    address = arena.address
    engine.read(file, 0, address, MIB, after=gate)
    arena.close()
    del arena
    assert is_mapped(address)
    open_gate()
    engine.drain()
    engine.close()  # the I/O thread has released the last operation
    assert not is_mapped(address)


def test_a_window_outlives_a_transfer_without_being_told(
    make_engine: Callable[..., _C.Engine], make_file: MakeFile, gate: _C.Ticket, open_gate: OpenGate
) -> None:
    engine = make_engine()
    file = make_file(b"\1" * MIB)
    arena = _C.Arena(MIB, lock=False, huge_pages=False)
    window = arena.window(MIB)
    window.map(0, 0, MIB)
    address = window.address
    ticket = engine.read(file, 0, address, MIB, after=gate)
    view = arena.view(0, MIB)
    del window, arena
    assert is_mapped(address)
    open_gate()
    ticket.wait()
    engine.close()
    assert not is_mapped(address)
    assert bytes(memoryview(view)) == b"\1" * MIB


def test_memory_without_an_owner_is_refused(engine: _C.Engine, make_file: MakeFile) -> None:
    file = make_file(b"\1" * MIB)
    memory = Memory(MIB)
    for submit in (engine.read, engine.write):
        with pytest.raises(ConfigError, match="keep="):
            submit(file, 0, memory.address, MIB)
    engine.read(file, 0, 0, 0).wait()  # of nothing, nobody is the owner
    assert engine.in_flight == 0


def test_who_keeps_memory_may_be_anything_that_python_runs_when_it_goes(
    engine: _C.Engine, arena: _C.Arena, make_file: MakeFile, gate: _C.Ticket, open_gate: OpenGate
) -> None:
    """The end of one may submit the next, in the middle of a submission."""
    file = make_file(b"\1" * MIB)
    submitted = []

    class Owner(Memory):
        def __del__(self) -> None:
            submitted.append(engine.read(file, 0, arena.address, MIB))

    for _ in range(10):
        memory = Owner(MIB)
        engine.read(file, 0, memory.address, MIB, keep=memory, after=gate)
    del memory
    assert not submitted
    open_gate()
    engine.drain()
    assert len(submitted) == 10
    wait_for_all(submitted)


def test_transfers_that_belong_together_are_over_when_one_fails(
    engine: _C.Engine, arena: _C.Arena, make_file: MakeFile, gate: _C.Ticket, open_gate_later: OpenGate
) -> None:
    file, short = make_file(os.urandom(MIB)), make_file(b"short")
    with pytest.raises(IoError, match="unexpected end of file"), all_over() as tickets:
        tickets.append(engine.read(short, 0, arena.address, MIB))
        tickets.append(engine.read(file, 0, arena.address + MIB, MIB, after=gate))
        open_gate_later()
    assert tickets[1].done
    assert bytes(memoryview(arena.view(MIB, MIB))) == Path(file.path).read_bytes()


def test_transfers_that_belong_together_are_over_when_they_are_not_all_begun(
    engine: _C.Engine, arena: _C.Arena, make_file: MakeFile, gate: _C.Ticket, open_gate_later: OpenGate
) -> None:
    file = make_file(b"\1" * MIB)
    with pytest.raises(KeyboardInterrupt), all_over() as tickets:
        tickets.append(engine.read(file, 0, arena.address, MIB, after=gate))
        open_gate_later()
        raise KeyboardInterrupt
    assert tickets[0].done
    assert bytes(memoryview(arena.view(0, MIB))) == b"\1" * MIB
