"""GdsHandle and GdsFile over a stand-in for libcufile that takes memory of the host for a device's: which calls are made, what
goes through host memory instead, and that every byte is right, its neighbours' too.

What only a GPU can show (device memory, streams, the real driver) is not tested here.
"""

from __future__ import annotations

import copy
import ctypes
import gc
import logging
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from handle_bytes import noise, raw

from swapper import AioHandle, ConfigError, GdsFile, GdsHandle, IoError, StateError, UnsupportedError
from swapper.io import gds_deregister_buffer, gds_register_buffer
from swapper.io.handle.cufile import CuFile
from swapper.io.handle.gds_handle import PIECE_BYTES, begin_pieces, whole_sectors

RDWR = os.O_CREAT | os.O_RDWR
SIZES = [1, 4096, 4097, 12288, 100_000, (1 << 20) + 5]
OFFSETS = [0, 4096, 4095, 1, 123_457]


class Call(ctypes.Structure):
    _fields_ = (
        ("op", ctypes.c_char),
        ("at", ctypes.c_long),
        ("size", ctypes.c_long),
        ("in_memory", ctypes.c_long),
        ("base", ctypes.c_void_p),
    )


@pytest.fixture
def cufile(library: ctypes.CDLL) -> CuFile:
    library.call_at.restype = Call
    return CuFile(library, device_type="cpu")


@pytest.fixture
def gds(cufile: CuFile) -> Iterator[GdsHandle]:
    with GdsHandle(intra_op_parallelism=3, cufile=cufile) as handle:
        yield handle


def calls(library: ctypes.CDLL) -> list[Call]:
    return [library.call_at(i) for i in range(library.call_count())]


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()


@pytest.mark.whole
@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("nbytes", SIZES)
def test_whole_sectors_are_within_and_no_more_could_be(offset: int, nbytes: int) -> None:
    begin, end = whole_sectors(offset, nbytes)
    if end:
        assert 0 <= begin < end <= nbytes and (offset + begin) % 4096 == 0 == (offset + end) % 4096
        assert begin < 4096 and nbytes - end < 4096
    else:
        assert -(-offset // 4096) * 4096 + 4096 > offset + nbytes


@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("nbytes", SIZES)
def test_a_tensor_changes_its_bytes_and_no_others(
    library: ctypes.CDLL, gds: GdsHandle, path: Path, offset: int, nbytes: int
) -> None:
    before = noise(2 << 20, 5)
    path.write_bytes(raw(before))
    source = noise(nbytes + 3, 6)[3:]  # of no alignment
    gds.submit_write(source, path, offset).wait()
    assert path.read_bytes() == raw(before[:offset]) + raw(source) + raw(before[offset + nbytes :])
    back = torch.zeros(nbytes + 3, dtype=torch.uint8)[3:]
    gds.submit_read(back, path, offset).wait()
    assert torch.equal(back, source)
    begin, end = whole_sectors(offset, nbytes)
    moved = {op: sum(call.size for call in calls(library) if call.op == op) for op in (b"w", b"r")}
    assert all(bool(moved[op]) == (end > begin) for op in moved), "whole sectors go by cuFile, and only they"
    assert all(call.at % 4096 == 0 == call.size % 4096 and call.in_memory >= 0 for call in calls(library))


def test_neighbours_within_a_sector_written_at_once_keep_all_bytes(gds: GdsHandle, path: Path) -> None:
    path.write_bytes(bytes(1 << 20))
    parts = list(noise(1 << 20, 7).split(10_007))
    operations = [gds.submit_write(part, path, n * 10_007) for n, part in enumerate(parts)]
    for operation in operations:
        operation.wait()
    assert path.read_bytes() == raw(torch.cat(parts))


def test_a_large_tensor_is_many_pieces_of_one_operation(library: ctypes.CDLL, gds: GdsHandle, path: Path) -> None:
    source = noise(2 * PIECE_BYTES + 4096, 8)
    gds.submit_write(source, path).wait()
    begins = {call.at for call in calls(library)}
    assert {0, PIECE_BYTES, 2 * PIECE_BYTES} <= begins
    back = torch.zeros_like(source)
    operation = gds.submit_read(back, path)
    assert operation.wait() and operation.done and operation.nbytes == source.numel()
    assert torch.equal(source, back)


def test_a_part_of_registered_memory_is_named_by_the_whole(library: ctypes.CDLL, gds: GdsHandle, path: Path) -> None:
    """cuFile knows memory by the address that was registered; other memory it takes without an offset only (the stand-in too)."""
    other, whole, loose = noise(40_960, 1), noise(40_960, 2), noise(40_960, 3)
    gds.pin_device_tensor(other)
    gds.pin_device_tensor(whole)
    part = whole[100:20_580]
    gds.submit_write(part, path).wait()
    gds.submit_write(whole, path, 20_480).wait()
    gds.submit_write(loose, path, 61_440).wait()
    gds.submit_read(part.zero_(), path, 20_480).wait()
    assert path.read_bytes() == raw(noise(40_960, 2)[100:20_580]) + raw(noise(40_960, 2)) + raw(loose)
    assert torch.equal(part, noise(40_960, 2)[:20_480])
    bases = {(call.op, call.at): call.base for call in calls(library)}
    assert {bases[b"w", 0], bases[b"w", 20_480], bases[b"r", 20_480]} == {whole.data_ptr()}
    assert bases[b"w", 61_440] == loose.data_ptr()


def test_a_failure_in_one_piece_is_the_operations_and_all_of_it_is_over(gds: GdsHandle, path: Path) -> None:
    path.write_bytes(bytes(1 << 20))
    operation = gds.submit_read(torch.zeros(8192, dtype=torch.uint8), path, 78 * 4096)
    with pytest.raises(IoError, match="cuFile"):
        operation.wait()
    with pytest.raises(IoError, match="cuFile says -5027"):
        gds.submit_read(torch.zeros(8192, dtype=torch.uint8), path, 77 * 4096).wait()


def test_pieces_that_have_begun_keep_the_file_when_the_rest_cannot_begin(
    library: ctypes.CDLL, cufile: CuFile, path: Path
) -> None:
    path.write_bytes(raw(noise(9000)))
    back, may_go_on = torch.zeros(9000, dtype=torch.uint8), threading.Event()

    def stage(begin: int, nbytes: int) -> NoReturn:
        raise RuntimeError(f"no thread for {nbytes} bytes at {begin}")

    with ThreadPoolExecutor(1) as threads:
        threads.submit(may_go_on.wait)
        file = cufile.open(str(path), writing=False)
        with pytest.raises(RuntimeError, match="no thread for 808 bytes at 8192"):
            list(begin_pieces(threads, file, "read", back, None, 0, stage))
        file.close()
        assert library.registered_files() == 1, "the piece that waits for the thread uses it"
        may_go_on.set()
    assert torch.equal(back[:8192], noise(9000)[:8192])
    assert library.registered_files() == 0


def test_a_file_that_cannot_go_direct_is_refused_or_goes_through_host_memory(
    library: ctypes.CDLL, cufile: CuFile, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    library.set_mode(4)
    source = noise(20_000)
    with GdsHandle(cufile=cufile) as strict, pytest.raises(IoError, match="5030"):
        strict.submit_write(source, path).wait()
    with GdsHandle(cufile=cufile, strict=False) as handle, caplog.at_level(logging.WARNING, "swapper.io"):
        handle.submit_write(source, path).wait()
    assert path.read_bytes() == raw(source) and library.call_count() == 0
    assert "through host memory" in caplog.text


def test_without_cufile_a_strict_handle_says_why_and_another_stages(path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there may be a cuFile here")
    with pytest.raises(UnsupportedError, match="CUDA"):
        GdsHandle()
    with GdsHandle(strict=False) as handle:
        assert not handle.is_gds and "through host memory" in handle.gds_reason


# --- GdsFile ------------------------------------------------------------------------------------------------------------


def test_storages_as_in_torchs_example(library: ctypes.CDLL, cufile: CuFile, path: Path) -> None:
    first, second = torch.randn(1024), torch.randn(2, 1024)
    file = GdsFile(str(path), RDWR, cufile=cufile)
    assert file.is_gds and file.handle is not None and library.registered_files() == 1
    file.save_storage(storage_of(first), offset=0)
    file.save_storage(storage_of(second), offset=first.nbytes)
    loaded = [torch.empty(1024), torch.empty(2, 1024)]
    file.load_storage(storage_of(loaded[0]), offset=0)
    file.load_storage(storage_of(loaded[1]), offset=first.nbytes)
    assert torch.equal(first, loaded[0]) and torch.equal(second, loaded[1])
    assert path.read_bytes() == raw(first) + raw(second)
    assert [(call.op, call.at, call.size) for call in calls(library)] == [
        (b"w", 0, 4096),
        (b"w", 4096, 8192),
        (b"r", 0, 4096),
        (b"r", 4096, 8192),
    ]
    file.deregister_handle()
    assert file.handle is None and library.registered_files() == 0
    for act in (file.load_storage, file.save_storage):
        with pytest.raises(StateError, match="register_handle"):
            act(storage_of(first))
    with pytest.raises(StateError, match="not registered"):
        file.deregister_handle()
    file.register_handle()
    with pytest.raises(StateError, match="already"):
        file.register_handle()
    del act, file
    assert library.registered_files() == 0


def test_storages_at_once_and_a_file_that_is_closed_with_them_under_way(
    library: ctypes.CDLL, cufile: CuFile, path: Path
) -> None:
    sources = [noise(300_000 + n, n) for n in range(6)]
    ends = [sum(source.numel() for source in sources[: n + 1]) for n in range(6)]
    with GdsFile(path, RDWR, cufile=cufile) as file, GdsFile(path, RDWR, cufile=cufile) as other:
        operations = [
            (file if n % 2 else other).submit_save(storage_of(source), ends[n] - source.numel())
            for n, source in enumerate(sources)
        ]
    assert all(operation.done for operation in operations)
    assert path.read_bytes() == raw(torch.cat(sources))
    assert library.registered_files() == 0


def test_a_file_through_host_memory_says_so_and_is_equal(library: ctypes.CDLL, cufile: CuFile, path: Path) -> None:
    library.set_mode(4)
    source, back = noise(50_001), torch.zeros(50_001, dtype=torch.uint8)
    with GdsFile(path, RDWR, cufile=cufile) as file:
        assert not file.is_gds and "5030" in file.reason and "host memory" in file.reason
        file.save_storage(storage_of(source), 17)
        file.load_storage(storage_of(back), 17)
    assert torch.equal(source, back) and library.call_count() == 0
    with pytest.raises(UnsupportedError, match="5030"):
        GdsFile(path, os.O_RDWR, strict=True, cufile=cufile)


def test_without_cufile_a_file_works_by_name_or_is_refused(path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there may be a cuFile here")
    source, back = torch.randn(1000), torch.zeros(1000)
    with GdsFile(path, RDWR) as file:
        assert not file.is_gds and "CUDA" in file.reason
        file.save_storage(storage_of(source))
        file.load_storage(storage_of(back))
        gds_register_buffer(storage_of(source))
        gds_deregister_buffer(storage_of(source))
    assert torch.equal(source, back)
    with pytest.raises(UnsupportedError, match="CUDA"):
        GdsFile(path, RDWR, strict=True)


def test_registered_storages(library: ctypes.CDLL, cufile: CuFile) -> None:
    storage = storage_of(torch.zeros(8192, dtype=torch.uint8))
    gds_register_buffer(storage, cufile=cufile)
    gds_register_buffer(storage, cufile=cufile)
    assert library.registered_buffers() == 1
    gds_deregister_buffer(storage, cufile=cufile)
    assert library.registered_buffers() == 0
    with pytest.raises(StateError, match="not registered"):
        gds_deregister_buffer(storage, cufile=cufile)
    with pytest.raises(IoError, match="5033"):
        gds_register_buffer(storage_of(torch.zeros(13, dtype=torch.uint8)), cufile=cufile)


def test_what_is_wrong_with_a_file_is_named(cufile: CuFile, path: Path) -> None:
    with pytest.raises(IoError, match="open"):
        GdsFile(path, os.O_RDONLY, cufile=cufile)
    path.write_bytes(bytes(8192))
    with GdsFile(path, os.O_RDONLY, cufile=cufile) as file:
        with pytest.raises(IoError, match="not open for writing"):
            file.save_storage(storage_of(torch.zeros(4)))
        with pytest.raises(IoError, match="8192 bytes"):
            file.load_storage(storage_of(torch.zeros(4)), 8192)
        with pytest.raises(ConfigError, match="file_offset"):
            file.load_storage(storage_of(torch.zeros(4)), -1)
        with pytest.raises(ConfigError, match="storage"):
            file.load_storage(torch.zeros(4))  # type: ignore[arg-type]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, copy.copy, pickle.dumps])
def test_a_handle_and_an_open_file_are_not_copied(tmp_path: Path, duplicate: Callable[[Any], Any]) -> None:
    """A copy of a file that is dropped would close its descriptor."""
    with AioHandle() as handle, GdsFile(tmp_path / "file", RDWR) as file:
        for thing in (handle, file):
            with pytest.raises(UnsupportedError, match="cannot be copied or pickled"):
                duplicate(thing)
        gc.collect()
        os.fstat(file.fd)
