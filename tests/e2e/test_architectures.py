"""Architectures of transformers x optimizers x placements x accumulation x checkpointing, against plain torch, bit for bit.

Each pair of choices occurs in one of the combinations, and each commit has others.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import devices
import pytest
import torch
from sampling import pairwise
from torch import nn

from e2e import third_party
from e2e.architectures import MODELS, Size
from e2e.early import updated_early
from e2e.models import finish_step
from e2e.twins import Twins

MakeTwins = Callable[..., Twins]

OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "AdamW": partial(torch.optim.AdamW, lr=1e-3),
    "AdamW, fused": partial(torch.optim.AdamW, lr=1e-3, fused=True),
    "SGD, nesterov": partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    "Adafactor": partial(torch.optim.Adafactor, lr=1e-2),
    "Lion": partial(third_party.Lion, lr=1e-4),
}
PLACES = {"all on NVMe": ("nvme", "nvme"), "state on NVMe": ("host", "nvme"), "parameters on NVMe": ("nvme", "host")}


CHOICES = {
    "model": list(MODELS),
    "optimizer": list(OPTIMIZERS),
    "places": list(PLACES),
    "kind": ["fp32", "bf16 with masters"],
    "accumulate": [1, 2],
    "checkpointing": [None, False, True],
}
COMBINATIONS = [tuple(row.values()) for row in pairwise(CHOICES, lambda _: True, os.environ["SWAPPER_TEST_SEED"])]


def make_pair(
    twins: MakeTwins, model: str, optimizer: str, places: str, kind: str, checkpointing: bool | None, **options: Any
) -> Twins:
    net = MODELS[model][0](Size()).train()
    if kind != "fp32":
        net = net.bfloat16()
    if checkpointing is not None:
        net.gradient_checkpointing_enable({"use_reentrant": checkpointing})
    params, state = PLACES[places]
    return twins(net, OPTIMIZERS[optimizer], master=kind != "fp32", params=params, optimizer_state=state, **options)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable.*:FutureWarning")
@pytest.mark.parametrize(list(CHOICES), COMBINATIONS)
def test_training_is_bit_equal(
    twins: MakeTwins, model: str, optimizer: str, places: str, kind: str, accumulate: int, checkpointing: bool | None
) -> None:
    loss_of = MODELS[model][1]
    pair = make_pair(twins, model, optimizer, places, kind, checkpointing)

    def step(net: Any, optimizer: Any) -> list[torch.Tensor]:
        losses = []
        for _ in range(accumulate):
            with torch.autocast("cpu", torch.bfloat16, enabled=kind != "fp32"):
                losses.append(loss_of(net))
            (losses[-1] / accumulate).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return [loss.detach() for loss in losses]

    pair.train(step, steps=3)
    pair.finish(paged=False)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable.*:FutureWarning")
@pytest.mark.parametrize(list(CHOICES), COMBINATIONS)
def test_training_with_updates_during_backward_is_bit_equal(
    twins: MakeTwins, model: str, optimizer: str, places: str, kind: str, accumulate: int, checkpointing: bool | None
) -> None:
    loss_of = MODELS[model][1]
    pair = make_pair(twins, model, optimizer, places, kind, checkpointing, update="backward")
    early: list[int] = []

    def step(net: Any, optimizer: Any) -> list[torch.Tensor]:
        losses = []
        for number in range(accumulate):
            only_accumulates = net is pair.swapped and number + 1 < accumulate
            with pair.manager.accumulate() if only_accumulates else nullcontext():
                with torch.autocast("cpu", torch.bfloat16, enabled=kind != "fp32"):
                    losses.append(loss_of(net))
                (losses[-1] / accumulate).backward()
        if net is pair.swapped:
            early.append(len(updated_early(pair)))
        optimizer.step()
        optimizer.zero_grad()
        return [loss.detach() for loss in losses]

    pair.train(step, steps=3)
    assert min(early) > 0
    pair.finish(paged=False)


@pytest.mark.parametrize("update", ["backward", "deferred", "step"])
@pytest.mark.parametrize("model", MODELS)
def test_a_deep_model_reads_what_was_planned(twins: MakeTwins, model: str, update: str) -> None:
    """Whatever its modules hand on to each other, no parameters come more often than they are used."""
    make, loss_of = MODELS[model]
    pair = twins(make(Size(layers=8)).train(), update=update, room_bytes=1 << 19)

    read = pair.read_bytes_a_step(lambda net, optimizer: finish_step(loss_of(net), optimizer), steps=3)
    # Deferred updates on a device: up to 14 % more is read than planned (GPT-2, BERT, Mixtral), and why is not known yet.
    more = 1.15 if devices.NAME and update == "deferred" else 1.1
    assert read <= more * pair.manager.current.run.plan.traffic.read_bytes["param"]
    pair.finish(paged=False)
