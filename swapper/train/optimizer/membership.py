"""Tracks the optimizer's group of each parameter: `param_groups` may be edited between two steps, as in plain torch.

The trained parameters were found at `offload`. Since then the user may have taken a parameter out of its group, moved
it, or removed, inserted, reordered and replaced groups. The next step follows such edits, and so does every numbering
of parameters. An edit that cannot be followed is refused by name before anything changes, and can be undone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from swapper.errors import StateError
from swapper.train.updates.sweep import NO_GROUP, Trainable


class Membership:
    """Keeps `settings` of the trained parameters equal to the optimizer's groups.

    Args:
        optimizer: the user's.
        trainables: the trained parameters.
        names: of all parameters of the model, by id.

    Attributes:
        edits: how often `follow` found that the groups had changed.
        untrained: parameters in a group that were frozen or in no group at `offload`.
        numbers: by id of a parameter in a group, its number in torch's state_dict.
    """

    def __init__(self, optimizer: Optimizer, trainables: Sequence[Trainable], names: Mapping[int, str]) -> None:
        self._optimizer = optimizer
        self._trainables = trainables
        self._names = names
        self._trained = {id(parameter) for trainable in trainables for parameter in trainable.parameters}
        self._settings = set.intersection(
            *(set(group) for group in optimizer.param_groups)
        )  # settings that every group has
        self._known: list[list[int]] | None = None
        self.edits = 0
        self.untrained: list[nn.Parameter] = []
        self.numbers: dict[int, int] = {}

    def follow(self) -> None:
        """Update everything here to the present groups. Requires that no step is open.

        Raises:
            StateError: an edit cannot be followed. Nothing has changed then.
        """
        groups = self._optimizer.param_groups
        members = [members_of(group, index) for index, group in enumerate(groups)]
        if members == self._known:
            return
        self._check(members)
        group_of = {key: index for index, keys in enumerate(members) for key in keys}
        for trainable in self._trainables:
            trainable.settings[:] = [group_of.get(id(parameter), NO_GROUP) for parameter in trainable.parameters]
        self.numbers = {key: number for number, key in enumerate(group_of)}
        self.untrained = [p for group in groups for p in group["params"] if id(p) not in self._trained]
        self._known = members
        self.edits += 1

    def _check(self, members: Sequence[Sequence[int]]) -> None:
        """Raise StateError unless each parameter is the model's, in one group only, and each group has all settings."""
        seen: dict[int, int] = {}
        for index, keys in enumerate(members):
            group = self._optimizer.param_groups[index]
            for setting in sorted(self._settings - group.keys()):
                raise StateError(
                    f"group {index} of the optimizer has no {setting!r}: add groups with optimizer.add_param_group(), which "
                    "fills in defaults"
                )
            for number, key in enumerate(keys):
                if key not in self._names:
                    raise StateError(
                        f"parameter {number} of the optimizer's group {index} {_describe(group['params'][number])} is not one of "
                        "the offloaded model's: train it with an optimizer of its own, or offload both models together, "
                        "offload([model, other], optimizer)"
                    )
                if key in seen:
                    where = "twice" if seen[key] == index else f"and in group {index}"
                    raise StateError(
                        f"parameter {self._names[key]} is in group {seen[key]} of the optimizer {where}, where torch would update "
                        "it twice in a step: take it out of the one before it joins the other"
                    )
                seen[key] = index


def members_of(group: Mapping[str, Any], index: int) -> list[int]:
    """Return the ids of a group's parameters, in order."""
    parameters = group.get("params")
    if not isinstance(parameters, list | tuple):
        raise StateError(
            f"group {index} of the optimizer has no list of parameters: its 'params' is a {type(parameters).__name__}"
        )
    return list(map(id, parameters))


def names_by_group(optimizer: Optimizer, names: Mapping[int, str]) -> list[list[str]]:
    """Return the names of each group's parameters, in order; one without a name is refused at the next step.

    Args:
        names: of the model's parameters, by id.
    """
    return [[names[id(p)] for p in group.get("params", ()) if id(p) in names] for group in optimizer.param_groups]


def _describe(value: Any) -> str:
    return f"(shape {list(value.shape)})" if isinstance(value, torch.Tensor) else f"(a {type(value).__name__})"
