"""Has an offloaded model pass what accelerate, Trainers and DistributedDataParallel do to a model before training.

accelerate moves it to the device of its rank, "cpu:0" without an accelerator: the same memory, and yet a copy for torch.

DDP's constructor sends the first rank's parameters to the others, from C++, which writes past the guard of cold parameters: into
a mapping that nobody reads. So `_sync_module_states` of torch.nn.parallel.distributed leaves parameters of managers to this
module, which sends them one by one and writes those that differ.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from swapper.errors import UnsupportedError
from swapper.modules.groups import Models
from swapper.modules.guarded import FaultHandler, handler_of
from swapper.modules.module_hooks import OwnHook, copy_without_hooks
from swapper.runtime.process import is_off
from swapper.tensors.torch_private import replace_sync_of_ddp, sync_of_ddp, without_torch_functions

_without_averaging: weakref.WeakKeyDictionary[FaultHandler, str] = weakref.WeakKeyDictionary()  # and why


class ModelBinding(Protocol):
    """What an offloaded model has from its start to its end."""

    def follow_gradients(self) -> None:
        """A step begins: the paged parameters' gradients are those that the user sees."""
        return

    def shown(self) -> str | None:
        """Return the name of a parameter whose memory a tensor of the user's shows, and could not be hidden."""
        return None

    def remove(self, keep_cold: bool) -> None:
        """Take the hooks out. `keep_cold`: paged parameters stay on NVMe."""


class Preparation(ModelBinding):
    """What an offloaded model does when it is prepared, until `remove`. What DDP's constructor does stays.

    Args:
        model: the user's, or several as one.
        fault_handler: of its parameters.
        without_averaging: why DDP cannot average its gradients: see `averaging_refused`; "" if it can.
    """

    def __init__(self, model: nn.Module, fault_handler: FaultHandler, without_averaging: str) -> None:
        if not is_off("ddp"):
            replace_sync_of_ddp(_sync_module_states)
        if without_averaging:
            _without_averaging[fault_handler] = without_averaging
        self._models = [*model.children()] if isinstance(model, Models) else [model]
        for each in self._models:
            copy_without_hooks(each)
            each.__dict__["_apply"] = OwnHook(_apply_of(each))

    def remove(self, keep_cold: bool) -> None:
        for model in self._models:
            model.__dict__.pop("_apply", None)
        self._models.clear()


# --- moving -------------------------------------------------------------------------------------------------------------


def _apply_of(module: nn.Module) -> Callable[..., nn.Module]:
    """Return `module._apply` that keeps tensors of which a conversion would only make an equal copy in host memory."""
    of = weakref.ref(module)

    def apply(convert: Callable[[torch.Tensor], Any], recurse: bool = True) -> nn.Module:
        module = of()
        assert module is not None, "it was called on it"
        plain: Callable[..., nn.Module] = type(module)._apply
        return plain(module, lambda tensor: tensor if _only_copies(convert, tensor) else convert(tensor), recurse)

    return apply


def _only_copies(convert: Callable[[torch.Tensor], Any], tensor: torch.Tensor) -> bool:
    """Return whether `convert(tensor)` is a copy and nothing else, by asking it of a small tensor in host memory."""
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        return False
    with without_torch_functions(), torch.no_grad():
        like = torch.ones((2,) * tensor.dim(), dtype=tensor.dtype, device="cpu")
        try:
            copy = convert(like)
            is_like = (copy.device, copy.dtype, copy.stride()) == (like.device, like.dtype, like.stride())
            return copy is not like and is_like and torch.equal(copy, like)
        except Exception:
            return False  # the real conversion raises the error


# --- DistributedDataParallel --------------------------------------------------------------------------------------------


def _sync_module_states(
    module: nn.Module,
    process_group: Any,
    broadcast_bucket_size: int,
    src: int,
    params_and_buffers_to_ignore: Container[str],
    broadcast_buffers: bool = True,
) -> None:
    """As torch's function of this name; parameters of managers are read, one at a time, and written where they differ."""
    ignored = params_and_buffers_to_ignore
    ours = {name: p for name, p in module.named_parameters() if name not in ignored and handler_of(p) is not None}
    for handler in {handler_of(parameter) for parameter in ours.values()}:
        if handler is not None and handler in _without_averaging:
            raise UnsupportedError(_without_averaging[handler])
    named = {name for tensors in (module.named_parameters(), module.named_buffers()) for name, _ in tensors}
    left = {name for name in named if name in ignored or name in ours}
    sync_of_ddp(module, process_group, broadcast_bucket_size, src, left, broadcast_buffers)
    for parameter in ours.values():
        _sync(parameter, process_group, src)


@torch.no_grad()
def _sync(parameter: nn.Parameter, process_group: Any, src: int) -> None:
    own = parameter.detach().to(parameter.device)
    value = torch.empty_like(own).copy_(own)
    dist.broadcast(value, group=process_group, group_src=src)
    fault_handler = handler_of(parameter)
    if fault_handler is not None and not _same_bits(value, own):
        fault_handler.write([parameter], torch.Tensor.copy_, lambda shown: parameter.copy_(value))


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(*(value.reshape(-1).view(torch.uint8) for value in (one, other)))
