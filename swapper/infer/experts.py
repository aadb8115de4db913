"""Experts of a mixture, read one by one: only those that tokens are routed to.

Current models hold the experts of a layer in one parameter for each of their maps, of shape (experts, out, in), and take one by its
index: `self.down_proj[expert]`. Such a parameter stays away as a whole; the guard on cold parameters sends the index here, and the
expert's own bytes are read, wherever the checkpoint has them. What was used last stays, as far as the cache's share of the budget
goes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from swapper.infer.adoption import view_of
from swapper.infer.matching import Recipe
from swapper.infer.rows import ReadInto
from swapper.infer.tracing import recipe_of_row


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """One parameter that holds all experts of a layer, and the recipe of each one's part of it."""

    parameter: nn.Parameter
    recipes: tuple[Recipe, ...]

    @property
    def stored_bytes(self) -> int:
        return sum(recipe.stored_bytes for recipe in self.recipes)

    @property
    def largest_bytes(self) -> int:
        """What one expert takes while it is read: its parts, and what is made of them."""
        return max(recipe.stored_bytes * (1 if recipe.make is None else 2) for recipe in self.recipes)


def takes_single_experts(module: nn.Module) -> bool:
    """Whether `module` indexes its experts, as far as it says: transformers has other forms, which take all at one time."""
    return getattr(getattr(module, "config", None), "_experts_implementation", None) in (None, "eager")


def find_recipes(name: str, parameter: nn.Parameter, recipe: Recipe) -> tuple[Recipe, ...] | None:
    """Return the recipe of each expert of `parameter`, or None if it does not hold experts that can be read one by one."""
    if parameter.ndim != 3 or "experts" not in name.split("."):
        return None
    rows = [recipe_of_row(recipe, row) for row in range(parameter.shape[0])]
    return tuple(row for row in rows if row is not None) if all(rows) else None


@dataclass
class _Expert:
    recipe: Recipe
    parts: list[torch.Tensor]
    tickets: list[Any]
    value: torch.Tensor | None = None

    def ready(self) -> torch.Tensor:
        for ticket in self.tickets:
            ticket.wait()
        self.tickets = []
        if self.value is None:
            self.value = self.recipe.from_parts(self.parts)
            self.parts = []
        return self.value


class Experts:
    """Owns the experts that are in memory, the last used ones of all layers.

    Args:
        layers: for each layer, its parameters that hold experts: one expert's parts of them are used together.
        read: submits reads.
        cache_bytes: the most that they take.
    """

    def __init__(self, layers: Sequence[Sequence[ExpertWeights]], read: ReadInto, cache_bytes: int) -> None:
        self._read = read
        self._cache_bytes = cache_bytes
        self._used_bytes = 0
        self._cache: OrderedDict[tuple[int, int], _Expert] = (
            OrderedDict()
        )  # by id of parameter and index; last used last
        self._weights = {id(w.parameter): (w, [o for o in layer if o is not w]) for layer in layers for w in layer}

    def take(self, parameter: nn.Parameter, index: Any) -> torch.Tensor | None:
        """Return `parameter[index]`, or None if that is not one expert."""
        if id(parameter) not in self._weights or not _is_number(index):
            return None
        weights, others = self._weights[id(parameter)]
        number = int(index)
        number += len(weights.recipes) if number < 0 else 0
        if not 0 <= number < len(weights.recipes):
            raise IndexError(f"expert {int(index)} of {len(weights.recipes)}")
        found = self._want(weights, number)
        for other in others:
            self._want(other, number)  # it will be asked for next
        with torch.inference_mode(False), torch.no_grad():
            return found.ready()

    def forget(self) -> None:
        for expert in self._cache.values():
            for ticket in expert.tickets:
                ticket.exception()
        self._cache.clear()
        self._weights.clear()

    def _want(self, weights: ExpertWeights, number: int) -> _Expert:
        key = (id(weights.parameter), number)
        if key in self._cache:
            self._cache.move_to_end(key)
            return self._cache[key]
        recipe = weights.recipes[number]
        self._make_room(_bytes_of(recipe))
        parts, tickets = [], []
        with torch.inference_mode(False):
            for stored in recipe.parts:
                memory = torch.empty(stored.nbytes, dtype=torch.uint8)
                tickets.append(self._read(stored, 0, memory.data_ptr(), stored.nbytes))
                parts.append(view_of(memory, 0, stored))
        self._cache[key] = _Expert(recipe, parts, tickets)
        self._used_bytes += _bytes_of(recipe)
        return self._cache[key]

    def _make_room(self, nbytes: int) -> None:
        while self._cache and self._used_bytes + nbytes > self._cache_bytes:
            _, expert = self._cache.popitem(last=False)
            for ticket in expert.tickets:  # asked for ahead and never used: its memory must outlive the read
                ticket.exception()
            self._used_bytes -= _bytes_of(expert.recipe)


def _bytes_of(recipe: Recipe) -> int:
    return recipe.stored_bytes


def _is_number(index: Any) -> bool:
    if isinstance(index, torch.Tensor):
        return index.ndim == 0 and not index.dtype.is_floating_point and index.dtype != torch.bool
    return type(index) is int
