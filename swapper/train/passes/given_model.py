"""Shows a session the user's model: what of it is paged, and how that looks from outside.

A model that this process has whole is paged as it is. Of one that `fully_shard` has sharded the rank pages its shards:
sharded/sharded_model.py has the same methods.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from swapper.durability.ranks import Ranks
from swapper.errors import StateError
from swapper.formats.stored import StoredTensor
from swapper.io.engines import Engine
from swapper.train.groups.parameter_group import GroupParameters
from swapper.train.layout.frozen import FrozenFiles
from swapper.train.layout.initial import Values
from swapper.train.layout.slices import TensorLocation
from swapper.train.optimizer.entries import StateForm
from swapper.train.optimizer.optimizer_set import OptimizerSet
from swapper.train.passes.fault_handler import ParameterFaultHandler
from swapper.train.passes.gathering import Placed, state_dict_of
from swapper.train.passes.preparation import ModelBinding, Preparation
from swapper.train.state.conditions import is_replicated
from swapper.train.state.optim import StateOwner, packed_groups
from swapper.train.state.optimizer_state import OptimizerState
from swapper.train.state.state_view import StateView
from swapper.train.steps.executor import UpdateExecutor


@dataclass(frozen=True, kw_only=True)
class HookTargets:
    """What a model's hooks act on.

    Attributes:
        fault_handler: of the paged parameters.
        groups: of these.
        place: returns where a parameter lies, by its name.
        kept_gradients: names of the parameters whose gradients stay autograd's own.
        without_averaging: why DDP cannot average gradients: see `averaging_refused`; "" if it can.
        updates: told of what is about to be used.
        enter_forward: called at the start of each forward; raises if the manager cannot be used.
        enter_phase: told which phase of a step begins.
        finish: finishes an open step before an access by the user; raises if the manager cannot be used.
        lose_ranks: told why this rank has left a collective that the others wait in.
    """

    fault_handler: ParameterFaultHandler
    groups: list[GroupParameters]
    place: Callable[[str], TensorLocation]
    kept_gradients: frozenset[str]
    without_averaging: str
    updates: UpdateExecutor
    enter_forward: Callable[[], None]
    enter_phase: Callable[[str], None]
    finish: Callable[[], None]
    lose_ranks: Callable[[BaseException], None]


class GivenModel:
    """A model that this process has whole, or several as one.

    Attributes:
        given: as given; its parameters are those that the user sees.
        module: its parameters are paged.
        is_sharded: they are shards.
        buffers: the name of what `buffer_bytes` counts, and its content.
        device: where parameters may be before they are paged, other than on the CPU.
        padded_numel: elements that are stored of a parameter, by the paged one's id, where these are more than it has.
        whole_shapes: the shape of each whole parameter, by the id of its shard.
        rows: the first row of each shard, and the rows of the whole parameter, by name.
    """

    is_sharded: ClassVar[bool] = False
    buffers: ClassVar[tuple[str, str]] = "DDP's buckets", "all gradients once more"
    device: torch.device | None = None
    padded_numel: Mapping[int, int] = {}
    whole_shapes: Mapping[int, torch.Size] = {}
    rows: Mapping[str, tuple[int, int]] = {}

    def __init__(self, given: nn.Module) -> None:
        self.given = given
        self.module = given

    def buffer_bytes(self) -> int | None:
        """Return how much memory DDP's buckets take, or FSDP2's own buffers at their peak; None without either.

        The buckets have all gradients once more. A model that is put into DDP later is not known here.
        """
        if not is_replicated(self.given):
            return None
        return sum(p.numel() * p.itemsize for p in self.given.parameters() if p.requires_grad)

    def paged(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return what is paged of a parameter that the user sees."""
        return parameter

    def names_of_given(self, names: Mapping[int, str]) -> Mapping[int, str]:
        """Return the names of the parameters that the user sees, by id; `names` are those of the paged ones."""
        return names

    def peers(self) -> tuple[int, ...]:
        """Return the ranks that hold the same model."""
        if isinstance(self.given, DistributedDataParallel):
            return tuple(dist.get_process_group_ranks(self.given.process_group))
        return ()

    def gathers(self) -> list[str]:
        """Return a line for what each rank gathers with the others at once, in order."""
        return []

    def optimizers_of(self, given: Sequence[Optimizer]) -> list[Optimizer]:
        """Return the user's optimizers over what is paged."""
        return list(given)

    def check_optimizer(self, forms: Iterable[StateForm], name: str) -> None:
        """Raise UnsupportedError if an optimizer with state of these forms is not exact on what is paged."""

    def check_rows(self, option: str) -> None:
        """Raise UnsupportedError unless each rank has whole rows of its shards, which `option` needs."""

    def prepare_more(self, ranks: Ranks) -> None:
        """More is about to be trained. Raises StateError, on all ranks, if it cannot be now."""

    def find_external(self, frozen: FrozenFiles, wanted: Mapping[str, nn.Parameter]) -> dict[str, StoredTensor]:
        """Return where the files have the `wanted` parameters, by name. See FrozenFiles.find."""
        return frozen.find(self.module, wanted)

    def initial_values(self, init: Any, engine: Engine, external: Collection[str]) -> Values:
        """Return the source of initial values. See Values."""
        return Values(init, self.module, engine, external)

    def bind(self, targets: HookTargets) -> ModelBinding:
        """Install the hooks of this kind of model."""
        return Preparation(self.module, targets.fault_handler, targets.without_averaging)

    def state_owner(
        self, owner: OptimizerState, optimizers: OptimizerSet, given: Sequence[Optimizer], member: int
    ) -> StateOwner:
        """Return the owner of the state that one of the `given` optimizers shows."""
        return owner if len(given) == 1 else MemberState(owner, optimizers, member)

    def state_dict(self, placed: Placed | None) -> dict[str, Any]:
        """Return what a snapshot has of the parameters. See `state_dict_of`."""
        return state_dict_of(self.module, placed)

    def optimizer_state_dict(self, optimizer: Optimizer, state: dict[int, dict[str, Any]]) -> dict[str, Any]:
        """Return what a snapshot has of one of the optimizers over what is paged; `state` is by number, as in torch."""
        return {"state": state, "param_groups": packed_groups(optimizer.param_groups)}


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
