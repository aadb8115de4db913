"""Failures of every backend: an error with the facts in it, and nothing half done."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from swapper import _C
from swapper.errors import IoError

MIB = 1 << 20
PAGE = 4096

MakeFile = Callable[..., _C.File]
MakeEngine = Callable[..., _C.Engine]


def failure(ticket: _C.Ticket) -> IoError:
    """The error of a ticket that must fail, checked to be the same by both ways of asking."""
    with pytest.raises(IoError) as caught:
        ticket.wait()
    assert ticket.done
    assert isinstance(ticket.error, IoError)
    assert str(ticket.error) == str(caught.value)
    return caught.value


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("size", [0, 3 * PAGE, 3 * PAGE + 1000, 8 * PAGE - 1])
def test_reading_past_the_end_is_an_error_at_the_end(
    make_engine: MakeEngine, arena: _C.Arena, make_file: MakeFile, size: int, direct: bool
) -> None:
    engine = make_engine(arena=arena, piece_bytes=2 * PAGE)
    content = os.urandom(size)
    file = make_file(content, direct=direct or None if direct else False)
    error = failure(engine.read(file, 0, arena.address, 8 * PAGE, checksum=True))
    assert (error.op, error.path, error.nbytes, error.errno) == ("read", file.path, 8 * PAGE, 0)
    assert size <= error.offset <= 8 * PAGE
    assert "unexpected end of file" in error.detail
    whole_pieces = size // (2 * PAGE) * 2 * PAGE
    assert memoryview(arena.view(0, whole_pieces)) == content[:whole_pieces]


def test_the_offset_of_an_error_is_where_it_happened(
    make_engine: MakeEngine, arena: _C.Arena, make_file: MakeFile
) -> None:
    engine = make_engine(depth=1, piece_bytes=PAGE)
    error = failure(engine.read(make_file(3 * PAGE), PAGE, arena.address, 8 * PAGE))
    assert (error.offset, error.nbytes) == (3 * PAGE, 8 * PAGE)


def test_a_full_filesystem_is_an_error_and_the_engine_goes_on(
    engine: _C.Engine, arena: _C.Arena, small_tmpfs: Path, make_file: MakeFile
) -> None:
    file = _C.File(small_tmpfs / "file", create=True)
    error = failure(engine.write(file, 0, arena.address, 16 * MIB, checksum=True))
    assert (error.op, error.errno, error.nbytes) == ("write", errno.ENOSPC, 16 * MIB)
    with pytest.raises(IoError) as caught:
        file.allocate(64 * MIB)
    assert caught.value.errno == errno.ENOSPC
    file.close()
    assert engine.in_flight == 0
    assert engine.read(make_file(MIB), 0, arena.address, MIB).wait()


def test_bad_addresses_are_errors(engine: _C.Engine, arena: _C.Arena, make_file: MakeFile) -> None:
    window = arena.window(MIB)  # nothing mapped
    error = failure(engine.read(make_file(MIB), 0, window.address, MIB))
    assert error.errno == errno.EFAULT


def test_operations_behind_a_failed_one_are_cancelled(engine: _C.Engine, arena: _C.Arena, make_file: MakeFile) -> None:
    empty, file = make_file(0, name="empty"), make_file(b"\1" * MIB)
    memory = memoryview(arena.view(0, arena.nbytes))
    memory[:MIB] = b"\2" * MIB
    first = engine.read(empty, 0, arena.address + MIB, PAGE)
    second = engine.write(file, 0, arena.address, MIB, after=first, checksum=True)
    third = engine.read(file, PAGE, arena.address, PAGE, after=second)
    nothing = engine.read(file, 0, 0, 0, after=third)
    for ticket, op, offset, nbytes in ((second, "write", 0, MIB), (third, "read", PAGE, PAGE), (nothing, "read", 0, 0)):
        error = failure(ticket)
        assert (error.op, error.path, error.offset, error.nbytes, error.errno) == (op, file.path, offset, nbytes, 0)
        assert error.detail == "cancelled: the operation it waited for failed"
    assert Path(file.path).read_bytes() == b"\1" * MIB
    assert memory[:MIB] == b"\2" * MIB
    after_the_fact = engine.read(file, 0, arena.address, PAGE, after=first)
    assert failure(after_the_fact).errno == 0
    with pytest.raises(IoError):
        _ = second.crc32


def test_a_failure_on_one_engine_cancels_on_another(
    make_engine: MakeEngine, arena: _C.Arena, make_file: MakeFile
) -> None:
    one, other = make_engine(), make_engine()
    for _ in range(50):
        first = one.read(make_file(0, name="empty"), 0, arena.address, PAGE)
        assert (
            "cancelled"
            in failure(other.read(make_file(PAGE, name="whole"), 0, arena.address, PAGE, after=first)).detail
        )


def test_drain_does_not_raise_for_failed_operations(engine: _C.Engine, arena: _C.Arena, make_file: MakeFile) -> None:
    tickets = [engine.read(make_file(0, name="empty"), 0, arena.address, PAGE) for _ in range(20)]
    engine.drain()
    assert all(isinstance(ticket.error, IoError) for ticket in tickets)


def test_a_range_beyond_any_file_is_refused(engine: _C.Engine, arena: _C.Arena, make_file: MakeFile) -> None:
    with pytest.raises(IoError) as caught:
        engine.read(make_file(PAGE), 2**63 - PAGE, arena.address, 2 * PAGE)
    assert caught.value.errno == errno.EINVAL


# ---- files ----------------------------------------------------------------------------------------------------------


def test_a_read_only_file_can_be_read_and_not_written(engine: _C.Engine, arena: _C.Arena, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(MIB))
    path.chmod(0o444)
    file = _C.File(path, read_only=True)
    assert engine.read(file, 0, arena.address, MIB).wait()
    assert memoryview(arena.view(0, MIB)) == path.read_bytes()
    with pytest.raises(IoError, match="read-only") as caught:
        engine.write(file, 0, arena.address, MIB)
    assert (caught.value.op, caught.value.errno) == ("write", errno.EBADF)
    file.close()


def test_a_closed_file_is_refused_everywhere(engine: _C.Engine, arena: _C.Arena, make_file: MakeFile) -> None:
    file = make_file(MIB)
    file.close()
    file.close()
    uses: list[Callable[[], object]] = [
        lambda: engine.read(file, 0, arena.address, PAGE),
        lambda: engine.write(file, 0, arena.address, PAGE),
        lambda: file.nbytes,
        lambda: file.allocate(PAGE),
        lambda: file.truncate(PAGE),
        file.sync,
    ]
    for use in uses:
        with pytest.raises(IoError) as caught:
            use()
        assert caught.value.errno == errno.EBADF
    assert file.path.endswith("file0")


def test_a_file_closed_or_removed_under_way_is_transferred_to_the_end(
    engine: _C.Engine, arena: _C.Arena, make_file: MakeFile, gate: _C.Ticket, open_gate: Callable[[], object]
) -> None:
    content = os.urandom(MIB)
    closed, removed = make_file(content), make_file(content)
    tickets = [
        engine.read(closed, 0, arena.address, MIB, after=gate),
        engine.read(removed, 0, arena.address + MIB, MIB, after=gate),
    ]
    closed.close()
    Path(removed.path).unlink()
    open_gate()
    assert all(ticket.wait() for ticket in tickets)
    assert memoryview(arena.view(0, 2 * MIB)) == content + content


def test_opening_says_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(IoError) as caught:
        _C.File(tmp_path / "missing")
    assert (caught.value.op, caught.value.path, caught.value.errno) == ("open", str(tmp_path / "missing"), errno.ENOENT)
    (tmp_path / "there").touch()
    with pytest.raises(IoError) as caught:
        _C.File(tmp_path / "there", create=True)
    assert caught.value.errno == errno.EEXIST
    with pytest.raises(IoError) as caught:
        _C.File(tmp_path)
    assert caught.value.errno == errno.EISDIR
    with pytest.raises(IoError) as caught:
        _C.File(tmp_path, read_only=True)
    assert caught.value.errno == errno.EISDIR


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    """Opening a FIFO to read would otherwise wait for somebody to write."""
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", "/dev/null"):
        for read_only in (True, False):
            with pytest.raises(IoError, match="neither a regular file nor a block device") as caught:
                _C.File(path, read_only=read_only)
            assert caught.value.errno == errno.EINVAL


def test_a_new_file_is_private_and_as_large_as_allocated(tmp_path: Path) -> None:
    file = _C.File(tmp_path / "file", create=True)
    file.allocate(MIB)
    assert file.nbytes == MIB
    file.allocate(PAGE)
    assert file.nbytes == MIB
    status = (tmp_path / "file").stat()
    assert status.st_mode & 0o777 == 0o600
    assert status.st_blocks * 512 >= MIB
    file.truncate(PAGE)
    file.sync()
    assert file.nbytes == PAGE
    file.close()


def test_direct_files_state_their_alignment_and_reason(make_file: MakeFile) -> None:
    file = make_file(PAGE)
    assert file.reason.startswith("direct" if file.direct else "buffered")
    assert file.alignment in (512, 1024, 2048, 4096)
    assert file.memory_alignment <= 4096
    assert make_file(PAGE, direct=False).reason == "buffered: requested"


def test_names_need_not_be_text(engine: _C.Engine, arena: _C.Arena, tmp_path: Path) -> None:
    path = os.path.join(os.fsencode(tmp_path), b"odd-\xff")  # noqa: PTH118
    file = _C.File(os.fsdecode(path), create=True)
    assert os.fsencode(file.path) == path
    assert failure(engine.read(file, 0, arena.address, PAGE)).path == os.fsdecode(path)
    file.close()


# ---- engines --------------------------------------------------------------------------------------------------------


def test_a_closed_engine_refuses_and_has_finished_everything(
    make_engine: MakeEngine, arena: _C.Arena, make_file: MakeFile
) -> None:
    engine = make_engine(arena=arena)
    file = make_file(16 * MIB)
    tickets = [engine.write(file, 0, arena.address, 16 * MIB, checksum=True) for _ in range(10)]
    engine.close()
    assert all(ticket.done and ticket.error is None for ticket in tickets)
    engine.close()
    engine.drain()
    for submit in (engine.read, engine.write):
        for nbytes in (0, PAGE):
            with pytest.raises(IoError, match="the engine is closed"):
                submit(file, 0, arena.address, nbytes)


# ---- machines that lack things --------------------------------------------------------------------------------------


@pytest.mark.parametrize("forbidden", ["io_uring_setup", "io_uring_enter"])
@pytest.mark.parametrize("follows", ["aio"])
def test_where_io_uring_is_forbidden_the_next_backend_takes_over_and_says_so(
    run_python: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path, follows: str, forbidden: str
) -> None:
    """As in containers: a seccomp filter answers the system call with EPERM."""
    number = {"io_uring_setup": 425, "io_uring_enter": 426}[forbidden]
    done = run_python(
        """
        import ctypes, os, struct, sys
        from swapper import _C
        from swapper.errors import ConfigError
        number, directory = int(sys.argv[1]), sys.argv[2]
        LOAD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06
        ALLOW, REFUSE = 0x7FFF0000, 0x00050001  # EPERM
        program = [(LOAD, 0, 0, 0), (JUMP_IF_EQUAL, 0, 1, number), (RETURN, 0, 0, REFUSE), (RETURN, 0, 0, ALLOW)]
        code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in program))
        header = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program), ctypes.addressof(code)))
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
        assert libc.prctl(22, 2, header, 0, 0) == 0, os.strerror(ctypes.get_errno())  # PR_SET_SECCOMP
        engine = _C.Engine()
        print(engine.backend, "|", engine.reason)
        arena = _C.Arena(1 << 20, lock=False)
        file = _C.File(os.path.join(directory, "file"), create=True)
        assert engine.write(file, 0, arena.address, 1 << 20).wait()
        try:
            _C.Engine(backend="uring")
        except ConfigError as error:
            print(error)
        """,
        number,
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    chosen, refused = done.stdout.splitlines()
    assert chosen.startswith(f"{follows} | ")
    for text in (chosen, refused):
        assert f"{forbidden}: Operation not permitted" in text


def test_a_filesystem_without_direct_io_is_used_buffered_or_refused() -> None:
    file = _C.File("/proc/version", read_only=True)
    assert not file.direct
    assert file.reason.startswith("buffered: ")
    file.close()
    with pytest.raises(IoError, match="O_DIRECT") as caught:
        _C.File("/proc/version", read_only=True, direct=True)
    assert (caught.value.op, caught.value.errno) == ("open", errno.EINVAL)


def test_a_drive_of_large_sectors_is_respected(engine: _C.Engine, arena: _C.Arena, large_sectors: Path) -> None:
    file = _C.File(large_sectors / "file", create=True)
    assert file.direct
    assert file.alignment == 4096
    content = os.urandom(MIB)
    memory = memoryview(arena.view(0, 2 * MIB))
    memory[:MIB] = content
    written = engine.write(file, 0, arena.address, MIB)
    assert engine.read(file, 0, arena.address + MIB, MIB, after=written).wait()
    assert memory[MIB:] == content
    assert engine.read(file, 513, arena.address + MIB + 1, 4095).wait()
    assert memory[MIB + 1 : MIB + 4096] == content[513 : 513 + 4095]
    assert engine.write(file, 700, arena.address + 1, 9000).wait()
    assert Path(file.path).read_bytes() == content[:700] + content[1:9001] + content[9700:]
    file.truncate(5000)
    error = failure(engine.read(file, 0, arena.address, 2 * PAGE))
    assert (error.offset, error.detail) == (5000, "unexpected end of file")
    file.close()
