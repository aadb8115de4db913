"""The chaos backend: from one seed always the same troubles, and with all of them every byte accounted for."""

from __future__ import annotations

import errno
import os
import random
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from swapper import _C
from swapper.errors import IoError

MIB = 1 << 20
PAGE = 4096
HARMLESS = {"short": 0.3, "interrupt": 0.2, "again": 0.2, "delay": 0.1, "reorder": 0.5}
INNER = ["uring", "aio", "threads"]

MakeFile = Callable[..., _C.File]


def test_it_says_what_it_is() -> None:
    for options in ({"backend": "chaos:threads"}, {"backend": "threads", "chaos": {"seed": 7, "eio": 0.5}}):
        engine = _C.Engine(**options)  # type: ignore[arg-type]
        assert engine.backend == "chaos:threads"
        assert "faults from seed" in engine.reason
        engine.close()
    engine = _C.Engine(backend="chaos")
    assert engine.backend.startswith("chaos:")
    engine.close()


@pytest.mark.parametrize("inner", INNER)
def test_harmless_troubles_do_no_harm(inner: str, make_file: MakeFile, arena: _C.Arena) -> None:
    for seed in range(5):
        engine = _C.Engine(backend=inner, chaos={"seed": seed, **HARMLESS}, piece_bytes=16 * PAGE, depth=8)
        content = random.Random(seed).randbytes(4 * MIB)
        file = make_file(b"")
        memory = memoryview(arena.view(1, 4 * MIB))
        memory[:] = content
        for begin in range(0, 4 * MIB, 50_001):
            engine.write(file, begin, arena.address + 1 + begin, min(50_001, 4 * MIB - begin), checksum=True)
        engine.drain()
        memory[:] = bytes(4 * MIB)
        assert Path(file.path).read_bytes() == content
        reads = [
            engine.read(file, at, arena.address + 1 + at, min(30_011, 4 * MIB - at)) for at in range(0, 4 * MIB, 30_011)
        ]
        assert all(ticket.wait() for ticket in reads)
        assert memory == content
        assert engine.bytes_read == engine.bytes_written == 4 * MIB
        engine.close()


@pytest.mark.parametrize("inner", INNER)
def test_every_byte_of_what_did_not_fail_is_right(inner: str, make_file: MakeFile) -> None:
    """Writes of many sizes and places at once, some fail. Of those that did not, every byte is in the file; where one
    failed, each byte is the old one or the new one; nothing outside of any of them has changed."""
    outcomes: Counter[int] = Counter()
    for seed in range(6):
        rng = random.Random(seed)
        chaos = {"seed": seed, **HARMLESS, "eio": 0.02, "enospc": 0.02}
        engine = _C.Engine(backend=inner, chaos=chaos, piece_bytes=4 * PAGE, depth=1 + 5 * seed)
        size = 2 * MIB
        file = make_file(b"o" * size)
        memory = _C.Arena(size + PAGE, lock=False)
        memoryview(memory.view(0, size + PAGE))[:] = b"n" * (size + PAGE)
        writes, at = [], rng.randrange(1000)
        while at < size - 60_000:
            nbytes = rng.choice([rng.randrange(1, 1000), rng.randrange(1, 60_000), 4 * PAGE])
            shift = rng.choice([0, 0, 1, 512])
            writes.append((at, nbytes, engine.write(file, at, memory.address + shift, nbytes)))
            at += nbytes + rng.choice([0, 0, rng.randrange(1, 9000)])
        engine.drain()
        content, expected, failed = Path(file.path).read_bytes(), bytearray(b"o" * size), 0
        for at, nbytes, ticket in writes:
            outcomes[ticket.error.errno if isinstance(ticket.error, IoError) else 0] += 1
            if ticket.error is None:
                expected[at : at + nbytes] = b"n" * nbytes
            else:
                failed += nbytes
                assert set(content[at : at + nbytes]) <= set(b"on")
                expected[at : at + nbytes] = content[at : at + nbytes]
        assert content == expected
        done = sum(nbytes for _, nbytes, ticket in writes if ticket.error is None)
        assert done <= engine.bytes_written <= done + failed
        assert engine.in_flight == 0
        engine.close()
    assert set(outcomes) == {0, errno.EIO, errno.ENOSPC}


@pytest.mark.parametrize("inner", INNER)
def test_reads_that_fail_say_so(inner: str, make_file: MakeFile) -> None:
    content = os.urandom(2 * MIB)
    file = make_file(content)
    engine = _C.Engine(backend=inner, chaos={"seed": 3, **HARMLESS, "eio": 0.02}, piece_bytes=4 * PAGE)
    arena = _C.Arena(4 * MIB, lock=False)
    memory = memoryview(arena.view(0, 4 * MIB))
    reads = [
        (at, engine.read(file, at, arena.address + at, 9001, checksum=True)) for at in range(0, 2 * MIB - 9001, 9001)
    ]
    engine.drain()
    for at, ticket in reads:
        if ticket.error is None:
            assert memory[at : at + 9001] == content[at : at + 9001]
            assert ticket.crc32 == _C.crc32(content[at : at + 9001])
        else:
            assert isinstance(ticket.error, IoError)
            assert (ticket.error.errno, ticket.error.op) == (errno.EIO, "read")
            assert at <= ticket.error.offset < at + 9001
    assert {ticket.error is None for _, ticket in reads} == {True, False}
    engine.close()


def test_an_endless_trouble_ends(make_file: MakeFile, arena: _C.Arena) -> None:
    engine = _C.Engine(chaos={"again": 1})
    error = engine.read(make_file(PAGE), 0, arena.address, PAGE).exception()
    assert isinstance(error, IoError)
    assert error.errno == errno.EAGAIN
    engine.close()


@pytest.mark.parametrize("inner", INNER)
def test_nothing_is_over_before_its_descriptor_is_readable(inner: str, make_file: MakeFile, arena: _C.Arena) -> None:
    """Nor what fails; and whoever closes the engine waits for it. The engine has a descriptor of its own."""
    content = os.urandom(MIB)
    file = make_file(content)
    for troubles in ({}, {"eio": 1}):
        gate, other_end = os.pipe()
        engine = _C.Engine(backend=inner, chaos={"until": gate, **troubles}, piece_bytes=16 * PAGE)
        os.close(gate)
        with os.fdopen(other_end, "wb"):
            ticket = engine.read(file, 0, arena.address, MIB)
            closer = threading.Thread(target=engine.close)
            closer.start()
            assert not ticket.wait(0.05)
            assert closer.is_alive()
            assert engine.bytes_read == 0
        closer.join()
        assert ticket.done
        assert (ticket.error is None) == (not troubles)
        assert troubles or memoryview(arena.view(0, MIB)) == content
