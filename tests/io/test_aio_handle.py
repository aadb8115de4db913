"""AioHandle: DeepNVMe's surface and its return values, any tensor, futures, threads, lifetimes."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from handle_bytes import RunPython, noise, raw
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import swapper
from swapper import AioHandle, ConfigError, IoError, Operation, UnsupportedError
from swapper.io.elements import views_of_range

MIB = 1 << 20

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


def test_a_descriptor_in_the_place_of_the_name(handle: AioHandle, path: Path) -> None:
    path.write_bytes(bytes(10_000))
    descriptor = os.open(path, os.O_RDWR)  # without O_DIRECT
    tensor = noise(5000)
    assert handle.async_pwrite(tensor, descriptor, 100) == 0
    assert handle.wait() == 1
    assert os.lseek(descriptor, 0, os.SEEK_CUR) == 0
    os.close(descriptor)
    assert path.read_bytes() == bytes(100) + raw(tensor) + bytes(4900)


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
    from swapper.io import locked

    with AioHandle() as handle:
        before = len(locked._locked_bytes)
        tensor = handle.new_cpu_locked_tensor(5000, torch.empty(0))
        view = tensor[10:]
        del tensor
        gc.collect()
        assert handle.is_pinned(view)
        del view
        gc.collect()
        assert len(locked._locked_bytes) == before


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


# --- any tensor ---------------------------------------------------------------------------------------------------------

DTYPES = [
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_strided", [False, True])
def test_every_dtype(handle: AioHandle, path: Path, dtype: torch.dtype, is_strided: bool) -> None:
    tensor = noise(dtype.itemsize * 3 * 1001).view(dtype).view(3, 1001)
    if dtype == torch.bool:
        tensor = torch.rand(3, 1001) > 0.5
    tensor = tensor.t() if is_strided else tensor
    back = torch.zeros(3, 1001, dtype=dtype).t() if is_strided else torch.zeros(3, 1001, dtype=dtype)
    handle.sync_pwrite(tensor, path)
    assert path.read_bytes() == raw(tensor)
    handle.sync_pread(back, path)
    assert raw(back) == raw(tensor)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.tensor(2.5),
        lambda: torch.empty(0),
        lambda: torch.empty(0, 5),
        lambda: torch.randn(2, 3, 4, 5, 6),
        lambda: torch.randn(2, 3, 4, 5, 6).permute(4, 2, 0, 3, 1),
        lambda: torch.randn(8, 16, 9, 9).to(memory_format=torch.channels_last),
        lambda: torch.randn(100)[1:-1],
        lambda: torch.randn(1).expand(1000),
        lambda: torch.randn(50, 1).expand(50, 70),
        lambda: torch.randn(64, dtype=torch.complex64).conj(),
        lambda: torch.randn(64, dtype=torch.complex64).conj().imag,
        lambda: torch.randn(3 * MIB)[::2],
        lambda: torch.nn.Parameter(torch.randn(5000)),
        lambda: torch.randn(5000, requires_grad=True) * 2,
    ],
    ids=["scalar", "empty", "empty2d", "5d", "permuted", "channels_last", "shifted", "expanded", "rows_expanded",
         "conj", "neg", "strided_big", "parameter", "in_a_graph"],
)  # fmt: skip
def test_every_kind_of_tensor(handle: AioHandle, path: Path, make: Callable[[], torch.Tensor]) -> None:
    tensor = make()
    path.write_bytes(b"old" * 10)
    handle.sync_pwrite(tensor, path)
    assert path.read_bytes() == raw(tensor)
    back = torch.empty_like(tensor.detach(), memory_format=torch.contiguous_format)
    handle.sync_pread(back, path)
    assert raw(back) == raw(tensor)
    spread = torch.zeros(*tensor.shape, 2, dtype=tensor.dtype)[..., 1]
    handle.sync_pread(spread, path)
    assert raw(spread) == raw(tensor)


def test_a_strided_tensor_of_many_slots_takes_bounded_memory(tmp_path: Path) -> None:
    tensor = torch.arange(24 * MIB, dtype=torch.int32).view(4096, -1).t()  # 96 MiB, 24 slots
    back = torch.zeros(4096, tensor.shape[0], dtype=torch.int32).t()
    with AioHandle() as handle:
        handle.sync_pwrite(tensor, tmp_path / "file", 12345)
        handle.sync_pread(back, tmp_path / "file", 12345)
    assert torch.equal(tensor, back)


def test_a_leaf_that_needs_gradients_may_be_read_into(handle: AioHandle, path: Path) -> None:
    path.write_bytes(raw(torch.full((1000,), 7.0)))
    parameter = torch.nn.Parameter(torch.zeros(1000))
    handle.sync_pread(parameter, path)
    assert parameter.eq(7).all() and parameter.requires_grad


def test_reading_into_what_a_backward_needs_is_noticed(handle: AioHandle, path: Path) -> None:
    path.write_bytes(bytes(4000))
    weight = torch.nn.Parameter(torch.randn(1000))
    loss = (weight**2).sum()
    handle.sync_pread(weight, path)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@given(st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_views_of_a_range_are_that_range(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 5), min_size=0, max_size=4))
    tensor = torch.arange(torch.Size(shape).numel()).view(shape)
    if tensor.ndim > 1:
        tensor = tensor.transpose(0, data.draw(st.integers(0, tensor.ndim - 1)))
    start = data.draw(st.integers(0, tensor.numel()))
    stop = data.draw(st.integers(start, tensor.numel()))
    views = list(views_of_range(tensor, start, stop))
    found = torch.cat([view.flatten() for view in views]) if views else torch.empty(0, dtype=torch.int64)
    assert torch.equal(found, tensor.flatten()[start:stop])
    assert len(views) <= 2 * max(tensor.ndim, 1) + 1


@given(pieces=st.lists(st.integers(0, 9000), min_size=1, max_size=8), offset=st.integers(0, 9000))
@settings(max_examples=25, deadline=None)
def test_neighbours_written_at_the_same_time_do_not_touch_each_other(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[int], offset: int
) -> None:
    path = tmp_path_factory.mktemp("neighbours") / "file"
    tensors = [noise(nbytes, seed=n) for n, nbytes in enumerate(pieces)]
    with AioHandle(block_size=4096) as handle:
        at = offset
        for tensor in tensors:
            handle.async_pwrite(tensor, path, at)
            at += tensor.numel()
        assert handle.wait() == len(tensors)
        back = [torch.zeros_like(tensor) for tensor in tensors]
        handle.submit_read_batch(back, path, offset).wait()
    assert path.read_bytes()[offset:] == b"".join(map(raw, tensors))
    assert all(map(torch.equal, tensors, back))


def test_neighbours_in_a_batch_are_one_transfer_and_others_are_not(handle: AioHandle, path: Path) -> None:
    """Tensors that lie side by side in memory and in the file go together; order, gaps, empty ones and strides are kept."""
    memory = noise(500_000)
    a, b, c, d = memory.split([1000, 3096, 400_000, 95_904])
    strided = memory[:3000].view(30, 100).t()
    for tensors in (
        [a, b, c, d],
        [d, a, b],
        [a, c],
        [a, a, b],
        [a, memory[:0], b],
        [a, b, strided, c, d],
        [b.view(12, 258), c],
    ):
        handle.submit_write_batch(tensors, path).wait()
        assert path.read_bytes() == b"".join(map(raw, tensors))
        into = torch.zeros_like(memory)
        back = [into[: each.numel()].view(each.shape) for each in tensors[:1]]
        handle.submit_read_batch(back, path).wait()
        assert torch.equal(back[0], tensors[0])
    before = [each._version for each in (a, b)]
    handle.submit_read_batch([a, b], path).wait()
    assert [each._version for each in (a, b)] > before, "autograd is told of each"


def test_a_batch_lies_in_one_file_in_order(handle: AioHandle, path: Path) -> None:
    tensors = [torch.randn(n, 3).t() if n % 2 else torch.randn(n) for n in range(1, 200)]
    handle.submit_write_batch(tensors, path).wait()
    assert path.read_bytes() == b"".join(map(raw, tensors))
    back = [torch.zeros(tensor.shape) for tensor in tensors]
    assert handle.submit_read_batch(back, path).wait()
    assert all(map(torch.equal, tensors, back))
    assert handle.submit_write_batch([], path).wait()
    assert path.read_bytes() == b""


CHAOS = {"seed": 3, "short": 0.2, "interrupt": 0.2, "again": 0.2, "delay": 0.1, "reorder": 0.2}


@pytest.mark.parametrize("backend", ["uring", "aio", "threads"])
def test_calls_that_come_up_short_lose_nothing(tmp_path: Path, backend: str) -> None:
    tensors = [noise(200_003), noise(400_000).view(400, 1000).t(), noise(1), noise(0), noise(65536)]
    with AioHandle(block_size=4096, queue_depth=8, backend=backend, chaos=CHAOS) as handle:
        for n, tensor in enumerate(tensors * 5):
            handle.async_pwrite(tensor, tmp_path / str(n), n)
        assert handle.wait() == 25
        back = [
            torch.zeros(*reversed(t.shape), dtype=t.dtype).t() if t.ndim > 1 else torch.zeros_like(t) for t in tensors
        ]
        for n in range(25):
            assert handle.sync_pread(back[n % 5], tmp_path / str(n), n) == 1
            assert torch.equal(back[n % 5], tensors[n % 5])


def test_operations_that_fail_at_random_all_say_so(path: Path) -> None:
    """Every byte is accounted for: what says that it is written is."""
    source = noise(64 * 8192)
    with AioHandle(block_size=4096, queue_depth=8, chaos={"seed": 5, "eio": 0.05, "enospc": 0.05}) as handle:
        path.write_bytes(bytes(source.numel()))
        pieces = source.split(8192)
        operations = [handle.submit_write(piece, path, n * 8192) for n, piece in enumerate(pieces)]
        failed = [operation.exception() is not None for operation in operations]
    assert 0 < sum(failed) < 64
    content = path.read_bytes()
    for n, piece in enumerate(pieces):
        assert failed[n] or content[n * 8192 :][:8192] == raw(piece)


def test_debug_finds_a_source_that_is_changed_in_flight(tmp_path: Path) -> None:
    source = noise(16 * MIB)
    with AioHandle(debug=True, queue_depth=1, block_size=64 << 10) as handle:
        operations = [handle.submit_write(source, tmp_path / str(n)) for n in range(4)]
        source[-1] ^= 1
        errors = [operation.exception() for operation in operations]
    assert any(errors), "the last of four can hardly have been written before"


def test_an_operation_that_has_not_begun_is_called_off(tmp_path: Path) -> None:
    tensor = noise(16 * MIB)
    with AioHandle(queue_depth=1, block_size=4096) as handle:
        operations = [handle.submit_write(tensor, tmp_path / str(n)) for n in range(8)]
        called_off = [operation.cancel() for operation in reversed(operations)][::-1]
        for operation, off in zip(operations, called_off, strict=True):
            assert operation.cancelled is off
            assert (operation.exception() is not None) is off
        assert called_off[-1]
        assert handle.wait() == 0


# --- futures ------------------------------------------------------------------------------------------------------------


def test_a_failed_operation_says_so_in_every_way(handle: AioHandle, path: Path) -> None:
    path.write_bytes(bytes(1 << 20))
    operation = handle.submit_read(torch.empty(1 << 20, dtype=torch.uint8), path)
    operation.wait()
    path.write_bytes(b"")
    with pytest.raises(IoError):
        handle.submit_read(torch.empty(1 << 20, dtype=torch.uint8), path)


def test_an_event_loop_that_is_over_is_not_kept(handle: AioHandle, path: Path) -> None:
    async def main() -> weakref.ref[asyncio.AbstractEventLoop]:
        assert await handle.submit_write(noise(1 << 20), path) == 1 << 20
        return weakref.ref(asyncio.get_running_loop())

    loop = asyncio.run(main())
    gc.collect()
    assert loop() is None


def test_operations_are_awaited_in_asyncio(handle: AioHandle, tmp_path: Path) -> None:
    tensors = [noise(100_000, seed=n) for n in range(20)]
    strided = noise(100_000).view(100, 1000).t()

    async def main() -> list[int]:
        written = [handle.submit_write(tensor, tmp_path / str(n)) for n, tensor in enumerate(tensors)]
        sizes = await asyncio.gather(*map(wait_for, written), wait_for(handle.submit_write(strided, tmp_path / "s")))
        back = torch.zeros_like(tensors[3])
        assert await handle.submit_read(back, tmp_path / "3") == 100_000
        assert torch.equal(back, tensors[3])
        return sizes

    async def wait_for(operation: Operation) -> int:
        return await operation

    assert asyncio.run(main()) == [100_000] * 21
    assert (tmp_path / "s").read_bytes() == raw(strided)


def test_a_timeout_leaves_the_operation_going(handle: AioHandle, path: Path) -> None:
    tensor = noise(32 * MIB)
    operation = handle.submit_write(tensor, path)
    while not operation.wait(0):
        pass
    assert operation.done
    assert path.stat().st_size == 32 * MIB


def test_many_threads_may_submit(tmp_path: Path) -> None:
    failures: list[BaseException] = []
    with AioHandle(block_size=4096, queue_depth=16) as handle:

        def work(n: int) -> None:
            try:
                for turn in range(20):
                    tensor = noise(10_000 + n, seed=n * 100 + turn)
                    back = torch.zeros_like(tensor)
                    handle.submit_write(tensor, tmp_path / str(n)).wait()
                    assert handle.sync_pread(back, tmp_path / str(n)) == 1
                    assert torch.equal(tensor, back)
            except BaseException as failure:
                failures.append(failure)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failures == []


def test_a_tensor_lives_until_its_transfer_is_over(handle: AioHandle, path: Path) -> None:
    tensor = noise(4 * MIB)
    expected = raw(tensor)
    gone = weakref.ref(tensor)
    handle.async_pwrite(tensor, path)
    del tensor
    gc.collect()
    handle.wait()
    gc.collect()
    assert gone() is None
    assert path.read_bytes() == expected


def test_a_handle_that_is_dropped_finishes_what_it_began(path: Path) -> None:
    tensor = noise(8 * MIB)
    handle = AioHandle()
    handle.async_pwrite(tensor, path)
    handle.async_pwrite(tensor.view(2048, 4096).t(), path.with_name("strided"))
    del handle
    gc.collect()
    assert path.read_bytes() == raw(tensor)
    assert path.with_name("strided").read_bytes() == raw(tensor.view(2048, 4096).t())


@pytest.mark.parametrize("ending", ["", "del handle", "raise SystemExit"])
def test_a_process_that_ends_finishes_what_it_began(path: Path, run_python: RunPython, ending: str) -> None:
    done = run_python(
        f"""
        import sys, torch, swapper
        handle = swapper.AioHandle()
        handle.submit_write(torch.full((4 << 20,), 7, dtype=torch.uint8), sys.argv[1])
        handle.submit_write(torch.full((1024, 2048), 7, dtype=torch.uint8).t(), sys.argv[1] + "s")
        {ending}
        """,
        path,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert path.read_bytes() == b"\7" * (4 * MIB)
    assert path.with_name("files").read_bytes() == b"\7" * (2 * MIB)


def test_closing_finishes_and_tells_of_failures_that_nobody_waited_for(small_tmpfs: Path) -> None:
    handle = AioHandle()
    tensor = noise(600 << 10)
    for n in range(10):
        handle.async_pwrite(tensor, small_tmpfs / str(n))
    with pytest.raises(IoError) as raised:
        handle.close()
    assert raised.value.errno == 28
    handle.close()


def test_a_failure_that_nobody_asks_for_is_logged(small_tmpfs: Path, caplog: pytest.LogCaptureFixture) -> None:
    with AioHandle() as handle:
        tensor = noise(600 << 10)
        operations = [handle.submit_write(tensor, small_tmpfs / str(n)) for n in range(10)]
        for operation in operations:
            operation.settle()
        del operations, operation
    gc.collect()
    assert "nobody asked" in caplog.text


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    def once() -> None:
        with AioHandle(block_size=4096, queue_depth=4) as handle:
            handle.async_pwrite(noise(10_000), tmp_path / "a")
            handle.async_pwrite(noise(10_000).view(100, 100).t(), tmp_path / "b")
            handle.wait()
            with pytest.raises(IoError):
                handle.sync_pread(torch.empty(1), tmp_path / "none")

    def counts() -> tuple[int, int]:
        gc.collect()
        threads = 0
        for task in Path("/proc/self/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                threads += (
                    not (task / "comm").read_text().startswith("iou-")
                )  # the kernel's end when they have been idle
        return len(list(Path("/proc/self/fd").iterdir())), threads

    once()
    before = counts()
    for _ in range(10):
        once()
    assert counts() == before


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
