"""A window whose memory is on its way to a file and promised to what comes next: its own bytes, whoever is how far."""

from __future__ import annotations

import ctypes
import os
import random
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from swapper import _C
from swapper.errors import IoError

PAGE = 4096
CHUNK_BYTES = 256 << 10
NBYTES = 2 * CHUNK_BYTES + PAGE

MakeFile = Callable[..., _C.File]


class TensorLocation:
    """A window on memory that has `content`, and files: of its bytes, and of those of another that comes."""

    def __init__(self, arena: _C.Arena, make_file: MakeFile) -> None:
        self.arena = arena
        self.window = arena.window(NBYTES)
        self.file, self.other = make_file(PAGE + NBYTES), make_file(os.urandom(NBYTES))
        self.fill(os.urandom(NBYTES))

    def fill(self, content: bytes) -> None:
        self.content = content
        memoryview(self.arena.view(PAGE, NBYTES))[:] = content
        self.window.map(0, PAGE, NBYTES)

    def promise(self, engine: _C.Engine) -> tuple[_C.Ticket, _C.Ticket]:
        """Write the bytes and have the others come to the same memory. Returns both tickets."""
        address = self.arena.address + PAGE
        write = engine.write(self.file, PAGE, address, NBYTES)
        self.window.promise(0, NBYTES, PAGE, write, self.file, PAGE)
        return write, engine.read(self.other, 0, address, NBYTES, after=write)

    def shows(self, begin: int = 0, end: int = NBYTES) -> bool:
        return bytes(memoryview(self.window)[begin:end]) == self.content[begin:end]


@pytest.fixture
def place(arena: _C.Arena, make_file: MakeFile) -> TensorLocation:
    return TensorLocation(arena, make_file)


def test_it_shows_its_bytes_before_the_write_is_over_and_after_others_are_there(
    place: TensorLocation, make_engine: Callable[..., _C.Engine], gate_fd: int, open_gate: Callable[[], object]
) -> None:
    engine = make_engine(chaos={"until": gate_fd})
    write, read = place.promise(engine)
    assert place.shows(0, 10)
    assert not write.done
    open_gate()
    read.wait()
    assert bytes(memoryview(place.arena.view(PAGE, NBYTES))) == Path(place.other.path).read_bytes()
    assert place.shows()


def test_it_shows_its_bytes_where_the_write_fails(place: TensorLocation) -> None:
    engine = _C.Engine(backend="threads", chaos={"seed": 1, "eio": 1})
    write, read = place.promise(engine)
    assert isinstance(write.exception(), IoError)
    assert read.exception() is not None
    assert place.shows()
    place.window.map(0, PAGE, NBYTES)
    assert place.shows()
    engine.close()


@pytest.fixture
def looked_at(place: TensorLocation) -> Iterator[list[str]]:
    """Two threads that look at the window all the time, without the GIL; what they see of other bytes."""
    wrong: list[str] = []
    is_over = threading.Event()
    content = ctypes.create_string_buffer(place.content, NBYTES)
    compare = ctypes.CDLL(None).memcmp
    compare.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)

    def look(seed: int) -> None:
        choices = random.Random(seed)
        while not is_over.is_set() and not wrong:
            at = choices.randrange(NBYTES - 100)
            if compare(place.window.address + at, ctypes.addressof(content) + at, 100) != 0:
                wrong.append(f"at {at}")

    threads = [threading.Thread(target=look, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield wrong
    sys.setswitchinterval(interval)
    is_over.set()
    for thread in threads:
        thread.join()


def test_who_looks_all_the_time_never_sees_other_bytes(place: TensorLocation, looked_at: list[str]) -> None:
    """The engine delays and reorders what it does."""
    engine = _C.Engine(backend="threads", chaos={"seed": 3, "delay": 0.1, "reorder": 0.5})
    for _ in range(100):
        _, read = place.promise(engine)
        read.wait()
        engine.read(place.file, PAGE, place.arena.address + PAGE, NBYTES).wait()
        place.window.map(0, PAGE, NBYTES)
    engine.close()
    assert looked_at == []


def test_who_looks_while_windows_are_mapped_and_unmapped_never_sees_other_bytes(
    place: TensorLocation, looked_at: list[str]
) -> None:
    Path(place.file.path).write_bytes(bytes(PAGE) + place.content)
    for number in range(2000):
        if number % 3:
            place.window.guard(0, NBYTES)
        if number % 2:
            place.window.map(0, PAGE, NBYTES)
        place.window.unmap(0, NBYTES, place.file, PAGE)
        place.window.map(0, PAGE, NBYTES)
    assert looked_at == []
