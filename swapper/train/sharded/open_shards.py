"""Hides the shards and gradients of a sharded model while a deferred step that changes or uses them is open.

FSDP2's parameters and gradients are DTensors, whose dispatcher passes by the guards of cold parameters and fixed gradients
(updates/deferred.py): it works on `_local_tensor`. So that is an HiddenShard until its group is updated. It finishes the step
before any operation, on this rank alone: no collective is run, since a rank may read its shards by itself. FSDP2 gathers from
`FSDPParam._sharded_param_data`, which stays what it is.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

from swapper.tensors.guarded_tensor import GuardedTensor
from swapper.tensors.torch_private import make_without_memory, outside_operations, pytree, storage_uses
from swapper.train.sharded.cold_shard import ColdShard
from swapper.train.sharded.shards import Shard


class HiddenShard(GuardedTensor):
    """Stands for a local tensor that cannot be used as it is. It has no memory.

    Args:
        like: has its form.

    Attributes:
        swapper_local: the tensor; None if it is gone.
        swapper_finish: makes that usable, or raises.
    """

    swapper_local: torch.Tensor | None
    swapper_finish: Callable[[], None]

    @staticmethod
    def __new__(cls, like: torch.Tensor, local: torch.Tensor | None, finish: Callable[[], None]) -> HiddenShard:
        tensor: HiddenShard = make_without_memory(cls, like)
        tensor.swapper_local, tensor.swapper_finish = local, finish
        return tensor

    @staticmethod
    def _operate(func: Any, args: Any, kwargs: Any) -> Any:
        """Functions of Python, among them those that the dispatcher does not see, as `numpy` and `untyped_storage`."""
        args, kwargs = _finished((args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        with outside_operations():
            args, kwargs = _finished((args, kwargs or {}))
        return func(*args, **kwargs)

    def _instead(self, operation: str) -> torch.Tensor:
        local: torch.Tensor = _finished(self)
        return copy.deepcopy(local) if operation == "__deepcopy__" else local


def _finished(tree: Any) -> Any:
    """Return `tree` with local tensors in place of their HiddenShards, for which no step is open any more."""

    def finish(tensor: HiddenShard) -> torch.Tensor | None:
        tensor.swapper_finish()
        return tensor.swapper_local

    return pytree.tree_map_only(HiddenShard, finish, tree)


def local_of(tensor: Any) -> Any:
    """Return the local tensor of a DTensor, whether a step is open or not: of a gradient on NVMe its ColdGradient."""
    local = tensor._local_tensor
    local = local.swapper_local if type(local) is HiddenShard else local
    return local.swapper_cold if type(local) is ColdShard else local


class OpenShards:
    """Hides the shards of one group, and their gradients.

    Args:
        finish: finishes an open step, if there is one.
    """

    def __init__(self, shards: Sequence[Shard], finish: Callable[[], None]) -> None:
        self._shards = shards
        self._finish = finish
        self._hidden: list[Any] = []
        self._uses = [_uses_of(shard) for shard in shards]

    def hide(self) -> None:
        """A step opens."""
        for shard in self._shards:
            for tensor in (shard.parameter, shard.parameter.grad):
                local = None if tensor is None else tensor._local_tensor  # type: ignore[attr-defined]
                if local is not None and not isinstance(local, HiddenShard | ColdShard):
                    tensor._local_tensor = HiddenShard(local, local, self._finish)  # type: ignore
                    self._hidden.append(tensor)

    def show(self) -> None:
        """The group is updated, or the model closes."""
        for tensor in self._hidden:
            tensor._local_tensor = local_of(tensor)
        self._hidden.clear()

    def shown(self) -> str | None:
        """Return the name of a parameter whose shard another tensor shows (`to_local`, a state_dict); None if there is none.

        Such a tensor cannot be hidden.
        """
        uses = zip(self._shards, self._uses, strict=True)
        return next((shard.name for shard, before in uses if _uses_of(shard) > before), None)


def _uses_of(shard: Shard) -> int:
    """Return how many tensors share the memory of a shard, which FSDP2's own two always do."""
    if not shard.local.numel():
        return 0
    return storage_uses(shard.fsdp_param._sharded_param_data.untyped_storage())
