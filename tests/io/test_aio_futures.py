"""Operations of an AioHandle as futures: awaited, from many threads, dropped, called off, and what is left when a process ends."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from pathlib import Path

import pytest
import torch
from e2e.leaks import live_threads
from handle_bytes import MIB, RunPython, noise, raw

from swapper import AioHandle, IoError, Operation

# --- futures ------------------------------------------------------------------------------------------------------------


@pytest.mark.whole
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
    assert "nobody waited for it" in caplog.text


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    def once() -> None:
        with AioHandle(block_size=4096, queue_depth=4) as handle:
            handle.async_pwrite(noise(10_000), tmp_path / "a")
            handle.async_pwrite(noise(10_000).view(100, 100).t(), tmp_path / "b")
            handle.wait()
            with pytest.raises(IoError):
                handle.sync_pread(torch.empty(1), tmp_path / "none")

    def held() -> tuple[int, list[str]]:
        gc.collect()
        threads = [
            name for name in live_threads() if name.startswith("swapper-")
        ]  # others come and go: pytest's timers
        return len(list(Path("/proc/self/fd").iterdir())), sorted(threads)

    once()
    before = held()
    for _ in range(10):
        once()
    assert held() == before
