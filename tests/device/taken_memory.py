"""Takes a device's memory in the middle of a run, as another process would, on the stand-in for CUDA.

python taken_memory.py UPDATE STATE MOMENT DIRECTORY        prints each error, then whether all losses are plain torch's
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Any

import torch
from cuda_stand_in import plugin as plugin  # has what follows run on the stand-in
from torch import nn

import swapper

WIDTH, STEPS, SHORT = 256, 5, 2
runtime = ctypes.CDLL("libcudart.so.13")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            value = torch.tanh(layer(value)) + value
        return value.square().mean()


class Other:
    """Has all memory that torch does not hold."""

    def __init__(self) -> None:
        self._taken: list[ctypes.c_void_p] = []

    def take(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
        address = ctypes.c_void_p()
        assert runtime.cudaMalloc(ctypes.byref(address), ctypes.c_size_t(free)) == 0
        self._taken.append(address)

    def give(self) -> None:
        while self._taken:
            assert runtime.cudaFree(self._taken.pop()) == 0


def inputs(number: int) -> torch.Tensor:
    return torch.randn(2048, WIDTH, generator=torch.Generator().manual_seed(number)).cuda()


def plain() -> list[float]:
    model, losses = Model().cuda(), []
    optimizer = torch.optim.AdamW(model.parameters())
    for number in range(STEPS):
        loss = model(inputs(number))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main(update: str, state: str, moment: str, directory: Path) -> None:
    expected, losses, other, errors = plain(), list[float](), Other(), 0
    model: Any = Model()
    with swapper.SwapManager(directory, host_memory="64MiB") as manager:
        model, optimizer = manager.offload(
            model, torch.optim.AdamW(model.parameters()), device="cuda", update=update, optimizer_state=state
        )
        while len(losses) < STEPS:
            is_short = len(losses) == SHORT and errors == 0
            try:
                value = inputs(len(losses))
                if is_short and moment == "forward":
                    other.take()
                loss = model(value)
                if is_short and moment == "backward":
                    other.take()
                loss.backward()
                if is_short and moment == "update":
                    other.take()
                optimizer.step()
                optimizer.zero_grad()
                found = loss.item()
            except (swapper.BudgetError, torch.OutOfMemoryError) as error:
                print(type(error).__name__, str(error).partition("\n")[0])
                errors += 1
                other.give()
                optimizer.zero_grad()
            else:
                losses.append(found)
                other.give()
    print("equal" if losses == expected else f"{losses}, plain {expected}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], Path(sys.argv[4]))
