"""manager.accumulate_batches: micro-batches that pass group by group give what they give one after the other, bit for bit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from e2e.architectures import MODELS, Size
from e2e.models import Biased, Dropping, Net, Shuffled, Staged, tokens
from e2e.twins import Twins

MakeTwins = Callable[..., Twins]
Loss = Callable[[Any, Any], torch.Tensor]

COUNT = 4


def loss_of(model: Any, batch: Any) -> torch.Tensor:
    logits = model(batch)
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch.flatten()) / COUNT


def accumulated(
    pair: Twins, model: Any, batches: list[Any], loss: Loss = loss_of, **options: Any
) -> list[torch.Tensor]:
    """Accumulate the batches' gradients: in the plain model one after the other, in the swapped one together."""
    if model is pair.swapped:
        assert pair.manager is not None
        return pair.manager.accumulate_batches(partial(loss, model), batches, **options)
    losses = []
    for batch in batches:
        losses.append(loss(model, batch))
        losses[-1].backward()
    return [one.detach() for one in losses]


def step(pair: Twins, model: Any, optimizer: Any, loss: Loss = loss_of, **options: Any) -> list[torch.Tensor]:
    losses = accumulated(pair, model, [tokens() for _ in range(COUNT)], loss, **options)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return losses


def train(pair: Twins, steps: int = 3, **options: Any) -> None:
    pair.train(lambda model, optimizer: step(pair, model, optimizer, **options), steps)
    assert not [thread for thread in threading.enumerate() if "_work" in thread.name]


NETS: dict[str, Callable[[], nn.Module]] = {
    "blocks": partial(Net, depth=8),
    "tied": partial(Net, depth=8, tied=True),
    "two passes": partial(Net, depth=6, passes=2),
    "checkpointing": partial(Net, depth=8, checkpointing=False),
    "a shared bias": Biased,
    "lists in a list": Staged,
    "other blocks each": partial(Dropping, depth=10),
    "another order each": partial(Shuffled, depth=6),
}


@pytest.mark.parametrize(
    "options",
    [{}, {"update": "deferred"}, {"gradients": "nvme"}, {"optimizer_state": "host"}],
    ids=["at the step", "deferred", "gradients on NVMe", "state in memory"],
)
@pytest.mark.parametrize("net", NETS)
def test_steps_are_bit_equal(twins: MakeTwins, net: str, options: dict[str, Any]) -> None:
    room_bytes = 1 << 20 if "each" in net else 0  # micro-batches that go other ways lease more at once
    pair = twins(NETS[net](), room_bytes=room_bytes, **options)
    train(pair)
    pair.finish(paged=not options)


@pytest.mark.parametrize("name", MODELS)
def test_architectures_of_transformers(twins: MakeTwins, name: str) -> None:
    make, loss = MODELS[name]
    model = make(Size()).eval()  # dropout is another test's
    pair = twins(model)

    def seeded(net: Any, seed: int) -> torch.Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            inputs = loss
            return inputs(net) / COUNT

    def run(net: Any, optimizer: Any) -> list[torch.Tensor]:
        losses = accumulated(pair, net, [1, 2, 3], seeded)
        optimizer.step()
        optimizer.zero_grad()
        return losses

    pair.train(run, 2)
    pair.finish(paged=False)
