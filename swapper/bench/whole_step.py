"""Measures what a training step needs besides the drive: a device's link, an update, and a small step as a whole."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

import swapper
from swapper.bench.plain import Gpt, GptConfig, make_gpt, make_optimizer

LINK_BYTES = 256 << 20
LINK_COPIES = 8
"""The fastest of these counts."""
CONFIG = GptConfig(vocabulary=256, context=128, layers=8, width=512)
"""25 million parameters: 400 MB each way in a step, with all of it on NVMe in fp32."""
HOST_MEMORY = "256MiB"
BATCH = 1
STEPS = 5
"""The median of all but the first two counts: they fill pages and learn the order."""


@dataclass(frozen=True)
class Link:
    """Bytes a second between page-locked host memory and a device."""

    up_bytes_per_s: float
    down_bytes_per_s: float


@dataclass(frozen=True)
class WholeStep:
    """A training step with parameters and optimizer state on NVMe, and one of plain torch with all of it in memory.

    Attributes:
        parameters: of the model.
        plain_s: seconds of plain torch.
        wall_s: seconds with swapper.
        read_bytes, written_bytes: of that step.
    """

    parameters: int
    plain_s: float
    wall_s: float
    read_bytes: int
    written_bytes: int


def find_device() -> torch.device | None:
    """Return the accelerator of this process; None if there is none."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return None if found is None else torch.device(found.type, torch.accelerator.current_device_index())


def measure_link(device: torch.device) -> Link:
    here = torch.empty(LINK_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True)
    there = torch.empty(LINK_BYTES, dtype=torch.uint8, device=device)

    def rate(source: torch.Tensor, target: torch.Tensor) -> float:
        return LINK_BYTES / min(_timed(lambda: target.copy_(source), device) for _ in range(LINK_COPIES))

    return Link(rate(here, there), rate(there, here))


def measure_update(device: torch.device) -> float:
    """Return how many fp32 parameters AdamW updates in a second."""
    parameter = torch.nn.Parameter(torch.zeros(16 << 20, device=device))
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    return parameter.numel() / min(_timed(optimizer.step, device) for _ in range(4))


def measure_step(directory: Path, device: torch.device) -> WholeStep:
    """Take some steps of a small GPT, in plain torch and with swapper, whose files are removed afterwards."""
    tokens = torch.arange(BATCH * CONFIG.context, device=device).view(BATCH, -1) % CONFIG.vocabulary
    plain = _step_of(*_model(device), tokens)
    plain_s = statistics.median([_timed(plain, device) for _ in range(STEPS)][2:])
    del plain
    with (
        tempfile.TemporaryDirectory(prefix="swapper-bench-", dir=directory) as scratch,
        swapper.SwapManager(scratch, host_memory=HOST_MEMORY) as manager,
    ):
        model, optimizer = manager.offload(
            *_model(torch.device("cpu")), params="nvme", optimizer_state="nvme", device=device
        )
        step = _step_of(model, optimizer, tokens)
        seconds = [_timed(step, device) for _ in range(STEPS)]
        stats, wall_s = manager.stats(), statistics.median(seconds[2:])
        return WholeStep(CONFIG.parameters, plain_s, wall_s, stats.read_bytes, stats.written_bytes)


def _model(device: torch.device) -> tuple[Gpt, torch.optim.Optimizer]:
    model = make_gpt(CONFIG, torch.float32).to(device)
    return model, make_optimizer(model.parameters(), 1e-3)


def _step_of(model: Gpt, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> Callable[[], None]:
    def step() -> None:
        model(tokens, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _timed(run: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of a call, to the end of what it has queued."""
    began_s = time.perf_counter()
    run()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter() - began_s
