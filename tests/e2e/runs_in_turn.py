"""Trains four models one after the other in this process, each in a budget of its own. See test_given_back.py.

python runs_in_turn.py DIRECTORY BUDGET_MIB
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import torch
from torch import nn

import swapper

WIDTH = 1024
LAYERS = 12  # 48 MiB of parameters, 96 of AdamW's state


def main(directory: Path, budget_mib: int) -> None:
    gc.disable()  # it comes when it likes
    managers = []
    for number in range(4):
        where = directory / str(number)
        where.mkdir()
        with torch.device("meta"):
            model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
        manager = swapper.SwapManager(where, host_memory=f"{budget_mib}MiB", commits=swapper.CommitPolicy(every=None))
        managers.append(manager)
        init = lambda module: [nn.init.ones_(p) for p in module.parameters(recurse=False)]  # noqa: E731
        model, optimizer = manager.offload(
            model, torch.optim.AdamW(model.parameters()), params="nvme", optimizer_state="nvme", init=init
        )
        model(torch.ones(1, WIDTH)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        manager.close()
    print("all four")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
