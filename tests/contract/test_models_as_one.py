"""Several models as one, in training and in inference: they share one budget, and each computes as by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from model_users import WIDTH
from safetensors.torch import save_file
from torch import nn

import swapper
from swapper.modules.cold import is_cold

Opened = tuple[dict[str, nn.Module], Any]
"""The models, and the counters of what they share."""
SIZES = {"policy": 6, "reference": 4}
BUDGET = 8 << 20


def make(name: str) -> nn.Module:
    torch.manual_seed(SIZES[name])
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(SIZES[name]))).eval().requires_grad_(False)


@contextmanager
def trained(directory: Path) -> Iterator[Opened]:
    models = {name: make(name) for name in SIZES}
    with swapper.SwapManager(directory, host_memory=BUDGET) as manager:
        manager.offload(models, None, params="nvme")
        yield models, manager.counters


@contextmanager
def loaded(directory: Path) -> Iterator[Opened]:
    models = {}
    with swapper.shared_memory(BUDGET):
        for name in SIZES:
            save_file(make(name).state_dict(), directory / f"{name}.safetensors")
            with torch.device("meta"):
                model = make(name)
            models[name] = swapper.load(model, directory / f"{name}.safetensors")
    with swapper.loaded(models["policy"]) as of:
        assert swapper.loaded(models["reference"]) is of
        yield models, of.counters


@pytest.mark.parametrize("user", [trained, loaded])
@pytest.mark.parametrize("order", ["policy reference", "policy policy reference", "reference policy policy"])
def test_each_computes_as_by_itself_within_one_budget(user: Callable[[Path], Any], order: str, tmp_path: Path) -> None:
    value = torch.ones(2, WIDTH)
    with torch.no_grad():
        expected = {name: make(name)(value) for name in SIZES}
    with user(tmp_path) as (models, counters), torch.no_grad():
        assert sum(p.nbytes for name in SIZES for p in make(name).parameters()) > BUDGET
        for name in order.split() * 3:
            assert torch.equal(models[name](value), expected[name])
        assert counters.pool_bytes + counters.resident_bytes <= BUDGET
        assert all(any(is_cold(p) for p in model.parameters()) for model in models.values())
