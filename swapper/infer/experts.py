"""Reads single experts of a mixture, only those with tokens; on a device, keeps the last used ones.

Copies to a device are made without a wait: host memory of experts is registered with the device, and a copy has a
stream of its own: those of weights that are used next overlap with the kernels before them. What an expert's value is
computed from stays there as it is stored.

Some models have a list of modules, each of them an expert, whose weights are read when it runs (`OnDemandHome`).
Current models of transformers have the experts of a layer in one parameter for each of their maps, of shape (experts,
out, in), and index it: `self.down_proj[expert]`. Such a parameter stays cold as a whole; its fault handler
passes the index here, and the expert's own bytes are read, wherever the checkpoint has them. The last used experts
stay, as far as the cache's share of the budget goes.
"""

from __future__ import annotations

import ast
import inspect
import math
import textwrap
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from swapper.device.copies import NewCopies, NewCopy
from swapper.device.device import OUT_OF_MEMORY
from swapper.device.device_memory import LockedMemory
from swapper.errors import StateError
from swapper.formats.stored import Empty
from swapper.infer.adoption import view_of
from swapper.infer.matching import Recipe
from swapper.infer.tracing import recipe_of_row
from swapper.infer.weight_rows import Reading, ReadInto
from swapper.infer.weights import FOR_INFERENCE
from swapper.modules.home import GroupHome, Update

Key = tuple[str, int, int]
"""Of a recipe in the cache: ("parameter", its id, expert) or ("group", its index, number of the weight)."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """An expert on the device.

    Attributes:
        copy: of it; `version` is that of its memory then.
        parts: of the expert as they are stored, views of that memory.
        users: streams that have waited for the copy.
    """

    copy: NewCopy
    parts: list[torch.Tensor]
    version: int
    users: set[torch.Stream] = field(default_factory=set)


class DeviceExperts:
    """Owns the copies, last used ones up to a limit, and host memory for what they are copied from.

    Args:
        copies: queues them.
        host_bytes: of that memory.
        limit: returns the bytes of the device that they may have, given those that images are to get now.
    """

    def __init__(self, copies: NewCopies, host_bytes: int, limit: Callable[[int], int]) -> None:
        self._copies = copies
        self._device = copies.device
        self._limit = limit
        self._memory = LockedMemory(copies.device, host_bytes)
        self._entries: OrderedDict[Key, _Entry] = OrderedDict()  # last used last
        self._used_bytes = 0

    def take(self, nbytes: int) -> torch.Tensor:
        """Return host memory, uint8 of shape (nbytes,). If the registered one is in too small pieces it is other memory."""
        self._copies.collect()
        found = self._memory.take(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu") if found is None else found

    def __contains__(self, key: Key) -> bool:
        return key in self._entries

    def was_changed(self, key: Key) -> bool:
        """Return True if somebody has written to an expert there."""
        entry = self._entries.get(key)
        return entry is not None and entry.copy.memory._version != entry.version

    def value(self, key: Key, recipe: Recipe) -> torch.Tensor:
        """Return an expert that is there, for kernels on the current stream."""
        self._entries.move_to_end(key)
        entry, current = self._entries[key], self._device.current_stream()
        if current not in entry.users:
            self._device.let_wait(current, entry.copy.filled_at)
            entry.users.add(current)
        with torch.inference_mode(False), torch.no_grad():
            return recipe.from_parts(entry.parts)

    def send(self, key: Key, recipe: Recipe, sources: Sequence[torch.Tensor]) -> None:
        """Queue the copy of an expert, whose parts `sources` have: uint8, read, in host memory.

        Raises:
            torch.OutOfMemoryError: the device has no memory left, after all others were dropped.
        """
        copy = self._copies.send(sources, self._allocate)
        with torch.inference_mode(False), torch.no_grad():
            parts = [view_of(copy.memory, at, part) for at, part in zip(copy.offsets, recipe.parts, strict=True)]
        self._entries[key] = _Entry(copy, parts, copy.memory._version)
        self._used_bytes += copy.memory.nbytes

    def drop(self, key: Key) -> None:
        """Drop an expert. Its memory is released when nobody has it any more, behind what uses it now."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._used_bytes -= entry.copy.memory.nbytes
            stream = entry.copy.stream
            self._device.let_wait(stream, entry.copy.filled_at)
            for user in entry.users - {stream}:
                self._device.let_wait(stream, self._device.record(user))

    def shrink(self, image_bytes: int) -> None:
        """Drop what is beyond the limit, when images are to get this many bytes."""
        self._shrink_to(self._limit(image_bytes))

    def close(self) -> None:
        """Drop all, and wait for copies in flight."""
        self._entries.clear()
        self._copies.finish()

    def _allocate(self, nbytes: int) -> torch.Tensor:
        self._shrink_to(self._limit(0) - nbytes)
        try:
            return self._device.empty(nbytes)
        except OUT_OF_MEMORY:
            self._shrink_to(0)
            self._device.release_cached()
            return self._device.empty(nbytes)

    def _shrink_to(self, nbytes: int) -> None:
        while self._entries and self._used_bytes > max(nbytes, 0):
            self.drop(next(iter(self._entries)))


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """One parameter that holds all experts of a layer, and the recipe of each one's part of it."""

    parameter: nn.Parameter
    recipes: tuple[Recipe, ...]

    @property
    def stored_bytes(self) -> int:
        return sum(recipe.stored_bytes for recipe in self.recipes)

    @property
    def made_bytes(self) -> int:
        """Memory of the result that is computed for one expert."""
        first = self.recipes[0]
        return 0 if first.make is None else math.prod(self.parameter.shape[1:]) * first.dtype.itemsize

    @property
    def largest_bytes(self) -> int:
        """Return the memory of one expert while it is read: its parts, and the result."""
        return max(recipe.stored_bytes for recipe in self.recipes) + self.made_bytes


def are_experts(name: str, module: nn.Module) -> bool:
    """Return True if `module` is a list of experts that are modules of their own, judged by its name."""
    is_list = isinstance(module, nn.ModuleList | nn.ModuleDict) and len(module) > 1
    return is_list and "expert" in name.rpartition(".")[2]


def takes_single_experts(module: nn.Module) -> bool:
    """Return True if `module` indexes its experts, by its own setting: other forms of transformers use all at once."""
    form = getattr(getattr(module, "config", None), "_experts_implementation", None)
    return form in (None, "eager") and not _gives_away(type(module), set(module._parameters))


def _gives_away(cls: type[nn.Module], names: Collection[str]) -> bool:
    """Return True if the source of the class's forward, if available, uses a parameter as a whole."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(cls.forward))))
    except (OSError, TypeError, SyntaxError):
        return False
    taken: list[ast.AST] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            taken += [*node.args, *(keyword.value for keyword in node.keywords)]
        elif isinstance(node, ast.BinOp):
            taken += [node.left, node.right]
    own = [node for node in taken if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)]
    return any(node.attr in names and getattr(node.value, "id", "") == "self" for node in own)


def find_recipes(name: str, parameter: nn.Parameter, recipe: Recipe) -> tuple[Recipe, ...] | None:
    """Return the recipe of each expert of `parameter`, or None if its experts cannot be read one by one."""
    if parameter.ndim != 3 or "experts" not in name.split("."):
        return None
    rows = [recipe_of_row(recipe, row) for row in range(parameter.shape[0])]
    return tuple(row for row in rows if row is not None) if all(rows) else None


@dataclass
class _CachedWeight(Reading):
    """One recipe's memory: the file's bytes, or the result if that is no larger."""

    recipe: Recipe
    memory: list[torch.Tensor] = field(default_factory=list)
    parts: list[torch.Tensor] = field(default_factory=list)
    leases: int = 0
    value: torch.Tensor | None = None
    version: int = 0  # of the value, when it was made

    @property
    def has_failed(self) -> bool:
        return any(ticket.done and ticket.error is not None for ticket in self.tickets)

    @property
    def was_changed(self) -> bool:
        return self.value is not None and self.value._version != self.version

    def ready(self, empty: Empty) -> torch.Tensor:
        """Return the value, in host memory: in `empty`'s if it is larger than what is stored, and computed at each use."""

        def memory(shape: Sequence[int], **options: Any) -> torch.Tensor:
            is_larger = math.prod(shape) * options["dtype"].itemsize > self.recipe.stored_bytes
            return (empty if is_larger else torch.empty)(shape, **options)

        self.wait()
        if self.value is not None:
            return self.value
        with torch.inference_mode(False), torch.no_grad():
            value = self.recipe.from_parts(self.parts, memory)
        if value.nbytes <= self.recipe.stored_bytes:
            self.value, self.parts, self.memory, self.version = value, [], [], value._version
        return value


class Experts:
    """Owns the experts in memory, the last used ones of all layers.

    Args:
        read: submits reads.
        cache_bytes: their maximum.
        empty: memory for results that are computed at each use.

    Attributes:
        there: those on the device of their use, if that is not the CPU.
    """

    def __init__(self, read: ReadInto, cache_bytes: int, empty: Empty = torch.empty) -> None:
        self.there: DeviceExperts | None = None
        self._read = read
        self._empty = empty
        self._cache_bytes = cache_bytes
        self._used_bytes = 0
        self._cache: OrderedDict[Key, _CachedWeight] = OrderedDict()  # last used last
        self._weights: dict[int, tuple[ExpertWeights, list[ExpertWeights]]] = {}  # by id; others of its layer

    def add_layer(self, layer: Sequence[ExpertWeights]) -> None:
        """Add the parameters of a layer that hold experts: one expert's parts of them are used together."""
        for weights in layer:
            self._weights[id(weights.parameter)] = weights, [other for other in layer if other is not weights]

    def take(self, parameter: nn.Parameter, index: Any) -> Any:
        """Return `parameter[index]`, or NotImplemented if that is not one expert."""
        if not _is_number(index):
            return NotImplemented
        weights, others = self._weights[id(parameter)]
        number = int(index)
        number += len(weights.recipes) if number < 0 else 0
        if not 0 <= number < len(weights.recipes):
            raise IndexError(f"expert {int(index)} of {len(weights.recipes)}")
        key: Key = ("parameter", id(parameter), number)
        if self._was_changed(key):
            self.forget_changed([key])
            raise StateError(
                f"expert {number} of a parameter of shape {list(parameter.shape)} was changed in a forward: {FOR_INFERENCE}. The "
                "change is undone"
            )
        if self.there is None:
            found = self._want(key, weights.recipes[number])
        else:
            value = self._value_there(self.there, key, weights.recipes[number])
        for other in others:
            self._prefetch(("parameter", id(other.parameter), number), other.recipes[number])  # it will be used next
        return found.ready(self._empty) if self.there is None else value

    def lease(
        self, recipes: Sequence[tuple[Key, Recipe]], next_ones: Sequence[tuple[Key, Recipe]]
    ) -> list[torch.Tensor]:
        """Return the results of `recipes`, valid until `release`. Those in `next_ones` will be requested next."""
        if self.there is not None:
            values = [self._value_there(self.there, key, recipe) for key, recipe in recipes]
            for key, recipe in next_ones:
                self._prefetch(key, recipe)
            return values
        found: list[_CachedWeight] = []
        try:
            for key, recipe in recipes:
                part = self._want(key, recipe)
                part.leases += 1
                found.append(part)
            for key, recipe in next_ones:
                self._want(key, recipe)
            return [part.ready(self._empty) for part in found]
        except BaseException:
            for part in found:
                part.leases -= 1
            raise

    def release(self, keys: Sequence[Key]) -> None:
        for key in keys if self.there is None else ():
            self._cache[key].leases -= 1

    def forget_changed(self, keys: Sequence[Key]) -> None:
        """Read unleased experts again that somebody wrote to."""
        for key in keys:
            part = self._cache.pop(key, None)
            self._used_bytes -= 0 if part is None else part.recipe.stored_bytes
            if self.there is not None:
                self.there.drop(key)

    def forget(self) -> None:
        for part in self._cache.values():
            part.settle()
        self._cache.clear()
        self._weights.clear()
        if self.there is not None:
            self.there.close()
            self.there = None

    def _was_changed(self, key: Key) -> bool:
        part = self._cache.get(key)
        return (part is not None and part.was_changed) or (self.there is not None and self.there.was_changed(key))

    def _value_there(self, there: DeviceExperts, key: Key, recipe: Recipe) -> torch.Tensor:
        if key not in there:
            part = self._want(key, recipe)
            part.wait()
            there.send(key, recipe, part.memory)
        return there.value(key, recipe)

    def _prefetch(self, key: Key, recipe: Recipe) -> None:
        if self.there is None or key not in self.there:
            part = self._want(key, recipe)
            if self.there is not None and part.is_read:
                self.there.send(key, recipe, part.memory)

    def _want(self, key: Key, recipe: Recipe) -> _CachedWeight:
        part = self._cache.get(key)
        if part is None:
            self._make_room(recipe.stored_bytes)
            part = _CachedWeight(recipe)
            self._begin(part)
            self._cache[key] = part
            self._used_bytes += recipe.stored_bytes
        elif part.has_failed:
            self._begin(part)
        self._cache.move_to_end(key)
        return part

    def _begin(self, part: _CachedWeight) -> None:
        part.memory, part.parts, part.tickets, part.value = [], [], [], None
        with torch.inference_mode(False):
            for stored in part.recipe.parts:
                memory = self._take(stored.nbytes)
                part.tickets.append(self._read(stored, 0, memory))
                part.memory.append(memory)
                part.parts.append(view_of(memory, 0, stored))

    def _take(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu") if self.there is None else self.there.take(nbytes)

    def _make_room(self, nbytes: int) -> None:
        idle = (key for key, part in list(self._cache.items()) if not part.leases)
        while self._used_bytes + nbytes > self._cache_bytes and (key := next(idle, None)) is not None:
            part = self._cache.pop(key)
            part.settle()
            self._used_bytes -= part.recipe.stored_bytes


class OnDemandHome(GroupHome):
    """The experts' cache, for a group of an expert that is a module of its own: read when that runs.

    Args:
        recipes: of the group's weights.
        with_it: the weights of the expert's other groups, which will be needed next.
    """

    def __init__(
        self, experts: Experts, recipes: Sequence[tuple[Key, Recipe]], with_it: Sequence[tuple[Key, Recipe]]
    ) -> None:
        super().__init__()
        self._experts = experts
        self._recipes = list(recipes)
        self._with_it = with_it
        self._leased: list[Key] = []

    def fetch(self, update: Update | None) -> bool:
        self.values = self._experts.lease(self._recipes, self._with_it)
        self._leased = [key for key, _ in self._recipes]
        return False  # which experts are used is not known ahead

    def give_back(self, changed: bool = False) -> None:
        keys, self._leased, self.values = self._leased, [], ()
        self._experts.release(keys)

    def forget(self) -> None:
        self.give_back()

    def discard_changes(self) -> None:
        self._experts.forget_changed([key for key, _ in self._recipes])

    def unmanage(self, number: int) -> None:
        del self._recipes[number]


def _is_number(index: object) -> bool:
    if isinstance(index, torch.Tensor):
        return index.ndim == 0 and not index.dtype.is_floating_point and index.dtype != torch.bool
    return type(index) is int
