"""The budget of every model is divided so that it is kept, and one that is too small is refused with the smallest that works."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from e2e.twins import named_budget
from model_users import LAYERS, WIDTH
from safetensors.torch import save_file
from torch import nn

import swapper

Run = Callable[[Path, int], tuple[torch.Tensor, int]]
"""Runs one model within these bytes; returns its result, and the bytes of host memory that it had."""


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def run(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.ones(2, WIDTH))  # type: ignore[no-any-return]


def trained(directory: Path, budget: int) -> tuple[torch.Tensor, int]:
    with swapper.SwapManager(directory, host_memory=budget, resume="discard") as manager:
        model = make()
        manager.offload(
            model, torch.optim.SGD(model.parameters()), params="nvme", optimizer_state="nvme", gradients="nvme"
        )
        return run(model), manager.counters.pool_bytes + manager.counters.resident_bytes


def loaded(directory: Path, budget: int) -> tuple[torch.Tensor, int]:
    save_file(make().state_dict(), directory / "model.safetensors")
    with torch.device("meta"):
        model = make().eval()
    swapper.load(model, directory / "model.safetensors", host_memory=budget)
    with swapper.loaded(model) as of:
        return run(model), of.counters.pool_bytes + of.counters.resident_bytes


@pytest.mark.parametrize("user", [trained, loaded])
def test_the_smallest_budget_that_is_named_works_is_kept_and_no_smaller_one_does(user: Run, tmp_path: Path) -> None:
    with pytest.raises(swapper.BudgetError) as refused:
        user(tmp_path, 4096)
    smallest = named_budget(refused.value)
    result, nbytes = user(tmp_path, smallest)
    assert nbytes <= smallest < sum(p.nbytes for p in make().parameters())
    assert torch.equal(result, run(make()))
    with pytest.raises(swapper.BudgetError):
        user(tmp_path, smallest - 1)
