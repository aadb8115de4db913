"""An offloaded model in the form of a checkpoint: a state dict as torch makes it, of tensors that are elsewhere.

A parameter is shown by the tensor at its place, which has no data unless its pages are in memory: who writes the checkpoint looks
at the place, not at the data. Where kernels run on an accelerator the parameter is not at its place, which is shown for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from swapper.modules.cold import aliases
from swapper.modules.models import Models

Placed = Callable[[int], torch.Tensor | None]
"""Returns the tensor at the place of the parameter of that id; None for what is no such parameter."""


def state_dict_of(model: nn.Module, placed: Placed | None) -> dict[str, Any]:
    """Return the model's state dict, or those of several by name.

    Args:
        placed: where parameters are not at their places.
    """
    with aliases():
        if isinstance(model, Models):
            return {name: _state_dict(child, placed) for name, child in model.named_children()}
        return _state_dict(model, placed)


def _state_dict(model: nn.Module, placed: Placed | None) -> dict[str, Any]:
    content: dict[str, Any] = model.state_dict(keep_vars=placed is not None)
    for key, value in list(content.items()):
        if placed is not None and isinstance(value, torch.Tensor):
            there = placed(id(value))
            content[key] = value.detach().cpu() if there is None else there
    return content
