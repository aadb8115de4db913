"""A run that gets more to train on its way, killed at every system call by which it changes a file, as a program.

Usage: regrouped_run.py DIRECTORY [STRIDE [FIRST]]. Each run begins anew, is killed before its call number FIRST, FIRST + STRIDE,
..., every second time half-way through it where it is a write, and goes on unkilled: losses and the final state are those of
plain torch.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import swapper
from e2e import killed_run
from e2e.stopped_calls import run_until

BUDGET = "16MiB"
STEPS = 6
STAGES = {2: 5, 4: 1}
"""After how many steps which layer is trained too."""


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(192, 192), nn.GELU())]
    model = nn.Sequential(nn.Embedding(killed_run.WORDS, 192), *layers, nn.Linear(192, killed_run.WORDS))
    model.requires_grad_(False)
    model[-1].requires_grad_(True)
    return model, torch.optim.AdamW(model[-1].parameters(), lr=1e-3)


def train_more(model: nn.Module, optimizer: Any, layer: int) -> None:
    model[layer].requires_grad_(True)
    optimizer.add_param_group({"params": list(model[layer].parameters()), "lr": 1e-2})


def train_step(model: nn.Module, optimizer: Any, number: int) -> float:
    words = killed_run.batch(number)
    loss = nn.functional.cross_entropy(model(words).view(-1, killed_run.WORDS), words.view(-1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def run(directory: Path, losses: Path, until: int = STEPS, **options: Any) -> list[float]:
    """Train from wherever the last run was committed; returns the losses of the steps taken."""
    directory.mkdir(exist_ok=True)
    model, optimizer = make()
    taken = []
    with swapper.SwapManager(directory, host_memory=BUDGET, resume="auto", **options) as manager:
        for layer in STAGES.values():
            if f"{layer}.weight" in manager.trained:
                train_more(model, optimizer, layer)
        model, optimizer = manager.offload(model, optimizer, params="nvme", optimizer_state="nvme")
        while manager.step < min(until, STEPS):
            layer = STAGES.get(manager.step, -1)
            if layer >= 0 and f"{layer}.weight" not in manager.trained:
                train_more(model, optimizer, layer)
                assert len(list(directory.rglob("*.swap"))) == 2, "what there was before is left"
            number = manager.step
            taken.append(train_step(model, optimizer, number))
            with losses.open("a") as log:
                log.write(f"{number} {taken[-1].hex()}\n")
        if until >= STEPS and not (directory / "final.pt").exists():
            manager.snapshot(directory / "final.pt")
    return taken


class Expected:
    """What plain torch does."""

    def __init__(self) -> None:
        model, optimizer = make()
        self.losses = []
        for number in range(STEPS):
            if number in STAGES:
                train_more(model, optimizer, STAGES[number])
            self.losses.append(train_step(model, optimizer, number))
        self.model, self.optimizer = model.state_dict(), optimizer.state_dict()

    def check(self, directory: Path, losses: Path) -> None:
        """Assert that a run which came to its end, however often it was killed, is the same."""
        for line in losses.read_text().splitlines():
            number, loss = line.split()
            assert float.fromhex(loss) == self.losses[int(number)], f"step {number} differs after a kill"
        final = torch.load(directory / "final.pt", weights_only=True)
        for name, value in self.model.items():
            assert torch.equal(final["model"][name], value), f"{name} differs after kills"
        for number, state in self.optimizer["state"].items():
            for name, value in state.items():
                assert torch.equal(final["optimizer"]["state"][number][name], value), f"{name} differs after kills"


def main(directory: Path, stride: int, first: int) -> None:
    torch.set_num_threads(1)
    expected = Expected()
    place, losses = directory / "run", directory / "losses"
    kills, at, torn = 0, first, False
    while True:
        place.mkdir()

        def work() -> None:
            run(place, losses, backend="threads")

        status, calls = run_until(work, killed_run.fork, place, at, torn)
        killed = os.WIFSIGNALED(status)
        if killed:
            _, status = os.waitpid(killed_run.fork(work), 0)
        if status != 0:
            raise SystemExit(f"the run that was killed at call {at} ({calls[-1]}, torn: {torn}) did not go on")
        expected.check(place, losses)
        losses.unlink()
        shutil.rmtree(place)
        if not killed:
            break
        kills += 1
        at, torn = at + stride, not torn
    print(f"{kills} kills at {len(calls)} calls, all exact")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *[int(argument) for argument in (*sys.argv[2:4], *("1", "0")[len(sys.argv) - 2 :])])
