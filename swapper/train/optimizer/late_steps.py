"""Advances an optimizer's counters, so that a trial sees what it does in later steps."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.optim import Optimizer

from swapper.train.optimizer.own_code import numbers_of

LATER = (100, 1_000_000)
"""Steps that are tried whatever the code says."""
MAX_TARGETS = 16
MAX_SLOW_TARGETS = 4
MAX_NUMBER = 10_000_000


def targets_of(optimizer: Optimizer, is_slow: bool) -> list[int]:
    """Return the numbers of steps that may begin something: those in its code and settings, and large ones."""
    numbers = sorted(number for number in numbers_of(optimizer) if number <= MAX_NUMBER)
    return [*numbers[-(MAX_SLOW_TARGETS if is_slow else MAX_TARGETS) :], *(LATER[-1:] if is_slow else LATER)]


def advanced(before: Any, after: Any, target: int) -> Any:
    """Return a copy of `after` in which each counter, what has grown by one since `before`, is just below `target`.

    Its next values are `target` - 1, `target` and so on. A counter is not set back.
    """
    if isinstance(after, dict) and isinstance(before, dict):
        return {key: advanced(before.get(key), value, target) for key, value in after.items()}
    if type(after) in (list, tuple) and isinstance(before, list | tuple) and len(before) == len(after):
        return type(after)(advanced(*pair, target) for pair in zip(before, after, strict=True))
    if isinstance(after, torch.Tensor) and isinstance(before, torch.Tensor):
        is_counter = after.numel() == 1 == before.numel() and bool((after - before == 1).all())
        return after.clamp(min=target - 2) if is_counter else after.clone()
    if type(after) in (int, float) and type(before) is type(after) and after - before == 1:
        return type(after)(max(after, target - 2))
    return copy.deepcopy(after)
