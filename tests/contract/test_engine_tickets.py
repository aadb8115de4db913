"""Tickets of every backend: calling off, waiting without raising, and telling an event loop."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from swapper import _C
from swapper.errors import IoError

MIB = 1 << 20
PAGE = 4096

MakeFile = Callable[..., _C.File]
OpenGate = Callable[[], object]


def test_an_operation_is_called_off_before_it_begins(
    engine: _C.Engine, arena: _C.Arena, make_file: MakeFile, gate: _C.Ticket, open_gate: OpenGate
) -> None:
    file = make_file(b"\1" * MIB)
    memoryview(arena.view(0, MIB))[:] = b"\2" * MIB
    write = engine.write(file, 0, arena.address, MIB, after=gate)
    follower = engine.read(file, 0, arena.address, PAGE, after=write)
    bystander = engine.read(file, 0, arena.address + MIB, MIB, after=gate)
    assert not write.cancelled
    assert write.cancel()
    assert write.cancel(), "once more is no harm"
    with pytest.raises(IoError, match="cancelled before it began"):
        write.wait()
    assert write.done
    assert write.cancelled
    with pytest.raises(IoError, match="the operation it waited for failed"):
        follower.wait()
    assert not follower.cancelled
    assert not bystander.done
    open_gate()
    assert bystander.wait()
    engine.drain()
    assert engine.in_flight == 0
    assert Path(file.path).read_bytes() == b"\1" * MIB


def test_an_operation_that_has_begun_is_not_called_off(engine: _C.Engine, arena: _C.Arena, make_file: MakeFile) -> None:
    file = make_file(os.urandom(MIB))
    ticket = engine.read(file, 0, arena.address, MIB)
    assert ticket.wait()
    assert not ticket.cancel()
    assert not ticket.cancelled
    assert ticket.exception() is None
    nothing = engine.read(file, 0, arena.address, 0)
    assert not nothing.cancel()


def test_calling_off_races_with_beginning_and_one_of_them_wins(
    engine: _C.Engine, arena: _C.Arena, make_file: MakeFile
) -> None:
    content = os.urandom(MIB)
    file = make_file(content)
    memory = memoryview(arena.view(0, 4 * MIB))
    outcomes = set()
    for _ in range(300):
        memory[:MIB] = bytes(MIB)
        tickets = [engine.read(file, 0, arena.address + MIB, MIB), engine.read(file, 0, arena.address, MIB)]
        called_off = tickets[1].cancel()
        outcomes.add(called_off)
        error = tickets[1].exception()
        assert called_off == tickets[1].cancelled == (error is not None)
        assert memory[:MIB] == (bytes(MIB) if called_off else content)
    engine.drain()
    assert engine.in_flight == 0


def test_a_thousand_called_off_make_room_in_the_inbox(
    engine: _C.Engine, arena: _C.Arena, make_file: MakeFile, gate: _C.Ticket
) -> None:
    file = make_file(MIB)
    tickets = [engine.read(file, 0, arena.address, PAGE, after=gate) for _ in range(4096)]
    assert all(ticket.cancel() for ticket in tickets)
    more = [engine.read(file, 0, arena.address, PAGE) for _ in range(4096)]
    assert all(ticket.wait() for ticket in more)
    assert all(ticket.exception() is not None for ticket in tickets)


def test_exception_waits_and_does_not_raise(
    engine: _C.Engine, arena: _C.Arena, make_file: MakeFile, gate: _C.Ticket, open_gate_later: OpenGate
) -> None:
    late = engine.read(make_file(PAGE), 0, arena.address, PAGE, after=gate)
    with pytest.raises(TimeoutError):
        late.exception(0.01)
    open_gate_later()
    assert late.exception() is None
    failed = engine.read(make_file(0, name="empty"), 0, arena.address, PAGE)
    error = failed.exception(60)
    assert isinstance(error, IoError)
    assert str(error) == str(failed.error)


def test_an_event_loop_awaits_tickets(
    engine: _C.Engine, arena: _C.Arena, make_file: MakeFile, gate: _C.Ticket, open_gate: OpenGate
) -> None:
    file = make_file(os.urandom(8 * MIB))

    async def settle(tickets: list[_C.Ticket]) -> int:
        loop, ready, calls = asyncio.get_running_loop(), asyncio.Event(), 0
        fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)  # type: ignore[attr-defined]

        def look() -> None:
            nonlocal calls
            calls += 1
            os.eventfd_read(fd)  # type: ignore[attr-defined]
            open_gate()
            if all(ticket.done for ticket in tickets):
                ready.set()

        loop.add_reader(fd, look)
        for ticket in tickets:
            ticket.notify(fd)
        await asyncio.wait_for(ready.wait(), 60)
        loop.remove_reader(fd)
        os.close(fd)
        return calls

    early = engine.read(file, 0, arena.address, PAGE)
    assert early.wait()
    tickets = [engine.read(file, n * MIB, arena.address + n * MIB, MIB, after=gate) for n in range(8)]
    assert asyncio.run(settle([early, *tickets])) >= 2, "once for what is done already, and for what that lets go on"
    assert asyncio.run(settle([early])) == 1


def test_a_full_eventfd_does_not_hold_up_the_engine(
    engine: _C.Engine, arena: _C.Arena, make_file: MakeFile, gate: _C.Ticket, open_gate: OpenGate
) -> None:
    fd = os.eventfd(0, os.EFD_CLOEXEC)  # type: ignore[attr-defined]
    os.eventfd_write(fd, 2**64 - 2)  # type: ignore[attr-defined]  # one more, and a write waits
    file = make_file(PAGE)
    engine.read(file, 0, arena.address, PAGE, after=gate).notify(fd)
    behind = engine.read(file, 0, arena.address, PAGE, after=gate)
    open_gate()
    try:
        assert behind.wait(timeout_s=60)
    finally:
        os.eventfd_read(fd)  # type: ignore[attr-defined]
        os.close(fd)


def test_the_eventfd_may_be_closed_and_must_be_one(
    engine: _C.Engine,
    arena: _C.Arena,
    make_file: MakeFile,
    gate: _C.Ticket,
    open_gate: OpenGate,
    tmp_path: Path,
) -> None:
    """A number that belongs to another file by the time the ticket is done gets nothing."""
    ticket = engine.read(make_file(PAGE), 0, arena.address, PAGE, after=gate)
    fd = os.eventfd(0)  # type: ignore[attr-defined]
    ticket.notify(fd)
    with (tmp_path / "innocent").open("wb") as stream:
        os.dup2(stream.fileno(), fd)  # Closes the eventfd and takes its number, in one step.
        open_gate()
        assert ticket.wait()
        engine.drain()
    os.close(fd)
    assert (tmp_path / "innocent").read_bytes() == b""
    with pytest.raises(IoError) as caught:
        ticket.notify(10_000)
    assert caught.value.errno == 9


def test_many_threads_submit_wait_and_call_off(engine: _C.Engine, arena: _C.Arena, make_file: MakeFile) -> None:
    content = os.urandom(MIB)
    file = make_file(content)
    failures: list[BaseException] = []

    def use(number: int) -> None:
        try:
            memory = memoryview(arena.view(number * MIB, MIB))
            for _ in range(50):
                ticket = engine.read(file, 0, arena.address + number * MIB, MIB)
                unwanted = engine.read(file, 0, arena.address + (number + 8) * MIB, PAGE, after=ticket)
                unwanted.cancel()
                assert ticket.wait()
                assert memory == content
                assert unwanted.cancelled == (unwanted.exception() is not None)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=use, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
