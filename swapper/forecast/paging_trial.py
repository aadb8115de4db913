"""Measures what pages take of the processors: small models are loaded and used as they are in a session, from a file.

What their modules compute is not in it, only their hooks, leases, pages that are mapped and first touched, and the engine's thread.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from torch import nn

from swapper import _C
from swapper.errors import BudgetError, ConfigError
from swapper.infer.load_model import load
from swapper.infer.loaded_model import loaded
from swapper.paging.virtual_drive import PagingCosts

LAYERS, PASSES = 8, 6
"""Of a trial. The first pass counts for nothing."""
STAYING_BYTES, SMALL_BYTES, LARGE_BYTES = 128 << 10, 512 << 10, 4 << 20
"""Of a layer that stays, and of layers of few and of many pages, which do not."""
MUCH_BYTES = 64 << 20
"""Memory for all layers, and of a cache: in a step neither data nor Python's code are in one, and Python takes twice as long."""


def measure_paging(has_checksums: bool) -> PagingCosts:
    """Return what pages take, in a second or so.

    Args:
        has_checksums: the engine takes checksums of what moves.
    """
    with closing(_C.Arena(MUCH_BYTES)) as memory:
        stays, few, many = (_LayerCosts.of(nbytes, memory) for nbytes in (STAYING_BYTES, SMALL_BYTES, LARGE_BYTES))
        checked_s = median(_crc_seconds(memory) for _ in range(PASSES)) / MUCH_BYTES if has_checksums else 0.0
    mapped_byte_s = _mapping_seconds()
    few_s, many_s = (of.layer_s - of.nbytes * mapped_byte_s for of in (few, many))
    page_s = max(many_s - few_s, 0.0) / (many.pages - few.pages)
    return PagingCosts(
        use_s=stays.layer_s,
        access_s=max(few_s - few.pages * page_s, stays.layer_s),
        page_s=page_s,
        mapped_byte_s=mapped_byte_s,
        transfer_s=many.transfer_s,
        checked_byte_s=checked_s,
        takes_turns=torch.get_num_threads() >= len(os.sched_getaffinity(0)),
    )


def _mapping_seconds() -> float:
    """Return what the first touch of a byte takes in a new mapping of memory that is there."""
    file = os.memfd_create("swapper-trial")
    try:
        os.truncate(file, MUCH_BYTES)
        times_s = []
        for _ in range(PASSES):
            with mmap.mmap(file, MUCH_BYTES) as memory:
                began_s = time.thread_time()
                touched = sum(memory[:: mmap.PAGESIZE])
                times_s.append(time.thread_time() - began_s)
                began_s = time.thread_time()
                touched += sum(memory[:: mmap.PAGESIZE])
                times_s[-1] -= time.thread_time() - began_s
    finally:
        os.close(file)
    return max(median(times_s[1:]), 0.0) / MUCH_BYTES


def _crc_seconds(memory: _C.Arena) -> float:
    began_s = time.perf_counter()
    _C.crc32_address(memory.address, MUCH_BYTES)
    return time.perf_counter() - began_s


class _Layer(nn.Module):
    """A module that touches each page of its weight, and computes nothing.

    Attributes:
        apart_s: the thread's seconds that do not count.
    """

    apart_s = 0.0

    def __init__(self, nbytes: int, memory: _C.Arena) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(nbytes, dtype=torch.uint8, device="cpu"), requires_grad=False)
        self._memory = memory

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._apart(self._empty_caches)
        self._touch()
        self._apart(self._empty_caches, self._touch, self._empty_caches)
        return x

    def _touch(self) -> None:
        self.weight[:: mmap.PAGESIZE].max()

    def _empty_caches(self) -> None:
        _C.crc32_address(self._memory.address, MUCH_BYTES)

    def _apart(self, *acts: Callable[[], None]) -> None:
        began_s = time.thread_time()
        for act in acts:
            act()
        _Layer.apart_s += time.thread_time() - began_s


@dataclass(frozen=True)
class _LayerCosts:
    """A layer's costs: of the thread that uses it, the bytes and pages that come, and the engine's thread for one of them."""

    layer_s: float
    nbytes: float
    pages: float
    transfer_s: float

    @classmethod
    def of(cls, nbytes: int, memory: _C.Arena) -> _LayerCosts:
        """Use LAYERS layers of this many bytes, with as little memory as works; small ones stay."""
        model: nn.Module = nn.Sequential(*(_Layer(nbytes, memory) for _ in range(LAYERS)))
        with tempfile.TemporaryDirectory(prefix="swapper-") as folder:
            path = Path(folder) / "trial.pt"
            try:
                torch.save(model.state_dict(), path)
            except (OSError, RuntimeError) as error:
                raise ConfigError(
                    f"predict writes {LAYERS * nbytes >> 20} MiB to {tempfile.gettempdir()} for a trial, which failed ({error}): "
                    "name a directory with space in the environment's TMPDIR"
                ) from error
            try:
                model = load(model, path, host_memory=1)
            except BudgetError as error:
                model = load(model, path, host_memory=error.smallest_bytes or MUCH_BYTES)
            try:
                return cls._measure(model)
            finally:
                loaded(model).unload()

    @classmethod
    def _measure(cls, model: nn.Module) -> _LayerCosts:
        found: list[tuple[float, float, float]] = []
        counters, x = loaded(model).counters, torch.zeros(1, device="cpu")
        for _ in range(PASSES):
            before_bytes = counters.read_bytes["param"]
            _Layer.apart_s, began_s, all_s = 0.0, time.thread_time(), time.process_time()
            model(x)
            thread_s = time.thread_time() - began_s
            engine_s = time.process_time() - all_s - thread_s
            found.append((thread_s - _Layer.apart_s, engine_s, counters.read_bytes["param"] - before_bytes))
        used_s, engine_s, nbytes = (median(each) / LAYERS for each in zip(*found[1:], strict=True))
        pages = nbytes / max(counters.frame_bytes, 1)
        return cls(used_s, nbytes, pages, engine_s / max(pages, 1))
