"""Saved activations of a CUDA device: gradients are plain torch's, and memory is saved; on a GPU only."""

from __future__ import annotations

import contextlib
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import swapper

pytestmark = pytest.mark.gpu
MIB = 1 << 20
WIDTH, ROWS, DEPTH = 1024, 4096, 8


class Maps(nn.Module):
    """Eight blocks that save 80 MiB each."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(WIDTH, 2 * WIDTH) for _ in range(DEPTH))
        self.down = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(DEPTH))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            value = value + down(torch.tanh(up(value)).sin())
        return value


@pytest.fixture
def manager(tmp_path: Path) -> Any:
    with swapper.SwapManager(tmp_path, host_memory="64MiB") as made:
        yield made


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return Maps().cuda()


def gradients(model: nn.Module, value: torch.Tensor, context: Any = None) -> list[torch.Tensor]:
    model.zero_grad()
    with context or contextlib.nullcontext():
        model(value).square().mean().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def assert_equal(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


@pytest.mark.parametrize(
    "options",
    [
        {"to": "host", "host_memory": "1GiB", "device_memory": "96MiB"},
        {"to": "host", "host_memory": "128MiB", "device_memory": "64MiB"},
        {"to": "auto", "host_memory": "192MiB", "device_memory": "96MiB"},
        {"to": "nvme", "host_memory": "96MiB", "device_memory": "64MiB"},
    ],
    ids=str,
)
def test_gradients_are_plain_torchs(manager: Any, model: nn.Module, options: dict[str, Any]) -> None:
    value = torch.randn(ROWS, WIDTH, device="cuda")
    wanted = gradients(model, value)
    activations = swapper.offload_activations(manager, **options)
    found = [gradients(model, value, activations) for _ in range(4)]  # queued one behind the other, without waiting
    for one in found:
        assert_equal(one, wanted)
    counters = activations.counters
    assert counters.down_bytes > 0 and counters.up_bytes > 0
    assert (counters.written_bytes > 0) == (options["to"] != "host")


def test_the_device_needs_less_memory(manager: Any, model: nn.Module) -> None:
    value = torch.randn(ROWS, WIDTH, device="cuda")
    activations = swapper.offload_activations(manager, to="host", host_memory="1GiB", device_memory="96MiB")
    peaks = []
    for context in (None, activations):
        gradients(model, value, context)
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        gradients(model, value, context)
        peaks.append(torch.cuda.max_memory_allocated())
    assert peaks[1] < peaks[0] - 300 * MIB


def test_a_stream_of_the_users_own(manager: Any, model: nn.Module) -> None:
    value = torch.randn(ROWS, WIDTH, device="cuda")
    wanted = gradients(model, value)
    activations = swapper.offload_activations(manager, to="host", host_memory="1GiB", device_memory="64MiB")
    stream = torch.cuda.Stream()
    for _ in range(3):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            there = gradients(model, value, activations)
        torch.cuda.current_stream().wait_stream(stream)
        assert_equal(there, wanted)
        assert_equal(gradients(model, value, activations), wanted)


def test_the_memory_for_it_is_page_locked(manager: Any, model: nn.Module) -> None:
    value = torch.randn(ROWS, WIDTH, device="cuda")
    activations = swapper.offload_activations(manager, to="host", host_memory="1GiB", device_memory="64MiB")
    gradients(model, value, activations)
    activations._locked.wait()
    assert activations._locked.describe() == "registered"
    piece = activations._locked.take(MIB)
    assert piece.is_pinned()
    assert activations.counters.unlocked_bytes == 0


def test_nothing_is_left(manager: Any, model: nn.Module) -> None:
    value = torch.randn(ROWS, WIDTH, device="cuda")
    gradients(model, value)
    model.zero_grad()
    before = torch.cuda.memory_allocated()
    activations = swapper.offload_activations(manager, to="auto", host_memory="192MiB", device_memory="96MiB")
    for _ in range(2):
        gradients(model, value, activations)
    with activations:
        model(value)  # never run backward
    with activations:
        pass
    model.zero_grad()
    assert torch.cuda.memory_allocated() <= before + MIB
    assert activations.counters.device_held_bytes == 0
