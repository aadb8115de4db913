"""Compares what ranks that train together give to `offload`: what decides the bits of a step must be the same on all.

Those that hold the same model are compared: the ranks of a DDP model, or of an FSDP2 model's mesh. A model of neither may be one
stage of several. Where bytes lie (placements, budgets, drives) changes no bit, and may differ.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from swapper.durability.ranks import Ranks
from swapper.errors import ConfigError
from swapper.train.optimizer.optim import packed_groups
from swapper.train.optimizer.optimizer_set import OptimizerSet
from swapper.train.session.request import Request

Digests = tuple[tuple[int, ...], dict[str, str]]
"""The ranks that a rank is compared with, and digests of what it gives, by subject."""

_REMEDIES = {
    "model": "Build the same model on all ranks, from the same configuration",
    "fully_shard calls": "Call fully_shard on the same modules of all ranks, with the same options",
    "optimizer": "Make the same optimizer on all ranks, with the same settings",
    "options": "Pass the same to manager.offload on all ranks",
}


def digests(request: Request) -> Digests:
    """Return a digest of each subject."""
    subjects = _subjects(request)
    return request.model.peers(), {
        name: hashlib.sha256("\n".join(lines).encode()).hexdigest() for name, lines in subjects.items()
    }


def check_alike(request: Request, ranks: Ranks, told: Sequence[Sequence[Any]], verb: str = "manager.offload") -> None:
    """Compare the digests of all ranks. All ranks must call it.

    Args:
        told: for each rank the result of `digests`.
        verb: what they are about to call.

    Raises:
        ConfigError: they differ; names the first difference.
    """
    if not ranks.are_together:
        return
    for name, remedy in _REMEDIES.items():
        differing = [
            (rank, peer) for rank, (peers, of) in enumerate(told) for peer in peers if of[name] != told[peer][1][name]
        ]
        if not differing:
            continue
        rank, other = differing[0]
        lines = ranks.gather(_subjects(request)[name], "compare what ranks give")
        mine, theirs = _first_difference(lines[rank], lines[other])
        raise ConfigError(
            f"ranks give different {name.rstrip('s')}s to {verb}: rank {rank} has {mine}, and rank {other} has {theirs}. "
            f"{remedy}"
        )


def _subjects(request: Request) -> dict[str, list[str]]:
    optimizers, options = OptimizerSet(request.given_optimizers), request.options
    return {
        "model": [
            f"{name}: {tuple(p.shape)}, {p.dtype}{'' if p.requires_grad else ', frozen'}"
            for name, p in request.model.given.named_parameters()
        ],
        "fully_shard calls": request.model.gathers(),
        "optimizer": [optimizers.kind, *_settings(packed_groups(optimizers.param_groups))],
        "options": [
            f"update={options.update!r}",
            f"master_weights={options.master_weights}",
            f"state_codec={options.state_codec!r}",
            f"accelerator={options.accelerator}",
        ],
    }


def _settings(groups: Sequence[dict[str, Any]]) -> Iterator[str]:
    for number, group in enumerate(groups):
        yield from (f"{key}={_text(value)} in group {number}" for key, value in sorted(group.items()))


def _text(value: Any) -> str:
    """Return a text that is the same for the same value in every process."""
    if isinstance(value, torch.Tensor):
        return str(value.tolist()) if value.numel() == 1 else f"a tensor of {tuple(value.shape)}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_text, value))}]"
    return repr(value) if isinstance(value, (int, float, str, bool, type(None))) else type(value).__qualname__


def _first_difference(mine: Sequence[str], theirs: Sequence[str]) -> tuple[str, str]:
    for index in range(max(len(mine), len(theirs))):
        pair = tuple(lines[index] if index < len(lines) else "nothing there" for lines in (mine, theirs))
        if pair[0] != pair[1]:
            return pair[0], pair[1]
    return "what its digest says", "another"
