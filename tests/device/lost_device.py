"""Loses the device in the middle of something, on the stand-in for CUDA, and prints what came of each thing tried after that.

python lost_device.py KIND COPIES DIRECTORY        after so many copies more
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from cuda_stand_in import plugin as plugin  # has what follows run on the stand-in
from e2e.keywords import for_offload
from torch import nn

import swapper
from swapper import SwapManager, checkpoint

runtime = ctypes.CDLL("libcudart.so.13")
WIDTH = 256


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            value = torch.tanh(layer(value)) + value
        return value


def attempt(act: Callable[[], object]) -> None:
    try:
        act()
    except Exception as error:
        print(type(error).__name__, str(error).partition("\n")[0])


def train(copies: int, directory: Path, update: str, update_on: str) -> None:
    manager = SwapManager(directory, host_memory="64MiB")
    model = Model()
    options = {"device": "cuda", "device_memory": "5MiB", "update": update, "update_on": update_on}
    model, optimizer = manager.offload(
        model, torch.optim.AdamW(model.parameters()), params="nvme", **for_offload(options)
    )
    value = torch.randn(64, WIDTH, device="cuda")

    def step() -> None:
        model(value).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    lose_after(copies)
    attempt(step)
    attempt(step)
    attempt(manager.close)


def infer(copies: int, directory: Path) -> None:
    checkpoint.save(Model().state_dict(), directory / "model")
    with swapper.without_weights():
        empty = Model()
    model = swapper.load(empty, directory / "model", device="cuda", host_memory="1MiB", device_memory="700KiB")
    value = torch.randn(64, WIDTH, device="cuda")
    with torch.no_grad():
        model(value)
        lose_after(copies)
        for _ in range(2):
            attempt(lambda: model(value))
    attempt(swapper.loaded(model).unload)


def save_activations(copies: int, directory: Path) -> None:
    manager = SwapManager(directory, host_memory="64MiB")
    model, value = Model().cuda(), torch.randn(4096, WIDTH, device="cuda")
    activations = swapper.offload_activations(manager, host_memory="8MiB", device_memory="256KiB")

    def step() -> None:
        with activations:
            loss = model(value).square().mean()
        loss.backward()

    step()
    step()
    lose_after(copies)
    attempt(step)
    attempt(step)
    attempt(manager.close)


def transfer(copies: int, directory: Path) -> None:
    handle = swapper.AioHandle()
    tensor = torch.zeros(80 << 20, dtype=torch.uint8, device="cuda")
    handle.submit_write(tensor, directory / "x").wait()
    lose_after(copies)
    attempt(handle.submit_write(tensor, directory / "x").wait)
    attempt(lambda: handle.submit_read(tensor, directory / "x"))
    attempt(handle.close)


def save(copies: int, directory: Path) -> None:
    state = {str(n): torch.zeros(5 << 20, device="cuda") for n in range(4)}
    checkpoint.save(state, directory / "whole")
    lose_after(copies)
    attempt(lambda: checkpoint.save(state, directory / "half"))
    assert [path.name for path in directory.iterdir()] == ["whole"], "half a checkpoint was left"
    attempt(lambda: checkpoint.load(directory / "whole", map_location="cuda"))


def lose_after(copies: int) -> None:
    torch.cuda.synchronize()
    runtime.stand_in_lose_device_at_copy(copies)


KINDS: dict[str, Callable[[int, Path], None]] = {
    "infer": infer,
    "save_activations": save_activations,
    "transfer": transfer,
    "save": save,
    **{
        f"train-{update}-{on}": lambda copies, directory, update=update, on=on: train(copies, directory, update, on)
        for update in ("step", "deferred", "backward")
        for on in ("cpu", "device")
    },
}

if __name__ == "__main__":
    KINDS[sys.argv[1]](int(sys.argv[2]), Path(sys.argv[3]))
