"""Shows a session a model that `fully_shard` has sharded: this rank pages its shards. See passes/given_model.py.

A model that was built on the meta device is initialized shard by shard: no rank ever has the whole model in memory. From a
checkpoint a rank reads the bytes of its own rows. A function is called with each module in turn, whose own parameters are whole
meanwhile, as on the CPU; the rank keeps its rows of them. The optimizer's state is shown as plain torch has it: for the model's
parameters, as DTensors.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from swapper.durability.ranks import Ranks
from swapper.errors import StateError, UnsupportedError
from swapper.formats.stored import StoredTensor
from swapper.io.engines import Engine
from swapper.modules.groups import Group
from swapper.train.layout.content import NOT_BY_ROWS
from swapper.train.layout.given_values import FrozenFiles, Initialize, Values
from swapper.train.optimizer.entries import StateForm
from swapper.train.optimizer.optimizer_set import OptimizerSet
from swapper.train.passes.gathering import Placed
from swapper.train.passes.given_model import GivenModel, HookTargets, ModelBinding
from swapper.train.sharded.buffers import buffer_bytes
from swapper.train.sharded.local_tensors import shown_like
from swapper.train.sharded.shard_hooks import ShardHooks
from swapper.train.sharded.shards import (
    Shard,
    Shards,
    local_state,
    optimizer_of,
    shard_count,
    sharded_like,
    sharded_rows,
)
from swapper.train.state.optim import StateOwner, packed_groups
from swapper.train.state.optimizer_state import OptimizerState
from swapper.train.state.state_view import StateView


class ShardValues(Values):
    """The source of initial values of a rank's shards. For arguments and errors see Values."""

    def __init__(
        self, init: Initialize | str | os.PathLike[str], shards: Shards, engine: Engine, external: Collection[str] = ()
    ) -> None:
        super().__init__(init, shards.model, engine, external)
        self._shard_of = {key: shard for key, shard in shards.of.items() if key in self._wanted}
        self._wanted = {id(shard.local) for shard in self._shard_of.values()}
        self._names = {id(shard.local): shard.name for shard in self._shard_of.values()}
        for shard in self._shard_of.values() if self._source is not None else ():
            self._stored[shard.name] = rows_of(self._stored[shard.name], shard)
        self._modules: Sequence[nn.Module] = ()
        self._whole: dict[int, nn.Parameter] = {}  # by id of the model's: those that another module owns too

    def batches(self, groups: Iterable[Group]) -> Iterator[tuple[list[nn.Parameter], list[nn.Parameter]]]:
        """See Values. A function is called in the order of `model.modules()`."""
        if self._source is not None:
            yield from super().batches(groups)
            return
        group_of = {id(local): group.index for group in groups for _, local in group.parameters}
        owning = ((module, self._own(module)) for module in self._model.modules())
        known = ((module, own) for module, own in owning if own)
        for _, batch in groupby(known, key=lambda item: {group_of[id(shard.local)] for shard in item[1].values()}):
            members = list(batch)
            self._modules = [module for module, _ in members]
            locals_ = list({id(s.local): s.local for _, own in members for s in own.values()}.values())
            yield locals_, locals_

    @torch.no_grad()
    def fill(self, parameters: Iterable[nn.Parameter]) -> None:
        if self._source is not None:
            super().fill(parameters)
            return
        for module in self._modules:
            self._fill_module(module, self._own(module))

    def _fill_module(self, module: nn.Module, own: dict[str, Shard]) -> None:
        """Call the function with `module` while its own parameters are whole, and keep this rank's rows."""
        sharded = dict(module._parameters)
        for name, shard in own.items():
            whole = self._whole.get(id(shard.parameter))
            if whole is None:
                zeros = torch.zeros(shard.parameter.shape, dtype=shard.local.dtype, device="cpu")
                whole = nn.Parameter(zeros, requires_grad=shard.local.requires_grad)
            module._parameters[name] = whole
        try:
            self._initialize(module)
            for name, shard in own.items():
                found: Any = module._parameters[name]
                shard.local.copy_(found[shard.rows.start : shard.rows.stop])
                if any(id(module) not in self._done for module in self._owners(shard)):
                    self._whole[id(shard.parameter)] = found
                else:
                    self._whole.pop(id(shard.parameter), None)
        finally:
            module._parameters.update(sharded)

    def _own(self, module: nn.Module) -> dict[str, Shard]:
        """Return the shards of the module's own parameters, by attribute."""
        own = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
        found = {name: self._shard_of[id(p)] for name, p in own.items() if id(p) in self._shard_of}
        if found and len(found) < len(own):
            raise UnsupportedError(
                f"{type(module).__name__} has parameters on the meta device ({', '.join(found)}) and others that are not: init= "
                "would be called with shards. Build all of them on the meta device, or none"
            )
        return found

    def _owners(self, shard: Shard) -> Iterator[nn.Module]:
        return (m for m in self._model.modules() if any(p is shard.parameter for p in m._parameters.values()))


def rows_of(stored: StoredTensor, shard: Shard) -> StoredTensor:
    """Return the place of a shard's rows in a stored tensor. Raises UnsupportedError: they are not one run of bytes."""
    rows = shard.rows
    if not rows:
        return replace(stored, shape=tuple(shard.local.shape), nbytes=0, stride=None)
    found = stored.rows(rows.start, rows.stop)
    if found is None:
        raise UnsupportedError(
            f"{stored.name!r} in {stored.path} is not contiguous, so rows of it cannot be read alone: make one file of it by "
            f"`swapper export {stored.path} NEW --to safetensors`"
        )
    return found


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
            number: {key: shown_like(value, parameters[number]) for key, value in state.items()}
            for number, state in self._owner.save().items()
        }

    def load(self, state: dict[int, dict[str, Any]]) -> None:
        self._owner.load({number: local_state(values) for number, values in state.items()})

    def find_frozen(self, state: dict[int, dict[str, Any]]) -> dict[nn.Parameter, dict[str, Any]]:
        return self._owner.find_frozen({number: local_state(values) for number, values in state.items()})

    def begin_frozen(self, state: Mapping[nn.Parameter, Mapping[str, Any]]) -> None:
        self._owner.begin_frozen(state)

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
        return shown_like(self._owner.read(self._shards.of[id(parameter)].local, key), parameter)

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


class ShardedModel(GivenModel):
    """A model whose shards of this rank are paged.

    Raises:
        UnsupportedError: see Shards.
    """

    is_sharded: ClassVar[bool] = True
    buffers: ClassVar[tuple[str, str]] = "FSDP2's buffers", "gathered parameters and reduced gradients"

    def __init__(self, given: nn.Module) -> None:
        super().__init__(given)
        self.module = self.shards = Shards(given)
        shards = self.shards.all
        self.device = shards[0].fsdp_param.device
        self.padded_numel = {id(shard.local): shard.padded_numel for shard in shards}
        self.whole_shapes = {id(shard.local): shard.parameter.shape for shard in shards}
        self.rows = {
            shard.name: (shard.rows.start, shard.parameter.shape[0]) if shard.is_by_rows else NOT_BY_ROWS
            for shard in shards
        }

    def buffer_bytes(self) -> int | None:
        return buffer_bytes(self.shards)

    def paged(self, parameter: nn.Parameter) -> nn.Parameter:
        shard = self.shards.of.get(id(parameter))
        return parameter if shard is None else shard.local

    def names_of_given(self, names: Mapping[int, str]) -> Mapping[int, str]:
        return {key: shard.name for key, shard in self.shards.of.items()}

    def peers(self) -> tuple[int, ...]:
        mesh: Any = self.shards.all[0].parameter.device_mesh  # type: ignore[attr-defined]
        return tuple(mesh.mesh.flatten().tolist())

    def gathers(self) -> list[str]:
        return [
            f"{', '.join(shard.name for shard in shards)} by fully_shard({group.mp_policy}, reshard_after_forward="
            f"{group._reshard_after_forward}) over {shard_count(group)} ranks"
            for group, shards in self.shards.by_group
        ]

    def optimizers_of(self, given: Sequence[Optimizer]) -> list[Optimizer]:
        return [optimizer_of(one, self.shards) for one in given]

    def check_optimizer(self, forms: Iterable[StateForm], name: str) -> None:
        """Raise UnsupportedError if the optimizer looks at more than one element: it would see a shard for the whole."""
        if not all(form.may_cut for form in forms):
            raise UnsupportedError(
                f"{name} does not treat each element by itself, and a rank has only a shard of each parameter: use an elementwise "
                "optimizer (AdamW, SGD, ...) with a model that fully_shard has sharded, or DistributedDataParallel in its place"
            )

    def check_rows(self, option: str) -> None:
        if not all(shard.is_by_rows for shard in self.shards.all):
            raise UnsupportedError(
                f"{option} needs shards of whole rows, which tensor parallelism does not leave: leave it out, and load values with "
                "torch.distributed.checkpoint"
            )

    def prepare_more(self, ranks: Ranks) -> None:
        """All shards without gradients, whose places are about to change, require gradients where the parameters do by now."""
        ranks.settle("train more parameters", self._check_without_gradients, lambda _: None)
        for shard in self.shards.all:
            shard.local.requires_grad_(shard.parameter.requires_grad)

    def _check_without_gradients(self) -> None:
        for shard in self.shards.all:
            if shard.parameter.grad is not None:
                raise StateError(
                    f"a sharded model gets more to train while {shard.name} has a gradient: call optimizer.add_param_group(...) "
                    "between optimizer.zero_grad() and the next forward, with the parameters that are unfrozen then. Leave frozen "
                    "ones out of the groups until then"
                )

    def find_external(self, frozen: FrozenFiles, wanted: Mapping[str, nn.Parameter]) -> dict[str, StoredTensor]:
        """The rows of shards. FSDP2 reads a shard's padding too, which is not in the file: such a shard has a copy of its own."""
        self.check_rows("external=")
        shards = {shard.name: shard for shard in self.shards.all}
        whole = {name: p for name, p in wanted.items() if shards[name].padded_numel == p.numel()}
        found = frozen.find(self.module, whole, self.whole_shapes)
        return {name: rows_of(stored, shards[name]) for name, stored in found.items()}

    def initial_values(self, init: Any, engine: Engine, external: Collection[str]) -> Values:
        self.check_rows("init=")
        return ShardValues(init, self.shards, engine, external)

    def bind(self, targets: HookTargets) -> ModelBinding:
        return ShardHooks(self.shards, targets)

    def state_owner(
        self, owner: OptimizerState, optimizers: OptimizerSet, given: Sequence[Optimizer], member: int
    ) -> StateOwner:
        return ShardedState(owner, self.shards, given[member])

    def state_dict(self, placed: Placed | None) -> dict[str, Any]:
        return model_state(self.shards)

    def optimizer_state_dict(self, optimizer: Optimizer, state: dict[int, dict[str, Any]]) -> dict[str, Any]:
        return optimizer_state(self.shards, optimizer, state)
