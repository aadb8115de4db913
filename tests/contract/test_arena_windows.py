"""The arena and its windows: one memory, seen at several addresses."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from swapper import _C
from swapper.errors import ConfigError, IoError

BACKENDS = ["uring", "aio", "threads", "chaos"]
MIB = 1 << 20
PAGE = 4096

RunPython = Callable[..., "subprocess.CompletedProcess[str]"]


def test_sizes_are_rounded_up() -> None:
    for huge_pages in (True, False):
        assert _C.Arena(1, lock=False, huge_pages=huge_pages).nbytes == PAGE
        assert _C.Arena(PAGE + 1, lock=False, huge_pages=huge_pages).nbytes == 2 * PAGE
        assert _C.Arena(2 * MIB, lock=False, huge_pages=huge_pages).nbytes == 2 * MIB
    for nbytes in (0, 2**63):
        with pytest.raises(ConfigError):
            _C.Arena(nbytes)


def test_views_are_the_arenas_memory_and_writable(arena: _C.Arena) -> None:
    one = torch.frombuffer(arena.view(0, 8 * PAGE), dtype=torch.float32)
    other = torch.frombuffer(arena.view(4 * PAGE, PAGE), dtype=torch.float32)
    assert one.data_ptr() == arena.address
    one.fill_(3)
    assert torch.all(other == 3)
    view = arena.view(123, 45)
    assert (view.address, view.nbytes) == (arena.address + 123, 45)
    assert memoryview(view).nbytes == 45


def test_what_does_not_fit_is_refused(arena: _C.Arena) -> None:
    for offset, nbytes in ((0, arena.nbytes + 1), (arena.nbytes + 1, 0), (2**63, 2**63)):
        with pytest.raises(ConfigError, match="do not fit"):
            arena.view(offset, nbytes)
    window = arena.window(8 * PAGE)
    for numbers in (
        (1, 0, PAGE),
        (0, 1, PAGE),
        (0, 0, 1),
        (8 * PAGE, 0, PAGE),
        (0, arena.nbytes, PAGE),
        (0, 0, 9 * PAGE),
    ):
        with pytest.raises(ConfigError):
            window.map(*numbers)
    for numbers in ((1, PAGE), (0, 9 * PAGE), (2**63, 2**63)):
        with pytest.raises(ConfigError):
            window.unmap(*numbers)
    with pytest.raises(ConfigError):
        arena.window(0)


def test_memory_outlives_the_closed_arena() -> None:
    arena = _C.Arena(MIB, lock=False, huge_pages=False)
    window = arena.window(MIB)
    tensor = torch.frombuffer(arena.view(0, MIB), dtype=torch.uint8)
    arena.close()
    arena.close()
    gc.collect()
    window.map(0, 0, MIB)
    tensor.fill_(7)
    assert torch.all(torch.frombuffer(window, dtype=torch.uint8) == 7)
    for use in (
        lambda: arena.view(0, 1),
        lambda: arena.window(PAGE),
        lambda: arena.nbytes,
        lambda: _C.Engine(arena=arena),
    ):
        with pytest.raises(IoError, match="the arena is closed"):
            use()


def test_memory_is_given_back() -> None:
    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("swapper-arena")

    before = mapped()
    for _ in range(10):
        arena = _C.Arena(64 * MIB, lock=False)
        window = arena.window(16 * MIB)
        window.map(0, 0, 16 * MIB)
        tensor = torch.frombuffer(window, dtype=torch.uint8)
        arena.close()
        del arena, window, tensor
        gc.collect()
    assert mapped() == before


def test_a_tensor_over_an_empty_window_touches_nothing(arena: _C.Arena) -> None:
    window = arena.window(64 * MIB)
    tensor = torch.frombuffer(window, dtype=torch.float32)
    assert tensor.data_ptr() == window.address
    assert tensor.numel() * 4 == window.nbytes
    assert window.address % (2 * MIB) == 0


def test_windows_show_the_frames_mapped_in_any_order(arena: _C.Arena) -> None:
    frames = torch.frombuffer(arena.view(0, 8 * MIB), dtype=torch.uint8).view(8, MIB)
    for n in range(8):
        frames[n] = n
    window = arena.window(4 * MIB)
    shown = torch.frombuffer(window, dtype=torch.uint8).view(4, MIB)
    for order in ((3, 1, 4, 1), (5, 2, 6, 0), (0, 1, 2, 3)):
        for place, frame in enumerate(order):
            window.map(place * MIB, frame * MIB, MIB)
        for place, frame in enumerate(order):
            assert torch.all(shown[place] == frame)
    shown[2] = 99
    assert torch.all(frames[2] == 99)
    window.unmap(0, 4 * MIB)
    window.map(MIB, 7 * MIB, MIB)
    assert torch.all(shown[1] == 7)
    assert torch.all(frames[2] == 99)


@pytest.mark.parametrize("backend_name", BACKENDS)
@pytest.mark.parametrize("through_window", [False, True])
def test_bytes_read_into_a_frame_appear_in_its_window(
    arena: _C.Arena, tmp_path: Path, backend_name: str, through_window: bool
) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(4 * MIB))
    file = _C.File(path)
    engine = _C.Engine(backend=backend_name, arena=arena)
    window = arena.window(4 * MIB)
    window.map(0, 8 * MIB, 4 * MIB)
    address = window.address if through_window else arena.address + 8 * MIB
    assert engine.read(file, 0, address, 4 * MIB, checksum=True).wait()
    assert memoryview(window) == path.read_bytes()
    assert memoryview(arena.view(8 * MIB, 4 * MIB)) == path.read_bytes()
    engine.close()


def test_many_windows_at_once(arena: _C.Arena) -> None:
    windows = [arena.window(4 * PAGE) for _ in range(1000)]
    assert len({window.address for window in windows}) == 1000
    memory = torch.frombuffer(arena.view(0, 4000 * PAGE), dtype=torch.int64).view(4000, PAGE // 8)
    memory[:, 0] = torch.arange(4000)
    for n, window in enumerate(windows):
        window.map(0, n * 4 * PAGE, 4 * PAGE)
    for n, window in enumerate(windows):
        assert torch.frombuffer(window, dtype=torch.int64).view(4, PAGE // 8)[:, 0].tolist() == [
            *range(4 * n, 4 * n + 4)
        ]


@pytest.mark.parametrize("touch", ["before", "after"])
def test_touching_what_is_not_mapped_is_a_segmentation_fault(run_python: RunPython, touch: str) -> None:
    done = run_python(
        """
        import faulthandler, sys
        from swapper import _C
        faulthandler.enable()
        arena = _C.Arena(1 << 20, lock=False, huge_pages=False)
        window = arena.window(8192)
        if sys.argv[1] == "after":
            window.map(0, 0, 8192)
            memoryview(window)[0] = 1
            window.unmap(0, 4096)
            memoryview(window)[4096] = 1
        print("alive", flush=True)
        memoryview(window)[0] = 1
        print("not here")
        """,
        touch,
    )
    assert done.stdout == "alive\n"
    assert "Fatal Python error: Segmentation fault" in done.stderr  # the handler that was there before has its turn
    assert done.returncode == -signal.SIGSEGV


def test_an_arena_that_may_not_be_locked_says_why_and_works(run_python: RunPython) -> None:
    done = run_python(
        """
        import os, resource, sys
        import swapper.errors
        from swapper import _C
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
        if os.geteuid() == 0:
            try:
                os.setresuid(65534, 65534, 65534)
            except OSError:
                sys.exit(77)
        arena = _C.Arena(8 << 20)
        assert not arena.locked
        assert "65536" in arena.lock_reason and "mlock" in arena.lock_reason, arena.lock_reason
        memoryview(arena.view(0, 1))[0] = 1
        engine = _C.Engine(arena=arena)
        print(engine.reason)
        """
    )
    if done.returncode == 77:
        pytest.skip("root cannot become another user here: its user namespace has no other")
    assert done.returncode == 0, done.stderr


def test_locked_memory_is_locked() -> None:
    arena = _C.Arena(4 * MIB)
    if not arena.locked:
        pytest.skip(f"locking is not permitted here: {arena.lock_reason}")
    assert arena.lock_reason == ""
    begin = f"{arena.address:x}-"
    smaps = Path("/proc/self/smaps").read_text()
    entry = smaps[smaps.index(begin) :].split("VmFlags:")
    flags = entry[1].splitlines()[0].split()
    assert {"sh", "lo", "dc"} <= set(flags)  # shared, locked, not copied on fork


def test_an_arena_that_is_not_to_be_locked_is_not() -> None:
    arena = _C.Arena(MIB, lock=False)
    assert not arena.locked
    assert arena.lock_reason == "locking was not requested"


def taken_bytes() -> dict[int, int]:
    """Inode -> bytes of memory, of every arena in the process."""
    found = {}
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the descriptor of the listing itself is gone by now
            if "memfd:swapper-arena" in str(descriptor.readlink()):
                status = descriptor.stat()
                found[status.st_ino] = status.st_blocks * 512
    return found


def mapped_bytes(memory: _C.Arena | _C.Window, kind: str, offset: int = 0) -> int:
    """Bytes of the mapping at `offset` of an arena or a window that smaps counts as `kind`."""
    smaps = Path("/proc/self/smaps").read_text()
    entry = smaps[smaps.index(f"{memory.address + offset:x}-") :]
    return int(entry[entry.index(f"{kind}:") :].split()[1]) << 10


def in_huge_pages(arena: _C.Arena) -> int:
    """Bytes of the arena's own mapping that the page table holds as pages of 2 MiB."""
    return mapped_bytes(arena, "ShmemPmdMapped")


@pytest.mark.parametrize("lock", [True, False])
@pytest.mark.parametrize("nbytes", [PAGE, 2 * MIB - PAGE, 2 * MIB, 2 * MIB + PAGE, 7 * MIB, 130 * MIB + 3 * PAGE])
def test_huge_pages_lie_within_the_arena_and_take_no_more(nbytes: int, lock: bool) -> None:
    before = taken_bytes()
    arena = _C.Arena(nbytes, lock=lock)
    (taken,) = (taken for inode, taken in taken_bytes().items() if inode not in before)
    assert taken <= nbytes
    if arena.locked:
        assert taken == nbytes
    assert arena.huge_bytes <= nbytes // (2 * MIB) * 2 * MIB
    assert not any(memoryview(arena.view(0, nbytes)).tobytes())


@pytest.fixture
def huge_arena() -> Iterator[_C.Arena]:
    arena = _C.Arena(8 * MIB)
    if arena.huge_bytes < arena.nbytes:
        pytest.skip("no huge pages are to be had here (Linux 6.1 or later, and contiguous memory)")
    memoryview(arena.view(0, 1))[0] = 0
    if mapped_bytes(arena, "Rss") == 0:
        pytest.skip("smaps counts no memory here, as in QEMU, so it cannot show huge pages")
    yield arena
    arena.close()


def test_an_arena_that_is_not_to_have_huge_pages_has_none(huge_arena: _C.Arena) -> None:
    assert in_huge_pages(huge_arena) == huge_arena.nbytes
    small = _C.Arena(8 * MIB, huge_pages=False)
    assert small.huge_bytes == 0
    assert in_huge_pages(small) == 0


def test_a_window_of_whole_huge_pages_is_mapped_by_one_entry_for_each(huge_arena: _C.Arena) -> None:
    """Also while it is guarded, and after a write into it; what it shows and what is noted are as for any frame."""
    window = huge_arena.window(8 * MIB)
    for guarded in (False, True):
        window.map(4 * MIB, 2 * MIB, 4 * MIB, guarded)
        assert mapped_bytes(window, "ShmemPmdMapped", 4 * MIB) == 4 * MIB
        assert window.written_at(4 * MIB) == -1
        memoryview(window)[5 * MIB] = 7
        assert window.written_at(4 * MIB) == (5 * MIB if guarded else -1)
        assert memoryview(huge_arena.view(3 * MIB, 1))[0] == 7
    window.map(4 * MIB, 2 * MIB, 4 * MIB)
    window.guard(4 * MIB, 4 * MIB)
    assert mapped_bytes(window, "ShmemPmdMapped", 4 * MIB) == 4 * MIB
    window.unmap(4 * MIB, 4 * MIB)
    window.map(0, 6 * MIB, 2 * MIB)
    memoryview(window)[0] = 1
    assert memoryview(huge_arena.view(6 * MIB, 1))[0] == 1
    assert in_huge_pages(huge_arena) == huge_arena.nbytes, "the arena's own pages stay whole"


@pytest.mark.parametrize("backend_name", BACKENDS)
def test_frames_of_huge_pages_can_be_mapped_page_by_page(
    huge_arena: _C.Arena, tmp_path: Path, backend_name: str
) -> None:
    """Frames that begin and end within huge pages, some of them shown twice, read into by direct I/O, before and after a fork."""
    content = os.urandom(3 * MIB)
    path = tmp_path / "file"
    path.write_bytes(content)
    engine = _C.Engine(backend=backend_name, arena=huge_arena, piece_bytes=64 << 10)
    file = _C.File(path)
    window, other = huge_arena.window(4 * MIB), huge_arena.window(PAGE)
    window.map(PAGE, MIB + PAGE, 3 * MIB)
    other.map(0, MIB + PAGE, PAGE)
    engine.read(file, 0, window.address + PAGE, 3 * MIB).wait()
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    assert memoryview(huge_arena.view(MIB + PAGE, 3 * MIB)) == content
    assert memoryview(other) == content[:PAGE]
    window.unmap(PAGE, MIB)
    window.map(PAGE, 7 * MIB, MIB)
    engine.read(file, MIB, window.address + PAGE, MIB).wait()
    assert memoryview(window)[PAGE : PAGE + MIB] == content[MIB : 2 * MIB]
    assert memoryview(huge_arena.view(MIB + PAGE, 3 * MIB)) == content
    window.unmap(0, 4 * MIB)
    other.unmap(0, PAGE)
    assert in_huge_pages(huge_arena) == huge_arena.nbytes, "the arena's own pages stay whole"
    engine.close()


def test_the_first_write_into_a_guarded_range_is_let_through_and_noted(arena: _C.Arena) -> None:
    window = arena.window(8 * PAGE)
    seen = torch.frombuffer(window, dtype=torch.uint8)
    window.map(0, 0, 4 * PAGE)
    window.map(4 * PAGE, 4 * PAGE, 4 * PAGE)
    seen[:] = 1
    for begin in (0, 4 * PAGE):
        window.guard(begin, 4 * PAGE)
        assert window.written_at(begin) == -1
    assert seen.sum() == 8 * PAGE
    assert window.written_at(0) == window.written_at(4 * PAGE) == -1  # reading is no write
    seen[5 * PAGE + 7] = 9
    seen[4 * PAGE] = 9
    assert window.written_at(4 * PAGE) == 5 * PAGE + 7
    assert window.written_at(0) == -1
    assert seen.sum() == 8 * PAGE + 16
    window.guard(4 * PAGE, 4 * PAGE)
    assert window.written_at(4 * PAGE) == -1
    seen[6 * PAGE] = 9
    assert window.written_at(4 * PAGE) == 6 * PAGE
    window.map(4 * PAGE, 4 * PAGE, 4 * PAGE)  # for writing again
    seen[6 * PAGE] = 10
    assert window.written_at(4 * PAGE) == -1
    window.unmap(0, 8 * PAGE)
    assert window.written_at(0) == -1


def test_threads_that_write_into_a_guarded_range_at_once_all_succeed(arena: _C.Arena) -> None:
    window = arena.window(64 * PAGE)
    seen = torch.frombuffer(window, dtype=torch.uint8)
    window.map(0, 0, 64 * PAGE)
    for _ in range(20):
        seen.zero_()
        window.guard(0, 64 * PAGE)
        threads = [threading.Thread(target=seen[i * PAGE : (i + 1) * PAGE].fill_, args=(i,)) for i in range(64)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert torch.equal(seen.view(64, PAGE)[:, 5], torch.arange(64, dtype=torch.uint8))
        assert window.written_at(0) >= 0
        window.map(0, 0, 64 * PAGE)


@pytest.mark.parametrize("end", ["done", "unwatched"])
def test_memory_that_a_write_reads_changes_when_that_is_over(tmp_path: Path, end: str) -> None:
    """The drive gets what was there; then every thread may change it."""
    engine = _C.Engine(backend="chaos", chaos={"seed": 3, "delay": 1.0})
    arena = _C.Arena(16 * PAGE, lock=False)
    (tmp_path / "file").write_bytes(bytes(4 * PAGE))
    file = _C.File(str(tmp_path / "file"))
    view = arena.view(PAGE, 4 * PAGE - 100)
    bytes_ = torch.frombuffer(view, dtype=torch.uint8)
    for round_ in range(20):
        bytes_.fill_(round_)
        ticket = engine.write(file, 0, view.address, 4 * PAGE, keep=arena)
        view.watch(ticket)
        assert bytes_.sum() == round_ * len(bytes_)  # reading waits for nothing
        if end == "unwatched":
            ticket.wait()
            view.unwatch()
        threads = [threading.Thread(target=bytes_[i::4].add_, args=(100,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert ticket.done
        assert (tmp_path / "file").read_bytes()[: len(bytes_)] == bytes([round_]) * len(bytes_)
        assert bytes_.sum() == (round_ + 100) * len(bytes_)
    engine.close()
