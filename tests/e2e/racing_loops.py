"""Loops drawn from a seed, each trained by plain torch and swapped, while the drive is late or early: as a program.

Usage: racing_loops.py DIRECTORY SEED loops COUNT, or passes COUNT. A loop's operations (penalties on gradients, second
backwards over one graph, products with a Hessian, ...), its model (layers that are shared, frozen, used by functional
calls, checkpointed, ...) and where everything lives are drawn; results, gradients, parameters and optimizer state must be
plain torch's, bit for bit. `passes` does COUNT loops of each of CELLS.

Whether memory is used too early or too late shows only where transfers end at bad moments. So each transfer takes a time
that is drawn too, and between any two of autograd's nodes everything that is under way may end at once, before swapper
looks again.
"""

from __future__ import annotations

import itertools
import random
import shutil
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import devices
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from e2e.loop_operations import ENDINGS, OPERATIONS, WIDTH, WITHOUT_GRAPHS, Operation, Pass, ordinary, penalty
from e2e.twins import Twins
from swapper import _C

STEPS = 3
CHECKPOINTING = (None, False, True)
"""Without; and torch's use_reentrant."""
UPDATES = ("step", "deferred", "backward")


# --- models -----------------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    """A linear layer and something smooth behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value + torch.tanh(self.linear(value))


class Gated(Layer):
    """Two, of which one scales the other; with a norm in front."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        value = self.norm(value)
        return torch.sigmoid(self.gate(value)) * self.linear(value)


class Functional(Layer):
    """Uses its own parameter and its child's by functional calls: as they are, as a view, and computed with."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        hidden = F.softplus(F.linear(value, self.weight.t() * 0.5, self.weight[0]))
        return value + F.linear(hidden, self.linear.weight, self.linear.bias.tanh())


class Frozen(Layer):
    """Is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.linear.requires_grad_(False)


class Noisy(Layer):
    """With dropout."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return F.dropout(super().forward(value), 0.1, self.training)


LAYERS: tuple[Callable[[], Layer], ...] = (Layer, Layer, Gated, Functional, Frozen, Noisy)


class Chain(nn.Module):
    """Layers one after the other.

    Args:
        layers: some of them may be the same object, or have the same weight.
        checkpointing: for each layer, as CHECKPOINTING.
    """

    def __init__(self, layers: list[Layer], checkpointing: list[bool | None]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.checkpointing = checkpointing

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        for layer, use_reentrant in zip(self.layers, self.checkpointing, strict=True):
            value = layer(value) if use_reentrant is None else checkpoint(layer, value, use_reentrant=use_reentrant)
        return value


def draw_model(chance: random.Random) -> Chain:
    layers = [Layer()] + [chance.choice(LAYERS)() for _ in range(chance.randint(3, 6))]
    if chance.random() < 0.3:
        layers.append(chance.choice(layers))
    if chance.random() < 0.3:
        one, other = chance.sample(layers, 2)
        other.linear.weight = one.linear.weight
    kinds = [chance.choice(CHECKPOINTING) for _ in layers] if chance.random() < 0.5 else [None] * len(layers)
    return Chain(layers, kinds)


# --- a drive that is late or early ------------------------------------------------------------------------------------


class Drive:
    """Engines whose transfers take a time that is drawn, and what has them all end at once.

    Args:
        seed: of the times.
        hurries: how often, between two of autograd's nodes, from 0 to 1.
    """

    def __init__(self, seed: int, hurries: float) -> None:
        self._seed = seed
        self._hurries = hurries
        self._chance = random.Random(seed)
        self._engines: list[_C.Engine] = []

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Within, managers get their engines from here."""
        with mock.patch("swapper.modules.resources.open_engine", self._open):
            yield

    def _open(self, directories: Any, *, backend: str, **options: Any) -> _C.Engine:
        chaos = {"seed": self._seed, "delay": self._chance.choice([0.2, 0.7, 1.0]), "reorder": 0.3}
        self._engines.append(_C.Engine(backend="chaos", chaos=chaos, depth=self._chance.choice([2, 8, 32]), **options))
        return self._engines[-1]

    def hurry(self, *_: Any) -> None:
        """Everything ends that is under way. swapper is not told."""
        self._engines[-1].drain()

    def watch(self, result: Any) -> None:
        """Hurry, now and then, before a node of the result's graph runs."""
        for node in nodes_of(result):
            if self._chance.random() < self._hurries:
                node.register_prehook(self.hurry)


def nodes_of(result: torch.Tensor) -> list[Any]:
    """Return the nodes of a graph."""
    found: dict[Any, None] = {}
    waiting = [result.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found:
            found[node] = None
            waiting += [child for child, _ in node.next_functions]
    return list(found)


# --- one loop ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Loop:
    """What is trained, how, and where it lives: all that two runs of a seed share."""

    seed: int
    model: Chain
    steps: list[list[Operation]]
    options: dict[str, Any]
    hurries: float

    def __str__(self) -> str:
        layers = [type(layer).__name__ for layer in self.model.layers]
        steps = [[getattr(each, "func", each).__name__ for each in step] for step in self.steps]
        how = f"checkpointing {self.model.checkpointing}, {self.options}, hurries {self.hurries}"
        return f"seed {self.seed}: {layers}, {how}, {steps}"

    def train(self, directory: Path) -> None:
        """Raises AssertionError where the twins differ."""
        drive = Drive(self.seed, self.hurries)
        make_optimizer = partial(torch.optim.AdamW, lr=1e-2)
        with drive.in_use():
            pair = Twins(directory, self.model, make_optimizer, **self.options)
        try:
            for number, operations in enumerate(self.steps):
                pair.both(partial(self._step, pair, drive, operations, self.seed * 100 + number))
            pair.finish(paged=False)
        finally:
            pair.close()

    def _step(
        self, pair: Twins, drive: Drive, operations: list[Operation], seed: int, model: Any, optimizer: Any
    ) -> Any:
        run = Pass(pair, model, random.Random(seed), drive.watch if model is pair.swapped else lambda result: None)
        found = []
        for number, operation in enumerate(operations):
            run.is_last = number == len(operations) - 1
            found.append(operation(run))
        if self.options["update"] != "backward":
            gradients = [pair.gradient(parameter) for parameter in run.parameters]
            found.append([None if gradient is None else gradient.clone() for gradient in gradients])
        optimizer.step()
        optimizer.zero_grad(set_to_none=run.chance.random() < 0.9)
        return found


def draw_loop(seed: int) -> Loop:
    """Return the loop that has this seed."""
    chance = random.Random(seed)
    torch.manual_seed(seed)
    model = draw_model(chance)
    master = chance.random() < 0.2
    options = {
        "update": chance.choice(UPDATES),
        "room_bytes": chance.choice([0, 0, 1 << 18, 1 << 19, 1 << 20, 4 << 20]),
        "gradients": chance.choice(["auto", "auto", "auto", "nvme"]),
        "optimizer_state": chance.choice(["nvme", "nvme", "nvme", "host"]),
        "commit_every": chance.choice(["free", "free", 1, None]),
        "master": master,
    }
    has_graphs = True not in model.checkpointing and not devices.NAME  # where these are refused
    allowed, endings = (OPERATIONS, ENDINGS) if has_graphs else (WITHOUT_GRAPHS, ENDINGS[:2])
    steps = [
        [*(chance.choice(allowed) for _ in range(chance.randint(0, 3))), chance.choice(endings)] for _ in range(STEPS)
    ]
    return Loop(seed, model.bfloat16() if master else model, steps, options, chance.choice([0, 0.1, 0.5, 1]))


CELLS = [
    (update, graph, retains, checkpointing)
    for update, graph, retains, checkpointing in itertools.product(UPDATES, (False, True), (False, True), CHECKPOINTING)
    if not (graph and checkpointing is True)
]
"""Update time, create_graph, retain_graph, checkpointing. Reentrant checkpointing has no graph over a graph."""


def loop_of_cell(seed: int, update: str, graph: bool, retains: bool, checkpointing: bool | None) -> Loop:
    """Return a loop of 2 steps with nothing else in it."""
    chance = random.Random(seed)
    torch.manual_seed(seed)
    model = Chain([Layer() for _ in range(5)], [checkpointing] * 5)
    operation = partial(penalty if graph else ordinary, retains=retains)
    options = {"update": update, "room_bytes": chance.choice([0, 1 << 18, 1 << 19, 1 << 20])}
    return Loop(seed, model, [[operation]] * 2, options, chance.choice([0, 0.1, 1]))


def train_all(directory: Path, loops: Iterable[Loop]) -> tuple[int, int]:
    """Train loops. Returns how many there were, and how many went wrong, which it prints."""
    count = wrong = 0
    for loop in loops:
        place = directory / f"loop-{count}"
        place.mkdir()
        try:
            loop.train(place)
        except Exception:
            wrong += 1
            print(f"{loop}\n{traceback.format_exc(limit=-4)}", flush=True)
        shutil.rmtree(place)
        count += 1
    return count, wrong


def main(directory: Path, seed: int, what: str, count: int) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # torch's of create_graph in backward
    seeds = range(seed, seed + count)
    wrong = 0
    if what == "loops":
        number, wrong = train_all(directory, map(draw_loop, seeds))
        print(f"{number} loops, {wrong} wrong")
    elif what == "passes":
        for cell in CELLS:
            number, wrong_here = train_all(directory, (loop_of_cell(each, *cell) for each in seeds))
            wrong += wrong_here
            update, graph, retains, checkpointing = cell
            print(f"{update}, {graph=}, {retains=}, {checkpointing=}: {number} loops, {wrong_here} wrong", flush=True)
        print(f"{len(CELLS)} cells, {wrong} wrong")
    raise SystemExit(wrong > 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
