"""Files, descriptors and machines that a handle cannot use: an exception that says why, or the right bytes another way."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from handle_bytes import RunPython, noise, raw
from torch._subclasses.fake_tensor import FakeTensorMode

from swapper import AioHandle, ConfigError, GdsHandle, IoError, UnsupportedError


def test_a_closed_handle(path: Path) -> None:
    handle = AioHandle()
    handle.close()
    handle.close()
    for use in (handle.sync_pread, handle.sync_pwrite, handle.async_pread, handle.submit_write, handle.submit_read):
        with pytest.raises(IoError, match="closed") as raised:
            use(torch.empty(10), path)  # type: ignore[operator]
        assert raised.value.errno == errno.EBADF
    assert handle.wait() == 0
    assert not path.exists()


@pytest.mark.whole
def test_a_file_removed_meanwhile(handle: AioHandle, path: Path) -> None:
    """What was begun goes on in the removed file; what comes after makes a new one, or finds none."""
    first, second = noise(8 << 20), noise(4096, seed=1)
    operation = handle.submit_write(first, path)
    path.unlink()
    handle.sync_pwrite(second, path)
    operation.wait()
    assert path.read_bytes() == raw(second)
    path.unlink()
    with pytest.raises(IoError) as raised:
        handle.sync_pread(second, path)
    assert raised.value.errno == errno.ENOENT


@pytest.mark.whole
def test_a_file_cut_while_it_is_read(handle: AioHandle, path: Path) -> None:
    """Either the bytes were read in time, or it raises."""
    content = noise(16 << 20)
    path.write_bytes(raw(content))
    back = torch.zeros_like(content)
    operation = handle.submit_read(back, path)
    os.truncate(path, 4096)
    if operation.exception() is None:
        assert torch.equal(back, content)


@pytest.mark.whole
@pytest.mark.parametrize("flags", [os.O_RDWR, os.O_WRONLY, os.O_RDWR | os.O_APPEND])
def test_a_descriptor_opened_without_direct_io(handle: AioHandle, path: Path, flags: int) -> None:
    path.write_bytes(bytes(4096))
    descriptor = os.open(path, flags)
    tensor = noise(5000)
    handle.async_pwrite(tensor, fd=descriptor)
    assert handle.wait() == 1
    os.close(descriptor)
    assert path.read_bytes() == raw(tensor)


def test_a_read_only_file(path: Path, run_python: RunPython) -> None:
    path.write_bytes(b"unharmed")
    path.chmod(0o444)
    path.parent.chmod(0o755)
    done = run_python(
        """
        import os, sys, torch, swapper
        handle = swapper.AioHandle()
        if os.geteuid() == 0:
            for parent in list(__import__("pathlib").Path(sys.argv[1]).parents)[:-2]:
                try:
                    os.chmod(parent, 0o755)
                except OSError:
                    pass
            os.setresuid(65534, 65534, 65534)
        try:
            handle.sync_pwrite(torch.zeros(100), sys.argv[1])
        except swapper.IoError as error:
            print(error.errno)
        """,
        path,
    )
    assert (done.returncode, done.stdout) == (0, f"{errno.EACCES}\n"), done.stderr
    assert path.read_bytes() == b"unharmed"


@pytest.mark.whole
@pytest.mark.parametrize("writing", [True, False])
def test_a_directory(handle: AioHandle, tmp_path: Path, writing: bool) -> None:
    with pytest.raises(IoError) as raised:
        (handle.sync_pwrite if writing else handle.sync_pread)(torch.zeros(10), tmp_path)
    assert raised.value.errno == errno.EISDIR


def test_a_fifo_does_not_hang(path: Path, run_python: RunPython) -> None:
    os.mkfifo(path)
    done = run_python(
        """
        import sys, torch, swapper
        for method in ("sync_pwrite", "sync_pread"):
            try:
                getattr(swapper.AioHandle(), method)(torch.zeros(10), sys.argv[1])
            except swapper.IoError as error:
                print(method, "raised", flush=True)
        """,
        path,
    )
    assert (done.returncode, done.stdout) == (0, "sync_pwrite raised\nsync_pread raised\n"), done.stderr


@pytest.mark.whole
@pytest.mark.parametrize("target", ["/dev/null", "/dev/zero"])
def test_a_device_that_is_no_drive(handle: AioHandle, target: str) -> None:
    with pytest.raises(IoError, match="neither a file nor a drive"):
        handle.sync_pwrite(torch.zeros(10), target)


@pytest.mark.whole
@pytest.mark.parametrize("target", [True, "a\0b"])
def test_what_is_no_path(handle: AioHandle, target: object) -> None:
    with pytest.raises(ConfigError):
        handle.sync_pwrite(torch.zeros(10), target)  # type: ignore[arg-type]


@pytest.mark.whole
def test_a_missing_directory(handle: AioHandle, tmp_path: Path) -> None:
    with pytest.raises(IoError) as raised:
        handle.sync_pwrite(torch.zeros(10), tmp_path / "no" / "file")
    assert raised.value.errno == errno.ENOENT


@pytest.mark.whole
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA here")
@pytest.mark.parametrize("writing", [True, False])
def test_a_cuda_tensor_where_there_is_no_cuda(handle: AioHandle, path: Path, writing: bool) -> None:
    path.write_bytes(bytes(4096))
    with FakeTensorMode():
        tensor = torch.empty(10, device="cuda")
    with pytest.raises(UnsupportedError, match="no CUDA device"):
        (handle.sync_pwrite if writing else handle.sync_pread)(tensor, path)


@pytest.mark.whole
@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_a_tensor_without_memory(handle: AioHandle, path: Path) -> None:
    with FakeTensorMode():
        fake = torch.empty(10)
    emptied, strided = torch.zeros(1000), torch.zeros(10, 100).t()
    emptied.untyped_storage().resize_(0)
    strided.untyped_storage().resize_(0)
    for tensor in (fake, emptied, strided):
        with pytest.raises(UnsupportedError, match="no memory"):
            handle.sync_pwrite(tensor, path)
    assert not path.exists()


@pytest.mark.whole
@pytest.mark.parametrize("offset", [-1, -4096, 1 << 63, 1.5, True])
def test_an_offset_that_is_none(handle: AioHandle, path: Path, offset: object) -> None:
    path.write_bytes(bytes(4096))
    for use in (handle.sync_pread, handle.sync_pwrite, handle.async_pread, handle.async_pwrite):
        with pytest.raises(ConfigError, match="file_offset"):
            use(torch.zeros(10), path, offset)  # type: ignore[operator]
    assert path.read_bytes() == bytes(4096)


@pytest.mark.whole
def test_an_offset_beyond_what_a_file_can_hold(handle: AioHandle, path: Path) -> None:
    with pytest.raises(IoError):
        handle.sync_pwrite(torch.zeros(4096), path, (1 << 63) - 4096)


FORBID_IO_URING = """
import ctypes, struct
libc = ctypes.CDLL(None, use_errno=True)
# allow everything but io_uring_setup (425), which gives EPERM: as containers' filters do
program = b"".join(struct.pack("HBBI", *step) for step in [
    (0x20, 0, 0, 0), (0x15, 0, 1, 425), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)])
memory = ctypes.create_string_buffer(program)
class Filter(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("steps", ctypes.c_void_p)]
assert libc.prctl(38, 1, 0, 0, 0) == 0
wanted = Filter(4, ctypes.addressof(memory))
assert libc.prctl(22, 2, ctypes.byref(wanted)) == 0, ctypes.get_errno()
"""


@pytest.mark.parametrize("backend", ["uring"])
def test_io_uring_forbidden(path: Path, run_python: RunPython, backend: str) -> None:
    done = run_python(
        FORBID_IO_URING
        + textwrap.dedent(
            """
            import sys, torch, swapper
            handle = swapper.AioHandle()
            tensor, back = torch.randn(5000), torch.zeros(5000)
            assert handle.sync_pwrite(tensor, sys.argv[1]) == 1
            assert handle.sync_pread(back, sys.argv[1]) == 1
            assert torch.equal(tensor, back)
            assert handle.backend != sys.argv[2] and "io_uring" in handle.reason, handle.reason
            try:
                swapper.AioHandle(backend=sys.argv[2])
            except swapper.ConfigError:
                print("other backend")
            """
        ),
        path,
        backend,
    )
    assert (done.returncode, done.stdout) == (0, "other backend\n"), done.stderr


def test_a_full_tmpfs_keeps_the_files_that_are_there(small_tmpfs: Path) -> None:
    kept = noise(1 << 20)
    with AioHandle() as handle:
        handle.sync_pwrite(kept, small_tmpfs / "kept")
        with pytest.raises(IoError) as raised:
            handle.sync_pwrite(noise(5 << 20), small_tmpfs / "too much")
        assert raised.value.errno == errno.ENOSPC
        back = torch.zeros_like(kept)
        handle.sync_pread(back, small_tmpfs / "kept")
    assert torch.equal(kept, back)


FAULTY = """
import errno, os, sys
import mfusepy as fuse
BAD = range(1 << 20, (1 << 20) + 4096)
SIZE = 4 << 20
class Faulty(fuse.Operations):
    def getattr(self, path, fh=None):
        if path == "/":
            return {"st_mode": 0o40755, "st_nlink": 2}
        return {"st_mode": 0o100644, "st_nlink": 1, "st_size": SIZE}
    def open(self, path, flags): return 1
    def readdir(self, path, fh): return [".", "..", "file"]
    def truncate(self, path, length, fh=None): return 0
    def read(self, path, size, offset, fh):
        if offset < BAD.stop and offset + size > BAD.start:
            raise fuse.FuseOSError(errno.EIO)
        return bytes(min(size, max(SIZE - offset, 0)))
    def write(self, path, data, offset, fh):
        if offset < BAD.stop and offset + len(data) > BAD.start:
            raise fuse.FuseOSError(errno.EIO)
        return len(data)
fuse.FUSE(Faulty(), sys.argv[1], foreground=True, direct_io=True, nothreads=True)
"""


@pytest.fixture
def faulty_drive(mount_fuse: Callable[..., Path]) -> Path:
    """A filesystem with one file whose second MiB begins with a bad sector."""
    return mount_fuse(FAULTY)


@pytest.mark.parametrize("is_strided", [False, True])
@pytest.mark.parametrize("writing", [True, False])
def test_an_error_of_the_drive_in_the_middle(faulty_drive: Path, writing: bool, is_strided: bool) -> None:
    tensor = torch.zeros(4 << 20, dtype=torch.uint8)
    tensor = tensor.view(2048, 2048).t() if is_strided else tensor
    with AioHandle(block_size=64 << 10) as handle:
        with pytest.raises(IoError) as raised:
            (handle.sync_pwrite if writing else handle.sync_pread)(tensor, faulty_drive / "file", 0)
        assert raised.value.errno == errno.EIO
        assert handle.wait() == 0, "the failure is told once"
        good = torch.ones(4096, dtype=torch.uint8)
        assert handle.sync_pread(good, faulty_drive / "file", 0) == 1, "the handle goes on"
        assert not good.any()


@pytest.mark.parametrize("begin", [(1 << 20) - 50, (1 << 20) + 1, 100])
def test_an_error_of_the_drive_at_the_edge_of_a_write(faulty_drive: Path, begin: int) -> None:
    """Bytes that share a sector with others go by way of the page cache; what the drive says about them is not lost."""
    nbytes = (1 << 20) + 100 - begin if begin == 100 else 100
    with AioHandle(block_size=64 << 10) as handle:
        with pytest.raises(IoError) as raised:
            handle.sync_pwrite(torch.zeros(nbytes, dtype=torch.uint8), faulty_drive / "file", begin)
        assert raised.value.errno == errno.EIO
        assert handle.sync_pwrite(torch.zeros(100, dtype=torch.uint8), faulty_drive / "file", 100) == 1


@pytest.fixture
def hollow_drive(tmp_path: Path):
    """An ext4 with room, on a loop device whose own file can no longer grow: the page cache takes what the drive then refuses."""
    below, image, mount_point = tmp_path / "below", tmp_path / "below" / "image", tmp_path / "hollow"
    device = ""
    below.mkdir()
    mount_point.mkdir()

    def command(*words: object) -> str:
        try:
            done = subprocess.run([str(word) for word in words], capture_output=True, text=True, check=False)
        except FileNotFoundError:
            pytest.skip(f"no such command here: {words[0]}")
        if done.returncode != 0:
            pytest.skip(f"not permitted here: {' '.join(map(str, words))}: {done.stderr.strip()}")
        return done.stdout.strip()

    try:
        command("mount", "-t", "tmpfs", "-o", "size=3m", "swapper-test", below)
        command("truncate", "--size", "64M", image)
        command("mkfs.ext4", "-q", "-O", "^has_journal", image)
        device = command("losetup", "--find", "--show", image)
        command("mount", device, mount_point)
        with (mount_point / "file").open("wb") as stream:
            os.posix_fallocate(stream.fileno(), 0, 16 << 20)
        os.sync()
        with (below / "rest").open("wb", buffering=0) as rest, contextlib.suppress(OSError):
            while True:
                rest.write(bytes(4096))
        yield mount_point
    finally:
        subprocess.run(["umount", "--lazy", mount_point], check=False, capture_output=True)
        if device:
            subprocess.run(["losetup", "--detach", device], check=False)
        subprocess.run(["umount", "--lazy", below], check=False, capture_output=True)


@pytest.mark.whole
@pytest.mark.parametrize("nbytes", [100, (4 << 20) + 100])
def test_an_error_of_the_drive_in_the_flush_of_an_edge(hollow_drive: Path, nbytes: int) -> None:
    """write(2) succeeds, into the page cache; only the flush brings the failure to light. It is the operation's."""
    with AioHandle(block_size=64 << 10) as handle:
        with pytest.raises(IoError) as raised:
            handle.sync_pwrite(torch.ones(nbytes, dtype=torch.uint8), hollow_drive / "file", 8 << 20)
        assert raised.value.errno in (errno.ENOSPC, errno.EIO)
        assert handle.wait() == 0


def test_a_forked_child_is_told(path: Path, run_python: RunPython) -> None:
    done = run_python(
        """
        import os, sys, torch, swapper
        handle = swapper.AioHandle()
        handle.sync_pwrite(torch.zeros(1000).view(10, 100).t(), sys.argv[1])
        child = os.fork()
        if child == 0:
            for tensor in (torch.zeros(1000), torch.zeros(10, 100).t()):
                try:
                    handle.sync_pread(tensor, sys.argv[1])
                except swapper.IoError as error:
                    assert "forked child" in str(error)
                else:
                    os._exit(1)
            raise SystemExit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        """,
        path,
    )
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA here")
def test_gds_says_what_is_missing() -> None:
    with pytest.raises(UnsupportedError, match="CUDA"):
        GdsHandle()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA here")
def test_gds_that_need_not_be_falls_back_and_says_so(path: Path) -> None:
    with GdsHandle(strict=False) as handle:
        assert not handle.is_gds
        assert "CUDA" in handle.reason and "host memory" in handle.reason
        tensor, back = noise(5000), torch.zeros(5000, dtype=torch.uint8)
        assert handle.sync_pwrite(tensor, path) == 1
        assert handle.sync_pread(back, path) == 1
        assert torch.equal(tensor, back)
        assert handle.pin_device_tensor(tensor) is False
        assert handle.unpin_device_tensor(tensor) is False
        assert handle.new_pinned_device_tensor(10, torch.empty(0)).shape == (10,)
