"""AioHandle: DeepNVMe's surface and its return values, and what is refused."""

from __future__ import annotations

import gc
import inspect
import os
from pathlib import Path

import pytest
import torch
from handle_bytes import MIB, noise, raw

import swapper
from swapper import AioHandle, ConfigError, IoError, UnsupportedError

# --- the surface --------------------------------------------------------------------------------------------------------


def test_deepnvmes_options_are_taken_in_place_and_by_name() -> None:
    for handle in (
        AioHandle(1024, 2, True, True, 2),
        AioHandle(block_size=1024, queue_depth=2, single_submit=True, overlap_events=True, intra_op_parallelism=2),
        AioHandle(1024, 2, True, True, num_threads=2),
    ):
        with handle:
            assert handle.get_block_size() == 1024
            assert handle.get_queue_depth() == 2
            assert handle.get_single_submit() is True
            assert handle.get_overlap_events() is True
            assert handle.get_intra_op_parallelism() == handle.get_thread_count() == 2
            assert handle.get_alignment() == 1024


def test_deepnvmes_defaults() -> None:
    with AioHandle() as handle:
        assert (handle.get_block_size(), handle.get_queue_depth(), handle.get_intra_op_parallelism()) == (MIB, 128, 1)
        assert (handle.get_single_submit(), handle.get_overlap_events(), handle.get_alignment()) == (False, False, 512)


@pytest.mark.whole
def test_deepnvmes_return_values(handle: AioHandle, path: Path) -> None:
    tensor = noise(8192)
    assert handle.write(tensor, path, True) == 0
    assert handle.read(tensor, path, True) == 0
    assert handle.sync_pwrite(tensor, path) == 1
    assert handle.sync_pread(tensor, path) == 1
    assert handle.async_pread(tensor, path) == 0
    assert handle.async_pread(tensor, path) == 0
    assert handle.wait() == 2
    assert handle.wait() == 0
    assert handle.pread(tensor, path, False, True) == 0
    assert handle.pread(tensor, path, False, False) == 2, "a synchronous one waits for those before it, and counts them"
    assert handle.pwrite(tensor, path, True, **{"async": False}) == 1
    assert handle.pread(tensor, path, True, True, 0) == 0
    assert handle.wait() == 1


@pytest.mark.whole
def test_deepnvmes_argument_names(handle: AioHandle, path: Path) -> None:
    tensor = noise(4096)
    handle.async_pwrite(buffer=tensor, filename=os.fspath(path), file_offset=0)
    handle.wait()
    descriptor = os.open(path, os.O_WRONLY)
    handle.async_pwrite(buffer=tensor, fd=descriptor, file_offset=4096)
    os.close(descriptor)  # the transfer goes on
    handle.wait()
    assert path.read_bytes() == raw(tensor) * 2
    for name in ("read", "write", "pread", "pwrite", "sync_pread", "sync_pwrite", "async_pread", "async_pwrite"):
        names = list(inspect.signature(getattr(handle, name)).parameters)
        assert names[:2] == ["buffer", "filename"] and "file_offset" in names


@pytest.mark.whole
def test_a_descriptor_in_the_place_of_the_name(handle: AioHandle, path: Path) -> None:
    path.write_bytes(bytes(10_000))
    descriptor = os.open(path, os.O_RDWR)  # without O_DIRECT
    tensor = noise(5000)
    assert handle.async_pwrite(tensor, descriptor, 100) == 0
    assert handle.wait() == 1
    assert os.lseek(descriptor, 0, os.SEEK_CUR) == 0
    os.close(descriptor)
    assert path.read_bytes() == bytes(100) + raw(tensor) + bytes(4900)


@pytest.mark.whole
def test_locked_tensors(handle: AioHandle, path: Path) -> None:
    locked = handle.new_cpu_locked_tensor(num_elem=5000, example_tenosr=torch.empty(0, dtype=torch.float16))
    assert (locked.shape, locked.dtype, locked.any().item()) == ((5000,), torch.float16, False)
    with AioHandle() as other:
        assert handle.is_pinned(locked) and other.is_pinned(locked) and other.is_pinned(locked[100:200])
    assert not handle.is_pinned(torch.empty(10))
    locked.normal_()
    handle.sync_pwrite(locked, path)
    assert path.read_bytes() == raw(locked)
    assert handle.free_cpu_locked_tensor(tensor=locked) is True
    assert handle.free_cpu_locked_tensor(locked) is False
    assert not handle.is_pinned(locked)
    assert locked.sum().isfinite(), "its memory is there as long as someone has it"
    assert handle.free_cpu_locked_tensor(torch.empty(3)) is False


def test_a_locked_tensor_that_nobody_has_gives_its_memory_back() -> None:
    from swapper.io.handle import deepnvme

    with AioHandle() as handle:
        before = len(deepnvme._locked_bytes)
        tensor = handle.new_cpu_locked_tensor(5000, torch.empty(0))
        view = tensor[10:]
        del tensor
        gc.collect()
        assert handle.is_pinned(view)
        del view
        gc.collect()
        assert len(deepnvme._locked_bytes) == before


@pytest.mark.whole
def test_validation_finds_other_bytes(handle: AioHandle, path: Path) -> None:
    tensor = noise(100_000)
    handle.pwrite(tensor, path, True, True)
    while path.read_bytes() != raw(tensor):
        pass
    with path.open("r+b") as stream:
        stream.seek(70_000)
        stream.write(bytes([int(tensor[70_000]) ^ 1]))
    with pytest.raises(IoError, match="70000"):
        handle.wait()


@pytest.mark.whole
@pytest.mark.parametrize(
    "options",
    [
        {"block_size": 0}, {"block_size": -1}, {"block_size": 1.5}, {"queue_depth": 0}, {"num_threads": 0},
        {"intra_op_parallelism": True}, {"backend": "magic"}, {"block_size": 1 << 40},
    ],
    ids=str,
)  # fmt: skip
def test_an_option_out_of_range_is_named(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options)).replace("num_threads", "intra_op_parallelism")):
        AioHandle(**options)  # type: ignore[arg-type]


@pytest.mark.whole
def test_what_has_no_bytes_is_refused_with_the_reason(handle: AioHandle, path: Path) -> None:
    path.write_bytes(bytes(100_000))
    refused = {
        "sparse": torch.eye(3).to_sparse(),
        "meta": torch.empty(3, device="meta"),
        "not list": [1.0, 2.0],
        "quantized": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
    }
    for word, thing in refused.items():
        with pytest.raises(UnsupportedError, match=word.split()[-1]):
            handle.submit_write(thing, path)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="expanded"):
        handle.submit_read(torch.zeros(1).expand(100), path)
    assert path.stat().st_size == 100_000


def test_the_names_are_public() -> None:
    assert {"AioHandle", "GdsHandle", "Operation"} <= set(swapper.__all__)


@pytest.mark.whole
def test_arguments_that_name_no_transfer_are_refused(handle: AioHandle, path: Path) -> None:
    tensor = torch.ones(10)
    with pytest.raises(ConfigError, match="name one of filename= and fd="):
        handle.async_pwrite(tensor)
    with pytest.raises(ConfigError, match="name one of filename= and fd="):
        handle.async_pwrite(tensor, path, fd=0)
    with pytest.raises(TypeError, match="the argument 'async' is missing"):
        handle.pwrite(tensor, path, False)
    with pytest.raises(TypeError, match="unknown arguments"):
        handle.pread(tensor, path, False, True, asynchronous=True)
    with pytest.raises(ConfigError, match="num_elem=-1 must be a number of elements, 0 or more"):
        handle.new_cpu_locked_tensor(-1, tensor)
    with pytest.raises(ConfigError, match="file_offset=-1 must be a number of bytes, 0 or more"):
        handle.sync_pwrite(tensor, path, -1)
    assert not path.exists()
    assert f"queue_depth=8, intra_op_parallelism=1, backend={handle.backend!r})" in repr(handle)


def test_a_failure_after_another_error_is_logged_and_hides_nothing(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path.write_bytes(bytes(8192))
    with pytest.raises(ZeroDivisionError), AioHandle(chaos={"eio": 1.0}) as handle:
        handle.async_pread(torch.empty(8192, dtype=torch.uint8), path)
        1 / 0  # noqa: B018
    assert "while closing after another error" in caplog.text
    caplog.clear()
    handle = AioHandle(chaos={"eio": 1.0})
    handle.async_pread(torch.empty(8192, dtype=torch.uint8), path)
    del handle
    gc.collect()
    assert "closing a dropped AioHandle: " in caplog.text
