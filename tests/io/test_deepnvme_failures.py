"""Failures of DeepNVMe that are silent or end the process, each by its name: here the bytes are right, or it raises.

Checked against DeepSpeed 0.19. What could end the process runs in one of its own.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from handle_bytes import RunPython, noise, raw

from swapper import AioHandle, IoError
from swapper.bench.measure import PeakMemory


@pytest.mark.whole
def test_a_write_of_5000_bytes_leaves_5000_bytes(handle: AioHandle, path: Path) -> None:
    tensor = noise(5000)
    assert handle.sync_pwrite(tensor, path) == 1
    assert path.read_bytes() == raw(tensor)


@pytest.mark.whole
@pytest.mark.parametrize("nbytes", [1, 511, 512, 513, 4095, 4097, 5000, 65537, 1_000_001])
def test_an_odd_size_makes_a_round_trip(handle: AioHandle, path: Path, nbytes: int) -> None:
    tensor, back = noise(nbytes), torch.zeros(nbytes, dtype=torch.uint8)
    assert handle.sync_pwrite(tensor, path) == 1
    assert path.stat().st_size == nbytes
    assert handle.sync_pread(back, path) == 1
    assert torch.equal(tensor, back)


@pytest.mark.whole
@pytest.mark.parametrize("offset", [1, 100, 4095, 5000])
def test_a_write_at_an_odd_offset_is_there(handle: AioHandle, path: Path, offset: int) -> None:
    path.write_bytes(b"\xee" * 20000)
    tensor = noise(5000)
    assert handle.sync_pwrite(tensor, path, offset) == 1
    assert path.read_bytes() == b"\xee" * offset + raw(tensor) + b"\xee" * (15000 - offset)


@pytest.mark.whole
@pytest.mark.parametrize("offset", [1, 100, 4095, 5000])
def test_a_read_at_an_odd_offset_is_right(handle: AioHandle, path: Path, offset: int) -> None:
    content = noise(30000)
    path.write_bytes(raw(content))
    back = torch.zeros(20000, dtype=torch.uint8)
    assert handle.sync_pread(back, path, offset) == 1
    assert torch.equal(back, content[offset : offset + 20000])


def test_a_full_drive_raises(small_tmpfs: Path) -> None:
    with AioHandle() as handle:
        with pytest.raises(IoError) as raised:
            handle.sync_pwrite(noise(8 << 20), small_tmpfs / "file")
        assert raised.value.errno == 28


def test_many_small_writes_until_the_drive_is_full_raise(small_tmpfs: Path) -> None:
    handle = AioHandle()
    tensor = noise(64 << 10)
    with pytest.raises(IoError) as raised:
        for n in range(100):
            handle.async_pwrite(tensor, small_tmpfs / str(n))
        handle.wait()
    assert raised.value.errno == 28
    handle.close()


@pytest.mark.whole
def test_reading_a_5000_byte_file_gives_its_bytes(handle: AioHandle, path: Path) -> None:
    content = noise(5000)
    path.write_bytes(raw(content))
    back = torch.zeros(5000, dtype=torch.uint8)
    assert handle.sync_pread(back, path) == 1
    assert torch.equal(content, back)


@pytest.mark.whole
def test_a_non_contiguous_view_receives_its_data(handle: AioHandle, path: Path) -> None:
    content = torch.arange(10000, dtype=torch.float32)
    path.write_bytes(raw(content))
    back = torch.zeros(100, 300)
    assert handle.sync_pread(back[:, ::3], path) == 1
    assert torch.equal(back[:, ::3].flatten(), content)
    assert not back[:, 1::3].any() and not back[:, 2::3].any()


@pytest.mark.whole
def test_a_non_contiguous_view_is_written_in_order(handle: AioHandle, path: Path) -> None:
    tensor = torch.randn(300, 200).t()
    assert handle.sync_pwrite(tensor, path) == 1
    assert path.read_bytes() == raw(tensor)


def test_reading_past_the_end_raises(path: Path, run_python: RunPython) -> None:
    path.write_bytes(bytes(4096))
    done = run_python(
        """
        import sys, torch, swapper
        for method, *arguments in [("sync_pread",), ("async_pread",), ("read", False), ("pread", False, False)]:
            handle = swapper.AioHandle()
            try:
                getattr(handle, method)(torch.empty(8192, dtype=torch.uint8), sys.argv[1], *arguments)
                handle.wait()
            except swapper.IoError as error:
                assert "8192" in str(error) and sys.argv[1] in str(error), error
                print(method, "raised", flush=True)
        """,
        path,
    )
    raised = [f"{method} raised" for method in ("sync_pread", "async_pread", "read", "pread")]
    assert (done.returncode, done.stdout.splitlines()) == (0, raised), done.stderr


def test_waiting_with_nothing_pending_gives_0(run_python: RunPython) -> None:
    done = run_python("import swapper; print(swapper.AioHandle().wait())")
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr


def test_a_bad_descriptor_raises(path: Path, run_python: RunPython) -> None:
    path.write_bytes(b"unharmed")
    done = run_python(
        """
        import errno, os, sys, torch, swapper
        read_only, closed = os.open(sys.argv[1], os.O_RDONLY), os.dup(0) + 100  # one that nothing opens meanwhile
        os.dup2(0, closed)
        os.close(closed)
        for name, descriptor in {"-1": -1, "9999": 9999, "closed": closed, "read-only": read_only}.items():
            handle = swapper.AioHandle()
            try:
                handle.async_pwrite(torch.zeros(4096), fd=descriptor)
            except swapper.IoError as error:
                assert error.errno == errno.EBADF, error
                print(name, "raised", flush=True)
        """,
        path,
    )
    raised = [f"{name} raised" for name in ("-1", "9999", "closed", "read-only")]
    assert (done.returncode, done.stdout.splitlines()) == (0, raised), done.stderr
    assert path.read_bytes() == b"unharmed"


REFUSE_LOCKING = """
    import ctypes, resource
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(24, 14, 0, 0, 0) != 0:  # PR_CAPBSET_DROP, CAP_IPC_LOCK
        pass  # not root: there is nothing to drop
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    sets = (ctypes.c_uint32 * 6)()
    libc.capget(header, sets)
    for n in (0, 1, 2):
        sets[n] &= ~(1 << 14)
    assert libc.capset(header, sets) == 0
"""


def test_a_refused_mlock_raises(path: Path, run_python: RunPython) -> None:
    done = run_python(
        "import textwrap\nexec(textwrap.dedent('''"
        + REFUSE_LOCKING
        + """'''))
import torch, swapper
handle = swapper.AioHandle()
try:
    handle.new_cpu_locked_tensor(1 << 20, torch.empty(0))
except swapper.IoError as error:
    assert error.op == "mlock" and "ulimit" in str(error), error
    print("raised")
loose = swapper.AioHandle(strict=False)
tensor = loose.new_cpu_locked_tensor(1 << 20, torch.empty(0)).fill_(3)
assert loose.sync_pwrite(tensor, """
        + repr(str(path))
        + """) == 1
print("written")
"""
    )
    assert (done.returncode, done.stdout) == (0, "raised\nwritten\n"), done.stderr
    assert path.read_bytes() == raw(torch.full((1 << 20,), 3.0))


@pytest.mark.whole
def test_a_smaller_rewrite_leaves_no_stale_tail(handle: AioHandle, path: Path) -> None:
    handle.sync_pwrite(noise(100_000), path)
    smaller = noise(5000, seed=1)
    handle.sync_pwrite(smaller, path)
    assert path.read_bytes() == raw(smaller)


@pytest.mark.whole
def test_an_offset_of_0_that_is_said_leaves_the_rest_of_the_file(handle: AioHandle, path: Path) -> None:
    whole, head = noise(100_000), noise(5000, seed=1)
    handle.sync_pwrite(whole, path)
    handle.sync_pwrite(head, path, 0)
    assert path.read_bytes() == raw(head) + raw(whole)[5000:]


def test_an_async_write_of_ordinary_memory_returns_at_once(tmp_path: Path) -> None:
    """DeepNVMe copies all of it first: 256 MiB take it some 100 ms."""
    tensor = torch.ones(256 << 20, dtype=torch.uint8)
    gate, other_end = os.pipe()
    with AioHandle(chaos={"until": gate}) as handle, PeakMemory(interval_s=0.001) as memory:
        with os.fdopen(other_end, "wb"):  # nothing is over before it is closed
            operation = handle.submit_write(tensor, tmp_path / "file")
            assert not operation.done
        operation.wait()
    os.close(gate)
    assert memory.growth_bytes < 64 << 20  # nor is it copied later


@pytest.mark.whole
def test_each_operation_can_be_waited_for_by_itself(handle: AioHandle, tmp_path: Path) -> None:
    good = handle.submit_write(noise(100_000), tmp_path / "good")
    content = tmp_path / "content"
    content.write_bytes(bytes(4096))
    operations = [handle.submit_read(torch.empty(4096, dtype=torch.uint8), content) for _ in range(4)]
    for operation in operations:
        assert operation.wait()
        assert operation.done and operation.exception() is None
    assert good.wait()


@pytest.mark.whole
@pytest.mark.parametrize("parallelism", [1, 2, 3, 7])
def test_a_size_that_does_not_divide_by_the_threads_is_taken(path: Path, parallelism: int) -> None:
    tensor, back = noise(100_003), torch.zeros(100_003, dtype=torch.uint8)
    with AioHandle(num_threads=parallelism) as handle:
        assert handle.sync_pwrite(tensor, path) == 1
        assert handle.sync_pread(back, path) == 1
    assert torch.equal(tensor, back)


@pytest.mark.whole
def test_a_missing_file_raises_with_its_name(handle: AioHandle, path: Path) -> None:
    with pytest.raises(IoError, match="file") as raised:
        handle.sync_pread(torch.empty(10), path)
    assert raised.value.errno == 2
    assert isinstance(raised.value, OSError)
    assert raised.value.path == os.fspath(path)


def test_not_strict_answers_as_deepnvme_does(path: Path) -> None:
    with AioHandle(strict=False) as handle:
        assert handle.sync_pread(torch.empty(10), path) == -1
        assert handle.async_pread(torch.empty(10), path) == -1
        assert handle.wait() == 0
