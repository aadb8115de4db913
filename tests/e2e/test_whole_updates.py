"""Optimizers that update a matrix as a whole take several times its bytes in passing: that memory stays for the next one."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import swapper
from swapper.runtime import free_memory

ROWS, COLUMNS, TEMPORARIES = 2048, 1024, 5
STEPS = 12


class Centered(Optimizer):
    """Subtracts the mean of each column, which no part of a matrix knows."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    average = self.state[parameter].setdefault("average", torch.zeros_like(parameter))
                    centered = parameter.grad - parameter.grad.mean(dim=0)
                    made = [centered.mul(factor) for factor in range(1, TEMPORARIES)]
                    average.add_(made[0], alpha=0.1)
                    parameter.add_(average, alpha=-group["lr"])


def page_faults(directory: Path) -> list[int]:
    """Train, and return the page faults of each step's updates."""
    plain = nn.Sequential(nn.Linear(COLUMNS, ROWS, bias=False), nn.Linear(ROWS, COLUMNS, bias=False))
    with swapper.SwapManager(directory, host_memory="96MiB") as manager:
        model, optimizer = manager.offload(plain, Centered(plain.parameters()), update="step")
        faults = []
        for _ in range(STEPS):
            model(torch.ones(2, COLUMNS)).sum().backward()
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            optimizer.step()
            faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
            optimizer.zero_grad()
    return faults


@pytest.mark.skipif(not hasattr(free_memory._libc, "mallopt"), reason="this C library has no mallopt")
def test_memory_that_an_update_takes_each_time_is_not_given_back_in_between(tmp_path: Path) -> None:
    program = [sys.executable, __file__, str(tmp_path)]  # other tests leave holes in this process's heap
    faults = json.loads(subprocess.run(program, capture_output=True, text=True, check=True).stdout)
    pages = 2 * TEMPORARIES * 4 * ROWS * COLUMNS // resource.getpagesize()
    assert min(faults) < pages / 4, f"{faults} page faults, of {pages} pages that a step's updates take in passing"


if __name__ == "__main__":
    print(json.dumps(page_faults(Path(sys.argv[1]))))
