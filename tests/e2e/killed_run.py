"""A run that is killed again and again, as a program: it trains, its parent kills it, the next one goes on.

Usage: killed_run.py DIRECTORY SEED KILLS. The parent has torch imported and forks each run, so that a kill costs little. A run
writes a byte to a pipe at each forward and backward of each layer and around each step; the parent kills it with SIGKILL after
a random number of them, so the kills fall anywhere in a step. Whatever is seen must equal a run that nobody killed.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import swapper

STEPS = 12
WORDS = 512
BUDGET = "10MiB"


def make() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(192, 192), nn.GELU())]
    model = nn.Sequential(nn.Embedding(WORDS, 192), *layers, nn.Linear(192, WORDS))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7)


def train_step(model: nn.Module, optimizer: Any, scheduler: Any, number: int) -> float:
    words = torch.randint(0, WORDS, (2, 8), generator=torch.Generator().manual_seed(number))
    loss = cross_entropy(model(words).view(-1, WORDS), words.view(-1))
    loss.backward()
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    return loss.item()


def run(directory: Path, losses: Path, ticks: int) -> None:
    """Train to the end, from wherever the last run was committed."""
    model, optimizer, scheduler = make()
    for module in model:
        module.register_forward_hook(lambda *_: os.write(ticks, b"f") and None)
        module.register_full_backward_hook(lambda *_: os.write(ticks, b"b") and None)
    with swapper.SwapManager(directory, host_memory=BUDGET, resume="auto") as manager:
        model, optimizer = manager.offload(model, optimizer, params="nvme", optimizer_state="nvme")
        manager.register(scheduler=scheduler)
        os.write(ticks, b"o")
        with losses.open("a") as log:
            while manager.step < STEPS:
                number = manager.step
                log.write(f"{number} {train_step(model, optimizer, scheduler, number).hex()}\n")
                log.flush()
                os.write(ticks, b"s")
        manager.snapshot(directory / "final.pt").result()


def run_and_kill(directory: Path, losses: Path, after: int) -> bool:
    """Fork a run and kill it after so many ticks. Returns True if it was killed, False if it came to its end before."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        try:
            run(directory, losses, writer)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    os.close(writer)
    while after > 0 and (seen := os.read(reader, after)):
        after -= len(seen)
    os.close(reader) if after else os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if not after:
        os.close(reader)
    if not os.WIFSIGNALED(status) and os.WEXITSTATUS(status) != 0:
        raise SystemExit("a run failed")
    return os.WIFSIGNALED(status)


def main(directory: Path, seed: int, kills: int) -> None:
    torch.set_num_threads(1)
    model, optimizer, scheduler = make()
    expected = [train_step(model, optimizer, scheduler, number) for number in range(STEPS)]
    chance = random.Random(seed)
    killed = runs = 0
    while killed < kills:
        place = directory / f"run-{runs}"
        place.mkdir()
        while run_and_kill(place, place / "losses", chance.randrange(1, 60)):
            killed += 1
        for line in (place / "losses").read_text().splitlines():
            number, loss = line.split()
            assert float.fromhex(loss) == expected[int(number)], f"step {number} differs after a kill"
        final = torch.load(place / "final.pt", weights_only=True)
        for name, tensor in model.state_dict().items():
            assert torch.equal(final["model"][name], tensor), f"{name} differs after kills"
        assert final["registered"]["scheduler"]["last_epoch"] == scheduler.last_epoch
        runs += 1
    print(f"{killed} kills, {runs} runs, all exact")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
