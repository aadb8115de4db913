"""Any address, any offset, any size: what every backend promises about bytes that do not fit the sectors.

The model is a bytearray, written to as Python's own `pwrite` would; files are compared whole, so that a byte too many, too
few, or of a neighbour shows. They are read back by Python, and by the engine into memory of yet another alignment.
"""

from __future__ import annotations

import os
import random
import subprocess
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import examples

from swapper import _C
from swapper.errors import IoError

BACKENDS = ["uring", "aio", "threads", "chaos"]
PAGE = 4096
MIB = 1 << 20

MakeFile = Callable[..., _C.File]
MakeEngine = Callable[..., _C.Engine]


class Memory:
    """Memory of any alignment, as a tensor has it: private, and beginning `shift` bytes after a page."""

    def __init__(self, content: bytes | int, shift: int = 0) -> None:
        nbytes = content if isinstance(content, int) else len(content)
        self._keep = bytearray(nbytes + 2 * PAGE)
        begin = -address_of(self._keep) % PAGE + shift
        self.bytes = memoryview(self._keep)[begin : begin + nbytes]
        self.address = address_of(self._keep) + begin
        if not isinstance(content, int):
            self.bytes[:] = content


def address_of(memory: bytearray) -> int:
    import ctypes

    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def patched(content: bytearray, offset: int, new: bytes) -> None:
    if not new:
        return
    content.extend(bytes(max(0, offset - len(content))))
    content[offset : offset + len(new)] = new


places = st.one_of(
    st.integers(0, 70_000), st.integers(0, 16).map(lambda n: n * PAGE), st.integers(0, 99).map(lambda n: n * 512)
)
sizes = st.one_of(st.integers(0, 1100), st.integers(0, 200_000), st.integers(0, 30).map(lambda n: n * PAGE))
shifts = st.sampled_from([0, 512, 1, 64, 4095])


@pytest.mark.parametrize("backend_name", BACKENDS)
@settings(max_examples=examples(60))
@given(
    start=sizes,
    runs=st.lists(st.tuples(st.booleans(), places, sizes, shifts), min_size=1, max_size=8),
    depth=st.integers(1, 20),
    direct=st.sampled_from([None, None, False]),
    debug=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_a_file_written_anywhere_is_what_python_would_have_made_of_it(
    backend_name: str,
    start: int,
    runs: list[tuple[bool, int, int, int]],
    depth: int,
    direct: bool | None,
    debug: bool,
    seed: int,
) -> None:
    rng = random.Random(seed)
    model = bytearray(rng.randbytes(start))
    engine = _C.Engine(backend=backend_name, depth=depth, piece_bytes=16 * PAGE, staging_bytes=256 << 10, debug=debug)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "file")
        path.write_bytes(model)
        file = _C.File(path, direct=direct)
        for writing, offset, nbytes, shift in runs:
            if writing:
                memory = Memory(rng.randbytes(nbytes), shift)
                ticket = engine.write(file, offset, memory.address, nbytes, checksum=True, keep=memory)
                assert ticket.wait()
                assert ticket.crc32 == zlib.crc32(memory.bytes)
                patched(model, offset, memory.bytes.tobytes())
                assert path.stat().st_size == len(model)
            else:
                memory = Memory(nbytes, shift)
                ticket = engine.read(file, offset, memory.address, nbytes, checksum=True, keep=memory)
                if nbytes and offset + nbytes > len(model):
                    assert isinstance(ticket.exception(), IoError)
                    assert "unexpected end of file" in str(ticket.error)
                else:
                    assert ticket.wait()
                    assert memory.bytes == model[offset : offset + nbytes]
                    assert ticket.crc32 == zlib.crc32(memory.bytes)
        engine.close()
        assert path.read_bytes() == model
        file.close()


@pytest.mark.parametrize("backend_name", BACKENDS)
@settings(max_examples=examples(25))
@given(
    sizes=st.lists(st.one_of(st.integers(1, 900), st.integers(1, 20_000)), min_size=1, max_size=120),
    begin=st.integers(0, 9000),
    old=st.integers(0, 300_000),
    aligned=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_neighbours_written_in_one_batch_leave_each_other_alone(
    backend_name: str, sizes: list[int], begin: int, old: int, aligned: bool, seed: int
) -> None:
    """Nobody waits for anybody: many of these share a sector, some share it with the old end of the file."""
    rng = random.Random(seed)
    model = bytearray(rng.randbytes(old))
    memory = Memory(rng.randbytes(begin + sum(sizes)), 0 if aligned else 3)
    engine = _C.Engine(backend=backend_name, depth=16, piece_bytes=PAGE)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "file")
        path.write_bytes(model)
        file = _C.File(path)
        places, offset = [], begin
        for nbytes in sizes:
            places.append((offset, nbytes))
            offset += nbytes
        rng.shuffle(places)
        tickets = [engine.write(file, at, memory.address + at, nbytes, keep=memory) for at, nbytes in places]
        assert all(ticket.wait() for ticket in tickets)
        patched(model, begin, memory.bytes[begin:].tobytes())
        assert path.read_bytes() == model
        back = Memory(len(model), 7)
        reads = [engine.read(file, at, back.address + at, nbytes, keep=back) for at, nbytes in places]
        assert all(ticket.wait() for ticket in reads)
        assert back.bytes[begin:offset] == memory.bytes[begin:offset]
        engine.close()
        file.close()


def test_edges_meet_whole_granules_without_loss(make_engine: MakeEngine, make_file: MakeFile) -> None:
    """Large writes that overlap small ones by their sectors: every byte is one that somebody wrote there, and where only one
    did, it is that one's."""
    engine = make_engine(depth=8, piece_bytes=2 * PAGE)
    file = make_file(b"\0" * (16 * PAGE))
    whole, small = Memory(b"W" * 16 * PAGE), Memory(b"s" * 16 * PAGE, 1)
    for _ in range(60):
        tickets = []
        for page in range(16):
            tickets.append(engine.write(file, page * PAGE, whole.address, PAGE, keep=whole))
            tickets.append(engine.write(file, page * PAGE + 1000, small.address, 10, keep=small))
        assert all(ticket.wait() for ticket in tickets)
        content = Path(file.path).read_bytes()
        for page in range(16):
            at = page * PAGE
            assert content[at : at + 1000] == b"W" * 1000
            assert content[at + 1010 : at + PAGE] == b"W" * (PAGE - 1010)
            assert content[at + 1000 : at + 1010] in (b"W" * 10, b"s" * 10)


def test_neighbours_may_be_written_by_different_engines(make_engine: MakeEngine, make_file: MakeFile) -> None:
    engines = [make_engine(depth=4) for _ in range(3)]
    file = make_file(b"")
    other = _C.File(file.path)
    nbytes = 10_007
    content = random.Random(5).randbytes(300 * nbytes)
    memory = Memory(content, 9)
    tickets = [
        engines[n % 3].write((file, other)[n % 2], n * nbytes, memory.address + n * nbytes, nbytes, keep=memory)
        for n in range(300)
    ]
    assert all(ticket.wait() for ticket in tickets)
    assert Path(file.path).read_bytes() == content
    other.close()


def test_neighbours_may_be_written_by_different_processes(
    backend: str, tmp_path: Path, run_python: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    path = tmp_path / "file"
    path.touch()
    script = """
        import ctypes, os, sys
        from swapper import _C
        backend, path = sys.argv[1:]
        me = 1 if os.fork() == 0 else 0
        engine, file = _C.Engine(backend=backend, depth=8), _C.File(path)
        memory = ctypes.create_string_buffer(bytes([65 + me]) * 5001)
        address = ctypes.addressof(memory)
        for n in range(me, 400, 2):
            engine.write(file, n * 5001, address, 5001, keep=memory)
        engine.close()
        if me == 0:
            assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
        """
    done = run_python(script, backend, path)
    assert (done.returncode, done.stderr) == (0, "")
    assert path.read_bytes() == b"".join(bytes([65 + n % 2]) * 5001 for n in range(400))


def test_memory_of_slots_is_taken_when_needed_and_bounded(make_engine: MakeEngine, make_file: MakeFile) -> None:
    engine = make_engine(depth=32, piece_bytes=MIB, staging_bytes=2 * MIB)
    file = make_file(24 * MIB + 1)
    aligned, odd = Memory(os.urandom(24 * MIB)), Memory(24 * MIB, 1)
    assert engine.write(file, 0, aligned.address, 24 * MIB, keep=aligned).wait()
    assert engine.staging_bytes == 0
    if not file.direct:
        pytest.skip(f"no direct I/O here: {file.reason}")
    reads = [engine.read(file, n * MIB, odd.address + n * MIB, MIB, keep=odd) for n in range(24)]
    other = make_file(b"")
    for n, read in enumerate(reads):
        engine.write(other, n * MIB + 1, odd.address + n * MIB, MIB, after=read, keep=odd)
    engine.drain()
    assert Path(other.path).read_bytes()[1:] == aligned.bytes
    assert engine.staging_bytes == 2 * MIB
    assert odd.bytes == aligned.bytes


def test_the_end_of_a_file_is_where_it_is(engine: _C.Engine, make_file: MakeFile) -> None:
    for size in (1, 511, 512, 5000, 8192, 70_001):
        content = os.urandom(size)
        file = make_file(content)
        memory = Memory(size + 1, 5)
        assert engine.read(file, 0, memory.address, size, keep=memory).wait()
        assert memory.bytes[:size] == content
        assert engine.read(file, size - 1, memory.address, 1, keep=memory).wait()
        assert memory.bytes[:1] == content[-1:]
        error = engine.read(file, 0, memory.address, size + 1, keep=memory).exception()
        assert isinstance(error, IoError)
        assert (error.errno, error.detail, error.offset) == (0, "unexpected end of file", size)
        beyond = engine.read(file, size + 10_000, memory.address, 1, keep=memory).exception()
        assert isinstance(beyond, IoError)


def test_a_gap_before_a_write_reads_as_zeros(engine: _C.Engine, make_file: MakeFile) -> None:
    file = make_file(b"begin")
    memory = Memory(b"e" * 10_001, 3)
    assert engine.write(file, 50_001, memory.address, 10_001, keep=memory).wait()
    assert Path(file.path).read_bytes() == b"begin" + bytes(49_996) + b"e" * 10_001


def test_an_unnamed_file_takes_odd_writes_too(engine: _C.Engine, make_file: MakeFile) -> None:
    file = make_file(b"")
    Path(file.path).unlink()
    memory = Memory(os.urandom(9999), 1)
    assert engine.write(file, 1, memory.address, 9999, keep=memory).wait()
    back = Memory(9999, 2)
    assert engine.read(file, 1, back.address, 9999, keep=back).wait()
    assert back.bytes == memory.bytes
    assert file.nbytes == 10_000


def test_odd_writes_on_a_full_filesystem_fail(engine: _C.Engine, small_tmpfs: Path) -> None:
    file = _C.File(small_tmpfs / "file", create=True)
    memory = Memory(8 * MIB + 77, 1)
    error = engine.write(file, 3, memory.address, 8 * MIB + 77, keep=memory).exception()
    assert isinstance(error, IoError)
    assert error.errno == 28
    file.close()


@pytest.mark.parametrize("filesystem", ["tmpfs", "large_sectors"])
def test_other_filesystems_take_any_place(engine: _C.Engine, filesystem: str, request: pytest.FixtureRequest) -> None:
    directory: Path = request.getfixturevalue({"tmpfs": "small_tmpfs"}.get(filesystem, filesystem))
    rng = random.Random(3)
    model = bytearray()
    path = directory / "file"
    file = _C.File(path, create=True)
    for _ in range(100):
        offset, nbytes = rng.randrange(300_000), rng.choice([rng.randrange(100), rng.randrange(100_000)])
        memory = Memory(rng.randbytes(nbytes), rng.choice([0, 1, 512]))
        assert engine.write(file, offset, memory.address, nbytes, keep=memory).wait()
        patched(model, offset, memory.bytes.tobytes())
        back = Memory(nbytes, 3)
        assert engine.read(file, offset, back.address, nbytes, keep=back).wait()
        assert back.bytes == memory.bytes
    assert path.read_bytes() == model
    file.close()


def test_everything_may_be_staged(make_engine: MakeEngine, make_file: MakeFile) -> None:
    engine = make_engine(stage=True)
    content = os.urandom(3 * MIB)
    file = make_file(content)
    if not file.direct:
        pytest.skip(f"no direct I/O here: {file.reason}")
    own = _C.Arena(4 * MIB, lock=False)
    assert engine.read(file, 0, own.window(MIB).address, 0).wait()
    assert engine.read(file, 0, own.address + PAGE, 3 * MIB).wait()
    assert memoryview(own.view(PAGE, 3 * MIB)) == content
    assert engine.staging_bytes == 0, "an arena needs no slots"
    memory = Memory(3 * MIB)
    assert engine.read(file, 0, memory.address, 3 * MIB, keep=memory).wait()
    assert memory.bytes == content
    assert engine.staging_bytes > 0


@pytest.fixture
def repeating() -> Iterator[tuple[_C.Window, bytes]]:
    """4 GiB and a little of addresses, which show the same 2 MiB over and over."""
    arena = _C.Arena(2 * MIB, lock=False)
    pattern = random.Random(8).randbytes(2 * MIB)
    memoryview(arena.view(0, 2 * MIB))[:] = pattern
    window = arena.window(2050 * 2 * MIB)
    for n in range(2050):
        window.map(n * 2 * MIB, 0, 2 * MIB)
    yield window, pattern
    arena.close()


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("backend", ["uring"])
def test_one_operation_may_be_larger_than_4_gib(
    repeating: tuple[_C.Window, bytes], tmp_path: Path, backend: str, shift: int
) -> None:
    window, pattern = repeating
    if os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize < 6 << 30:
        pytest.skip("not enough space here")
    nbytes = (4 << 30) + 3 * MIB + 5
    engine = _C.Engine(backend=backend)
    file = _C.File(tmp_path / "file", create=True)
    try:
        write = engine.write(file, 0, window.address + shift, nbytes)
        assert write.wait()
        assert file.nbytes == nbytes
        doubled = pattern + pattern
        with open(file.path, "rb") as stream:  # noqa: PTH123
            for at in (0, 2 * MIB - 100, (4 << 30) - 50, (4 << 30) + 3 * MIB - 95):
                stream.seek(at)
                assert stream.read(100) == doubled[(at + shift) % (2 * MIB) :][:100]
        assert engine.read(file, 0, window.address + shift, nbytes).wait()
        assert engine.bytes_read == engine.bytes_written == nbytes
        assert engine.read(file, nbytes - MIB - 1, window.address + shift + nbytes - MIB - 1, MIB + 1).wait()
    finally:
        engine.close()
        file.close()
        Path(file.path).unlink()
