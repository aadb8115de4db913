"""Finds what a forward leaves beside its output: a term of the loss in an attribute of a module, as mixtures of experts do.

Its backward reads parameters before that of the output does. In host memory such reads are answered; a device answers none, so the
groups must be leased by then, as for an output. What is left elsewhere, by a hook or in a closure, is not found.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from swapper.modules.groups import Unit
from swapper.modules.module_hooks import OwnHook


def modules_by_unit(units: Iterable[Unit]) -> dict[str, tuple[weakref.ref[nn.Module], ...]]:
    """Return the modules of each unit, by its name, without those of units inside it. Nothing of a model is kept alive."""
    units = list(units)
    heads = {id(unit.module) for unit in units}
    return {unit.name: tuple(map(weakref.ref, _outside_of_others(unit.module, heads))) for unit in units}


def _outside_of_others(module: nn.Module, heads: Collection[int]) -> Iterator[nn.Module]:
    yield module
    for child in module.children():
        if id(child) not in heads:
            yield from _outside_of_others(child, heads)


def side_outputs(modules: Sequence[weakref.ref[nn.Module]], given: Collection[Any]) -> list[torch.Tensor]:
    """Return the tensors with a graph in attributes of `modules`, and in lists, tuples and dicts there, that nothing watches yet.

    Args:
        given: autograd's nodes of what the forward was given.
    """
    return [tensor for tensor in _in_attributes(modules) if tensor.grad_fn not in given and not _is_watched(tensor)]


def _in_attributes(modules: Sequence[weakref.ref[nn.Module]]) -> Iterator[torch.Tensor]:
    for module in [one for reference in modules if (one := reference()) is not None]:
        for value in vars(module).values():
            kind = type(value)
            if kind is torch.Tensor:
                values: Iterable[Any] = (value,)
            elif kind is dict:
                values = value.values()
            elif kind is list or kind is tuple:
                values = value
            else:
                continue
            yield from (one for one in values if type(one) is torch.Tensor and one.grad_fn is not None)


def _is_watched(tensor: torch.Tensor) -> bool:
    hooks = tensor._backward_hooks
    return hooks is not None and any(isinstance(hook, OwnHook) for hook in hooks.values())
