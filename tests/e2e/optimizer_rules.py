"""Optimizers with rules that see more than one element, each from the first step on or only from a later one.

A rule scales the gradient of a parameter by what it finds: the parameter's size, norms, its place in the group, marks on it,
other parameters, settings of other groups, random numbers. A trigger says when a rule acts, and where the count is kept.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

Find = Callable[["Ruled", dict[str, Any], int, torch.Tensor], Any]


def all_norm(optimizer: Ruled, group: dict[str, Any], *_: Any) -> torch.Tensor:
    return torch.stack([p.grad.float().norm() for p in group["params"] if p.grad is not None]).norm()


def carried(optimizer: Ruled, group: dict[str, Any], index: int, p: torch.Tensor) -> float:
    optimizer.carry = 0.5 * optimizer.carry + float(p.grad.float().norm())
    return optimizer.carry


def draw_from_python(*_: Any) -> float:
    return random.random()


RULES: dict[str, Find] = {
    "nothing": lambda o, g, i, p: 1.0,
    "size": lambda o, g, i, p: 2.0 if p.numel() > 5000 else 1.0,
    "shape": lambda o, g, i, p: 2.0 if p.shape[:1] == (96,) else 1.0,
    "dimensions": lambda o, g, i, p: 1.0 + p.dim(),
    "its norm": lambda o, g, i, p: p.grad.float().norm(),
    "its largest": lambda o, g, i, p: p.grad.float().abs().max(),
    "norm of all": all_norm,
    "clipped by all": lambda o, g, i, p: torch.clamp(1.0 / (all_norm(o, g) + 1e-6), max=1.0),
    "place": lambda o, g, i, p: 2.0 if i >= 5 else 1.0,
    "count": lambda o, g, i, p: 1.0 / len(g["params"]),
    "identity": lambda o, g, i, p: 2.0 if id(p) in o.chosen else 1.0,
    "a mark": lambda o, g, i, p: getattr(p, "rate", 1.0),
    "requires_grad": lambda o, g, i, p: 1.0 if p.requires_grad else 0.0,
    "a Parameter": lambda o, g, i, p: 1.0 if isinstance(p, nn.Parameter) else 0.0,
    "first group": lambda o, g, i, p: o.param_groups[0]["scale"],
    "carried on": carried,
    "random": lambda o, g, i, p: torch.rand(()),
    "random by Python": draw_from_python,
}
TRIGGERS = ("always", "state", "tensor", "group", "attribute", "loop")


class Clock:
    """The training loop's own count, which no trial can advance."""

    now = 0


class Ruled(Optimizer):
    """SGD with momentum and a rule, which acts in steps after `after`."""

    def __init__(self, params: Any, rule: str, trigger: str, after: int) -> None:
        super().__init__(params, {"lr": 0.01, "scale": 1.0, "k": 0})
        self.rule, self.trigger = rule, trigger
        self.after, self.calls, self.carry = after, 0, 0.0
        listed = [p for group in self.param_groups for p in group["params"]]
        self.chosen = {id(p) for p in listed[1::2]} if rule == "identity" else set()
        for number, group in enumerate(self.param_groups):
            group["scale"] = 1.0 + number
        if rule == "a mark":
            for p in listed[::2]:
                p.rate = 0.5

    def acts(self, group: dict[str, Any], state: dict[str, Any]) -> bool:
        counts = {
            "state": state["step"],
            "tensor": int(state["count"]),
            "group": group["k"],
            "attribute": self.calls,
            "loop": Clock.now,
        }
        return self.trigger == "always" or counts[self.trigger] > self.after

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.calls += 1
        for group in self.param_groups:
            group["k"] += 1
            for index, p in enumerate(group["params"]):
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(step=0, count=torch.zeros(()), momentum=torch.zeros_like(p))
                state["step"] += 1
                state["count"] += 1
                scale = RULES[self.rule](self, group, index, p) if self.acts(group, state) else 1.0
                state["momentum"].mul_(0.9).add_(p.grad * scale)
                p.add_(state["momentum"], alpha=-group["lr"])
