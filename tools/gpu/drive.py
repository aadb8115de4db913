"""Measures transfers between drive and device, through host memory (AioHandle) and past it (cuFile), against their
limit.

The drive's rate is that of the same engine with locked host memory, in the same file, alternating with the measured
transfer. Handles are not strict, so that a refused memory lock is not fatal; transfers raise all the same.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from gpu.bench import Bench, Row, check_equal, each, ratio
from gpu.copies import link_rates
from swapper import AioHandle, GdsFile, GdsHandle, UnsupportedError

BAR = 0.90
LIMIT = "min(drive, link)"
STAGED = ("drive -> device, AioHandle", "device -> drive, AioHandle")
DIRECT = ("drive -> device, GdsHandle", "device -> drive, GdsHandle")
FILE = ("drive -> device, GdsFile", "device -> drive, GdsFile")
Transfer = Callable[[torch.Tensor], object]


def through_host_memory(bench: Bench) -> Iterator[Row]:
    with AioHandle(queue_depth=32, strict=False) as handle, Trial(bench, handle) as trial:
        path = str(trial.path)
        yield from trial.rows(
            STAGED,
            lambda tensor: handle.submit_read(tensor, path).wait(),
            lambda tensor: handle.submit_write(tensor, path, 0).wait(),
        )


def by_cufile(bench: Bench) -> Iterator[Row]:
    try:
        handle = GdsHandle(intra_op_parallelism=8)
    except UnsupportedError as error:
        yield from (Row(figure, f"{BAR} of {LIMIT}", reason=str(error), is_open=True) for figure in DIRECT)
        return
    with handle, AioHandle(queue_depth=32, strict=False) as host, Trial(bench, host) as trial:
        path = str(trial.path)
        handle.pin_device_tensor(trial.on_device)
        yield from trial.rows(
            DIRECT,
            lambda tensor: handle.submit_read(tensor, path).wait(),
            lambda tensor: handle.submit_write(tensor, path, 0).wait(),
        )


def by_gds_file(bench: Bench) -> Iterator[Row]:
    """By either path; the row names it."""
    with (
        AioHandle(queue_depth=32, strict=False) as host,
        Trial(bench, host) as trial,
        GdsFile(trial.path, os.O_RDWR) as file,
    ):
        way = "cuFile" if file.is_gds else "through host memory"
        yield from trial.rows(
            (f"{FILE[0]} ({way})", f"{FILE[1]} ({way})"),
            lambda tensor: file.load_storage(tensor.untyped_storage()),
            lambda tensor: file.save_storage(tensor.untyped_storage()),
        )


class Trial:
    """A file with known bytes, host and device memory for them, and the limits."""

    def __init__(self, bench: Bench, host: AioHandle) -> None:
        self.bench = bench
        self.nbytes = bench.size(1 << 30, 1 << 20)
        self._host = host
        self._place = tempfile.TemporaryDirectory(dir=bench.directory, prefix="swapper-gpu-check-")
        self.path = Path(self._place.name) / "file"
        self.in_memory = host.new_cpu_locked_tensor(self.nbytes, torch.empty(0, dtype=torch.uint8))
        self.on_device = torch.empty(self.nbytes, dtype=torch.uint8, device=bench.device).random_(0, 256)
        self.in_memory.copy_(self.on_device)
        self.on_device.zero_()
        host.submit_write(self.in_memory, self.path).wait()
        self.link = link_rates(bench)

    def __enter__(self) -> Trial:
        return self

    def __exit__(self, *_: object) -> None:
        self._place.cleanup()

    def rows(self, figures: tuple[str, str], load: Transfer, save: Transfer) -> Iterator[Row]:
        path, host, device = str(self.path), self.in_memory, self.on_device
        wanted = host.clone()

        def loads() -> Iterator[Row]:
            times = self.bench.seconds_by_turns(
                [lambda: self._host.submit_read(host, path).wait(), lambda: load(device)], rounds=4, warmup=1
            )
            check_equal(device, wanted, figures[0])
            yield self._row(figures[0], times, self.link[0])

        def saves() -> Iterator[Row]:
            device.copy_(wanted.bitwise_not_())
            times = self.bench.seconds_by_turns(
                [lambda: self._host.submit_write(host, path, 0).wait(), lambda: save(device)], rounds=4, warmup=1
            )
            self._host.submit_read(host, path).wait()
            check_equal(host, wanted, figures[1])
            yield self._row(figures[1], times, self.link[1])

        yield from each(((figures[0],), loads), ((figures[1],), saves))

    def _row(self, figure: str, times: list[float], link: float) -> Row:
        drive = self.nbytes / times[0]
        return ratio(figure, self.nbytes, times[1], min(drive, link), LIMIT, BAR)
