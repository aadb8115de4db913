"""`state_codec=`: the optimizer's state is stored encoded. "split" is bit-equal to plain torch; what rounds is bit-equal to itself,
whatever the budget, placement, update time and number of threads, over a close and over snapshots, and near plain torch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import swapper
from e2e.keywords import for_manager
from e2e.models import Net, train_step
from e2e.optimizers import OPTIMIZERS
from e2e.twins import Twins, adamw, smallest_budget

LOSSY = ("bf16", "8bit")
PLACES = {
    "all on the drive": {},
    "parameters in memory": {"params": "host"},
    "deferred": {"update": "deferred"},
    "in backward": {"update": "backward"},
    "gradients on the drive": {"gradients": "nvme"},
    "all in memory": {"params": "host", "optimizer_state": "host", "host_memory": "1GiB"},
    "a large budget": {"host_memory": "1GiB"},
}


def bf16_net() -> nn.Module:
    torch.manual_seed(0)
    return Net().bfloat16()


class Run:
    """A run of `Net` in bf16 with fp32 masters."""

    def __init__(
        self, directory: Path, codec: Any, make_optimizer: Callable[[Any], Any] = adamw, **options: Any
    ) -> None:
        self.model = bf16_net()
        self.optimizer: Any = make_optimizer(self.model.parameters())
        budget = options.pop("host_memory", None)
        self.options = {"params": "nvme", "optimizer_state": "nvme", "master_weights": torch.float32, **options}
        self.options["state_codec"] = codec
        budget = budget or smallest_budget(directory, self.model, self.optimizer, **self.options)
        self.manager = swapper.SwapManager(directory, resume="auto", **for_manager({"host_memory": budget}))
        _, self.optimizer = self.manager.offload(self.model, self.optimizer, **self.options)
        torch.manual_seed(self.manager.step)

    def train(self, steps: int) -> list[float]:
        return [train_step(self.model, self.optimizer).item() for _ in range(steps)]

    def content(self) -> dict[str, Any]:
        """Return clones of everything: parameters, decoded state, masters."""
        owner = self.manager.current.run.model.optimizer_state
        with self.manager.gather(self.model):
            parameters = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        state = copy.deepcopy(self.optimizer.state_dict()["state"])
        masters = {name: owner._coded.read(name, "master") for name in parameters if owner._coded.has(name, "master")}
        return {"parameters": parameters, "state": state, "masters": masters}

    def close(self) -> None:
        self.manager.close()
