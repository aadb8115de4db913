"""The way through cuFile, against a stand-in for NVIDIA's library that moves host memory: calls, errors, short transfers.

What only a GPU can show (device memory, streams, the real driver) is not tested here.
"""

from __future__ import annotations

import ctypes
import errno
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from handle_bytes import noise, raw

from swapper import IoError, UnsupportedError
from swapper.io.cufile import CuFile
from swapper.io.gds import GdsTransfer

STAND_IN = r"""
#include <errno.h>
#include <stdlib.h>
#include <sys/types.h>
#include <unistd.h>
typedef struct { int error, cuda; } Status;
typedef struct { int type; union { int fd; void *pointer; } handle; const void *operations; } Descriptor;
static int registered;
Status cuFileDriverOpen(void) { return (Status){getenv("CUFILE_REFUSES") ? 5001 : 0, 0}; }
Status cuFileHandleRegister(void **handle, Descriptor *wanted) {
  if (wanted->type != 1) return (Status){5022, 0};
  *handle = (void *)(long)(wanted->handle.fd + 1);
  return (Status){0, 0};
}
void cuFileHandleDeregister(void *handle) {}
Status cuFileBufRegister(const void *base, size_t size, int flags) {
  return size == 13 ? (Status){5033, 1} : (registered++, (Status){0, 0});
}
Status cuFileBufDeregister(const void *base) { registered--; return (Status){0, 0}; }
int registered_now(void) { return registered; }
static size_t shorter(size_t size) { return size > 100000 ? 98304 : size; }
ssize_t cuFileRead(void *handle, void *base, size_t size, off_t at, off_t in_memory) {
  if (at == 4096 * 77) return -5027;
  if (at == 4096 * 78) { errno = EIO; return -1; }
  return pread((int)(long)handle - 1, (char *)base + in_memory, shorter(size), at);
}
ssize_t cuFileWrite(void *handle, const void *base, size_t size, off_t at, off_t in_memory) {
  return pwrite((int)(long)handle - 1, (const char *)base + in_memory, shorter(size), at);
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler here")
    place = tmp_path_factory.mktemp("cufile")
    (place / "stand_in.c").write_text(STAND_IN)
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-o", place / "libcufile.so", place / "stand_in.c"],
        check=True,
        capture_output=True,
    )
    return ctypes.CDLL(str(place / "libcufile.so"), use_errno=True)


def aligned(nbytes: int) -> torch.Tensor:
    whole = torch.zeros(nbytes + 4096, dtype=torch.uint8)
    return whole.narrow(0, -whole.data_ptr() % 4096, nbytes)


def test_all_bytes_go_however_short_the_calls(library: ctypes.CDLL, path: Path) -> None:
    cufile = CuFile(library)
    source, back = aligned(1 << 20), aligned(1 << 20)
    source.copy_(noise(1 << 20))
    for op, tensor in (("write", source), ("read", back)):
        file = cufile.open(str(path), writing=op == "write")
        file.transfer(op, tensor.data_ptr(), 0, 8192, 1 << 19)
        file.transfer(op, tensor.data_ptr(), 1 << 19, 8192 + (1 << 19), 1 << 19)
        file.close()
    assert path.read_bytes() == bytes(8192) + raw(source)
    assert torch.equal(source, back)


def test_a_transfer_in_many_pieces_is_one_part_of_an_operation(library: ctypes.CDLL, path: Path) -> None:
    cufile = CuFile(library)
    source, back = aligned(40 << 20), aligned(40 << 20)
    source.copy_(noise(40 << 20))
    with ThreadPoolExecutor(3) as threads:
        for op, tensor in (("write", source), ("read", back)):
            file = cufile.open(str(path), writing=op == "write")

            def move(begin: int, nbytes: int, op=op, tensor=tensor, file=file) -> None:  # type: ignore[no-untyped-def]
                file.transfer(op, tensor.data_ptr(), begin, begin, nbytes)

            transfer = GdsTransfer(threads, file, op, move, 0, 40 << 20)
            assert transfer.wait() and transfer.done and transfer.error is None
    assert torch.equal(source, back)


@pytest.mark.parametrize("sector, number", [(77, 0), (78, errno.EIO)])
def test_an_error_is_raised_with_its_place(library: ctypes.CDLL, path: Path, sector: int, number: int) -> None:
    path.write_bytes(bytes(1 << 20))
    file = CuFile(library).open(str(path), writing=False)
    with pytest.raises(IoError) as raised:
        file.transfer("read", aligned(4096).data_ptr(), 0, sector * 4096, 4096)
    assert (raised.value.errno, raised.value.offset, raised.value.path) == (number, sector * 4096, str(path))
    with pytest.raises(IoError, match="ends"):
        file.transfer("read", aligned(4096).data_ptr(), 0, 1 << 20, 4096)
    file.close()


def test_registering_memory(library: ctypes.CDLL) -> None:
    cufile = CuFile(library)
    memory = aligned(8192)
    cufile.register_memory(memory.data_ptr(), 8192)
    assert library.registered_now() == 1
    assert cufile.unregister_memory(memory.data_ptr())
    assert library.registered_now() == 0
    with pytest.raises(IoError, match="5033"):
        cufile.register_memory(memory.data_ptr(), 13)


def test_a_driver_that_does_not_open_is_the_reason(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    libc = ctypes.CDLL(None)
    libc.setenv(b"CUFILE_REFUSES", b"1", 1)
    try:
        with pytest.raises(UnsupportedError, match="5001"):
            CuFile(library)
    finally:
        libc.unsetenv(b"CUFILE_REFUSES")


def test_a_library_that_is_not_cufile_is_the_reason() -> None:
    with pytest.raises(UnsupportedError, match="cuFileDriverOpen"):
        CuFile(ctypes.CDLL(None))
