"""Model, data, optimizer, schedule, manager and actions of the loops of libraries that libraries.py draws."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from e2e.twins import smallest_budget, smallest_device_budget
from torch.nn import functional as F
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, Dataset

import swapper
from fuzz.cases import Program
from fuzz.program_actions import ACTIONS
from fuzz.program_layers import VOCABULARY, Model
from fuzz.program_passes import LENGTH, Action, Side
from fuzz.programs import RULES, for_a_manager

SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "steps": partial(lr_scheduler.StepLR, step_size=1, gamma=0.7),
    "cosine": partial(lr_scheduler.CosineAnnealingLR, T_max=5),
    "one cycle": partial(lr_scheduler.OneCycleLR, max_lr=1e-2, total_steps=64),
    "warmup": partial(lr_scheduler.LinearLR, start_factor=0.5, total_iters=3),
    "lambda": partial(lr_scheduler.LambdaLR, lr_lambda=lambda step: 1 / (1 + step)),
}
READS = ("read", "evaluate", "model state", "average", "average by torch")
WRITES = ("write", "gather and write", "initialise", "swap average", "save and load", "optimizer state")
SETTINGS = ("other rate", "other decay")
BEFORE_STEP = ("clip norm", "clip value", "look", "scale gradients", "drop some", "add noise", "assign")


class Tokens(Dataset[torch.Tensor]):
    """Sequences of tokens."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randint(0, VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(index))


def loader_of(count: int, batch: int = 2, seed: int | None = None) -> DataLoader[torch.Tensor]:
    """Return a loader of `count` sequences, in an order of its own with a seed."""
    generator = torch.Generator().manual_seed(seed or 0)  # else each epoch draws from torch's own numbers
    return DataLoader(Tokens(count), batch, shuffle=seed is not None, generator=generator)


def loss_of(model: Any, batch: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(batch).float().flatten(0, 1), batch.flatten())


class LibraryLoop(ABC):
    """One of the twins of a program: a loop that a library runs, or is called by.

    Attributes:
        results: what actions returned, with the step and the action.
        found: all that is compared at the end.
        begun: the step from which it went on, after its end.
    """

    def __init__(self, program: Program, directory: Path, is_offloaded: bool) -> None:
        self.program, self.directory, self.is_offloaded = program, directory, is_offloaded
        self.arguments: dict[str, Any] = program["arguments"]
        self.results: list[Any] = []
        self.found: dict[str, Any] = {}
        self.begun = 0
        self.manager: Any = None
        self.end: tuple[str, int, Callable[[], object]] | None = None
        self._kept: dict[str, Any] = {}
        self._is_acting = False
        directory.mkdir(exist_ok=True)

    @abstractmethod
    def run(self) -> None:
        """Do all of the program."""

    def seed(self) -> None:
        torch.manual_seed(self.program["seed"])

    def make_model(self) -> Model:
        self.seed()
        model = Model(self.program["layers"], self.program["tied"])
        for parameter in model.parameters():
            parameter.data = parameter.data.contiguous()  # as they are from `offload` on
        return model

    def make_optimizer(self, parameters: Any) -> Any:
        return RULES[self.program["rule"]]([p for p in parameters if p.requires_grad])

    def make_schedule(self, optimizer: Any) -> Any:
        return SCHEDULES[self.arguments["schedule"]](optimizer)

    def make_manager(self, model: Any, optimizer: Any, **given: Any) -> dict[str, Any]:
        """Make the manager, and return the options of its `offload`."""
        options, commits, room_bytes = for_a_manager(self.program["options"])
        probe = self.directory / "probe"
        if "device" in options:
            options["device_memory"] = smallest_device_budget(probe, model, None, **options) + (2 << 20)
        budget = smallest_budget(probe, model, optimizer, **options) + room_bytes
        self.manager = swapper.SwapManager(self.directory / "run", budget, commits=commits, **given)
        return options

    def side(self, model: Any, optimizer: Any) -> Side:
        """Return what actions are given."""
        return Side(model, optimizer, self.manager, lambda *_: None, self.directory, kept=self._kept)

    def act(self, event: str, step: int, make_side: Callable[[], Side], own: dict[str, Action]) -> None:
        """Do the actions of an event of a step, with random numbers of their own."""
        if self._is_acting:  # an evaluation has events too
            return
        if self.end is not None and self.end[0] == event and step >= self.end[1]:
            self.end[2]()
        for number, (at, when, name, seed) in enumerate(self.program["actions"]):
            if (at, when) != (event, step):
                continue
            side, self._is_acting = make_side(), True
            side.chance = random.Random(seed)
            with torch.random.fork_rng():
                torch.manual_seed(seed)
                self.results.append((step, number, name, {**ACTIONS, **own}[name](side)))
            self._is_acting = False
