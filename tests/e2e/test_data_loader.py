"""DataLoader workers fork while the model lives in the parent and transfers are under way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from e2e.models import LENGTH, VOCABULARY, Net, finish_step, loss_of
from e2e.twins import Twins

MakeTwins = Callable[..., Twins]


class Numbered(Dataset[torch.Tensor]):
    """Samples that depend on their index only. May carry an object along into the workers."""

    def __init__(self, baggage: Any = None) -> None:
        self.baggage = baggage

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return (torch.arange(LENGTH) * (index + 3)) % VOCABULARY


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("params", ["nvme", "host"])
def test_training_with_worker_processes_is_bit_equal(twins: MakeTwins, params: str) -> None:
    pair = twins(Net(), params=params)
    # Workers inherit the model through the dataset, as they do where a dataset uses a model's configuration.
    loader = DataLoader(Numbered(pair.swapped), batch_size=2, num_workers=2, multiprocessing_context="fork")
    plain_loader = DataLoader(Numbered(), batch_size=2)
    for _ in range(3):  # each pass forks its workers anew, in the middle of training
        expected = list(plain_loader)
        for number, batch in enumerate(loader):
            assert torch.equal(batch, expected[number])

            def run(model: Any, optimizer: Any, batch: torch.Tensor = batch) -> torch.Tensor:
                loss = loss_of(model, batch)
                return finish_step(loss, optimizer)

            pair.train(run, steps=1)
    pair.finish(paged=params == "nvme")
