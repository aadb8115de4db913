"""Names of torch that are not public, each with what it is relied on for. All other modules use them by this one.

They are there, and do this, in torch 2.7 to 2.13: where another torch lacks one it is replaced here. FSDP2's own are in
train/sharded, where they are looked for; attributes of modules, tensors and storages (`_parameters`, `_version`, `_cdata`) are used
where they are needed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils import _pytree

without_torch_functions = torch._C.DisableTorchFunctionSubclass
"""Makes a context in which tensors of all classes are treated as torch's own: no `__torch_function__` is called."""

tree_map_only: Callable[..., Any] = _pytree.tree_map_only
"""(type, function, tree): returns lists, tuples and dictionaries as `tree`, with `function(leaf)` for each leaf of that type."""

# --- tensors ----------------------------------------------------------------------------------------------------------


def make_subclass(cls: type[torch.Tensor], like: torch.Tensor) -> Any:
    """Return a tensor of this class that shares memory with `like`, without its graph. `__torch_dispatch__` is called for it."""
    with without_torch_functions():
        return torch.Tensor._make_subclass(cls, like)


def make_without_memory(cls: type[torch.Tensor], like: torch.Tensor) -> Any:
    """Return a tensor of this class with the form of `like`. All that is done with it comes to its `__torch_dispatch__`."""
    strides, offset = like.stride(), like.storage_offset()
    return torch.Tensor._make_wrapper_subclass(
        cls, like.shape, strides=strides, storage_offset=offset, dtype=like.dtype, device=like.device
    )


def storage_uses(storage: torch.UntypedStorage) -> int:
    """Return how many tensors and Python objects hold `storage`; counting it adds none."""
    return int(torch._C._storage_Use_Count(storage._cdata))


def outside_operations() -> AbstractContextManager[Any]:
    """Return a context within `__torch_dispatch__` where the thread is as in no operation: in one, writes count no versions."""
    return torch._C._ForceDispatchKeyGuard(*_OUTSIDE)


_KEYS, _KEY = torch._C.DispatchKeySet, torch._C.DispatchKey
_OUTSIDE = _KEYS(_KEY.BackendSelect) | _KEYS(_KEY.ADInplaceOrView), _KEYS(_KEY.AutocastCPU)
"""Included and excluded keys of a thread that is in no operation."""


# --- torch.compile ----------------------------------------------------------------------------------------------------


def not_traced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Have torch.compile call `function` instead of tracing into it.

    torch.compiler.disable does the same but imports torch._dynamo: some seconds, in a process that may never compile.
    """
    try:
        frames = torch._C._dynamo.eval_frame
        skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
        frames.set_code_exec_strategy(function.__code__, skip)
    except AttributeError:  # another torch
        return torch.compiler.disable(function)  # type: ignore[no-any-return]
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = "it reads weights in, or makes them cold"  # type: ignore[attr-defined]
    return function


def never_trace(cls: type[torch.Tensor]) -> None:
    """Have torch.compile, if it is in use, run operations on tensors of this class without tracing them."""
    if (config := sys.modules.get("torch._dynamo.config")) is not None:
        config.nontraceable_tensor_subclasses.add(cls)
