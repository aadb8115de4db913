"""Whatever goes together trains as plain torch does, bit for bit, in the smallest budget that works.

The combinations are those of `pairwise`: each pair of choices below occurs in one of them, if it can, and each commit has others.
Other tests look at what a choice promises beyond that: what it reads, refuses, undoes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import NAME, device_of_tests, need_update_there
from infer.host_device import ORDERS, HostDevice
from sampling import pairwise
from torch import nn
from torch.nn import functional as F

from e2e.device_twins import MIB
from e2e.early import train
from e2e.loops import LOOPS
from e2e.models import WIDTH, Biased, Block, Net, Output, Staged, hidden_of
from e2e.optimizers import OPTIMIZERS
from e2e.twins import Twins, smallest_device_budget
from swapper.capabilities import Feature, broken_rule

MakeTwins = Callable[..., Twins]


class Odd(Net):
    """With parameters of unusual shapes too."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 7))
        self.one = nn.Parameter(torch.ones(1))
        self.prime = nn.Parameter(torch.randn(101, 211))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return super().forward(batch) * self.scale * self.one + self.prime.sum() * 1e-3 + self.empty.sum()


class Unused(Block):
    """Has a layer that its forward never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(WIDTH, 3 * WIDTH)


class InPlace(Net):
    """Changes each block's output in place, right after the block."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(batch) + self.position(batch.shape[1])
        for block in self.blocks:
            hidden = block(hidden)
            hidden.mul_(0.9)
            F.relu_(hidden)
        return self.head(self.norm(hidden)).mul_(1.1)


class Pieces(nn.Module):
    """Outputs with several tensors, some of which nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.side = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Any) -> tuple[Any, ...]:
        hidden = self.block(hidden_of(value[0]))
        return hidden, self.side(hidden), None, 7, [hidden.detach()]


class Several(Net):
    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        value: Any = (self.embedding(batch) + self.position(batch.shape[1]),)
        for block in self.blocks:
            value = block(value)
        return self.head(self.norm(value[0] + value[1]))


class Shared(Net):
    """Some of its modules are at several places of the tree."""

    def __init__(self) -> None:
        super().__init__()
        self.again = self.blocks[1]
        self.same = nn.ModuleList([self.blocks[2]] * 3)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(batch) + self.position(batch.shape[1])
        for block in (*self.blocks, self.again, *self.same):
            hidden = block(hidden)
        return self.head(self.norm(hidden))


def partly_frozen() -> Net:
    model = Net()
    model.blocks[1].requires_grad_(False)
    model.blocks[3].down.requires_grad_(False)
    return model


MODELS: dict[str, Callable[[], Net]] = {
    "net": Net,
    "tied": partial(Net, tied=True),
    "used twice": partial(Net, passes=2),
    "checkpointing": partial(Net, checkpointing=False),
    "reentrant checkpointing": partial(Net, checkpointing=True),
    "checkpointing, used twice": partial(Net, checkpointing=False, passes=2),
    "reentrant checkpointing, used twice": partial(Net, checkpointing=True, passes=2),
    "dropout": partial(Net, dropout=0.1),
    "partly frozen": partly_frozen,
    "odd shapes": Odd,
    "biased": partial(Biased, depth=4),
    "staged": partial(Staged, depth=5),
    "outputs in a dict": partial(Net, make_block=partial(Block, lambda hidden: {"hidden": [hidden]})),
    "outputs in a dataclass": partial(Net, make_block=partial(Block, lambda hidden: Output(hidden, {"none": None}))),
    "unused parts": partial(Net, make_block=Unused),
    "unused outputs": partial(Several, make_block=Pieces),
    "changed in place": InPlace,
    "shared modules": Shared,
}


def with_norms_in_fp32(model: nn.Module) -> nn.Module:
    """The rest in bf16: groups with two dtypes."""
    model.bfloat16()
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.float()
            module.register_forward_pre_hook(lambda _, args: (args[0].float(),))
            module.register_forward_hook(lambda _, args, output: output.bfloat16())
    return model


DTYPES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "fp32": nn.Module.float,
    "fp64": nn.Module.double,
    "bf16": nn.Module.bfloat16,
    "bf16 with masters": nn.Module.bfloat16,
    "two": with_norms_in_fp32,
}


def matrices_and_vectors(model: nn.Module) -> list[dict[str, Any]]:
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices, vectors = [p for p in trained if p.dim() > 1], [p for p in trained if p.dim() <= 1]
    return [{"params": matrices}, {"params": vectors, "lr": 3e-3}]


SELECTIONS: dict[str, Callable[[nn.Module], Any]] = {
    "all": lambda model: [p for p in model.parameters() if p.requires_grad],
    "two groups": matrices_and_vectors,
    "in another order": lambda model: [p for p in model.parameters() if p.requires_grad][::-1],
}

CHOICES = {
    "optimizer": list(OPTIMIZERS),
    "select": list(SELECTIONS),
    "update": ["step", "deferred", "backward"],
    "params": ["nvme", "host", "auto"],
    "state": ["nvme", "host", "auto", "device"],
    "gradients": ["host", "nvme", "device"],
    "dtype": list(DTYPES),
    "device": ["none", *ORDERS],
    "update_on": ["cpu", "device"],
    "commit_every": ["free", 2, None],
    "drives": [1, 2],
    "model": list(MODELS),
    "loop": list(LOOPS),
    "state_codec": ["exact", "split"],
}

LATE = (
    "closure",
    "retained graph",
    "gradient penalty",
    "discarded forward",
    "evaluation",
    "evaluation within",
    "inference mode",
)
"""Loops of which a backward need not update anything."""

CLIPPED = ("clipped", "clipped again", "clipped by the manager", "scaler", "gradients changed")
"""Loops that need all gradients before any update."""


def is_possible(row: Mapping[str, Any]) -> bool:
    """Return whether swapper says that it can do it, and plain torch can."""
    has_masters, loop = row["dtype"] == "bf16 with masters", row["loop"]
    return broken_rule(features_of(row)) is None and not (
        (has_masters and (loop in ("closure", "scheduler", "scaler") or row["select"] != "all"))  # no PlainMasters
        or (loop == "scaler" and "fused" in row["optimizer"] and row["dtype"] in ("bf16", "two"))  # unscaled in bf16
        or (loop in ("retained graph", "gradient penalty") and "reentrant" in row["model"])  # torch refuses
        or (loop == "gradient penalty" and trains_on_device(row))
        or (row["model"] == "odd shapes" and (row["optimizer"] == "adafactor" or loop == "clipped again"))  # 0 elements
        or (row["optimizer"] == "adafactor" and row["dtype"] == "two")  # torch: eps of the first one only
        or (loop == "scheduler" and row["optimizer"] == "adamw tensor lr")
        or (row["state_codec"] == "split" and (not has_masters or row["update_on"] == "device"))
        or (loop in ("gradients changed", "gradients looked at") and not are_tensors(row))
    )


def trains_on_device(row: Mapping[str, Any]) -> bool:
    """Return whether the swapped twin does, by its row or by SWAPPER_TEST_DEVICE."""
    return row["device"] != "none" or bool(NAME)


def features_of(row: Mapping[str, Any]) -> set[Feature]:
    asked = {
        Feature.DEVICE: trains_on_device(row),
        Feature.UPDATE_ON_DEVICE: row["update_on"] == "device",
        Feature.STATE_ON_DEVICE: row["state"] == "device",
        Feature.GRADIENTS_ON_DEVICE: row["gradients"] == "device",
        Feature.IN_FORWARD: row["update"] == "deferred",
        Feature.IN_BACKWARD: row["update"] == "backward",
        Feature.CLIPPING: row["loop"] in CLIPPED,
    }
    return {feature for feature, is_so in asked.items() if is_so}


def are_tensors(row: Mapping[str, Any]) -> bool:
    """Return whether gradients can be looked at."""
    return row["gradients"] == "device" or (row["gradients"] == "host" and not trains_on_device(row))


COMBINATIONS = pairwise(CHOICES, is_possible, os.environ["SWAPPER_TEST_SEED"])


@pytest.mark.parametrize("row", COMBINATIONS, ids=lambda row: ", ".join(map(str, row.values())))
def test_training_is_bit_equal(second_drive: Path, twins: MakeTwins, row: dict[str, Any]) -> None:
    device = None if row["device"] == "none" else device_of_tests(row["device"])
    need_update_there({"update_on": row["update_on"] if device else "cpu"})
    pair = twins(
        DTYPES[row["dtype"]](MODELS[row["model"]]()),
        OPTIMIZERS[row["optimizer"]],
        others=[second_drive] if row["drives"] == 2 else [],
        select=SELECTIONS[row["select"]],
        master=row["dtype"] == "bf16 with masters",
        commit_every=row["commit_every"],
        room_bytes=0 if device is None else MIB,
        update=row["update"],
        params=row["params"],
        optimizer_state=row["state"],
        gradients=row["gradients"],
        state_codec=row["state_codec"],
        wait=True,
    )
    if device is not None:
        pair.options |= {"device": device, "update_on": row["update_on"]}
        budget = smallest_device_budget(pair.directory, pair.swapped, pair.original, **pair.options)
        pair.options["device_memory"] = budget + 2 * MIB  # reentrant checkpointing uses more at one time
    pair.offload()
    run = LOOPS[row["loop"]](pair)
    if row["update"] != "backward":
        pair.train(run, steps=3)
    elif not all(early := train(pair, run, steps=3)):
        assert row["loop"] in LATE, early
    pair.both(lambda _, optimizer: optimizer.zero_grad())
    counters = pair.manager.counters
    if row["params"] == row["state"] == "nvme" and row["device"] == "none":
        assert counters.bytes_read > 0 or counters.pool_bytes >= counters.state_bytes
    assert not isinstance(device, HostDevice) or device.peak_bytes <= pair.options["device_memory"]
    pair.finish(paged=False)
