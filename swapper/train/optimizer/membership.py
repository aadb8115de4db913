"""Which group of the optimizer each parameter is in: `param_groups` may be edited between two steps, as in plain torch.

What is trained was found out when the model was offloaded. The user may since have taken a parameter out of its group, moved it to
another one, or removed, inserted, reordered and replaced groups: that is followed at the next step, and wherever parameters are
numbered. What cannot be followed is refused by name before anything is changed, and can be undone.
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
    """Keeps `settings` of what is trained as the optimizer's groups are now.

    Args:
        optimizer: the user's.
        trainables: what is trained.
        names: of all parameters of the model, by id.

    Attributes:
        edits: how often `follow` found that the groups had changed.
        untrained: parameters that are in a group, and were frozen or in none when the model was offloaded.
        numbers: by id of a parameter that is in a group, its number in torch's state_dict.
    """

    def __init__(self, optimizer: Optimizer, trainables: Sequence[Trainable], names: Mapping[int, str]) -> None:
        self._optimizer = optimizer
        self._trainables = trainables
        self._names = names
        self._trained = {id(parameter) for trainable in trainables for parameter in trainable.parameters}
        self._settings = set.intersection(*(set(group) for group in optimizer.param_groups))  # that each group has
        self._known: list[list[int]] | None = None
        self.edits = 0
        self.untrained: list[nn.Parameter] = []
        self.numbers: dict[int, int] = {}

    def follow(self) -> None:
        """Have everything here as the groups are now. No step is open.

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
        """Raise StateError unless each parameter is the model's, and in one group only, and each group has all settings."""
        seen: dict[int, int] = {}
        for index, keys in enumerate(members):
            group = self._optimizer.param_groups[index]
            for setting in sorted(self._settings - group.keys()):
                raise StateError(
                    f"group {index} of the optimizer has no {setting!r}: add groups with optimizer.add_param_group(), which "
                    "fills in what is not given"
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
    """Return the names of the parameters that each group has, in order; what has none is refused at the next step.

    Args:
        names: of the model's parameters, by id.
    """
    return [[names[id(p)] for p in group.get("params", ()) if id(p) in names] for group in optimizer.param_groups]


def _describe(value: Any) -> str:
    return f"(shape {list(value.shape)})" if isinstance(value, torch.Tensor) else f"(a {type(value).__name__})"
