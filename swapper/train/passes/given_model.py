"""Shows a session the user's model: what of it is paged, and how that looks from outside.

A model that this process has whole is paged as it is. Of one that `fully_shard` has sharded the rank pages its shards:
sharded/sharded_model.py has the same methods.

[Note: preparing a model] It passes what accelerate, Trainers and DistributedDataParallel do to a model before training.
accelerate moves it to the device of its rank, "cpu:0" without an accelerator: the same memory, and yet a copy for torch.

DDP's constructor sends the first rank's parameters to the others, from C++, which writes past the guard of cold parameters: into
a mapping that nobody reads. So `_sync_module_states` of torch.nn.parallel.distributed leaves parameters of managers to this
module, which sends them one by one and writes those that differ.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from swapper.durability.ranks import Ranks
from swapper.errors import StateError, UnsupportedError
from swapper.formats.stored import StoredTensor
from swapper.io.engines import Engine
from swapper.io.tensor_bytes import has_same_bits
from swapper.modules.cold import is_cold
from swapper.modules.groups import Models
from swapper.modules.guarded import FaultHandler, handler_of
from swapper.modules.module_hooks import OwnHook, copy_without_hooks
from swapper.runtime.process import is_off
from swapper.tensors.torch_private import replace_sync_of_ddp, sync_of_ddp, without_torch_functions
from swapper.train.gradients.cold_grad import ColdGradient
from swapper.train.groups.parameter_group import GroupParameters
from swapper.train.groups.session_guard import SessionEvents
from swapper.train.layout.given_values import FrozenFiles, Values
from swapper.train.layout.slices import TensorLocation
from swapper.train.optimizer.entries import StateForm
from swapper.train.optimizer.optimizer_set import OptimizerSet
from swapper.train.passes.fault_handler import ParameterFaultHandler
from swapper.train.passes.gathering import Placed, state_dict_of
from swapper.train.passes.train_hooks import PassOwner
from swapper.train.state.conditions import is_replicated
from swapper.train.state.optim import StateOwner, packed_groups
from swapper.train.state.optimizer_state import OptimizerState
from swapper.train.state.state_view import StateView
from swapper.train.steps.executor import UpdateExecutor

_without_averaging: weakref.WeakKeyDictionary[FaultHandler, str] = weakref.WeakKeyDictionary()  # and why


class ModelBinding(Protocol):
    """What an offloaded model has from its start to its end."""

    def follow_gradients(self) -> None:
        """A step begins: the paged parameters' gradients are those that the user sees."""
        return

    def shown(self) -> str | None:
        """Return the name of a parameter whose memory a tensor of the user's shows, and could not be hidden."""
        return None

    def remove(self, keep_cold: bool) -> None:
        """Take the hooks out. `keep_cold`: paged parameters stay on NVMe."""


class Preparation(ModelBinding):
    """What an offloaded model does when it is prepared, until `remove`. What DDP's constructor does stays.

    Args:
        model: the user's, or several as one.
        fault_handler: of its parameters.
        without_averaging: why DDP cannot average its gradients: see `averaging_refused`; "" if it can.
    """

    def __init__(self, model: nn.Module, fault_handler: FaultHandler, without_averaging: str) -> None:
        if not is_off("ddp"):
            replace_sync_of_ddp(_sync_module_states)
        if without_averaging:
            _without_averaging[fault_handler] = without_averaging
        self._models = [*model.children()] if isinstance(model, Models) else [model]
        for each in self._models:
            copy_without_hooks(each)
            each.__dict__["_apply"] = OwnHook(_apply_of(each))

    def remove(self, keep_cold: bool) -> None:
        for model in self._models:
            model.__dict__.pop("_apply", None)
        self._models.clear()


@dataclass(frozen=True)
class HookTargets:
    """What a model's hooks act on.

    Attributes:
        fault_handler: of the paged parameters.
        groups: of these.
        places: of tensors, by the name of the parameter and kind.
        kept_gradients: names of the parameters whose gradients stay autograd's own.
        takes_on_device: gradients are copied from an accelerator, and by now perhaps not yet.
        without_averaging: why DDP cannot average gradients: see `averaging_refused`; "" if it can.
        updates: told of what is about to be used.
        passes: begins forwards, and the phases of a step.
        finish: finishes an open step before an access by the user; raises if the manager cannot be used.
        events: of the session.
    """

    fault_handler: ParameterFaultHandler
    groups: list[GroupParameters]
    places: Mapping[tuple[str, str], TensorLocation]
    kept_gradients: frozenset[str]
    takes_on_device: bool
    without_averaging: str
    updates: UpdateExecutor
    passes: PassOwner
    finish: Callable[[], None]
    events: SessionEvents


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


# --- moving -------------------------------------------------------------------------------------------------------------


def _apply_of(module: nn.Module) -> Callable[..., nn.Module]:
    """Return `module._apply` that keeps tensors of which a conversion would only make an equal copy in host memory.

    So swapped parameters and gradients stay where they are in `model.cpu()`, which Lightning calls when it has trained.
    """
    of = weakref.ref(module)

    def apply(convert: Callable[[torch.Tensor], Any], recurse: bool = True) -> nn.Module:
        module = of()
        assert module is not None, "it was called on it"
        plain: Callable[..., nn.Module] = type(module)._apply
        return plain(module, lambda tensor: tensor if _only_copies(convert, tensor) else convert(tensor), recurse)

    return apply


def _only_copies(convert: Callable[[torch.Tensor], Any], tensor: torch.Tensor) -> bool:
    """Return whether `convert(tensor)` is a copy in host memory and nothing else, by asking it of a small tensor."""
    is_away = is_cold(tensor) or isinstance(tensor, ColdGradient)
    if tensor.layout != torch.strided or not (tensor.device.type == "cpu" or is_away):
        return False
    with without_torch_functions(), torch.no_grad():
        like = torch.ones((2,) * tensor.dim(), dtype=tensor.dtype, device=tensor.device)
        try:
            copy = convert(like)
            is_like = (copy.device.type, copy.dtype, copy.stride()) == ("cpu", like.dtype, like.stride())
            return copy is not like and is_like and torch.equal(copy, like.cpu())
        except Exception:
            return False  # the real conversion raises the error


# --- DistributedDataParallel --------------------------------------------------------------------------------------------


def _sync_module_states(
    module: nn.Module,
    process_group: Any,
    broadcast_bucket_size: int,
    src: int,
    params_and_buffers_to_ignore: Container[str],
    broadcast_buffers: bool = True,
) -> None:
    """As torch's function of this name; parameters of managers are read, one at a time, and written where they differ."""
    ignored = params_and_buffers_to_ignore
    ours = {name: p for name, p in module.named_parameters() if name not in ignored and handler_of(p) is not None}
    for handler in {handler_of(parameter) for parameter in ours.values()}:
        if handler is not None and handler in _without_averaging:
            raise UnsupportedError(_without_averaging[handler])
    named = {name for tensors in (module.named_parameters(), module.named_buffers()) for name, _ in tensors}
    left = {name for name in named if name in ignored or name in ours}
    sync_of_ddp(module, process_group, broadcast_bucket_size, src, left, broadcast_buffers)
    for parameter in ours.values():
        _sync(parameter, process_group, src)


@torch.no_grad()
def _sync(parameter: nn.Parameter, process_group: Any, src: int) -> None:
    own = parameter.detach().to(parameter.device)
    value = torch.empty_like(own).copy_(own)
    dist.broadcast(value, group=process_group, group_src=src)
    fault_handler = handler_of(parameter)
    if fault_handler is not None and not has_same_bits(value, own):
        fault_handler.write([parameter], torch.Tensor.copy_, lambda shown: parameter.copy_(value))


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

    def find_frozen(self, state: dict[int, dict[str, Any]]) -> dict[nn.Parameter, dict[str, Any]]:
        return self._owner.find_frozen(state, self._optimizers.numbers(self._member))

    def begin_frozen(self, state: Mapping[nn.Parameter, Mapping[str, Any]]) -> None:
        self._owner.begin_frozen(state)

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
