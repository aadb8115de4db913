"""Reading a window where nothing is mapped: answered from the file that backs the place, or a death with a reason."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from e2e.given_back import bytes_at

from swapper import _C
from swapper.errors import IoError

CHUNK_BYTES = 256 << 10
NBYTES = 4 * CHUNK_BYTES + 8192


@pytest.fixture
def content() -> bytes:
    return os.urandom(NBYTES)


@pytest.fixture
def file(tmp_path: Path, content: bytes) -> _C.File:
    path = tmp_path / "backing"
    path.write_bytes(bytes(4096) + content)
    return _C.File(str(path))


@pytest.fixture
def window() -> _C.Window:
    arena = _C.Arena(8 << 20, lock=False)
    return arena.window(NBYTES)


def test_what_is_read_is_what_the_file_has(window: _C.Window, file: _C.File, content: bytes) -> None:
    window.unmap(0, NBYTES, file, 4096)
    view = memoryview(window)
    assert view[NBYTES - 1] == content[-1]
    assert bytes(view[CHUNK_BYTES - 100 : CHUNK_BYTES + 100]) == content[CHUNK_BYTES - 100 : CHUNK_BYTES + 100]
    assert bytes(view[:NBYTES]) == content


def test_what_is_read_is_what_a_part_of_an_arena_has(window: _C.Window) -> None:
    """Of another arena too, and after everybody else has released it."""
    arena = _C.Arena(2 << 20, lock=False)
    view = arena.view(8192, 3 * 4096)
    content = os.urandom(3 * 4096)
    memoryview(view)[:] = content
    window.unmap(4096, 8192, view, 4096)
    del view
    arena.close()
    assert bytes(memoryview(window)[4096 : 4096 + 8192]) == content[4096:]


def test_each_place_has_its_own_backing(window: _C.Window, file: _C.File, content: bytes) -> None:
    window.unmap(0, 4096, file, 4096 + 8192)
    window.unmap(4096, 8192, file, 4096)
    assert bytes(memoryview(window)[: 4096 + 8192]) == content[8192 : 8192 + 4096] + content[:8192]


def test_a_map_takes_the_place_of_what_was_read(file: _C.File) -> None:
    arena = _C.Arena(8 << 20, lock=False)
    window = arena.window(NBYTES)
    memoryview(arena.view(0, 4096))[:] = b"m" * 4096
    window.unmap(0, 8192, file, 4096)
    before = bytes(memoryview(window)[:8192])
    window.map(0, 0, 4096)
    window.unmap(4096, 4096, file, 8192)
    assert bytes(memoryview(window)[:8192]) == b"m" * 4096 + before[4096:]


def test_the_window_keeps_the_file_open(window: _C.Window, file: _C.File, content: bytes) -> None:
    window.unmap(0, NBYTES, file, 4096)
    file.close()
    Path(file.path).unlink()
    assert bytes(memoryview(window)[:NBYTES]) == content


@pytest.mark.parametrize("before", ["nothing", "a read", "a read of all"])
def test_what_is_written_stays_and_is_put_into_what_is_mapped_next(file: _C.File, content: bytes, before: str) -> None:
    arena = _C.Arena(8 << 20, lock=False)
    window = arena.window(NBYTES)
    view, memory = memoryview(window), memoryview(arena.view(0, NBYTES))
    window.unmap(0, NBYTES, file, 4096)
    if before != "nothing":
        bytes(view[:] if before == "a read of all" else view[CHUNK_BYTES : CHUNK_BYTES + 1])
    assert window.written_at(0) == -1
    expected, noted = bytearray(content), _C.writes_noted()
    for at in (CHUNK_BYTES + 5, NBYTES - 1, CHUNK_BYTES + 9):
        view[at] = expected[at] = expected[at] ^ 255
    assert window.written_at(0) == CHUNK_BYTES + 5
    assert _C.writes_noted() == noted + 2  # one for each chunk
    assert bytes(view[:NBYTES]) == expected
    memory[:] = content  # as it is read from the file
    assert window.map(0, 0, NBYTES)
    assert bytes(view[:NBYTES]) == bytes(memory) == expected
    assert window.written_at(0) == CHUNK_BYTES + 5
    assert not window.map(0, 0, NBYTES)
    assert window.written_at(0) == -1
    assert Path(file.path).read_bytes()[4096:] == content


def test_what_is_filled_is_ordinary_memory_with_all_bytes(window: _C.Window, file: _C.File, content: bytes) -> None:
    """Also what was written; and also in a forked child, with the file gone."""
    view = memoryview(window)
    window.unmap(0, NBYTES, file, 4096)
    view[CHUNK_BYTES + 5] = content[CHUNK_BYTES + 5] ^ 255
    expected = bytearray(content)
    expected[CHUNK_BYTES + 5] ^= 255
    assert window.fill(0, NBYTES)
    file.close()
    Path(file.path).write_bytes(b"")
    child = os.fork()
    if child == 0:
        os._exit(0 if bytes(view[:NBYTES]) == expected else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert bytes(view[:NBYTES]) == expected
    view[0] = 1
    assert not window.fill(0, NBYTES), "nothing is absent any more"


def test_what_has_nothing_behind_it_is_not_filled(window: _C.Window, file: _C.File, content: bytes) -> None:
    arena = _C.Arena(8 << 20, lock=False)
    mapped = arena.window(4096)
    mapped.map(0, 0, 4096)
    assert not mapped.fill(0, 4096)
    memoryview(mapped)[0] = 1
    assert memoryview(arena.view(0, 1))[0] == 1
    window.unmap(0, 4096)
    assert not window.fill(0, 4096)
    window.unmap(0, NBYTES, file, 4096)
    os.truncate(file.path, 4096 + CHUNK_BYTES)
    with pytest.raises(IoError, match="fill"):
        window.fill(0, NBYTES)
    assert bytes(memoryview(window)[:CHUNK_BYTES]) == content[:CHUNK_BYTES], "it is as it was"


def test_what_was_written_under_guard_stays_when_the_memory_goes(file: _C.File, content: bytes) -> None:
    arena = _C.Arena(8 << 20, lock=False)
    window = arena.window(NBYTES)
    view, memory = memoryview(window), memoryview(arena.view(0, NBYTES))
    memory[:] = content
    window.map(0, 0, NBYTES)
    window.guard(0, NBYTES)
    view[7] = expected = content[7] ^ 255
    window.unmap(0, NBYTES, file, 4096)
    memory[:] = bytes(NBYTES)  # another's by now
    assert bytes(view[:NBYTES]) == content[:7] + bytes([expected]) + content[8:]
    view[8] = 1
    assert window.written_at(0) == 7
    assert window.map(0, 0, NBYTES)
    assert bytes(memory) == content[:7] + bytes([expected, 1]) + content[9:]
    window.unmap(0, NBYTES)  # as where a step is undone
    window.unmap(0, NBYTES, file, 4096)
    assert bytes(view[:NBYTES]) == content
    assert window.written_at(0) == -1


def test_threads_that_write_while_the_memory_comes_and_goes_lose_nothing(file: _C.File, content: bytes) -> None:
    """Each thread has bytes of its own, and finds in them what it wrote last."""
    arena = _C.Arena(8 << 20, lock=False)
    window = arena.window(NBYTES)
    window.unmap(0, NBYTES, file, 4096)
    wrong: list[int] = []
    is_over = threading.Event()

    def write(at: int) -> None:
        view = memoryview(window)
        value = view[at]
        while not is_over.is_set() and not wrong:
            value = (value + 1) % 256
            view[at] = value
            if view[at] != value:
                wrong.append(at)

    threads = [threading.Thread(target=write, args=(at,)) for at in (0, 1, CHUNK_BYTES - 1, NBYTES - 1)]
    for thread in threads:
        thread.start()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    for _ in range(300):
        memoryview(arena.view(0, NBYTES))[:] = content
        if window.map(0, 0, NBYTES):
            pass  # noted already
        else:
            window.guard(0, NBYTES)
        window.unmap(0, NBYTES, file, 4096)
    is_over.set()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(interval)
    assert wrong == []


def test_a_read_that_faults_as_the_memory_comes_is_no_write(file: _C.File) -> None:
    """The handler finds the memory mapped read-only by then, as for a write."""
    arena = _C.Arena(8 << 20, lock=False)
    window = arena.window(8192)
    window.unmap(0, 8192, file, 4096)
    is_over = threading.Event()
    libc = ctypes.CDLL(None)  # without the GIL

    def read() -> None:
        into = ctypes.create_string_buffer(64)
        while not is_over.is_set():
            libc.memcpy(into, ctypes.c_void_p(window.address + 4096), 64)

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    noted = 0
    for _ in range(500):
        window.unmap(0, 8192, file, 4096)
        window.map(0, 0, 8192, True)
        noted += window.written_at(0) >= 0
    is_over.set()
    for thread in threads:
        thread.join()
    assert noted == 0


def test_many_threads_may_read_at_one_time(window: _C.Window, file: _C.File, content: bytes) -> None:
    wrong: list[int] = []

    def read(start: threading.Barrier) -> None:
        start.wait()
        if bytes(memoryview(window)[:NBYTES]) != content:
            wrong.append(1)

    for _ in range(20):
        window.unmap(0, NBYTES, file, 4096)
        barrier = threading.Barrier(4)
        threads = [threading.Thread(target=read, args=(barrier,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


def test_what_reads_take_is_bounded_and_what_was_written_stays(file: _C.File, content: bytes) -> None:
    """320 MiB are read, of one file again and again: more than the 256 MiB that there are for it. What went is read anew."""
    arena = _C.Arena(1 << 20, lock=False)
    part = 4 * CHUNK_BYTES
    windows = [arena.window(8 * part) for _ in range(40)]
    for window in windows:
        for begin in range(0, 8 * part, part):
            window.unmap(begin, part, file, 4096)
    written = memoryview(windows[0])
    written[7] = 1
    places = [(window.address, window.address + 8 * part) for window in windows]
    for window in [*windows, windows[1]]:
        view = memoryview(window)
        for at in range(0, 8 * part, CHUNK_BYTES):
            assert view[at + 9] == content[at % part + 9]
    assert 255 << 20 < bytes_at(places) <= (256 << 20) + CHUNK_BYTES
    assert written[7] == 1 and windows[0].written_at(0) == 7


PROGRAM = """
import os, sys
from swapper import _C
file = _C.File(sys.argv[1])
window = _C.Arena(1 << 20, lock=False).window(8192)
view = memoryview(window)
{action}
"""


def run(path: str, action: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROGRAM.format(action=action), path]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("action", ["view[0]", "window.unmap(0, 8192, file, 4096); window.unmap(0, 8192); view[0]"])
def test_without_backing_a_read_ends_the_process(file: _C.File, action: str) -> None:
    assert run(file.path, action).returncode == -11


def test_a_handler_that_was_reset_is_installed_again(file: _C.File) -> None:
    """As by Lightning's Trainer, which at its end restores what Python says of each signal: of handlers in C it knows nothing."""
    done = run(
        file.path,
        "import signal; window.unmap(0, 8192, file, 4096); view[0]; "
        "signal.signal(signal.SIGSEGV, signal.getsignal(signal.SIGSEGV)); "
        "window.unmap(0, 8192, file, 4096); print(view[0])",
    )
    assert (done.returncode, done.stdout) == (0, f"{Path(file.path).read_bytes()[4096]}\n")


def test_other_faults_are_passed_on(file: _C.File) -> None:
    done = run(file.path, "import faulthandler, ctypes; faulthandler.enable(); ctypes.string_at(0)")
    assert done.returncode == -11
    assert "Segmentation fault" in done.stderr
    done = run(file.path, "import ctypes; window.unmap(0, 8192, file, 4096); ctypes.string_at(0)")
    assert done.returncode == -11
    assert "gather" not in done.stderr


def test_a_file_that_is_too_short_is_not_taken_for_zeros(file: _C.File) -> None:
    os.truncate(file.path, 4096)
    assert run(file.path, "window.unmap(0, 8192, file, 4096); view[0]").returncode == -11


def test_a_forked_child_is_not_served(file: _C.File) -> None:
    action = """
window.unmap(0, 8192, file, 4096)
child = os.fork()
if child == 0:
    view[0]
    os._exit(0)
_, status = os.waitpid(child, 0)
assert os.WTERMSIG(status) == 11, status
view[0]
"""
    done = run(file.path, action)
    assert done.returncode == 0, done.stderr
