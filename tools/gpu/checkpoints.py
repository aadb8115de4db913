"""Measures swapper.checkpoint's save and load of CUDA tensors against torch's, and against drive and link."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.utils.serialization

from gpu.bench import Bench, Row, check_equal, each, ratio
from gpu.copies import link_rates
from gpu.drive import LIMIT
from swapper import AioHandle, checkpoint

SAVES = (
    "checkpoint.save of CUDA tensors",
    "the same, use_pinned_memory_for_d2h",
    "torch.save (to the page cache)",
)
SAVE_BAR = 0.9
LOADS = ("checkpoint.load to CUDA", "torch.load (from the page cache)")


def saves_and_loads(bench: Bench) -> Iterator[Row]:
    count, numel = bench.size(32, 2), bench.size(16 << 20, 1 << 16)
    state = {f"layer.{n}": torch.randn(numel, device=bench.device) for n in range(count)}
    nbytes = count * numel * 4
    config: Any = torch.utils.serialization.config

    def save_pinned() -> None:
        with config.patch({"save.use_pinned_memory_for_d2h": True}):
            checkpoint.save(state, ours)

    with tempfile.TemporaryDirectory(dir=bench.directory, prefix="swapper-gpu-check-") as place:
        ours, theirs, plain = (Path(place) / name for name in ("ours.pt", "torch.pt", "plain"))
        writes, reads = drive_rates(bench, plain, nbytes)
        up, down = link_rates(bench)

        def row(figure: str, act: Callable[[], object], limit: float) -> Iterator[Row]:
            bar = SAVE_BAR if figure == SAVES[0] else None
            yield ratio(figure, nbytes, bench.seconds(act, rounds=2, warmup=1), limit, LIMIT, bar)

        def load() -> Iterator[Row]:
            loaded = checkpoint.load(ours, map_location=bench.device)
            for name, tensor in state.items():
                check_equal(loaded[name], tensor, name)
            del loaded
            yield from row(LOADS[0], lambda: checkpoint.load(ours, map_location=bench.device), min(reads, up))

        def load_by_torch() -> Iterator[Row]:
            yield from row(LOADS[1], lambda: torch.load(theirs, map_location=bench.device), min(reads, up))

        saves = (lambda: checkpoint.save(state, ours), save_pinned, lambda: torch.save(state, theirs))
        yield from each(
            *(((f,), partial(row, f, act, min(writes, down))) for f, act in zip(SAVES, saves, strict=True)),
            ((LOADS[0],), load),
            ((LOADS[1],), load_by_torch),
        )


def drive_rates(bench: Bench, path: Path, nbytes: int) -> tuple[float, float]:
    """Return bytes a second from locked host memory to the drive, and back."""
    with AioHandle(queue_depth=32, strict=False) as handle:
        memory = handle.new_cpu_locked_tensor(nbytes, torch.empty(0, dtype=torch.uint8))
        writing = bench.seconds(lambda: handle.submit_write(memory, path, 0).wait(), rounds=2, warmup=1)
        reading = bench.seconds(lambda: handle.submit_read(memory, path).wait(), rounds=2, warmup=1)
    path.unlink()
    return nbytes / writing, nbytes / reading
