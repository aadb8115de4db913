"""Which optimizers are refused without a trial (optimizer_probe.py): where a trial would not find it out, or not say why."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import LBFGS, SGD, Optimizer, SparseAdam

from swapper.errors import UnsupportedError

NARROW = (torch.bfloat16, torch.float16)
"""Dtypes in which torch's kernels differ from each other."""


def check_supported(optimizer: Optimizer) -> None:
    """Raise UnsupportedError unless a trial of `optimizer` tells all that matters."""
    if not isinstance(optimizer, Optimizer):
        raise UnsupportedError(f"offload takes a torch.optim.Optimizer; {type(optimizer).__name__} is not supported")
    kind = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    if isinstance(optimizer, LBFGS):
        raise UnsupportedError(
            f"{kind} cannot be paged: it keeps a history of flat vectors over all parameters and runs the closure several times "
            "within a step. Use an optimizer that updates each parameter from its own gradient"
        )
    if isinstance(optimizer, SparseAdam):
        raise UnsupportedError(
            f"{kind} cannot be paged: it takes sparse gradients, which have no fixed place. "
            "Build embeddings with sparse=False, and use Adam"
        )
    for group in optimizer.param_groups:
        for option in ("capturable", "differentiable"):
            if group.get(option):
                raise UnsupportedError(
                    f"{type(optimizer).__name__}({option}=True) cannot be paged: build it with {option}=False"
                )
    _check_attributes(kind, optimizer)


def check_settings(optimizer: Optimizer, group: dict[str, Any], dtype: torch.dtype) -> None:
    """Raise UnsupportedError for a group of parameters (or masters) of `dtype` that torch itself updates wrongly."""
    if isinstance(optimizer, SGD) and group.get("fused") and group.get("momentum") and dtype in NARROW:
        raise UnsupportedError(
            f"SGD(fused=True, momentum={group['momentum']}) gives wrong values for {dtype} from its second step on in torch "
            "itself: leave out fused=True, or say master_weights=torch.float32"
        )


def _check_attributes(kind: str, optimizer: Optimizer) -> None:
    """Refuse an optimizer that reaches parameters by another way than its groups: its shadow would update those, and not slices."""
    own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    pending = [
        (name, value, 0)
        for name, value in vars(optimizer).items()
        if name not in ("param_groups", "state", "step") and not name.endswith("_hooks")
    ]
    while pending:
        name, value, depth = pending.pop()
        if isinstance(value, Optimizer):
            raise UnsupportedError(
                f"{kind} cannot be paged: its attribute {name!r} is an optimizer of its own, which would update parameters that "
                "are away. Offload that one, and do what the wrapper does in the training loop"
            )
        if id(value) in own:
            raise UnsupportedError(
                f"{kind} cannot be paged: its attribute {name!r} holds parameters, which may be away when it uses them; "
                "an optimizer must find them in its param_groups"
            )
        if isinstance(value, dict) and depth < 3:
            pending += [(name, item, depth + 1) for pair in value.items() for item in pair]
        elif isinstance(value, list | tuple | set | frozenset) and depth < 3:
            pending += [(name, item, depth + 1) for item in value]
