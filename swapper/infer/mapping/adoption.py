"""Gives a model the memory that its weights will be read into. From here on the model is changed.

Parameters on the meta device cannot get data: new objects take their places, one for each, so that tied ones stay tied. Those on
the CPU stay the same objects.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import count

import torch
from torch import nn

from swapper.formats.read_plan import FileRange
from swapper.formats.stored import StoredTensor
from swapper.infer.mapping.matching import Weight
from swapper.paging.section import Section, own_storage


class Places:
    """Every place of a module tree where a parameter is registered."""

    def __init__(self, model: nn.Module) -> None:
        self._places: dict[int, list[tuple[nn.Module, str]]] = {}
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    self._places.setdefault(id(parameter), []).append((module, name))

    def replace(self, parameter: nn.Parameter, new: nn.Parameter) -> None:
        for module, name in self._places[id(parameter)]:
            module._parameters[name] = new
        self._places[id(new)] = self._places.pop(id(parameter))


def adopt(places: Places, weight: Weight, data: torch.Tensor) -> nn.Parameter:
    """Give a parameter `data`, which nobody trains; returns the parameter that has it, a new one for one on the meta device."""
    parameter = weight.parameter
    if parameter.device.type == "meta":
        parameter = nn.Parameter(data, requires_grad=False)
        places.replace(weight.parameter, parameter)
    else:
        parameter.requires_grad_(False)
        parameter.grad = None
        parameter.data = data
    return parameter


def empty(places: Places, parameters: Iterable[nn.Parameter]) -> None:
    """Take the parameters' memory away: the model has the shapes on the meta device, as before it was loaded."""
    for parameter in parameters:
        shape, dtype = parameter.shape, parameter.dtype
        places.replace(parameter, nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False))


def view_of(memory: torch.Tensor, offset: int, stored: StoredTensor) -> torch.Tensor:
    """Return `stored` as it lies in `memory` (uint8) at `offset`. Touches nothing."""
    flat = memory[offset : offset + stored.nbytes].view(stored.dtype)
    if stored.stride is not None:
        return flat.as_strided(stored.shape, stored.stride, flat.storage_offset())
    return flat.view(stored.shape)


def locate(
    runs: Sequence[FileRange], sections: Sequence[Section], weights: Sequence[Weight]
) -> list[list[torch.Tensor]]:
    """Return for each weight its parts, as views of the sections that the runs are read into."""
    places = {
        number: (section.memory, offset)
        for run, section in zip(runs, sections, strict=True)
        for number, offset in run.places
    }
    numbers = count()
    return [[_view(places.get(next(numbers)), part) for part in weight.recipe.parts] for weight in weights]


def _view(place: tuple[torch.Tensor, int] | None, stored: StoredTensor) -> torch.Tensor:
    if place is None:  # it has no bytes
        return torch.empty(stored.shape, dtype=stored.dtype)
    memory, offset = place
    return view_of(own_storage(memory[offset : offset + stored.nbytes]), 0, stored)
