"""Finds the tensors in what a module returns: nested containers, dataclasses, and any other object's attributes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree


def tensors_of(output: Any) -> tuple[list[torch.Tensor], Callable[[list[torch.Tensor]], Any]]:
    """Return the tensors in `output` (nested lists, tuples, dicts, dataclasses) and how to build it anew with others."""
    if isinstance(output, torch.Tensor):
        return [output], lambda new: new[0]
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        fields = [f.name for f in dataclasses.fields(output) if hasattr(output, f.name)]
        tensors, rebuild = tensors_of([getattr(output, name) for name in fields])

        def rebuild_dataclass(new: list[torch.Tensor]) -> Any:
            for name, value in zip(fields, rebuild(new), strict=True):
                try:
                    setattr(output, name, value)
                except dataclasses.FrozenInstanceError:
                    object.__setattr__(output, name, value)
            return output

        return tensors, rebuild_dataclass
    leaves, spec = pytree.tree_flatten(output)
    if len(leaves) == 1 and leaves[0] is output:
        return _tensors_of_object(output)
    parts = [tensors_of(leaf) for leaf in leaves]

    def rebuild_tree(new: list[torch.Tensor]) -> Any:
        taken = iter(new)
        built = [rebuild([next(taken) for _ in tensors]) for tensors, rebuild in parts]
        return pytree.tree_unflatten(built, spec)

    return [tensor for tensors, _ in parts for tensor in tensors], rebuild_tree


def _tensors_of_object(output: Any) -> tuple[list[torch.Tensor], Callable[[list[torch.Tensor]], Any]]:
    """Any other object: what its attributes hold."""
    attributes = getattr(output, "__dict__", None)
    if not attributes or callable(output):
        return [], lambda new: output
    values = {
        name: value for name, value in attributes.items() if isinstance(value, torch.Tensor | list | tuple | dict)
    }
    tensors, rebuild = tensors_of(list(values.values()))

    def rebuild_object(new: list[torch.Tensor]) -> Any:
        attributes.update(zip(values, rebuild(new), strict=True))
        return output

    return tensors, rebuild_object
