"""Shows a session a model that `fully_shard` has sharded: this rank pages its shards. See passes/given_model.py."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar

from torch import nn
from torch.optim import Optimizer

from swapper.durability.ranks import Ranks
from swapper.errors import StateError, UnsupportedError
from swapper.formats.stored import StoredTensor
from swapper.io.engines import Engine
from swapper.train.layout.content import NOT_BY_ROWS
from swapper.train.layout.frozen import FrozenFiles
from swapper.train.layout.initial import Values
from swapper.train.optimizer.entries import StateForm
from swapper.train.optimizer.optimizer_set import OptimizerSet
from swapper.train.passes.gathering import Placed
from swapper.train.passes.given_model import GivenModel, HookTargets, ModelBinding
from swapper.train.sharded.buffers import buffer_bytes
from swapper.train.sharded.shard_hooks import ShardHooks
from swapper.train.sharded.shard_values import ShardValues, rows_of
from swapper.train.sharded.sharded_state import ShardedState, model_state, optimizer_state
from swapper.train.sharded.shards import Shards, optimizer_of, shard_count
from swapper.train.state.optim import StateOwner
from swapper.train.state.optimizer_state import OptimizerState


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
