"""CUDA tensors to files and back, by every door there is; on a GPU only."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.serialization import config

from swapper import _C, AioHandle, GdsFile, GdsHandle, checkpoint
from swapper.io.registered import CudaRegistrar, Registration, slabs
from swapper.io.staging import SLOT_BYTES, SLOTS

pytestmark = pytest.mark.gpu

NBYTES = SLOTS * SLOT_BYTES + (9 << 20) + 1237  # more than the ring holds at one time, and no whole sectors


def noise(nbytes: int = NBYTES) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device="cuda")


def bytes_of(tensor: torch.Tensor) -> bytes:
    there = tensor.cpu().contiguous()
    return ctypes.string_at(there.data_ptr(), there.nbytes)


@pytest.mark.whole
@pytest.mark.parametrize("offset", [0, 4096, 123])
def test_a_handle_writes_and_reads_device_memory(tmp_path: Path, offset: int) -> None:
    source, back = noise(), torch.zeros(NBYTES, dtype=torch.uint8, device="cuda")
    with AioHandle() as handle:
        handle.submit_write(source, tmp_path / "x", offset).wait()
        handle.submit_read(back, tmp_path / "x", offset).wait()
    assert (tmp_path / "x").read_bytes() == bytes(offset) + bytes_of(source)
    assert torch.equal(source, back)


def test_a_handle_takes_strided_tensors_and_what_is_queued_before_it(tmp_path: Path) -> None:
    source = torch.randn(1500, 2100, device="cuda")
    with AioHandle() as handle:
        for _ in range(50):
            source = source @ torch.eye(2100, device="cuda") + 1  # still running when the write is asked for
        handle.submit_write(source.t(), tmp_path / "x").wait()
        back = torch.zeros(2100, 1500, device="cuda")
        handle.submit_read(back, tmp_path / "x").wait()
        doubled = back * 2  # queued behind the read's last copy
    assert torch.equal(back, source.t()) and torch.equal(doubled, source.t() * 2)


def test_many_tensors_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By one stream: torch deals 32 in turn, so more would be the program's own."""
    sources, made, stream = [noise(100_000 + n) for n in range(20)], [], torch.cuda.Stream

    def counted(*of: Any, **options: Any) -> torch.cuda.Stream:
        if "stream_id" not in options:  # else it is one that there is
            made.append(of)
        return stream(*of, **options)

    monkeypatch.setattr(torch.cuda, "Stream", counted)
    with AioHandle() as handle:
        operations = [handle.submit_write(source, tmp_path / f"{n}") for n, source in enumerate(sources)]
        for operation in operations:
            operation.wait()
    assert all((tmp_path / f"{n}").read_bytes() == bytes_of(source) for n, source in enumerate(sources))
    assert len(made) <= 1


def test_a_gds_handle_that_may_stage_is_equal_whichever_way_it_takes(tmp_path: Path) -> None:
    source, back = noise(), torch.zeros(NBYTES, dtype=torch.uint8, device="cuda")
    with GdsHandle(strict=False, intra_op_parallelism=4) as handle:
        handle.pin_device_tensor(back)
        handle.submit_write(source, tmp_path / "x", 100).wait()
        handle.submit_read(back, tmp_path / "x", 100).wait()
        assert handle.gds_reason
    assert torch.equal(source, back)
    assert (tmp_path / "x").read_bytes() == bytes(100) + bytes_of(source)


def test_a_gds_file_says_its_way_and_is_equal(tmp_path: Path) -> None:
    first, second = torch.randn(100_000, device="cuda"), torch.randn(77, device="cuda")
    with GdsFile(tmp_path / "x", os.O_CREAT | os.O_RDWR) as file:
        assert file.is_gds or "host memory" in file.reason
        operations = [
            file.submit_save(first.untyped_storage(), 0),
            file.submit_save(second.untyped_storage(), first.nbytes),
        ]
        for operation in operations:
            operation.wait()
        back = torch.zeros_like(second)
        file.load_storage(back.untyped_storage(), first.nbytes)
    assert (tmp_path / "x").read_bytes()[: first.nbytes] == bytes_of(first)
    assert torch.equal(back, second)


@pytest.mark.whole
@pytest.mark.parametrize("is_pinned", [False, True])
def test_checkpoints_of_device_tensors_are_torchs(tmp_path: Path, is_pinned: bool) -> None:
    base = torch.randn(1 << 20, device="cuda")
    state = {
        "whole": base,
        "view": base[100:200],
        "half": torch.randn(300, 7, device="cuda").bfloat16(),
        "host": torch.ones(3),
    }
    with config.patch({"save.use_pinned_memory_for_d2h": is_pinned}):
        checkpoint.save(state, tmp_path / "x.pt")
    for loaded in (torch.load(tmp_path / "x.pt"), checkpoint.load(tmp_path / "x.pt")):
        assert all(
            torch.equal(loaded[name], tensor) and loaded[name].device == tensor.device for name, tensor in state.items()
        )
        assert loaded["view"].data_ptr() == loaded["whole"].data_ptr() + 400
    on_host = checkpoint.load(tmp_path / "x.pt", map_location="cpu")
    assert torch.equal(on_host["whole"], base.cpu())


def test_an_arena_is_registered_and_copied_from_at_once() -> None:
    nbytes = 8 << 20
    arena = _C.Arena(nbytes)
    registration = Registration(CudaRegistrar(), arena, slabs(0, nbytes, 4096))
    registration.wait()
    assert registration.describe() == "registered"
    memory = torch.frombuffer(arena.view(0, nbytes), dtype=torch.uint8)
    assert memory.is_pinned()
    memory.copy_(noise(nbytes))
    on_device = memory.to("cuda", non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(on_device.cpu(), memory)
    registration.close()
    assert not memory.is_pinned()


def test_memory_that_cannot_be_registered_leaves_no_error_behind() -> None:
    class Nowhere:
        address = 4096

        def wait_populated(self, nbytes: int, /) -> None: ...

    registration = Registration(CudaRegistrar(), Nowhere(), [(0, 4096)])
    registration.wait()
    assert "error" in registration.describe()
    assert torch.ones(10, device="cuda").sum().item() == 10
