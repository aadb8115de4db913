"""Shows a model that FSDP2 (torch.distributed.fsdp.fully_shard) has sharded as what this rank pages: its local shards.

[Note: the parts of a shard] FSDP2 keeps a rank's part of a parameter as `FSDPParam._sharded_param_data`, flat and padded to the
size of the largest rank's, and gathers from that. `FSDPParam.sharded_param`, the model's parameter, is a DTensor whose
`_local_tensor` is the part without padding, on the same storage. Autograd saves the gathered parameter, never the shard. So the
shard must be in memory while FSDP2 copies it into the all-gather's input, and at no other time.

[Note: shards of a model on an accelerator] They lie in host memory, as with FSDP2's CPUOffloadPolicy, and by its means: FSDP2
copies a shard there before it gathers it. A reduced gradient is copied to its place by swapper, and nobody waits for that; with
updates on the CPU FSDP2 copies it, and waits. So a shard is a CPU tensor in both cases, and torch allows it no gradient on a
device: it gets a tensor without data that refers to that (`stand_for`, gradients/cold_grad.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, overload

import torch
from torch import nn
from torch.optim import Optimizer

from swapper.errors import StateError, UnsupportedError
from swapper.tensors.torch_private import is_sharded

_PARTS = {
    "FSDPParamGroup": (
        "fsdp_params", "mesh_info", "mp_policy", "is_sharded", "unshard", "wait_for_unshard", "pre_forward", "post_backward",
        "_all_gather_result", "_reshard_after_forward", "_training_state", "comm_ctx", "device",
    ),
    "FSDPParam": (
        "sharded_param", "_sharded_param_data", "padded_sharded_param_size", "mesh_info", "fsdp_placement", "offload_to_cpu",
        "pin_memory", "param_dtype", "orig_dtype", "_orig_size", "_module_info", "reset_sharded_param", "to_sharded_dtensor",
    ),
    "DTensor": ("_local_tensor", "_spec", "placements", "device_mesh"),
}  # fmt: skip
"""What is used of FSDP2, most of it private, by class: other versions of torch may have something else."""
_PARTS_OF_SHARDS = "_all_gather_process_group", "_reduce_scatter_process_group"
"""Of an FSDPParamGroup that several ranks divide."""


@dataclass(frozen=True, eq=False)
class Shard:
    """This rank's part of one parameter.

    Attributes:
        fsdp_param: FSDP2's books of it.
        local: the part, as a plain parameter that is paged.
        padded_numel: elements that FSDP2 gathers from, at least as many as `local` has.
    """

    name: str
    fsdp_param: Any
    local: nn.Parameter
    padded_numel: int

    @property
    def parameter(self) -> nn.Parameter:
        """The model's parameter, a DTensor."""
        sharded: nn.Parameter = self.fsdp_param.sharded_param
        return sharded

    @property
    def is_by_rows(self) -> bool:
        """Whether the rank has whole rows, one after the other: not with tensor parallelism, which splits a parameter once more."""
        placements: Sequence[Any] = self.fsdp_param.sharded_param.placements
        return sum(not placement.is_replicate() for placement in placements) <= 1

    @property
    def rows(self) -> range:
        """The rows of the whole parameter that this rank has."""
        part = getattr(self.fsdp_param.mesh_info, "shard_mesh_rank", 0)  # `replicate` leaves each rank all of them
        begin = part * self.fsdp_param.padded_sharded_param_size[0]
        begin = min(begin, self.parameter.shape[0])
        return range(begin, begin + (self.local.shape[0] if self.local.dim() else 0))


class _GatheredGroup(nn.Module):
    """The shards of one FSDPParamGroup, which are gathered together."""

    def forward(self) -> None:
        raise NotImplementedError("it holds shards, and computes nothing")


class Shards(nn.Module):
    """The shards of a rank as a module that is never called. Each FSDPParamGroup is one group of swapper's.

    Args:
        model: the root that `fully_shard` was called on.

    Attributes:
        groups: a child for each FSDPParamGroup.
        by_group: for each FSDPParamGroup its shards.
        of: the shard of each of the model's parameters, by the parameter's id.

    Raises:
        UnsupportedError: a parameter is not sharded by rows, or by FSDP2 at all; or this version of torch lacks what is used.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = [model]  # no child: its parameters are not paged as they are
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        _begin(model)
        names.update({id(parameter): name for name, parameter in model.named_parameters()})
        self.groups = nn.ModuleList()
        self.by_group: list[tuple[Any, list[Shard]]] = []
        self.of: dict[int, Shard] = {}
        for group in param_groups_of(model):
            _check_parts(group, "FSDPParamGroup", () if shard_count(group) == 1 else _PARTS_OF_SHARDS)
            shards = [_shard(names[id(one.sharded_param)], one) for one in group.fsdp_params]
            self.by_group.append((group, shards))
            self.of.update({id(shard.parameter): shard for shard in shards})
            child = _GatheredGroup()
            for index, shard in enumerate(shards):
                child.register_parameter(str(index), shard.local)
            self.groups.append(child)
        for name, parameter in model.named_parameters():
            if id(parameter) not in self.of:
                raise UnsupportedError(
                    f"parameter {name} is not sharded, and others of the model are: call fully_shard(model) on the whole model "
                    "before manager.offload"
                )

    @property
    def model(self) -> nn.Module:
        return self._model[0]

    @property
    def all(self) -> list[Shard]:
        return [shard for _, shards in self.by_group for shard in shards]

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        if recurse and remove_duplicate:
            yield from ((shard.name, shard.local) for shard in self.all)
        elif recurse:
            named = self.model.named_parameters(prefix, remove_duplicate=False)
            yield from ((name, self.of[id(parameter)].local) for name, parameter in named)


def param_groups_of(model: nn.Module) -> list[Any]:
    """Return the FSDPParamGroups of `model`, each once, in the order of its modules."""
    found: dict[int, Any] = {}
    for module in model.modules():
        if is_sharded(module):
            state = module._get_fsdp_state()  # type: ignore[operator]
            groups = getattr(state, "_fsdp_param_groups", None)
            if groups is None:  # before torch 2.11
                groups = [] if state._fsdp_param_group is None else [state._fsdp_param_group]
            found.update({id(group): group for group in groups})
    return list(found.values())


def device_of(model: nn.Module) -> torch.device:
    """Return the device on which FSDP2 gathers a sharded model."""
    groups = param_groups_of(model)
    return groups[0].device if groups else torch.device("cpu")


def shard_count(param_group: Any) -> int:
    """Return among how many ranks an FSDPParamGroup divides its parameters: 1 with `replicate`."""
    return int(getattr(param_group.mesh_info, "shard_mesh_size", 1))


def _begin(model: nn.Module) -> None:
    """Have FSDP2 do what the first forward would do: shards may get other memory there."""
    if not is_sharded(model):
        raise UnsupportedError("only parts of the model are sharded: call fully_shard(model) last")
    groups = param_groups_of(model)
    checks = {"_validate_no_meta_params": lambda: None, "_validate_cpu_offload_params": lambda: None}
    for group in groups:
        vars(group).update(checks)  # shards on meta get memory when they are bound
    try:
        model._get_fsdp_state()._lazy_init()  # type: ignore[operator]
    finally:
        for group in groups:
            for name in checks:
                del vars(group)[name]


def _check_parts(owner: Any, kind: str, more: Sequence[str] = ()) -> None:
    """Raise UnsupportedError unless `owner` has what swapper uses of it."""
    missing = [name for name in (*_PARTS[kind], *more) if not hasattr(owner, name)]
    if missing:
        raise UnsupportedError(
            f"fully_shard of torch {torch.__version__} has no {kind}.{missing[0]}, which swapper uses: it pages shards of torch "
            "2.7 to 2.15. Install one of these, or a newer swapper"
        )


def _shard(name: str, fsdp_param: Any) -> Shard:
    _check_parts(fsdp_param, "FSDPParam")
    _check_parts(fsdp_param.sharded_param, "DTensor")
    spec = fsdp_param.sharded_param._spec
    if fsdp_param.fsdp_placement.dim != 0:
        raise UnsupportedError(
            f"parameter {name} is placed as {spec.placements}: swapper pages what fully_shard has sharded by rows, Shard(0): leave "
            "out shard_placement_fn"
        )
    part = fsdp_param.sharded_param._local_tensor
    if part.device.type not in ("cpu", "meta") and fsdp_param.sharded_param.grad is not None:
        raise StateError(
            f"parameter {name} has a gradient on {part.device}, and its shard is about to go to host memory: call "
            "optimizer.zero_grad() before manager.offload"
        )
    local = nn.Parameter(part.detach(), requires_grad=fsdp_param.sharded_param.requires_grad)
    return Shard(name, fsdp_param, local, fsdp_param._sharded_param_data.numel())


# --- the optimizer ------------------------------------------------------------------------------------------------------


class _GroupOfShards(MutableMapping[str, Any]):
    """A group of the user's optimizer, with shards in place of the model's parameters. What is set is set there."""

    def __init__(self, group: dict[str, Any], shards: Shards) -> None:
        self._group = group
        self._shards = shards

    def __getitem__(self, key: str) -> Any:
        value = self._group[key]
        of = self._shards.of
        return [of[id(p)].local if id(p) in of else p for p in value] if key == "params" else value

    def __setitem__(self, key: str, value: Any) -> None:
        if key == "params":
            of = {id(shard.local): shard.parameter for shard in self._shards.all}
            value = [of[id(local)] for local in value]
        self._group[key] = value

    def __delitem__(self, key: str) -> None:
        del self._group[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._group)

    def __len__(self) -> int:
        return len(self._group)


class _GroupsOfShards(Sequence[Any]):
    def __init__(self, optimizer: Optimizer, shards: Shards) -> None:
        self._optimizer = optimizer
        self._shards = shards

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        groups: Any = self._optimizer.param_groups[index]
        if isinstance(index, slice):
            return [_GroupOfShards(group, self._shards) for group in groups]
        return _GroupOfShards(groups, self._shards)

    def __delitem__(self, index: slice) -> None:
        del self._optimizer.param_groups[index]

    def __len__(self) -> int:
        return len(self._optimizer.param_groups)


def optimizer_of(optimizer: Optimizer, shards: Shards) -> Optimizer:
    """Return an optimizer of the same class, settings and state, which has the shards where `optimizer` has the parameters."""
    inner: Optimizer = object.__new__(type(optimizer))
    inner.__dict__.update(vars(optimizer))
    inner.__dict__["param_groups"] = _GroupsOfShards(optimizer, shards)
    inner.state = defaultdict(dict)
    for parameter, state in optimizer.state.items():
        inner.state[shards.of[id(parameter)].local] = local_state(state)
    return inner


def local_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an optimizer keeps for a parameter with the local parts of DTensors."""
    return {key: getattr(value, "_local_tensor", value) for key, value in state.items()}


def sharded_like(value: Any, parameter: Any) -> Any:
    """Return a tensor of a shard's shape as the DTensor that plain torch would keep for `parameter`; anything else as it is."""
    if not isinstance(value, torch.Tensor) or value.shape != parameter._local_tensor.shape or not value.dim():
        return value
    spec = parameter._spec
    if value.dtype == spec.tensor_meta.dtype and value.is_contiguous() and parameter.is_contiguous():
        return type(parameter.data)(value, spec, requires_grad=False)  # as from_local, in a hundredth of its time
    return sharded_rows(value, parameter)


def sharded_rows(value: torch.Tensor, parameter: Any) -> Any:
    """Return a tensor with the rows of a shard, however long, as a DTensor with those of `parameter`."""
    spec, shape = parameter._spec, torch.Size((parameter.shape[0], *value.shape[1:]))
    meta = type(spec.tensor_meta)(shape, torch.empty(shape, device="meta").stride(), value.dtype)
    return type(parameter.data)(
        value, replace(spec, tensor_meta=meta), requires_grad=False
    )  # from_local moves to the mesh
