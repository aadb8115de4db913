"""A default device of torch's, `with torch.device(...)`, changes nothing that training does.

`with torch.device("meta")` is the hardest one: memory there has no address.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

import swapper

X = torch.arange(32).view(2, 16)
PLACES = [
    "none",
    "offload",
    "forward",
    "backward",
    "zero_grad",
    "step",
    "snapshot",
    "state_dict",
    "gather",
    "close",
    "resume",
]


def make():
    torch.manual_seed(0)
    layers = nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256), nn.LayerNorm(256), nn.Linear(256, 256)
    return nn.Sequential(nn.Embedding(64, 256), *layers)


def only(place):
    """Return a function that gives a context in which "meta" is the default device if its argument is `place`."""
    return lambda here: torch.device("meta") if here == place else contextlib.nullcontext()


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


def train(model, optimizer, at, steps):
    losses = []
    for _ in range(steps):
        with at("zero_grad"):
            optimizer.zero_grad()
        with at("forward"):
            output = model(X)
        loss = output.square().mean()
        with at("backward"):
            loss.backward()
        with at("step"):
            optimizer.step()
        losses.append(loss.item())
    return losses


def assert_equal_states(model, ours):
    for name, value in model.state_dict().items():
        assert torch.equal(value, ours[name]), name


def offload(manager, make_optimizer, options):
    with torch.device("cpu"):
        model = make()
        optimizer = make_optimizer(model)
    return manager.offload(model, optimizer, **options)


@pytest.mark.parametrize(
    "options", [{"gradients": "host"}, {"gradients": "nvme", "update": "deferred"}, {"gradients": "nvme", "update": "backward"}],
    ids=lambda options: options.get("update", "step"),
)  # fmt: skip
@pytest.mark.parametrize("place", PLACES)
def test_training_is_that_without_a_default_device(tmp_path, place, options):
    at = only(place)
    # torch's Adam makes its counts of steps on the default device
    make_optimizer = sgd if place in ("forward", "backward", "step") else adamw
    options = {**options, "params": "nvme", "optimizer_state": "nvme"}
    reference = make()
    wanted = train(reference, make_optimizer(reference), only("none"), 4)
    found = []
    for begins in (True, False):
        with at("offload" if begins else "resume"):
            manager = swapper.SwapManager(tmp_path / "run", host_memory="8MiB", resume="auto")
            model, optimizer = offload(manager, make_optimizer, options)
        found += train(model, optimizer, at, 2)
        with at("snapshot"):
            manager.snapshot(tmp_path / f"{begins}.pt")
        with at("state_dict"):
            state = model.state_dict()
        if not begins:
            assert_equal_states(reference, state)
        with at("gather"), manager.gather(model[1]):
            assert model[1].weight.device.type == "cpu"
        with at("close"):
            manager.close()
    assert found == wanted
