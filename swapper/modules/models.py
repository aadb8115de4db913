"""Several models as one: a policy and its reference under one manager, a draft and its target in one `shared_memory`.

They are one model with a child for each: one set of groups, one budget, one order of use.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from swapper.errors import UnsupportedError


class Models(nn.Module):
    """Models by name. It has no forward: its children are called by themselves."""

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        super().__init__()
        for name, model in models.items():
            self.add_module(name, model)


def as_one(models: Any) -> nn.Module:
    """Return a module that is `models`, or contains them: a module, a dictionary of modules by name, or a list or tuple.

    Raises:
        UnsupportedError: it is something else.
    """
    if isinstance(models, nn.Module):
        return models
    by_name = dict(models) if isinstance(models, Mapping) else {}
    if isinstance(models, list | tuple):
        by_name = {str(number): model for number, model in enumerate(models)}
    strangers = [model for model in by_name.values() if not isinstance(model, nn.Module)]
    if not by_name or strangers:
        raise UnsupportedError(
            f"offload takes an nn.Module, not {type(models).__name__}; several models in a dictionary by name, or in a list"
        )
    for name in by_name:
        if not isinstance(name, str) or not name or "." in name:
            raise UnsupportedError(f"{name!r} cannot be the name of a model: use a string without dots")
    return Models(by_name)


def refuse_scripted(model: nn.Module, verb: str) -> None:
    """Refuse TorchScript: its code uses parameters where no hook and no guard sees it.

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
