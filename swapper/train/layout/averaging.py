"""Refuses averages of gradients over processes that a placement or an update time rules out."""

from __future__ import annotations

from collections.abc import Container

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import distributed as torch_ddp

from swapper.capabilities import Feature, broken_rule
from swapper.errors import UnsupportedError
from swapper.tensors.torch_private import composed, running_ddp


def is_replicated(module: nn.Module) -> bool:
    """Return whether gradients of `module` are averaged over processes: by DDP, or by torch's composable `replicate`."""
    return isinstance(module, torch_ddp.DistributedDataParallel) or "replicate" in composed(module)


def averaging_refused(update: str, gradients_leave: bool) -> str:
    """Return why DistributedDataParallel cannot average a model's gradients; "" if it can.

    Args:
        update: when the model is updated.
        gradients_leave: they are copied from an accelerator to the host as they arrive.
    """
    asked = {Feature.REPLICATED}
    if update == "backward":
        asked.add(Feature.IN_BACKWARD)
    if gradients_leave:
        asked.add(Feature.GRADIENTS_LEAVE)
    rule = broken_rule(asked)
    return "" if rule is None else rule.message


def check_averaging(model: nn.Module, update: str, gradients_leave: bool) -> None:
    """Raise UnsupportedError if gradients of `model` are averaged, which needs a group of processes, and cannot be.

    Args: see `averaging_refused`.
    """
    refusal = averaging_refused(update, gradients_leave)
    if refusal and dist.is_initialized() and any(map(is_replicated, model.modules())):
        raise UnsupportedError(refusal)


def check_not_averaged(ids: Container[int], refusal: str) -> None:
    """Raise UnsupportedError in a forward of a DistributedDataParallel that `offload` was not given, as Lightning's is.

    Args:
        ids: of the parameters that were offloaded.
        refusal: why their gradients cannot be averaged. See `averaging_refused`.
    """
    outer = running_ddp()
    if outer is not None and any(id(parameter) in ids for parameter in outer.parameters()):
        raise UnsupportedError(refusal)
