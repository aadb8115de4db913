"""Hides the shards and gradients of a sharded model while a deferred step that changes or uses them is open.

FSDP2's parameters and gradients are DTensors, whose dispatcher passes by the guards of cold parameters and fixed gradients
(steps/executor.py): it works on `_local_tensor`. So that is an OpenTensor until its group is updated. It finishes the step
before any operation, on this rank alone: no collective is run, since a rank may read its shards by itself. FSDP2 gathers from
`FSDPParam._sharded_param_data`, which stays what it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from swapper.modules.torch_functions import METADATA
from swapper.train.sharded.cold_shard import ColdShard
from swapper.train.sharded.shards import Shard

_KEYS, _KEY = torch._C.DispatchKeySet, torch._C.DispatchKey
_OUTSIDE = _KEYS(_KEY.BackendSelect) | _KEYS(_KEY.ADInplaceOrView), _KEYS(_KEY.AutocastCPU)
"""Included and excluded keys of a thread that is in no operation: in a dispatcher, in-place operations count no versions."""


class OpenTensor(torch.Tensor):
    """Stands for a local tensor that an open step changes or uses, and shares its memory.

    Attributes:
        swapper_local: the tensor.
        swapper_finish: finishes an open step, if there is one.
    """

    swapper_local: torch.Tensor
    swapper_finish: Callable[[], None]

    @staticmethod
    def __new__(cls, local: torch.Tensor, finish: Callable[[], None]) -> OpenTensor:
        tensor: OpenTensor = torch.Tensor._make_subclass(cls, local)
        tensor.swapper_local, tensor.swapper_finish = local, finish
        return tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Functions of Python, among them those that the dispatcher does not see, as `numpy` and `untyped_storage`."""
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        args, kwargs = _finished((args, kwargs or {}))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        with torch._C._ForceDispatchKeyGuard(*_OUTSIDE):
            args, kwargs = _finished((args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(_finished(self))

    def __deepcopy__(self, memo: Any) -> Any:
        return _finished(self).__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _finished(self).__reduce_ex__(protocol)


def _finished(tree: Any) -> Any:
    """Return `tree` with local tensors in place of their OpenTensors, for which no step is open any more."""

    def finish(tensor: OpenTensor) -> torch.Tensor:
        tensor.swapper_finish()
        return tensor.swapper_local

    return tree_map_only(OpenTensor, finish, tree)


def local_of(tensor: Any) -> Any:
    """Return the local tensor of a DTensor, whether a step is open or not: of a gradient on NVMe its ColdGradient."""
    local = tensor._local_tensor
    local = local.swapper_local if type(local) is OpenTensor else local
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
                if tensor is not None and not isinstance(tensor._local_tensor, OpenTensor | ColdShard):  # type: ignore[attr-defined]
                    tensor._local_tensor = OpenTensor(tensor._local_tensor, self._finish)  # type: ignore[attr-defined]
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
    return int(torch._C._storage_Use_Count(shard.fsdp_param._sharded_param_data.untyped_storage()._cdata))
