"""Measures passes through a model whose weights come from host memory or the drive, against link and drive.

The model is linear maps with few rows of input: their arithmetic is negligible against their bytes, so that a pass is
its transfers.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import swapper
from gpu.bench import Bench, Row, check_equal, each, ratio
from gpu.copies import link_rates
from gpu.drive import LIMIT
from swapper import AioHandle

FROM_HOST, FROM_DRIVE = "a pass: host memory -> device", "a pass: drive -> device"
ON_DEVICE = "a pass with all weights on the device"
PASSES = (FROM_HOST, FROM_DRIVE, ON_DEVICE)
HOST_BAR, DRIVE_BAR, DEVICE_BAR = 0.97, 0.97, 1.02
TOGETHER = 8
"""Passes in a timing: the first groups of one are copied while the one before ends."""
MIB = 1 << 20


class Maps(nn.Module):
    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.maps = nn.ModuleList(nn.Linear(width, width, bias=False, dtype=torch.bfloat16) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for linear in self.maps:
            x = torch.nn.functional.relu(linear(x))
        return x


def passes(bench: Bench) -> Iterator[Row]:
    layers, width = bench.size(32, 2), bench.size(4096, 256)
    torch.manual_seed(0)
    plain = Maps(layers, width)
    nbytes = sum(p.nbytes for p in plain.parameters())
    x = torch.randn(8, width, dtype=torch.bfloat16, device=bench.device)
    with tempfile.TemporaryDirectory(dir=bench.directory, prefix="swapper-gpu-check-") as place, torch.no_grad():
        path = Path(place) / "weights.pt"
        torch.save(plain.state_dict(), path)
        plain.to(bench.device)
        expected = plain(x)
        link = link_rates(bench)[0]
        several = 4 * nbytes // layers + 64 * MIB

        def from_host() -> Iterator[Row]:
            model = Loaded(bench, path, layers, width, host_bytes=2 * nbytes + 256 * MIB, device_bytes=several)
            taken = model.seconds(x, expected)
            of = "the best pinned copy"
            yield ratio(FROM_HOST, model.copied_bytes_a_pass, taken, link, of, HOST_BAR, model.told)

        def from_drive() -> Iterator[Row]:
            model = Loaded(bench, path, layers, width, host_bytes=384 * MIB, device_bytes=several)
            read, taken = model.read_bytes_a_pass, model.seconds(x, expected)
            yield ratio(FROM_DRIVE, read, taken, min(drive_rate(bench, path), link), LIMIT, DRIVE_BAR, model.told)

        def on_device() -> Iterator[Row]:
            model = Loaded(bench, path, layers, width, host_bytes=384 * MIB, device_bytes=2 * nbytes + 256 * MIB)
            model.seconds(x, expected, is_open=True)
            times = bench.seconds_by_turns([lambda: plain(x), lambda: model.run(x)])
            model.unload()
            found, bar = times[1] / times[0], f"{DEVICE_BAR} of plain torch's time"
            yield Row(ON_DEVICE, bar, f"{found:.3f} ({times[1] * 1e3:.2f} ms)", found <= DEVICE_BAR)

        yield from each(((FROM_HOST,), from_host), ((FROM_DRIVE,), from_drive), ((ON_DEVICE,), on_device))


class Loaded:
    """The model with its weights in the file, and in two memories."""

    def __init__(self, bench: Bench, path: Path, layers: int, width: int, host_bytes: int, device_bytes: int) -> None:
        with torch.device("meta"):
            empty = Maps(layers, width)
        on_device: dict[str, Any] = {"device": "cuda", "device_memory": device_bytes}
        self._bench = bench
        self._model = swapper.load(empty, path, host_memory=host_bytes, **({} if bench.on_cpu else on_device))
        self.read_bytes_a_pass = swapper.loaded(self._model).read_bytes_a_pass
        self.copied_bytes_a_pass = 0
        self.told = ""  # whether its memory is registered

    def run(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self._model(x)
        return result

    def seconds(self, x: torch.Tensor, expected: torch.Tensor, is_open: bool = False) -> float:
        """Return the time of the shortest pass; its output is verified outside of it."""
        for _ in range(3):  # the first reads everything, the second knows the order
            check_equal(self.run(x), expected, "a pass")
        registration: Any = swapper.loaded(self._model)._streaming.host_side
        if registration is not None:
            registration.wait()
            self.told = registration.describe()
        before = swapper.loaded(self._model).counters.uploaded_bytes
        self.run(x)
        self.copied_bytes_a_pass = swapper.loaded(self._model).counters.uploaded_bytes - before
        taken = self._bench.seconds(lambda: [self.run(x) for _ in range(TOGETHER)], rounds=5) / TOGETHER
        check_equal(self.run(x), expected, "a pass")
        if not is_open:
            self.unload()
        return taken

    def unload(self) -> None:
        swapper.loaded(self._model).unload()


def drive_rate(bench: Bench, path: Path) -> float:
    """Return bytes a second from the drive into locked memory, with the same engine."""
    nbytes = path.stat().st_size // 4096 * 4096
    with AioHandle(queue_depth=32, strict=False) as handle:  # the system may refuse to lock the memory
        memory = handle.new_cpu_locked_tensor(nbytes, torch.empty(0, dtype=torch.uint8))
        return nbytes / bench.seconds(lambda: handle.submit_read(memory, str(path)).wait(), rounds=4, warmup=1)
