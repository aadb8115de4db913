"""Shows one optimizer of several its own part of the state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from swapper.errors import StateError
from swapper.train.optimizer.optimizer_set import OptimizerSet
from swapper.train.state.optimizer_state import OptimizerState
from swapper.train.state.state_view import StateView


class MemberState:
    """Shows one optimizer of several its own part of the state: see StateOwner (optim.py) and StateStore.

    Args:
        owner: has the state of all.
        optimizers: all.
        member: the number of this one.
    """

    def __init__(self, owner: OptimizerState, optimizers: OptimizerSet, member: int) -> None:
        self._owner = owner
        self._optimizers = optimizers
        self._member = member
        self.view = StateView(self)

    @property
    def hidden(self) -> str | None:
        return self._owner.hidden

    def save(self) -> dict[int, dict[str, Any]]:
        return self._owner.save(self._optimizers.numbers(self._member))

    def load(self, state: dict[int, dict[str, Any]]) -> None:
        self._owner.load(state, self._optimizers.numbers(self._member))

    def skip_step(self, parameters: Iterable[torch.Tensor]) -> None:
        self._owner.skip_step(parameters)

    def with_state(self) -> list[torch.Tensor]:
        own = self._own
        return [parameter for parameter in self._owner.with_state() if id(parameter) in own]

    def keys(self, parameter: torch.Tensor) -> list[str]:
        return self._owner.keys(parameter) if id(parameter) in self._own else []

    def read(self, parameter: torch.Tensor, key: str) -> Any:
        return self._owner.read(parameter, key)

    def put(self, states: Mapping[torch.Tensor, Mapping[str, Any]]) -> None:
        own = self._own
        for parameter, state in states.items():
            if state and id(parameter) not in own:
                raise StateError(
                    f"the state of {self._optimizers.describe_member(self._member)} was given a parameter of shape "
                    f"{list(parameter.shape)} that is in none of its groups"
                )
        self._owner.put({parameter: state for parameter, state in states.items() if id(parameter) in own})

    @property
    def _own(self) -> set[int]:
        groups = self._optimizers.members[self._member].param_groups
        return {id(parameter) for group in groups for parameter in group["params"]}
