"""Measures a rank's pass of a model that `fully_shard` has sharded: with whole parameters, and what gathering them takes."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from swapper.modules.groups import Group
from swapper.train.sharded.shards import Shards, is_sharded, shard_count

GATHERED_BYTES = 16 << 20
"""Of a trial's collective, in all ranks together."""
TRIALS = 3


def copy_unsharded(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Return a deep copy of a model as it was before `fully_shard`: its modules' own classes, without FSDP2's hooks.

    Args:
        memo: what takes the place of an object, by its id: of each parameter.
    """
    sharded = [module for module in model.modules() if is_sharded(module)]
    states = [module._get_fsdp_state() for module in sharded]  # type: ignore[operator]
    classes = [type(module) for module in sharded]
    for state in states:
        memo[id(state)] = state
    try:
        for module, cls in zip(sharded, classes, strict=True):  # FSDP2's class, FSDPModule, the module's own
            module.__class__ = cls.__mro__[2]
        clone = copy.deepcopy(model, memo)
    finally:
        for module, cls in zip(sharded, classes, strict=True):
            module.__class__ = cls
    for module in clone.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key, hook in [*hooks.items()]:
                if any(getattr(hook, "__self__", None) is state for state in states):
                    del hooks[key]
    return clone


def compute_dtypes(shards: Shards) -> dict[int, torch.dtype]:
    """Return the dtype that each parameter has while it is gathered, by the id of the user's."""
    found = {}
    for shard in shards.all:
        found[id(shard.parameter)] = shard.fsdp_param.param_dtype or shard.fsdp_param.orig_dtype
    return found


def gathering_seconds(shards: Shards, groups: list[Group]) -> Mapping[int, float]:
    """Return, by group, the seconds of a gather of its parameters from all ranks. All ranks call this at the same time."""
    param_group = shards.by_group[0][0]
    ranks = shard_count(param_group)
    if ranks == 1:
        return {group.index: 0.0 for group in groups}
    device, process_group = shards.all[0].fsdp_param.device, param_group.mesh_info.shard_process_group
    parts = [torch.zeros(GATHERED_BYTES // ranks, dtype=torch.uint8, device=device) for _ in range(ranks)]
    times_s = []
    for _ in range(TRIALS):
        began_s = time.perf_counter()
        torch.distributed.all_gather(parts, parts[0].clone(), group=process_group)
        parts[0][0].item()  # on an accelerator it is over then
        times_s.append(time.perf_counter() - began_s)
    byte_s = min(times_s) / GATHERED_BYTES
    dtypes = compute_dtypes(shards)
    of = {id(shard.local): shard.parameter.numel() * dtypes[id(shard.parameter)].itemsize for shard in shards.all}
    return {group.index: byte_s * sum(of[id(parameter)] for _, parameter in group.parameters) for group in groups}
