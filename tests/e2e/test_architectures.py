"""Architectures of transformers x optimizers x placements x accumulation x checkpointing, against plain torch, bit for bit.

A sample, in which every architecture and every choice occurs; all of them with SWAPPER_TEST_ALL=1 (some hundred, some minutes).
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from e2e import third_party
from e2e.architectures import MODELS, Size
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
KINDS = ("fp32", "bf16 with masters")
CHECKPOINTING = (None, False, True)


def combinations() -> list[Any]:
    everything = list(itertools.product(MODELS, OPTIMIZERS, PLACES, KINDS, (1, 2), CHECKPOINTING))
    if not os.environ.get("SWAPPER_TEST_ALL"):
        sample = range(len(MODELS))
        return [
            (
                model,
                list(OPTIMIZERS)[i % 5],
                list(PLACES)[i % 3],
                KINDS[i % 2],
                1 + i // 2 % 2,
                CHECKPOINTING[i // 3 % 3],
            )
            for i, model in zip(sample, MODELS, strict=True)
        ]
    # Each pair of choices occurs: one in 7 of all, which is prime to every number of choices.
    return everything[::7]


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable.*:FutureWarning")
@pytest.mark.parametrize(("model", "optimizer", "places", "kind", "accumulate", "checkpointing"), combinations())
def test_training_is_bit_equal(
    twins: MakeTwins, model: str, optimizer: str, places: str, kind: str, accumulate: int, checkpointing: bool | None
) -> None:
    make, loss_of = MODELS[model]
    net = make(Size()).train()
    if kind != "fp32":
        net = net.bfloat16()
    if checkpointing is not None:
        net.gradient_checkpointing_enable({"use_reentrant": checkpointing})
    params, state = PLACES[places]
    pair = twins(net, OPTIMIZERS[optimizer], master=kind != "fp32", params=params, optimizer_state=state)

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
