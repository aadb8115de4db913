"""A run that is parked between its steps, as a program.

Usage: parked_run.py measure DIRECTORY LOSSES | parked_run.py wait DIRECTORY LOSSES | parked_run.py go DIRECTORY LOSSES.
"measure" prints swapper's memory before, in and after the park, in bytes; "wait" stays parked after the third step until it is
killed; "go" resumes. LOSSES gets a line for each step.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import swapper

STEPS = 6
PARK_AFTER = 3
WORDS = 512
WIDTH = 256
BUDGET = "24MiB"


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    layers = [
        layer for _ in range(6) for layer in (nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
    ]
    model = nn.Sequential(nn.Embedding(WORDS, WIDTH), *layers, nn.Linear(WIDTH, WORDS))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train_step(model: nn.Module, optimizer: Any, number: int) -> float:
    words = torch.randint(0, WORDS, (2, 8), generator=torch.Generator().manual_seed(number))
    loss = nn.functional.cross_entropy(model(words).view(-1, WORDS), words.view(-1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def memory_bytes() -> int:
    """Return this process's share of memory, with what it has page-locked and shared."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def main(mode: str, directory: Path, losses: Path) -> None:
    model, optimizer = make()
    with swapper.SwapManager(directory, host_memory=BUDGET, resume="auto") as manager:
        model, optimizer = manager.offload(model, optimizer, params="nvme", optimizer_state="nvme")
        while manager.step < STEPS:
            number = manager.step
            loss = train_step(model, optimizer, number)
            with losses.open("a") as log:
                log.write(f"{number} {loss.hex()}\n")
            if manager.step == PARK_AFTER and mode != "go":
                before = memory_bytes()
                with manager.parked():
                    figures = {"before": before, "parked": memory_bytes(), "pool": manager.counters.pool_bytes}
                    if mode == "wait":
                        print("parked", flush=True)
                        sys.stdin.read()
                figures["after"] = memory_bytes()
        if mode == "measure":
            print(json.dumps(figures))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
