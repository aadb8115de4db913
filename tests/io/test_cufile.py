"""The way through cuFile, against a stand-in for NVIDIA's library that moves host memory: calls, errors, short transfers.

What only a GPU can show (device memory, streams, the real driver) is not tested here.
"""

from __future__ import annotations

import ctypes
import errno
from pathlib import Path

import pytest
import torch
from handle_bytes import noise, raw

from swapper import IoError, UnsupportedError
from swapper.io.handle.cufile import CuFile


def aligned(nbytes: int) -> torch.Tensor:
    whole = torch.zeros(nbytes + 4096, dtype=torch.uint8)
    return whole.narrow(0, -whole.data_ptr() % 4096, nbytes)


def test_all_bytes_go_however_short_the_calls(library: ctypes.CDLL, path: Path) -> None:
    cufile = CuFile(library)
    source, back = aligned(1 << 20), aligned(1 << 20)
    source.copy_(noise(1 << 20))
    for op, tensor in (("write", source), ("read", back)):
        file = cufile.open(str(path), writing=op == "write")
        file.transfer(op, tensor.data_ptr(), 8192, 1 << 19)
        file.transfer(op, tensor.data_ptr() + (1 << 19), 8192 + (1 << 19), 1 << 19)
        file.close()
    assert path.read_bytes() == bytes(8192) + raw(source)
    assert torch.equal(source, back)


@pytest.mark.whole
@pytest.mark.parametrize("sector, number", [(77, 0), (78, errno.EIO)])
def test_an_error_is_raised_with_its_place(library: ctypes.CDLL, path: Path, sector: int, number: int) -> None:
    path.write_bytes(bytes(1 << 20))
    file, memory = CuFile(library).open(str(path), writing=False), aligned(4096)
    with pytest.raises(IoError) as raised:
        file.transfer("read", memory.data_ptr(), sector * 4096, 4096)
    assert (raised.value.errno, raised.value.offset, raised.value.path) == (number, sector * 4096, str(path))
    with pytest.raises(IoError, match="ends"):
        file.transfer("read", memory.data_ptr(), 1 << 20, 4096)
    file.close()


def test_a_file_is_registered_until_its_last_user_closes_it(library: ctypes.CDLL, path: Path) -> None:
    path.write_bytes(bytes(4096) + raw(noise(4096)))
    file, memory = CuFile(library).open(str(path), writing=False), aligned(4096)
    assert file.use() is file
    file.close()
    assert library.registered_files() == 1
    file.transfer("read", memory.data_ptr(), 4096, 4096)
    file.close()
    assert library.registered_files() == 0
    assert torch.equal(memory, noise(4096))


def test_registering_memory(library: ctypes.CDLL) -> None:
    cufile = CuFile(library)
    memory = aligned(8192)
    cufile.register_memory(memory.data_ptr(), 8192)
    assert library.registered_buffers() == 1
    assert cufile.unregister_memory(memory.data_ptr())
    assert library.registered_buffers() == 0
    with pytest.raises(IoError, match="5033"):
        cufile.register_memory(memory.data_ptr(), 13)


@pytest.mark.whole
@pytest.mark.parametrize("mode, reason", [(1, "5001"), (2, "compatibility mode")])
def test_a_driver_that_does_not_open_or_does_not_go_direct_is_the_reason(
    library: ctypes.CDLL, mode: int, reason: str
) -> None:
    library.set_mode(mode)
    with pytest.raises(UnsupportedError, match=reason):
        CuFile(library)


def test_peer_to_peer_without_the_kernel_module_is_direct(library: ctypes.CDLL) -> None:
    library.set_mode(3)
    CuFile(library)


def test_a_file_that_cannot_be_registered_is_named(library: ctypes.CDLL, path: Path) -> None:
    path.write_bytes(bytes(4096))
    library.set_mode(4)
    with pytest.raises(IoError, match="5030") as raised:
        CuFile(library).open(str(path), writing=False)
    assert (raised.value.errno, raised.value.path) == (errno.ENOTSUP, str(path))


def test_a_library_that_is_not_cufile_is_the_reason() -> None:
    with pytest.raises(UnsupportedError, match="cuFileDriverOpen"):
        CuFile(ctypes.CDLL(None))
