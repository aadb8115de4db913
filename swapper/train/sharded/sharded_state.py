"""Shows the optimizer's state of a sharded model as plain torch has it: for the model's parameters, as DTensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from swapper.train.sharded.shards import Shards, local_state, sharded_like, sharded_rows
from swapper.train.state.optim import packed_groups
from swapper.train.state.optimizer_state import OptimizerState
from swapper.train.state.state_view import StateView


class ShardedState:
    """The state of the shards of one model: see StateOwner (optim.py) and StateStore.

    Args:
        owner: has it.
        shards: of this rank.
        optimizer: the user's, over the model's parameters.
    """

    def __init__(self, owner: OptimizerState, shards: Shards, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._owner = owner
        self._shards = shards
        self._parameters = {id(shard.local): shard.parameter for shard in shards.all}
        self.view = StateView(self)

    @property
    def hidden(self) -> str | None:
        return "it would see shards for parameters, which fully_shard has made. Do that in step()"

    def save(self) -> dict[int, dict[str, Any]]:
        parameters = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        return {
            number: {key: sharded_like(value, parameters[number]) for key, value in state.items()}
            for number, state in self._owner.save().items()
        }

    def load(self, state: dict[int, dict[str, Any]]) -> None:
        self._owner.load({number: local_state(values) for number, values in state.items()})

    def skip_step(self, parameters: Iterable[torch.Tensor]) -> None:
        found = (self._shards.of.get(id(parameter)) for parameter in parameters)
        self._owner.skip_step(shard.local for shard in found if shard is not None)

    # --- see StateStore -------------------------------------------------------------------------------------------------

    def with_state(self) -> list[torch.Tensor]:
        return [self._parameters[id(local)] for local in self._owner.with_state()]

    def keys(self, parameter: torch.Tensor) -> list[str]:
        shard = self._shards.of.get(id(parameter))
        return [] if shard is None else self._owner.keys(shard.local)

    def read(self, parameter: torch.Tensor, key: str) -> Any:
        return sharded_like(self._owner.read(self._shards.of[id(parameter)].local, key), parameter)

    def put(self, states: Mapping[torch.Tensor, Mapping[str, Any]]) -> None:
        self._owner.put({self._shards.of[id(p)].local: local_state(state) for p, state in states.items()})


def model_state(shards: Shards) -> dict[str, Any]:
    """Return what torch.distributed.checkpoint.state_dict.get_model_state_dict does."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict  # takes a second

    return get_model_state_dict(shards.model)


def optimizer_state(shards: Shards, optimizer: Optimizer, state: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """Return what torch.distributed.checkpoint.state_dict.get_optimizer_state_dict does.

    Args:
        optimizer: of the shards.
        state: by number, as in torch's state_dict.
    """
    shard_of = {id(shard.local): shard for shard in shards.all}
    in_order = [shard_of[id(local)] for group in optimizer.param_groups for local in group["params"]]
    names = [_qualified(shard.name) for shard in in_order]
    settings = packed_groups(optimizer.param_groups)
    return {
        "state": {
            names[number]: {key: _like(value, in_order[number].parameter) for key, value in values.items()}
            for number, values in state.items()
        },
        "param_groups": [{**group, "params": [names[number] for number in group["params"]]} for group in settings],
    }


def _like(value: Any, parameter: Any) -> Any:
    """As `sharded_like`; of an encoded tensor the same for each of its parts, which have the parameter's rows."""
    if not isinstance(value, dict):
        return sharded_like(value, parameter)
    return {
        key: sharded_rows(part, parameter) if isinstance(part, torch.Tensor) else part for key, part in value.items()
    }


def _qualified(name: str) -> str:
    """Return a parameter's name as in torch's state dicts, without wrappers."""
    return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")
