"""Accelerators that are not there, too old, or lost: each is named, at once, in an error of swapper's own; stand-ins play them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from swapper import _C, AioHandle, DeviceError
from swapper.device.device import open_device
from swapper.io import staging
from swapper.io.staging import SLOT_BYTES, Staging

TOO_OLD = (
    "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver by downloading and "
    "installing a new version"
)
NO_DRIVER = "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and installed a driver"


class Accelerator:
    """In place of torch.cuda: as many devices as told; `begins` is what it raises when it is to begin."""

    def __init__(self, count: int = 0, begins: Exception | None = None, asked: Exception | None = None) -> None:
        self.count, self.begins, self.asked = count, begins, asked

    def is_available(self) -> bool:
        if self.asked is not None:
            raise self.asked
        return self.count > 0

    def device_count(self) -> int:
        return self.count

    def init(self) -> None:
        if self.begins is not None:
            raise self.begins


def open_on(accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch, device: str = "cuda") -> Any:
    monkeypatch.setattr(torch, "get_device_module", lambda _: accelerator)
    return open_device(device)


@pytest.mark.whole
@pytest.mark.parametrize("reason", [RuntimeError(TOO_OLD), RuntimeError(NO_DRIVER + "\nfrom somewhere")])
def test_no_driver_and_one_that_is_too_old_are_told_in_torchs_words(
    reason: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DeviceError) as caught:
        open_on(Accelerator(begins=reason), monkeypatch)
    assert str(reason).partition("\n")[0] in str(caught.value)
    assert "device='cpu' runs anywhere" in str(caught.value) and "somewhere" not in str(caught.value)


@pytest.mark.whole
@pytest.mark.parametrize(
    "accelerator, device, words",
    [
        (Accelerator(), "cuda", "no driver, one too old"),
        (Accelerator(begins=AssertionError("Torch not compiled with CUDA enabled")), "cuda", "not compiled with CUDA"),
        (Accelerator(asked=RuntimeError("CUDA driver initialization failed")), "cuda", "initialization failed"),
        (Accelerator(count=1), "cuda:3", "there are 1, counted from 0"),
    ],
)
def test_a_device_that_cannot_be_used_is_named(
    accelerator: Accelerator, device: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DeviceError, match=words):
        open_on(accelerator, monkeypatch, device)


def test_this_machine_without_a_device_says_why() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    with pytest.raises(DeviceError, match=r"device='cuda'.*device='cpu'"):
        open_device("cuda")


class LostStream:
    """Of a device with an error that stays: whatever is asked of it, once `after` calls were well, raises it."""

    def __init__(self, calls: list[str], after: int) -> None:
        self.calls, self.after = calls, after

    def _ask(self, what: str) -> None:
        self.calls.append(what)
        if len(self.calls) > self.after:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def wait_event(self, event: object) -> None:
        self._ask("wait")

    def synchronize(self) -> None:
        self._ask("synchronize")

    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


@pytest.mark.parametrize("after", [0, 1])
@pytest.mark.parametrize("kind", ["write", "read"])
def test_an_error_of_the_device_that_stays_ends_a_handles_transfer_and_no_slot_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, after: int
) -> None:
    engine, ring, calls = _C.Engine(backend="threads"), Staging(), []
    file = _C.File(str(tmp_path / "x"), create=True)
    (tmp_path / "x").write_bytes(bytes(3 * SLOT_BYTES))

    def move(offset: int, address: int, nbytes: int) -> Any:
        yield getattr(engine, kind)(file, offset, address, nbytes)

    monkeypatch.setattr(staging, "event_of", lambda tensor: "an event")
    monkeypatch.setattr(staging, "_stream_of", lambda device: LostStream(calls, after))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    values = torch.arange(3 * SLOT_BYTES // 4, dtype=torch.int32)
    transfer = ring.begin(kind, values, 0, "x", move)
    with pytest.raises(DeviceError, match=r"copying a tensor through host memory.*illegal memory access"):
        transfer.wait()
    monkeypatch.setattr(staging, "event_of", lambda tensor: None)  # the next tensor is the CPU's: the ring still works
    ring.begin("write", values.clone(), 0, "x", lambda *a: iter([engine.write(file, *a)])).wait()
    ring.close()
    assert (tmp_path / "x").read_bytes() == values.numpy().tobytes()


def test_a_transfer_that_the_device_fails_is_over_when_it_is_told_and_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(staging, "event_of", lambda tensor: "an event")
    monkeypatch.setattr(staging, "_stream_of", lambda device: LostStream(calls, 0))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    matrices = [torch.zeros(1000, 2000).t() for _ in range(8)]
    with AioHandle() as handle:
        operation = handle.submit_write_batch(matrices, tmp_path / "x")
        with pytest.raises(DeviceError, match="illegal memory access"):
            operation.wait()
        assert operation.done and calls == ["wait"] * len(matrices)
        unasked = handle.submit_write(matrices[0], tmp_path / "y")
    assert isinstance(unasked.exception(), DeviceError), "closing waits for it and leaves the outcome to who asks"
    del operation, unasked
    assert "nobody waited for it" not in caplog.text
