"""Runs of a small bf16 model whose optimizer state is stored encoded, and where they may place it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from infer.host_device import HostDevice
from torch import nn

import swapper
from e2e.keywords import for_manager
from e2e.models import Net, train_step
from e2e.twins import adamw, smallest_budget

UPDATED_THERE = {"device": "late", "device_memory": "64MiB", "accelerator": swapper.Accelerator(update_on="device")}
PLACES = {
    "all on the drive": {},
    "parameters in memory": {"params": "host"},
    "deferred": {"update": "deferred"},
    "in backward": {"update": "backward"},
    "gradients on the drive": {"gradients": "nvme"},
    "all in memory": {"params": "host", "optimizer_state": "host", "host_memory": "1GiB"},
    "a large budget": {"host_memory": "1GiB"},
    "on a device": {"device": "late", "device_memory": "64MiB"},
    "updated on a device": {**UPDATED_THERE, "optimizer_state": "nvme"},
    "updated on a device in backward": {**UPDATED_THERE, "update": "backward"},
    "updated on a device, deferred": {**UPDATED_THERE, "update": "deferred", "params": "host"},
    "on a device, also the state": {**UPDATED_THERE, "optimizer_state": "device"},
}


def bf16_net() -> nn.Module:
    torch.manual_seed(0)
    return Net().bfloat16()


class Run:
    """A run of `Net` in bf16 with fp32 masters."""

    def __init__(
        self,
        directory: Path,
        codec: Any,
        make_optimizer: Callable[[Any], Any] = adamw,
        others: Sequence[Path] = (),
        **options: Any,
    ) -> None:
        self.model = bf16_net()
        trained = options.pop("select", lambda model: model)(self.model)
        if trained is not self.model:
            self.model.requires_grad_(False)
            trained.requires_grad_(True)
        self.optimizer: Any = make_optimizer(trained.parameters())
        if options.pop("warm_up", False):
            torch.manual_seed(1)
            train_step(self.model, self.optimizer)
        budget = options.pop("host_memory", None)
        policy = {"commit_every": options.pop("commit_every")} if "commit_every" in options else {}
        if "device" in options:
            options["device"] = HostDevice(options["device"])
        self.options = {"params": "nvme", "optimizer_state": "nvme", "master_weights": torch.float32, **options}
        self.options["state_codec"] = codec
        budget = budget or smallest_budget(directory, self.model, self.optimizer, **self.options)
        directories = [directory, *others] if others else directory
        self.manager = swapper.SwapManager(directories, resume="auto", **for_manager({"host_memory": budget, **policy}))
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


def run_of(directory: Path, codec: Any, steps: int = 3, **options: Any) -> tuple[list[float], dict[str, Any]]:
    run = Run(directory, codec, **options)
    losses = run.train(steps)
    content = run.content()
    run.close()
    return losses, content
