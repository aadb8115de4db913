"""A run with several optimizers that kills itself again and again, as a program: several_run.py DIRECTORY KIND UPDATE FIRST.

KIND is "gan" (two models, two optimizers, three discriminator steps for each generator step) or "pair" (each steps
once). A run counts its ticks, around each forward, backward, optimizer step and end of an iteration, and kills itself
with SIGKILL at the tick whose number its parent chose: FIRST, and six more each time. The next one resumes. All losses
that any of them saw, and the last parameters, equal plain torch's.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # the optimizers do: once, by all runs
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import StepLR

import swapper

ITERATIONS = 4
NOISE, IMAGE, HIDDEN = 64, 96, 256
DISCRIMINATOR_STEPS = 3


def perceptron(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, outputs)
    )


class Training:
    """One of the two trainings, in plain torch or swapped.

    Attributes:
        context: around each iteration.
        tick: called at each place where the process may end.
    """

    def __init__(self, kind: str) -> None:
        torch.manual_seed(0)
        self.kind = kind
        self.generator, self.discriminator = perceptron(NOISE, IMAGE), perceptron(IMAGE, 1)
        models = [self.generator, self.discriminator]
        self.models = nn.ModuleDict({"generator": models[0], "discriminator": models[1]})
        self.optimizers: Any = [
            AdamW(self.generator.parameters(), lr=1e-3),
            SGD(self.discriminator.parameters(), 1e-2, 0.9),
        ]
        self.schedulers = [StepLR(optimizer, 2, 0.7) for optimizer in self.optimizers]
        self.context: Callable[[], Any] = nullcontext
        self.tick: Callable[[], None] = lambda: None

    def iteration(self, number: int) -> float:
        draw = torch.Generator().manual_seed(number)
        with self.context():
            loss = (self._gan if self.kind == "gan" else self._pair)(draw)
            for scheduler in self.schedulers:
                scheduler.step()
        return loss

    def _pair(self, draw: torch.Generator) -> float:
        loss = self.discriminator(self.generator(torch.randn(8, NOISE, generator=draw))).square().mean()
        self._backward(loss)
        for optimizer in self.optimizers:
            self._step(optimizer)
        return loss.item()

    def _gan(self, draw: torch.Generator) -> float:
        generator, discriminator = self.optimizers
        total = 0.0
        for _ in range(DISCRIMINATOR_STEPS):
            fake = self.generator(torch.randn(8, NOISE, generator=draw)).detach()
            real = torch.randn(8, IMAGE, generator=draw)
            self.tick()
            loss = nn.functional.softplus(self.discriminator(fake) - self.discriminator(real)).mean()
            self._backward(loss)
            self._step(discriminator)
            total += loss.item()
        loss = -self.discriminator(self.generator(torch.randn(8, NOISE, generator=draw))).mean()
        self._backward(loss)
        self._step(generator)
        discriminator.zero_grad()
        return total + loss.item()

    def _backward(self, loss: torch.Tensor) -> None:
        loss.backward()
        self.tick()

    def _step(self, optimizer: Any) -> None:
        optimizer.step()
        self.tick()
        optimizer.zero_grad()


@contextmanager
def swapped(directory: Path, kind: str, update: str) -> Iterator[tuple[Training, swapper.SwapManager]]:
    """Offload a training to `directory`, or resume it."""
    training = Training(kind)
    with swapper.SwapManager(directory, host_memory="7MiB", resume="auto") as manager:
        models = {"generator": training.generator, "discriminator": training.discriminator}
        _, training.optimizers = manager.offload(
            models, training.optimizers, params="nvme", optimizer_state="nvme", update=update
        )
        manager.register(**{f"scheduler{number}": scheduler for number, scheduler in enumerate(training.schedulers)})
        if kind == "gan":
            training.context = manager.one_step
        yield training, manager


def run(directory: Path, kind: str, update: str, last_tick: int) -> None:
    """Train from the last commit to the end, or to a tick."""
    ticks = iter(range(1, 1 << 30))

    def tick() -> None:
        if next(ticks) == last_tick:
            os.kill(os.getpid(), signal.SIGKILL)

    with swapped(directory, kind, update) as (training, manager), (directory / "losses").open("a") as log:
        training.tick = tick
        while manager.step < ITERATIONS:
            number = manager.step
            loss = training.iteration(number)
            log.write(f"{number} {loss.hex()}\n")
            log.flush()
            tick()
        with manager.gather(training.models):
            torch.save(training.models.state_dict(), directory / "final.pt")


def check(directory: Path, kind: str) -> None:
    """Assert that losses and parameters are plain torch's."""
    plain = Training(kind)
    losses = [plain.iteration(number) for number in range(ITERATIONS)]
    seen = [line.split() for line in (directory / "losses").read_text().splitlines()]
    for number, loss in seen:
        assert float.fromhex(loss) == losses[int(number)], f"iteration {number}"
    assert {int(number) for number, _ in seen} == set(range(ITERATIONS))
    final = torch.load(directory / "final.pt")
    for name, value in plain.models.state_dict().items():
        assert torch.equal(final[name], value), name


def main(directory: Path, kind: str, update: str, first: int) -> None:
    kills = 0
    assert swapper.SwapManager and swapper.StateError  # imported once, by all runs
    for last_tick in range(first, 1 << 30, 6):
        child = os.fork()
        if child == 0:
            run(directory, kind, update, last_tick)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status == 0:
            break
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, f"run {last_tick} ended with {status}"
        kills += 1
    check(directory, kind)
    print(f"{kills} kills")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]))
