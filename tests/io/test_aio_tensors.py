"""Any tensor through an AioHandle: every dtype and layout, views of one another, batches; calls that come up short."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from handle_bytes import MIB, noise, raw
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sampling import examples

from swapper import AioHandle
from swapper.io.tensor_bytes import flat_bytes, views_of_range

# --- any tensor ---------------------------------------------------------------------------------------------------------

DTYPES = [
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


@pytest.mark.whole
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


@pytest.mark.whole
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
        lambda: torch.randn(2)[::2],
        lambda: torch.randn(5, 3)[:, 1:2].t(),
        lambda: torch.randn(1).expand(1000),
        lambda: torch.randn(50, 1).expand(50, 70),
        lambda: torch.randn(64, dtype=torch.complex64).conj(),
        lambda: torch.randn(64, dtype=torch.complex64).conj().imag,
        lambda: torch.randn(3 * MIB)[::2],
        lambda: torch.nn.Parameter(torch.randn(5000)),
        lambda: torch.randn(5000, requires_grad=True) * 2,
    ],
    ids=["scalar", "empty", "empty2d", "5d", "permuted", "channels_last", "shifted", "one_of_two", "column",
         "expanded", "rows_expanded", "conj", "neg", "strided_big", "parameter", "in_a_graph"],
)  # fmt: skip
def test_every_kind_of_tensor(handle: AioHandle, path: Path, make: Callable[[], torch.Tensor]) -> None:
    tensor = make()
    path.write_bytes(b"old" * 10)
    handle.sync_pwrite(tensor, path)
    assert path.read_bytes() == raw(tensor) == flat_bytes(tensor).numpy().tobytes()
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


@pytest.mark.whole
def test_a_leaf_that_needs_gradients_may_be_read_into(handle: AioHandle, path: Path) -> None:
    path.write_bytes(raw(torch.full((1000,), 7.0)))
    parameter = torch.nn.Parameter(torch.zeros(1000))
    handle.sync_pread(parameter, path)
    assert parameter.eq(7).all() and parameter.requires_grad


@pytest.mark.whole
def test_reading_into_what_a_backward_needs_is_noticed(handle: AioHandle, path: Path) -> None:
    path.write_bytes(bytes(4000))
    weight = torch.nn.Parameter(torch.randn(1000))
    loss = (weight**2).sum()
    handle.sync_pread(weight, path)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@given(st.data())
@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
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
@settings(max_examples=examples(25))
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


@pytest.mark.whole
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


@pytest.mark.whole
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


@pytest.mark.whole
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
    source = noise(MIB)
    gate, other_end = os.pipe()
    with AioHandle(debug=True, queue_depth=1, block_size=64 << 10, chaos={"until": gate}) as handle:
        with os.fdopen(other_end, "wb"):  # nothing is over before it is closed
            operations = [handle.submit_write(source, tmp_path / str(n)) for n in range(4)]
            source[-1] ^= 1
        errors = [operation.exception() for operation in operations]
    os.close(gate)
    assert all("was changed while it was being written" in str(error) for error in errors)


def test_an_operation_that_has_not_begun_is_called_off(tmp_path: Path) -> None:
    tensor = noise(MIB)
    gate, other_end = os.pipe()
    with AioHandle(queue_depth=1, block_size=4096, chaos={"until": gate}) as handle:
        with os.fdopen(other_end, "wb"):  # nothing is over before it is closed
            operations = [handle.submit_write(tensor, tmp_path / str(n)) for n in range(8)]
            called_off = [operation.cancel() for operation in reversed(operations)][::-1]
        for operation, off in zip(operations, called_off, strict=True):
            assert operation.cancelled is off
            assert (operation.exception() is not None) is off
        assert all(called_off[1:])
        assert handle.wait() == 0
    os.close(gate)
