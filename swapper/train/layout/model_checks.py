"""Checks that a model can be offloaded: its parameters, and what shares their memory before `offload` moves them.

Attributes that are views of one parameter follow it to its location. Other attributes, parameters and buffers that share its memory
are refused by name; of what is not the model's own (a state_dict that is kept, the graph of an earlier forward) nothing is known
but its number, and a warning tells it.
"""

from __future__ import annotations

import itertools
import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from swapper.errors import StateError, UnsupportedError
from swapper.modules.cold import is_cold
from swapper.modules.groups import check_plain, refuse_scripted
from swapper.modules.guarded import is_guarded
from swapper.tensors.torch_private import count_uses, storage_of
from swapper.train.optimizer.entries import StateForm, is_plain

log = logging.getLogger("swapper")


def check_model(
    model: nn.Module, may_be_meta: bool, device: torch.device | None, frozen_may_be: bool, is_sharded: bool
) -> None:
    """Check that a model can be offloaded.

    Args:
        may_be_meta: parameters may be on the meta device.
        device: of the model, if not the CPU.
        frozen_may_be: frozen ones may be there.
        is_sharded: the parameters are FSDP2's shards.

    Raises:
        UnsupportedError: it cannot be.
        StateError: it is offloaded already.
    """
    if not isinstance(model, nn.Module):
        raise UnsupportedError(f"offload takes an nn.Module, not {type(model).__name__}")
    refuse_scripted(model, "manager.offload")
    for name, parameter in model.named_parameters():
        if is_cold(parameter) or is_guarded(parameter):
            raise StateError(
                f"parameter {name} is offloaded already: a model can belong to only one manager, so close the other one "
                "first"
            )
        if getattr(parameter, "_fsdp_flattened", False):
            raise UnsupportedError(
                f"parameter {name} is a part of a flat tensor of FullyShardedDataParallel, which is not paged: shard "
                "the model with fully_shard instead (with Lightning: ModelParallelStrategy in place of FSDPStrategy)"
            )
        if nn.parameter.is_lazy(parameter):
            raise UnsupportedError(f"parameter {name} is not initialised yet: run one forward before manager.offload")
        if parameter.is_meta and not may_be_meta and (parameter.requires_grad or not frozen_may_be):
            raise UnsupportedError(
                f"parameter {name} is on the meta device and has no values: pass their source, "
                "manager.offload(..., init=function_of_a_module or the path of a checkpoint), or build the model on the CPU"
            )
        if parameter.device.type not in ("cpu", "meta") and parameter.device != device:
            raise UnsupportedError(
                f"parameter {name} is on {parameter.device}, and the model is to run on {device or 'the CPU'}: pass "
                f"manager.offload(..., device={str(parameter.device)!r}), or call model.to('cpu') before the optimizer is built"
            )
        if type(parameter).__name__ == "DTensor":
            raise UnsupportedError(
                f"parameter {name} is a DTensor, and torch's fully_shard was not called on the given {type(model).__name__}: give "
                "manager.offload the module on which it was called, or call it on this one too"
            )
        check_plain(name, parameter)
    _check_modules(model)
    check_shared(model, is_sharded)


def _check_modules(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad:
            raise UnsupportedError(
                f"{name or type(module).__name__} makes sparse gradients, which have no fixed place: build the embedding with "
                "sparse=False"
            )
        if type(module).__module__.partition(".")[0] == "transformer_engine":
            raise UnsupportedError(
                f"{name or 'the model'} is a {type(module).__name__} of Transformer Engine, which may keep its weights in fp8 from "
                "one forward to the next and write gradients past autograd: train in fp8 with torchao's convert_to_float8_training"
            )


def check_state(
    name: str, parameter: nn.Parameter, state: Mapping[str, object], form: StateForm, updated: torch.dtype
) -> None:
    """Raise UnsupportedError unless the optimizer's existing state of a parameter has the form of the trial's."""
    known = {key.name: key for key in form.keys}
    for key, value in state.items():
        if not isinstance(value, torch.Tensor):
            fits = is_plain(value)
        else:
            fits = key in known and tuple(value.shape) == known[key].shape(parameter.shape)
            fits = fits and (value.dtype == known[key].dtype or updated != parameter.dtype)
        if not fits:
            shape = f" of {value.dtype} and shape {list(value.shape)}" if isinstance(value, torch.Tensor) else ""
            raise UnsupportedError(
                f"the optimizer's state of {name} has {sorted(state)}, of which {key!r} (a {type(value).__name__}{shape}) is "
                f"not its own ({sorted(known)}): offload it with the state that it made, or with none"
            )


@dataclass(frozen=True)
class SharedAttribute:
    """A tensor in a module's attributes that is a view of a parameter.

    Attributes:
        offset: in elements, from the parameter's first.
    """

    tensor: torch.Tensor
    parameter: nn.Parameter
    offset: int


def check_shared(model: nn.Module, is_sharded: bool) -> None:
    """Refuse memory that parameters share: `offload` would separate what plain torch changes together.

    Args:
        is_sharded: the parameters are FSDP2's shards, whose memory it holds too.

    Raises:
        UnsupportedError: different parameters overlap, or a parameter and a buffer, or an attribute that is no view of one
            parameter; or something else holds the memory of several.
    """
    stored = _stored(model)
    buffers = [(name, b) for name, b in model.named_buffers() if _has_memory(b)]
    is_buffer = {name for name, _ in buffers}
    places = sorted((t.data_ptr(), t.data_ptr() + _span(t), name) for name, t in (*stored, *buffers))
    end, owner = 0, ""  # of the parameter, or buffer, that ends last so far
    for begin, its_end, name in places:
        if begin < end and not {owner, name} <= is_buffer:
            raise _overlap(owner, name, is_buffer)
        end, owner = max((end, owner), (its_end, name))
    if not is_sharded:
        attributes = _find_attributes(model)
        _check_flat(stored, [*(b for _, b in buffers), *attributes.values()])
        _find_owners(attributes, stored)


def _overlap(one: str, other: str, buffers: set[str]) -> UnsupportedError:
    if one in buffers or other in buffers:
        buffer, parameter = (one, other) if one in buffers else (other, one)
        return UnsupportedError(
            f"buffer {buffer} shares the memory of parameter {parameter}, which offload moves: give it its own "
            "(`module.buffer = module.buffer.clone()`), or read the parameter instead, before manager.offload"
        )
    return UnsupportedError(
        f"parameters {one} and {other} share memory without being one object: make them one "
        "(`a.weight = b.weight`), or give each its own (`b.weight.data = b.weight.data.clone()`), before manager.offload"
    )


def find_shared_attributes(model: nn.Module) -> list[SharedAttribute]:
    """Return the attributes that are views of a parameter. `check_shared` has passed."""
    return list(_find_owners(_find_attributes(model), _stored(model)))


def _find_owners(attributes: dict[str, torch.Tensor], stored: list[tuple[str, nn.Parameter]]) -> list[SharedAttribute]:
    by_address = sorted(stored, key=lambda member: member[1].data_ptr())  # none overlaps another
    addresses = [parameter.data_ptr() for _, parameter in by_address]
    found = []
    for name, tensor in attributes.items():
        begin, end = tensor.data_ptr(), tensor.data_ptr() + _span(tensor)
        at = bisect_left(addresses, end) - 1
        if at < 0 or addresses[at] + _span(by_address[at][1]) <= begin:
            continue
        of, parameter = by_address[at]
        is_inside = addresses[at] <= begin and end <= addresses[at] + parameter.nbytes
        is_plain = type(tensor) is torch.Tensor and tensor.dtype == parameter.dtype and not tensor.is_conj()
        if not is_inside or not is_plain or not parameter.is_contiguous():
            raise UnsupportedError(
                f"attribute {name} ({tensor.dtype} {list(tensor.shape)}) shares memory with parameter {of}, which offload moves, "
                "and is no view of it alone: give one of them its own (`p.data = p.data.clone()`) before manager.offload"
            )
        found.append(SharedAttribute(tensor, parameter, (begin - addresses[at]) // parameter.itemsize))
    return found


def _stored(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, parameter) for name, parameter in model.named_parameters() if _has_memory(parameter)]


def _check_flat(stored: list[tuple[str, nn.Parameter]], known: list[torch.Tensor]) -> None:
    """Refuse parameters that are parts of a storage that something else holds too; warn where it holds one's alone."""
    of_storage: dict[int | None, list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in stored:
        of_storage.setdefault(storage_of(parameter), []).append((name, parameter))
    others = Counter(storage_of(tensor) for tensor in known)
    held = []
    for storage, members in of_storage.items():
        unknown = count_uses(members[0][1]) - len(members) - others[storage]
        if unknown > 0 and len(members) > 1:
            raise UnsupportedError(
                f"parameters {members[0][0]} and {members[1][0]} are parts of one tensor that something outside of the model "
                "still holds (a flat buffer), and offload would separate them from it: give each its own memory (`p.data = "
                "p.data.clone()`), or drop that tensor, before manager.offload"
            )
        if unknown > 0:
            held.append(members[0][0])
    if held:
        log.warning(
            "offload: something outside of the model refers to the memory of %s%s (a state_dict that is kept, .data, an array, the "
            "graph of an earlier forward): it keeps the values of before, while in plain torch it follows the parameters",
            ", ".join(held[:3]), "" if len(held) <= 3 else f" and {len(held) - 3} more",
        )  # fmt: skip


def _find_attributes(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors in the attributes of modules, also in lists, tuples and dictionaries, by name; no buffers."""
    own = {id(tensor) for tensor in itertools.chain(model.parameters(), model.buffers())}
    found: dict[str, torch.Tensor] = {}
    for prefix, module in model.named_modules():
        for key, value in vars(module).items():
            for name, tensor in _tensors(f"{prefix}.{key}" if prefix else key, value, set()):
                if id(tensor) not in own and _has_memory(tensor):
                    own.add(id(tensor))
                    found[name] = tensor
    return found


def _tensors(name: str, value: object, seen: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, list | tuple | dict) and id(value) not in seen:
        seen.add(id(value))
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield from _tensors(f"{name}[{key!r}]", item, seen)


def _has_memory(tensor: torch.Tensor) -> bool:
    """Return True if a tensor has elements in host memory, or in an accelerator's."""
    if tensor.is_meta or tensor.layout is not torch.strided or not tensor.numel():
        return False
    try:
        return tensor.data_ptr() != 0
    except RuntimeError:  # it has no storage: functorch's, a fake one, a class that wraps others
        return False


def _span(tensor: torch.Tensor) -> int:
    """Return the bytes from the first element to the end of the last, for any strides."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize
