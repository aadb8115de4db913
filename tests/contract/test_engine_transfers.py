"""Transfers of every backend: bytes, order and checksums."""

from __future__ import annotations

import errno
import os
import random
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import examples

from swapper import _C
from swapper.errors import ConfigError, IoError

BACKENDS = ["uring", "aio", "threads", "chaos"]
MIB = 1 << 20
PAGE = 4096

MakeFile = Callable[..., _C.File]
MakeEngine = Callable[..., _C.Engine]
OpenGate = Callable[[], object]


@pytest.mark.parametrize("backend_name", BACKENDS)
@settings(max_examples=examples(60))
@given(
    runs=st.lists(st.tuples(st.integers(0, 200), st.integers(1, 300)), min_size=1, max_size=6),
    depth=st.integers(1, 33),
    piece_pages=st.integers(1, 80),
    direct=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_bytes_written_are_the_bytes_read(
    backend_name: str, runs: list[tuple[int, int]], depth: int, piece_pages: int, direct: bool, seed: int
) -> None:
    """Overlapping runs, written one after the other, leave the file as Python's own writes would."""
    source = random.Random(seed).randbytes(600 * PAGE)
    expected = bytearray(500 * PAGE)
    arena = _C.Arena(1200 * PAGE, huge_pages=False)
    memory = memoryview(arena.view(0, arena.nbytes))
    memory[: len(source)] = source
    engine = _C.Engine(backend=backend_name, depth=depth, piece_bytes=piece_pages * PAGE, arena=arena)
    with tempfile.TemporaryDirectory() as directory:
        file = _C.File(Path(directory, "file"), create=True, direct=None if direct else False)
        file.truncate(len(expected))
        ticket = None
        for offset_pages, count in runs:
            offset, nbytes = offset_pages * PAGE, count * PAGE
            ticket = engine.write(file, offset, arena.address + offset, nbytes, after=ticket, checksum=True)
            expected[offset : offset + nbytes] = source[offset : offset + nbytes]
        read = engine.read(file, 0, arena.address + 600 * PAGE, len(expected), after=ticket, checksum=True)
        assert read.wait()
        assert ticket is not None
        assert ticket.crc32 == zlib.crc32(source[offset : offset + nbytes])
        assert memory[600 * PAGE :][: len(expected)] == expected
        assert Path(directory, "file").read_bytes() == expected
        assert read.crc32 == zlib.crc32(expected)
        assert engine.bytes_written == sum(count * PAGE for _, count in runs)
        assert engine.bytes_read == len(expected)
        engine.close()
        file.close()


def test_many_operations_at_once_each_land_in_their_place(
    make_engine: MakeEngine, arena: _C.Arena, make_file: MakeFile
) -> None:
    engine = make_engine(arena=arena, piece_bytes=2 * PAGE)
    content = random.Random(1).randbytes(16 * MIB)
    memory = memoryview(arena.view(0, arena.nbytes))
    memory[: len(content)] = content
    file = make_file(len(content))
    offsets = list(range(0, len(content), 4 * PAGE))
    random.Random(2).shuffle(offsets)
    writes = [engine.write(file, offset, arena.address + offset, 4 * PAGE) for offset in offsets]
    engine.drain()
    assert all(ticket.done and ticket.error is None for ticket in writes)
    assert engine.in_flight == 0
    half = arena.address + len(content)
    reads = [engine.read(file, offset, half + offset, 4 * PAGE) for offset in reversed(offsets)]
    assert all(ticket.wait() for ticket in reads)
    assert memory[len(content) :] == content


def test_more_operations_than_the_inbox_holds_all_finish(
    engine: _C.Engine, arena: _C.Arena, make_file: MakeFile
) -> None:
    file = make_file(MIB)
    tickets = [engine.read(file, 0, arena.address, PAGE) for _ in range(10_000)]
    engine.drain()
    assert all(ticket.done for ticket in tickets)
    assert engine.bytes_read == 10_000 * PAGE


def test_memory_outside_the_arena_works_too(engine: _C.Engine, make_file: MakeFile) -> None:
    other = _C.Arena(MIB, lock=False, huge_pages=False)
    memory = memoryview(other.view(0, MIB))
    file = make_file(os.urandom(MIB))
    assert engine.read(file, 0, other.address, MIB).wait()
    assert memory == Path(file.path).read_bytes()


def test_a_buffered_file_takes_any_offset_address_and_size(
    engine: _C.Engine, arena: _C.Arena, make_file: MakeFile
) -> None:
    content = os.urandom(100_003)
    file = make_file(content, direct=False)
    assert not file.direct
    assert engine.read(file, 17, arena.address + 5, 99_001).wait()
    assert memoryview(arena.view(5, 99_001)) == content[17 : 17 + 99_001]


def test_nothing_to_transfer_is_done_at_once(engine: _C.Engine, make_file: MakeFile) -> None:
    ticket = engine.write(make_file(PAGE), 0, 0, 0, checksum=True)
    assert ticket.done
    assert ticket.wait()
    assert ticket.crc32 == 0
    assert ticket.error is None


def test_times_are_on_the_monotonic_clock(engine: _C.Engine, arena: _C.Arena, make_file: MakeFile) -> None:
    import time

    before = time.monotonic()
    ticket = engine.read(make_file(MIB), 0, arena.address, MIB)
    assert ticket.wait()
    assert before <= ticket.submitted_s <= ticket.completed_s <= time.monotonic()


def test_a_ticket_waits_with_a_timeout_and_says_little_before_its_end(
    engine: _C.Engine, arena: _C.Arena, make_file: MakeFile, gate: _C.Ticket, open_gate: OpenGate
) -> None:
    ticket = engine.read(make_file(PAGE), 0, arena.address, PAGE, after=gate, checksum=True)
    assert ticket.wait(0) is False
    assert ticket.error is None
    assert ticket.nbytes == PAGE
    with pytest.raises(ValueError, match="not finished"):
        _ = ticket.crc32
    with pytest.raises(ValueError, match="not finished"):
        _ = ticket.completed_s
    open_gate()
    assert ticket.wait()
    plain = engine.read(make_file(PAGE), 0, arena.address, PAGE)
    assert plain.wait()
    with pytest.raises(ValueError, match="checksum"):
        _ = plain.crc32


# ---- order ----------------------------------------------------------------------------------------------------------


def test_a_chain_runs_in_its_order(engine: _C.Engine, arena: _C.Arena, make_file: MakeFile) -> None:
    """Each link moves the bytes one place on, so that any two out of order would lose them."""
    links = 40
    content = os.urandom(64 * PAGE)
    memoryview(arena.view(0, len(content)))[:] = content
    file = make_file((links + 1) * len(content))
    ticket = None
    for link in range(links):
        ticket = engine.write(file, link * len(content), arena.address + link % 2 * MIB, len(content), after=ticket)
        target = arena.address + (link + 1) % 2 * MIB
        ticket = engine.read(file, link * len(content), target, len(content), after=ticket)
    assert ticket is not None
    assert ticket.wait()
    assert memoryview(arena.view(links % 2 * MIB, len(content))) == content


def test_operations_that_wait_let_later_ones_pass(
    engine: _C.Engine, arena: _C.Arena, make_file: MakeFile, gate: _C.Ticket, open_gate: OpenGate
) -> None:
    file = make_file(MIB)
    behind = engine.read(file, 0, arena.address, MIB, after=gate)
    free = engine.read(file, 0, arena.address + MIB, MIB)
    assert free.wait()
    assert not behind.done
    open_gate()
    assert behind.wait()
    assert gate.done


def test_neither_direction_starves_the_other(
    make_engine: MakeEngine, arena: _C.Arena, make_file: MakeFile, gate: _C.Ticket, open_gate: OpenGate
) -> None:
    """A small write behind hundreds of reads, all let loose at one instant, is done long before the last of them."""
    engine = make_engine(depth=8, piece_bytes=16 * PAGE, arena=arena)
    file = make_file(os.urandom(17 * MIB))
    start = engine.read(file, 0, arena.address, PAGE, after=gate)
    reads = [engine.read(file, 0, arena.address, 16 * MIB, after=start) for _ in range(40)]
    write = engine.write(file, 16 * MIB, arena.address + 16 * MIB, 16 * PAGE, after=start)
    open_gate()
    engine.drain()
    assert sum(read.completed_s < write.completed_s for read in reads) < 30


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_smallest_depths_serve_both_directions(
    make_engine: MakeEngine, arena: _C.Arena, make_file: MakeFile, depth: int
) -> None:
    engine = make_engine(depth=depth, piece_bytes=PAGE)
    file = make_file(2 * MIB)
    tickets = []
    for _ in range(10):
        tickets.append(engine.read(file, 0, arena.address, 20 * PAGE))
        tickets.append(engine.write(file, MIB, arena.address + MIB, 20 * PAGE, checksum=True))
    assert all(ticket.wait() for ticket in tickets)


def test_operations_go_in_the_order_of_submission(
    make_engine: MakeEngine, arena: _C.Arena, make_file: MakeFile, gate: _C.Ticket, open_gate: OpenGate
) -> None:
    """With one piece in flight at a time nothing can overtake."""
    engine = make_engine(depth=1, piece_bytes=PAGE)
    file = make_file(MIB)
    tickets = [engine.read(file, 0, arena.address, 3 * PAGE, after=gate) for _ in range(50)]
    open_gate()
    engine.drain()
    times = [ticket.completed_s for ticket in tickets]
    assert times == sorted(times)


# ---- choosing -------------------------------------------------------------------------------------------------------


def test_auto_says_what_it_chose_and_why() -> None:
    engine = _C.Engine()
    assert engine.backend in BACKENDS
    assert engine.backend in engine.reason
    engine.close()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"backend": "carrier-pigeon"}, "carrier-pigeon"),
        ({"depth": 0}, "depth"),
        ({"depth": 100_000}, "depth"),
        ({"piece_bytes": 1000}, "piece_bytes"),
        ({"piece_bytes": 1 << 40}, "piece_bytes"),
        ({"staging_bytes": 1000}, "staging_bytes"),
        ({"backend": "chaos:carrier-pigeon"}, "carrier-pigeon"),
        ({"chaos": {"locusts": 0.5}}, "locusts"),
        ({"chaos": {"eio": 1.5}}, "eio"),
        ({"chaos": {"seed": -1}}, "seed"),
        ({"chaos": {"until": -1}}, "until"),
        ({"chaos": {"until": 0.5}}, "until"),
        ({"chaos": {"until": 1e10}}, "until"),
        ({"chaos": {"until": 1_000_000}}, "until.*Bad file descriptor"),
    ],
)
def test_options_out_of_range_are_refused_by_name(options: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        _C.Engine(**options)  # type: ignore[arg-type]


def test_io_error_is_an_os_error() -> None:
    with pytest.raises(OSError) as caught:
        _C.File("/nowhere/at/all")
    assert isinstance(caught.value, IoError)


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("place", [(0, 0, 3 * MIB), (7, 5, 2 * MIB + 11)], ids=["aligned", "staged"])
def test_a_read_of_other_bytes_than_are_expected_fails(
    make_engine: MakeEngine, make_file: MakeFile, place: tuple[int, int, int], direct: bool
) -> None:
    """However it is cut: one bit anywhere in it."""
    shift, offset, nbytes = place
    arena = _C.Arena(8 * MIB, huge_pages=False)
    engine = make_engine(arena=arena, piece_bytes=64 * PAGE)
    content = bytearray(random.Random(0).randbytes(4 * MIB))
    expected = zlib.crc32(content[offset : offset + nbytes])
    file = make_file(bytes(content), direct=None if direct else False)
    assert engine.read(file, offset, arena.address + shift, nbytes, expected=expected).wait()
    for at in (offset, offset + nbytes // 2, offset + nbytes - 1):
        changed = bytearray(content)
        changed[at] ^= 1 << at % 8
        Path(file.path).write_bytes(changed)
        ticket = engine.read(file, offset, arena.address + shift, nbytes, expected=expected)
        with pytest.raises(IoError, match=f"CRC-32 [0-9a-f]{{8}} instead of {expected:08x}") as failure:
            ticket.wait()
        assert (failure.value.errno, failure.value.offset, failure.value.nbytes) == (errno.EBADMSG, offset, nbytes)
    behind = engine.read(file, 0, arena.address, PAGE, after=ticket)
    with pytest.raises(IoError, match="cancelled"):
        behind.wait()
