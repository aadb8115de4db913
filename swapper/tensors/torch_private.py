"""Names of torch that are not public, each with what it is relied on for, and what they tell of a tensor's storage.

All other modules use them by this one. They are there, and do this, in torch 2.7 to 2.13: where another torch lacks
one it is replaced here. FSDP2's own are in train/sharded, where they are looked for; attributes of modules, tensors
and storages (`_parameters`, `_version`, `_cdata`) are used where they are needed. What imports much is imported when
it is asked for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import overrides
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.nn.parallel import distributed as ddp
from torch.utils import _pytree

pytree = _pytree
"""Takes lists, tuples and dictionaries apart, puts them together, and replaces their leaves."""

# --- classes of tensors -----------------------------------------------------------------------------------------------

without_torch_functions = torch._C.DisableTorchFunctionSubclass
"""Makes a context in which tensors of all classes are treated as torch's own: no `__torch_function__` is called."""
with_torch_functions = torch._C._EnableTorchFunction
"""Makes a context in which they are called again."""


def make_without_memory(cls: type[torch.Tensor], like: torch.Tensor) -> Any:
    """Return a tensor of this class with the form of `like`. All that is done with it comes to its `__torch_dispatch__`."""
    strides, offset = like.stride(), like.storage_offset()
    return torch.Tensor._make_wrapper_subclass(
        cls, like.shape, strides=strides, storage_offset=offset, dtype=like.dtype, device=like.device
    )


def replace_data(parameter: torch.nn.Parameter, tensor: torch.Tensor) -> None:
    """Give a parameter the data of a tensor on another device. All else that it is stays.

    (torch.utils.swap_tensors takes its attributes and hooks, and refuses those to which weak references are, as of nn.LSTM.)
    """
    hooks, later = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
    own = tensor.data  # counts versions by itself, and not with all that are views of the same memory
    torch._C._swap_tensor_impl(parameter, torch.nn.Parameter(own, requires_grad=parameter.requires_grad))
    if hooks:
        parameter._backward_hooks = hooks  # the new data has not been told
    if later:
        parameter._post_accumulate_grad_hooks = later


uses_of_storage = torch._C._storage_Use_Count
"""(`_cdata` of a storage): returns how many tensors and Python objects hold it, one of them for the question."""

# --- operations -------------------------------------------------------------------------------------------------------

AtenOperation = torch._ops.OpOverload
"""The class of ATen's operations, as a dispatcher below autograd calls them."""
schemas_of = torch._C._jit_get_schemas_for_operator
"""(name): returns the schemas of an operator's overloads; their arguments' `alias_info` says what is written to."""

foreach_clamp_max, foreach_clamp_min = torch._foreach_clamp_max_, torch._foreach_clamp_min_
foreach_mul, foreach_norm, foreach_zero = torch._foreach_mul_, torch._foreach_norm, torch._foreach_zero_
foreach_unscale = torch._amp_foreach_non_finite_check_and_unscale_
"""What clip_grad_norm_, clip_grad_value_, zero_grad and GradScaler call with lists of gradients."""


def outside_operations() -> AbstractContextManager[Any]:
    """Return a context within `__torch_dispatch__` where the thread is as in no operation: in one, writes count no versions."""
    return torch._C._ForceDispatchKeyGuard(*_OUTSIDE)


_KEYS, _KEY = torch._C.DispatchKeySet, torch._C.DispatchKey
_OUTSIDE = _KEYS(_KEY.BackendSelect) | _KEYS(_KEY.ADInplaceOrView), _KEYS(_KEY.AutocastCPU)
"""Included and excluded keys of a thread that is in no operation."""

# --- autograd ---------------------------------------------------------------------------------------------------------

backward_task = torch._C._current_graph_task_id
"""Returns the number of the backward that this thread runs, the innermost one; -1: none."""
keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph
"""Returns whether the running backward leaves its graph, for another one."""
will_run = torch._C._will_engine_execute_node
"""(node): returns whether the running backward contains the node. Raises RuntimeError for an accumulation of `backward()`."""
after_backward = torch.autograd.Variable._execution_engine.queue_callback
"""(function): has autograd call it when the running backward is over, if that does not fail."""
saved_tensor_hooks = torch._C._autograd._top_saved_tensors_default_hooks
"""(False): returns the innermost pair of hooks of torch.autograd.graph.saved_tensors_hooks; None: there are none."""

# --- modes and transforms, by thread ----------------------------------------------------------------------------------

dispatch_modes = torch._C._len_torch_dispatch_stack
"""Returns how many TorchDispatchModes are active."""
function_modes: Any = overrides._get_current_function_mode_stack
push_function_mode: Any = overrides._push_mode
pop_function_mode: Any = overrides._pop_mode
"""Return the active TorchFunctionModes; (mode): activates one; deactivates the innermost one."""
innermost_transform = torch._C._functorch.peek_interpreter_stack
"""Returns the innermost transform of torch.func that runs; None: none does."""
without_transforms = temporarily_clear_interpreter_stack
"""Makes a context in which no transform of torch.func runs."""
is_transformed = torch._C._functorch.is_functorch_wrapped_tensor
"""(tensor): returns whether a transform of torch.func has wrapped it."""


def is_traced() -> bool:
    """Return whether operations are recorded: by make_fx, torch.export, linearize, or torch.jit.trace."""
    is_proxied = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None
    return is_proxied or torch._C._get_tracing_state() is not None


# --- torch.distributed ------------------------------------------------------------------------------------------------


def storage_info() -> type:
    """Return the class of a place in DCP's metadata: (relative_path, offset, length), which DCP pickles."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo


def default_store() -> Any:
    """Return the store of the default process group, which all ranks read and write."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def timeout_of_ranks() -> object:
    """Return the timeout that the user gave to init_process_group; None, torch's own, if it was not for the CPU."""
    try:
        return torch.distributed.group.WORLD._get_backend(torch.device("cpu")).options._timeout  # type: ignore[union-attr]
    except (RuntimeError, AttributeError):
        return None


def composed(module: torch.nn.Module) -> Collection[str]:
    """Return the names of composable functions that were applied to `module` ("replicate", "fully_shard")."""
    from torch.distributed._composable.contract import _get_registry

    return _get_registry(module) or ()


def is_sharded(model: object) -> bool:
    """Return whether torch's fully_shard, or replicate_with_fsdp, was called on `model`."""
    return isinstance(model, torch.nn.Module) and hasattr(model, "_get_fsdp_state")


def running_ddp() -> torch.nn.Module | None:
    """Return the DistributedDataParallel whose forward runs."""
    return ddp.DistributedDataParallel._active_ddp_module


sync_of_ddp: Any = ddp._sync_module_states  # type: ignore[attr-defined]
"""(module, group, bytes of a bucket, source, names to leave out, whether buffers too): sends the source's values to the others."""


def replace_sync_of_ddp(function: Callable[..., None]) -> None:
    """Have DistributedDataParallel's constructor call `function` instead of `sync_of_ddp`, with the same arguments."""
    ddp._sync_module_states = function  # type: ignore[attr-defined]


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
    function._torchdynamo_disable_msg = "it moves weights or saved tensors"  # type: ignore[attr-defined]
    return function


def never_trace(cls: type[torch.Tensor]) -> None:
    """Have torch.compile, if it is in use, run operations on tensors of this class without tracing them."""
    if (config := sys.modules.get("torch._dynamo.config")) is not None:
        config.nontraceable_tensor_subclasses.add(cls)


# --- storages ---------------------------------------------------------------------------------------------------------


def storage_of(tensor: torch.Tensor) -> int | None:
    """Return the identity of a tensor's storage, on any device; None if it has none."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except NotImplementedError:  # sparse and opaque tensors, and those that functorch has wrapped
        return None


def count_uses(tensor: torch.Tensor) -> int:
    """Return how many tensors and arrays hold the storage of `tensor`, itself included; 0 if it has no memory of its own."""
    try:
        storage = tensor.untyped_storage()
    except NotImplementedError:  # a sparse tensor, or one that functorch has wrapped
        return 0
    return uses_of_storage(storage._cdata) - _OF_COUNTING


_OF_COUNTING = 0
_OF_COUNTING = count_uses(torch.empty(1, device="cpu")) - 1


def without_data(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor of this form whose storage is empty: code past its guard finds no memory."""
    with without_torch_functions(), torch.inference_mode(False):
        empty = torch.empty_like(tensor.detach(), memory_format=torch.contiguous_format)
    empty.untyped_storage().resize_(0)
    return empty
