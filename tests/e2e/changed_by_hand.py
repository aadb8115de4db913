"""The program that trains with changes by hand after each step, plain or swapped, and may end without closing.

Usage: changed_by_hand.py DIRECTORY CHANGE UPDATE STEPS PARAMS [killed]. Goes on where the run in DIRECTORY was committed. CHANGE
is a key of CHANGES, with "late " before it if the model is evaluated in between. STEPS: how many there are in the end. PARAMS:
where parameters are, "nvme" or "host". Prints the step from which it went on.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import swapper

WIDTH = 256


def decay(model: nn.Sequential, average: nn.Sequential, optimizer: Any, manager: Any) -> None:
    for parameter in model.parameters():
        parameter.mul_(0.9)


def decay_data(model: nn.Sequential, average: nn.Sequential, optimizer: Any, manager: Any) -> None:
    model[0].weight.data *= 0.9


def assign(model: nn.Sequential, average: nn.Sequential, optimizer: Any, manager: Any) -> None:
    model[0].weight.data = model[0].weight.data * 0.9


def decay_gathered(model: nn.Sequential, average: nn.Sequential, optimizer: Any, manager: Any) -> None:
    with nullcontext() if manager is None else manager.gather(model, write=True):
        decay(model, average, optimizer, manager)


def follow(model: nn.Sequential, average: nn.Sequential, optimizer: Any, manager: Any) -> None:
    for ours, theirs in zip(average.parameters(), model.parameters(), strict=True):
        ours.lerp_(theirs, 0.1)


def shrink_state(model: nn.Sequential, average: nn.Sequential, optimizer: Any, manager: Any) -> None:
    optimizer.state[model[0].weight]["exp_avg"].mul_(0.5)


def evaluate(model: nn.Sequential, average: nn.Sequential, optimizer: Any, manager: Any) -> None:
    """A forward that changes its parameters, as Embedding(max_norm=...) does."""
    hook = model[1].register_forward_pre_hook(partial(perturb, torch.ones(WIDTH, WIDTH) * 0.1))
    model(torch.randn(4, WIDTH))
    hook.remove()


def load(model: nn.Sequential, average: nn.Sequential, optimizer: Any, manager: Any) -> None:
    model.load_state_dict({name: value * 0.9 for name, value in model.state_dict().items()})


def nothing(model: nn.Sequential, average: nn.Sequential, optimizer: Any, manager: Any) -> None:
    """`take` has the forward add noise, which belongs to its own step."""


@torch.no_grad()
def perturb(noise: torch.Tensor | None, module: nn.Module, args: object) -> None:
    if noise is not None:
        module.weight.add_(noise)  # type: ignore[operator]


CHANGES: dict[str, Callable[[nn.Sequential, nn.Sequential, Any, Any], None]] = {
    "parameters": decay,
    "data": decay_data,
    "assigned": assign,
    "gathered": decay_gathered,
    "average": follow,
    "state": shrink_state,
    "loaded": load,
    "evaluation": evaluate,
    "noise": nothing,
}
"""By name, what is done after a step."""


def make() -> tuple[nn.Sequential, nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model, average = (nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))) for _ in range(2))
    return model, average.requires_grad_(False), torch.optim.AdamW(model.parameters(), lr=1e-2)


def take(step: int, change: str, model: nn.Sequential, average: nn.Sequential, optimizer: Any, manager: Any) -> None:
    torch.manual_seed(step)
    value, noise = torch.randn(4, WIDTH), torch.randn(WIDTH, WIDTH) if change.endswith("noise") else None
    hook = model[1].register_forward_pre_hook(partial(perturb, noise))
    model(value).square().mean().backward()
    hook.remove()
    if noise is not None:
        with torch.no_grad():
            model[1].weight.sub_(noise)
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        if change.startswith("late "):
            model(torch.randn(4, WIDTH))
        CHANGES[change.removeprefix("late ")](model, average, optimizer, manager)


def plain(change: str, steps: int) -> dict[str, torch.Tensor]:
    model, average, optimizer = make()
    for step in range(1, steps + 1):
        take(step, change, model, average, optimizer, None)
    return content(model, average, optimizer)


def content(model: nn.Sequential, average: nn.Sequential, optimizer: Any) -> dict[str, Any]:
    found = {
        **{f"model.{n}": v.clone() for n, v in model.state_dict().items()},
        "state": optimizer.state_dict()["state"],
    }
    return found | {f"average.{n}": v.clone() for n, v in average.state_dict().items()}


def swapped(
    directory: Path, change: str, update: str, steps: int, params: str, is_killed: bool
) -> tuple[int, dict[str, Any]]:
    """Return the step from which it went on, and the content at the end."""
    model, average, optimizer = make()
    manager = swapper.SwapManager(directory, host_memory="64MiB", resume="auto", commits=swapper.CommitPolicy(every=1))
    _, paged = manager.offload({"model": model, "average": average}, optimizer, params=params, update=update)
    begun = manager.step
    for step in range(begun + 1, steps + 1):
        take(step, change, model, average, paged, manager)
    if is_killed:
        with torch.no_grad():
            model(torch.randn(4, WIDTH))  # the last use, as that of the next step
        os.write(1, f"{begun}\n".encode())
        os._exit(0)
    found = content(model, average, paged)
    manager.close()
    return begun, found


if __name__ == "__main__":
    change, update, steps, params, *end = sys.argv[2:]
    print(swapped(Path(sys.argv[1]), change, update, int(steps), params, end == ["killed"])[0])
