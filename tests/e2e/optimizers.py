"""Optimizers of every kind: fused or not, settings that are tensors, state per element or by rows and columns."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.optim import ASGD, SGD, Adafactor, Adagrad, Adam, AdamW, NAdam

OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "adamw": partial(AdamW, lr=1e-3),
    "adamw fused": partial(AdamW, lr=1e-3, fused=True),
    "adamw foreach": partial(AdamW, lr=1e-3, foreach=True),
    "adamw amsgrad": partial(AdamW, lr=1e-3, amsgrad=True),
    "adamw fused amsgrad": partial(AdamW, lr=1e-3, amsgrad=True, fused=True),
    "adamw tensor lr": lambda parameters: AdamW(parameters, lr=torch.tensor(1e-3)),
    "adam fused": partial(Adam, lr=1e-3, fused=True, weight_decay=0.1),
    "adam decay": partial(Adam, lr=1e-3, weight_decay=0.1, betas=(0.8, 0.9), eps=1e-6, maximize=True),
    "sgd": partial(SGD, lr=1e-2, momentum=0.9),
    "asgd": partial(ASGD, lr=1e-2),
    "nadam": partial(NAdam, lr=1e-3),
    "adagrad": partial(Adagrad, lr=1e-2),
    "adafactor": partial(Adafactor, lr=1e-3),
}


class Counting(AdamW):
    """Counts its steps in its groups."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        return super().step(closure)
