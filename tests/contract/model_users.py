"""The users of what training and inference share: one model trained or loaded, on the CPU or on a device of host memory."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from infer.host_device import HostDevice
from safetensors.torch import save_file
from torch import nn

import swapper
from swapper import _C
from swapper.device.model_device import ModelDevice
from swapper.modules.cold import is_cold
from swapper.modules.leased_group import LeasedGroup
from swapper.modules.module_hooks import ModuleHooks
from swapper.modules.resources import Resources

WIDTH = 512
LAYERS = 6
MIB = 1 << 20


class Net(nn.Module):
    """Looks at a child's weight itself, and returns a view of a parameter as well as what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(256, WIDTH))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = F.linear(x, self.layers[0].weight)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.experts[1](x), self.position[:4]


def make() -> Net:
    torch.manual_seed(0)
    return Net()


class User:
    """One model, and what it is made of.

    Attributes:
        model: that runs.
        content: of its parameters, by name.
        tells: what is told of a change while a group was leased: "raises", or "keeps" the change.
        part: the model's part of an accelerator, if it has one, of `device_bytes`.
    """

    model: nn.Module
    groups: list[LeasedGroup]
    hooks: ModuleHooks[Any, Any]
    resources: Resources[Any]
    device: Any = None
    part: ModelDevice | None = None
    device_bytes = 0
    tells = "raises"

    def __init__(self) -> None:
        self.content = {name: p.detach().clone() for name, p in make().named_parameters()}

    def group(self) -> LeasedGroup:
        """Return one that goes away, and that a forward uses."""
        return next(group for group in self.groups if "layers.3.weight" in group.names)

    def run(self) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            return self.model(torch.ones(2, WIDTH))  # type: ignore[no-any-return]

    def forget_frames(self) -> None:
        """Nothing is in memory that nobody leases."""
        if self.device is not None:
            self.device.finish()
        self.resources.pager.flush()
        self.resources.pager.discard()

    @contextmanager
    def broken_drive(self) -> Any:
        """Within it no read ends well."""
        store = getattr(self.resources.store, "swap_files", self.resources.store)
        engine, store._engine = store._engine, _C.Engine(chaos={"seed": 1, "eio": 1})
        try:
            yield
        finally:
            store._engine.close()
            store._engine = engine

    def close(self) -> None: ...


class Trained(User):
    """Parameters on NVMe."""

    tells = "keeps"
    device_bytes = 8 * MIB

    def __init__(self, directory: Path, device: str) -> None:
        super().__init__()
        options: dict[str, Any] = (
            {} if device == "cpu" else {"device": HostDevice("late"), "device_memory": self.device_bytes}
        )
        self.manager = swapper.SwapManager(directory, host_memory=24 * MIB, commits=swapper.CommitPolicy(every=None))
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.model, self.optimizer = self.manager.offload(
            model, optimizer, params="nvme", optimizer_state="nvme", **options
        )
        run = self.manager.current.run
        run.pager.flush()
        self.groups = run.model.groups
        self.hooks = run.model.passes.hooks
        self.resources, self.device, self.part = run._resources, run.placed.processor, run.placed.processor

    def forget_leases(self) -> None:
        for group in self.groups:
            group.forget_leases()
        self.manager.current.run.model.passes.forget_leases()

    def close(self) -> None:
        self.manager.close()


class Loaded(User):
    """Weights read from a checkpoint."""

    device_bytes = 6 * MIB

    def __init__(self, directory: Path, device: str, name: str = "layers.3.weight") -> None:
        super().__init__()
        self._name = name
        save_file(self.content, directory / "model.safetensors")
        options: dict[str, Any] = (
            {} if device == "cpu" else {"device": HostDevice("late"), "device_memory": self.device_bytes}
        )
        with torch.device("meta"):
            model = Net()
        self.model = swapper.load(model.eval(), directory / "model.safetensors", host_memory="7MiB", **options)
        self._loaded = loaded = swapper.loaded(self.model)
        self.groups, self.hooks, self.resources = loaded._groups, loaded._hooks, loaded._streaming
        self.part = loaded._on_device
        self.device = None if self.part is None else self.part.tier

    def group(self) -> LeasedGroup:
        return next(group for group in self.groups if self._name in group.names)

    def close(self) -> None:
        self._loaded.unload()


USERS: dict[str, Callable[[Path], User]] = {
    "trained": lambda directory: Trained(directory, "cpu"),
    "trained on a device": lambda directory: Trained(directory, "device"),
    "loaded": lambda directory: Loaded(directory, "cpu"),
    "loaded on a device": lambda directory: Loaded(directory, "device"),
    "an expert": lambda directory: Loaded(directory, "cpu", "experts.1.weight"),
}


def is_away(group: LeasedGroup) -> bool:
    return all(is_cold(parameter) for parameter in group.parameters)
