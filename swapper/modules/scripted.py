"""Finds TorchScript in a model: its code uses parameters where no hook and no guard sees it."""

from __future__ import annotations

import torch
from torch import nn

from swapper.errors import UnsupportedError


def refuse_scripted(model: nn.Module, verb: str) -> None:
    """
    Raises:
        UnsupportedError: a module of `model` is TorchScript.
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            where = f"module {name}" if name else "the model"
            raise UnsupportedError(
                f"{where} is TorchScript ({type(module).__name__}), which uses its parameters where nothing brings them in first: "
                f"give {verb} the nn.Module that it was made of, before torch.jit.script or torch.jit.trace"
            )
