"""Matches tensors of a checkpoint with parameters and buffers of a model. Pure: changes neither."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from swapper.checkpoint.quantization import QuantizedLayout, layouts_of
from swapper.errors import CheckpointError, ConfigError, StateError, UnsupportedError
from swapper.formats.sources import Rename, Source, renamed
from swapper.formats.stored import ChunkedTensor, Empty, StoredTensor
from swapper.modules.cold import is_cold
from swapper.modules.groups import check_plain, refuse_scripted
from swapper.modules.guarded import is_guarded
from swapper.tensors.torch_private import storage_of

SHOWN_NAMES = 8  # in a message

Make = Callable[[Sequence[torch.Tensor], Empty], torch.Tensor]
"""Makes a tensor from its parts in the checkpoint, in memory that it is given. Its result may be a view of the parts."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to make a tensor from a checkpoint.

    Attributes:
        make: computes it from `parts`; None if it is the only one of them.
        by_rows: `make` treats each row alike, that is each index of the first dimension, which all parts have.
        node: its traced computation, if any (swapper.infer.tracing).
    """

    parts: tuple[StoredTensor, ...]
    make: Make | None
    dtype: torch.dtype
    by_rows: bool = False
    node: Any = None

    @property
    def stored_bytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def rows(self, begin: int, end: int) -> Recipe | None:
        """Return the recipe of `tensor[begin:end]`, which reads no other rows; None if there is none."""
        if self.make is not None and not self.by_rows:
            return None
        parts = [part.rows(begin, end) for part in self.parts]
        if any(part is None for part in parts):
            return None
        return replace(self, parts=tuple(part for part in parts if part is not None), node=None)

    def from_parts(self, parts: Sequence[torch.Tensor], empty: Empty = torch.empty) -> torch.Tensor:
        return parts[0] if self.make is None else self.make(parts, empty)


@dataclass(frozen=True, slots=True)
class Weight:
    """One parameter and its recipe.

    Attributes:
        name: the first of the parameter's names in the model.
    """

    name: str
    parameter: nn.Parameter
    recipe: Recipe

    @property
    def made_bytes(self) -> int:
        """Memory in addition to that of the parts while it is in use."""
        return 0 if self.recipe.make is None else self.parameter.numel() * self.recipe.dtype.itemsize


@dataclass(frozen=True, slots=True)
class BufferPlace:
    """A buffer in the checkpoint: the module and name under which it is registered."""

    module: nn.Module
    name: str
    recipe: Recipe


REMEDY = "what .to_dense(), .dequantize(), or .resolve_conj().resolve_neg() makes of them"


@dataclass(frozen=True)
class Match:
    """The result of `match`."""

    weights: list[Weight]
    buffers: list[BufferPlace]


def match(model: nn.Module, source: Source, *, strict: bool, dtype: torch.dtype | None, rename: Rename) -> Match:
    """Find each parameter and persistent buffer of `model` in `source`.

    A tied one may have any of its names there; of several the last counts, as it does for torch's load_state_dict.

    Raises:
        CheckpointError: names are missing or left over (if `strict`), or shapes differ; lists them.
        UnsupportedError: a parameter or buffer cannot be loaded.
        StateError: the model is loaded or offloaded already.
        ConfigError: an option is wrong.
    """
    if not isinstance(model, nn.Module):
        raise UnsupportedError(f"load takes an nn.Module, not {type(model).__name__}")
    refuse_scripted(model, "swapper.load")
    if not isinstance(strict, bool):
        raise ConfigError(f"strict={strict!r} must be True or False")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ConfigError(f"dtype={dtype!r} must be a floating-point torch.dtype, or None for the checkpoint's own")
    parameters: dict[int, nn.Parameter] = {}
    names_at: dict[Hashable, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        _check_parameter(name, parameter)
        parameters[id(parameter)] = parameter
        names_at.setdefault(_memory_of(parameter), []).append(name)
    refuse_aliases(model, parameters.values())
    _refuse_overlaps({names[0]: memory for memory, names in names_at.items() if isinstance(memory, Memory)})
    persistent = _persistent_buffers(model)
    names_of: dict[int, list[str]] = {}
    for name, buffer in persistent.items():
        names_of.setdefault(id(buffer), []).append(name)
    wanted = {name for names in names_at.values() for name in names} | persistent.keys()
    stored = renamed(source, wanted, rename)
    layouts = layouts_of(source.metadata, source.path)
    missing: list[str] = []

    def find(names: list[str], shape: torch.Size) -> Recipe | None:
        there = [name for name in names if name in stored]
        for name in there:
            _check_shape(name, tuple(shape), stored[name], layouts.get(stored[name].name))
        if not there:
            missing.append(names[0])
            return None
        last = stored[there[-1]]
        return _recipe(last, dtype, layouts.get(last.name))

    weights = [
        Weight(names[0], parameter, recipe)
        for parameter in parameters.values()
        if (recipe := find(names := names_at[_memory_of(parameter)], parameter.shape)) is not None
    ]
    recipes = {key: find(names, persistent[names[0]].shape) for key, names in names_of.items()}
    buffers = [
        BufferPlace(module, name, recipe)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if (recipe := recipes.get(id(buffer))) is not None
    ]
    unexpected = [name for name in stored if name not in wanted]
    others = [name for name in missing if any(f".{other}".endswith(f".{name}") for other in source.other_tensors)]
    if others or (strict and (missing or unexpected)):
        raise CheckpointError(
            f"{source.path} does not fit the model: {_listed('missing', missing)}; {_listed('unexpected', unexpected)}. "
            "Map names with rename=, or pass strict=False to skip unexpected names and keep the model's own values "
            "for missing ones"
            + (f". {_listed('sparse, quantized or lazy tensors', others)}: save {REMEDY}" if others else "")
        )
    check_values(model, {id(weight.parameter) for weight in weights}, buffers)
    return Match(weights, buffers)


def _recipe(stored: StoredTensor | ChunkedTensor, dtype: torch.dtype | None, layout: QuantizedLayout | None) -> Recipe:
    if isinstance(stored, ChunkedTensor):
        wanted = dtype if dtype is not None and stored.dtype.is_floating_point else stored.dtype
        parts = tuple(chunk.stored for chunk in stored.chunks)
        return Recipe(parts, lambda parts, empty: stored.assembled(parts, wanted, empty), wanted)
    if layout is not None:
        values = dtype or layout.torch_dtype
        return Recipe((stored,), lambda parts, empty: layout.dequantise(parts[0], values, empty), values, by_rows=True)
    if dtype is None or dtype == stored.dtype or not stored.dtype.is_floating_point:
        return Recipe((stored,), None, stored.dtype)
    return Recipe((stored,), lambda parts, empty: _cast(parts[0], dtype, empty), dtype, by_rows=True)


def _cast(tensor: torch.Tensor, dtype: torch.dtype, empty: Empty) -> torch.Tensor:
    if not tensor.is_contiguous():
        return tensor.to(dtype)  # which keeps the order of its dimensions
    return empty(tensor.shape, dtype=dtype, device=tensor.device).copy_(tensor)


def shape_of(stored: StoredTensor | ChunkedTensor, layout: QuantizedLayout | None) -> tuple[int, ...]:
    """Return the shape of the values in `stored`, quantized or not.

    Raises:
        CheckpointError: a quantized tensor does not have the shape of its layout.
    """
    if layout is None or isinstance(stored, ChunkedTensor):
        return stored.shape
    return layout.values_shape(stored)


class Memory(NamedTuple):
    """The elements of a parameter in memory. `begin` and `end` are bytes of its storage, none if there are gaps."""

    storage: int
    begin: int
    end: int
    shape: torch.Size
    stride: tuple[int, ...]


def _memory_of(parameter: nn.Parameter) -> Hashable:
    """Return what is equal for parameters of the same elements in memory: torch loads what one is given into both."""
    if parameter.is_meta:
        return id(parameter)
    begin = int(parameter.storage_offset()) * parameter.itemsize
    last = sum((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True))
    is_dense = last + 1 == parameter.numel()
    end = begin + int(parameter.nbytes) if is_dense else begin
    return Memory(parameter.untyped_storage()._cdata, begin, end, parameter.shape, parameter.stride())


def _refuse_overlaps(memory: Mapping[str, Memory]) -> None:
    """Raise UnsupportedError if parameters share some of their elements: torch would load the last of both into those."""
    before, name_before = Memory(0, 0, 0, torch.Size(), ()), ""
    for name, one in sorted(memory.items(), key=lambda item: item[1][:3]):
        if one.storage == before.storage and one.begin < min(before.end, one.end):
            raise UnsupportedError(
                f"parameters {name_before} and {name} share memory without being one object: make them one (`a.weight = "
                "b.weight`), or give each its own (`b.weight.data = b.weight.data.clone()`), before the load"
            )
        if one.storage != before.storage or one.end > before.end:
            before, name_before = one, name


def refuse_aliases(model: nn.Module, parameters: Collection[nn.Parameter]) -> None:
    """Raise UnsupportedError if the model has another tensor in the memory of a parameter, which will have other memory."""
    storages = {storage_of(parameter) for parameter in parameters if not parameter.is_meta}
    own = {id(parameter) for parameter in parameters}
    for prefix, module in model.named_modules() if storages else ():
        attributes = {**module.__dict__, "_buffers": None, **module._buffers}
        for name, tensor in ((name, tensor) for name, value in attributes.items() for tensor in _tensors_in(value)):
            if id(tensor) not in own and storage_of(tensor) in storages:
                qualified = f"{prefix}.{name}" if prefix else name
                raise UnsupportedError(
                    f"{qualified} shares the memory of a parameter, and would keep the parameter's first values: a loaded model's "
                    "weights are read into other memory. Make it from the parameter in the forward that uses it"
                )


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a module's attribute, other than the table of its parameters."""
    if isinstance(value, torch.Tensor):
        yield value
    elif type(value) in (list, tuple, dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(item)


def _persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return buffers by qualified name, as state_dict does, with each name of a shared one."""
    found = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                found[f"{prefix}.{name}" if prefix else name] = buffer
    return found


def _check_parameter(name: str, parameter: nn.Parameter) -> None:
    if is_cold(parameter) or is_guarded(parameter):
        raise StateError(f"parameter {name} is paged already: unload the model, or close its manager, first")
    check_plain(name, parameter)
    if parameter.device.type not in ("meta", "cpu"):
        raise UnsupportedError(f"parameter {name} is on {parameter.device}: build the model on meta or the CPU")


def _check_shape(
    name: str, shape: tuple[int, ...], stored: StoredTensor | ChunkedTensor, layout: QuantizedLayout | None
) -> None:
    found = shape_of(stored, layout)
    if shape != found:
        raise CheckpointError(
            f"{name} has the shape {list(shape)} in the model and {list(found)} in {stored.path} (as {stored.name!r}): build "
            "the model of this checkpoint, or map names with rename="
        )


def check_values(model: nn.Module, loaded: set[int], buffers: list[BufferPlace]) -> None:
    """Check that everything has values: a tensor on the meta device that is not loaded has none."""
    for name, parameter in model.named_parameters():
        if id(parameter) not in loaded and parameter.device.type == "meta":
            raise UnsupportedError(f"parameter {name} is not in the checkpoint, and has no values on the meta device")
    filled = {(id(place.module), place.name) for place in buffers}
    without = [
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and buffer.device.type == "meta" and (id(module), name) not in filled
    ]
    if without:
        raise UnsupportedError(
            f"{_listed('buffers', without)} are not in the checkpoint and, on the meta device, have no values. Build the model "
            "`with swapper.without_weights():` instead of `with torch.device('meta'):`, which makes buffers properly"
        )


def _listed(what: str, names: Sequence[str]) -> str:
    if not names:
        return f"{what}: none"
    more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
    return f"{what}: {', '.join(names[:SHOWN_NAMES])}{more}"
