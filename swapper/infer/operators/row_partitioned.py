"""Multiplies by matrices larger than the budget: some rows at a time, read while the previous ones are in use.

The rows of a matrix are the outputs of the map, so each part gives its own columns of the result, and no sum changes.
The module's `forward` is replaced on the instance while the model is loaded. In bf16 and fp16 the result has the bits
of the whole matrix; in wider types torch may choose another kernel for another number of rows, and the last bits may
differ.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from swapper.infer.mapping.adoption import view_of
from swapper.infer.mapping.matching import Recipe
from swapper.infer.operators.embedding_rows import ReadInto, check_place
from swapper.infer.runtime.weights import refuse_gradient
from swapper.io.alignment import SECTOR_BYTES, TENSOR_ALIGNMENT_BYTES, round_up
from swapper.io.waiting import wait_for_all
from swapper.modules.own_hook import not_traced, outside_transforms
from swapper.runtime.interrupts import defer_sigint

PARTS_IN_MEMORY = 4
"""Parts that are read or in use at once: a choice."""
MAX_PART_BYTES = 2 << 20  # a choice
ROWS_MULTIPLE = 64
"""Rows. Kernels process rows in groups of this many, or a divisor of it: other cuts would treat the last ones
differently."""


@dataclass(frozen=True)
class RowPartitionedLinear:
    """A linear map that is multiplied by parts.

    Attributes:
        module: the map.
        weight: its matrix of shape (out, in).
        bias: of shape (out,), if it streams too; None if it is in memory or there is none.
        part_rows: how many rows are read together; the last part may have fewer.
    """

    module: nn.Linear
    weight: Recipe
    bias: Recipe | None
    part_rows: int

    @property
    def stored_bytes(self) -> int:
        return sum(recipe.stored_bytes for recipe in self._whole)

    @property
    def slot_bytes(self) -> int:
        """Return the stored bytes of one part, with each of its tensors anywhere in a sector."""
        parts = [part for recipe in self.recipes(0, self.part_rows) for part in recipe.parts]
        return sum(round_up(part.nbytes, SECTOR_BYTES) + SECTOR_BYTES for part in parts)

    @property
    def made_bytes(self) -> int:
        """Return the bytes made of one part while it is in use."""
        made = [recipe for recipe in self._whole if recipe.make is not None]
        return sum(self.part_rows * self.module.in_features * recipe.dtype.itemsize for recipe in made)

    def ranges(self) -> Iterator[tuple[int, int]]:
        """Yield (first row, end) of each part."""
        for begin in range(0, self.module.out_features, self.part_rows):
            yield begin, min(begin + self.part_rows, self.module.out_features)

    def recipes(self, begin: int, end: int) -> list[Recipe]:
        """Return the recipes of rows [begin, end) of the matrix, and of the bias if that streams."""
        found = [recipe.rows(begin, end) for recipe in self._whole]
        return [recipe for recipe in found if recipe is not None]  # all of them: `cut` has checked it

    @property
    def _whole(self) -> list[Recipe]:
        return [self.weight] if self.bias is None else [self.weight, self.bias]


def cut(module: nn.Module, weight: Recipe, bias: Recipe | None) -> RowPartitionedLinear | None:
    """Return the partition of `module`; None if it is not plain enough."""
    if type(module) is not nn.Linear or weight.rows(0, 1) is None or (bias is not None and bias.rows(0, 1) is None):
        return None
    row_bytes = max(weight.stored_bytes // module.out_features, 1)
    rows = max(min(MAX_PART_BYTES, weight.stored_bytes // 8) // row_bytes, 1)
    number = -(-module.out_features // rows)  # of about equal size, so that the last part is not a small one
    part_rows = min(round_up(-(-module.out_features // number), ROWS_MULTIPLE), module.out_features)
    return RowPartitionedLinear(module, weight, bias, part_rows)


class RowPrefetcher:
    """Owns the memory into which parts are read, one map at a time.

    Parts are used in the order of their requests, and use the slots in turn. When the last ones of a map are in flight,
    the first ones of the map that followed it the last time are requested: so the drive does not idle between maps.
    """

    def __init__(self, memory: torch.Tensor, read: ReadInto) -> None:
        self._slots = memory.view(PARTS_IN_MEMORY, -1)
        self._read = read
        self._number = 0  # of requested parts
        self._reading: deque[_Reading] = deque()  # requested and not used up
        self._last: RowPartitionedLinear | None = None
        self._after: dict[int, RowPartitionedLinear] = {}  # by id: the map that followed it

    def multiply(self, linear: RowPartitionedLinear, x: torch.Tensor) -> torch.Tensor:
        """Return the product of the whole map with `x`, on its device."""
        if any(part.of != id(linear) for part in self._reading):
            self._forget()  # another map was expected
        if self._last is not None:
            self._after[id(self._last)] = linear
        self._last = linear
        ranges = list(linear.ranges())
        following = self._after.get(id(linear))
        ahead = [] if following is None else [(following, *range_) for range_ in following.ranges()]
        wanted = chain([(linear, *range_) for range_ in ranges[len(self._reading) :]], ahead)
        outputs = []
        try:
            for begin, end in ranges:
                self._ask(wanted)
                weight, *bias = self._reading[0].ready(x.device)
                here = linear.module.bias
                known = bias[0] if bias else None if here is None else here[begin:end]
                outputs.append(F.linear(x, weight, known))
                self._reading.popleft()
            self._ask(wanted)
        except BaseException:
            self._forget()
            raise
        return torch.cat(outputs, dim=-1)

    def _ask(self, wanted: Iterator[tuple[RowPartitionedLinear, int, int]]) -> None:
        """Begin to read the next parts, as far as there are slots."""
        while len(self._reading) < PARTS_IN_MEMORY:
            asked = next(wanted, None)
            if asked is None:
                return
            linear, begin, end = asked
            with (
                defer_sigint,
                outside_transforms(),
            ):  # an unknown read would fill a slot that has another part by then
                self._reading.append(_Reading(id(linear), linear.recipes(begin, end)))
                self._submit(self._reading[-1], self._slots[self._number % PARTS_IN_MEMORY])
                self._number += 1

    def _forget(self) -> None:
        for part in self._reading:
            part.settle()
        self._reading.clear()

    def _submit(self, reading: _Reading, slot: torch.Tensor) -> None:
        """Begin to read a part. Each tensor lies in memory as in its sector, if that suits the kernels."""
        cursor = 0
        for stored in (part for recipe in reading.recipes for part in recipe.parts):
            in_sector = stored.offset % SECTOR_BYTES
            at = round_up(cursor, SECTOR_BYTES) + (in_sector if in_sector % TENSOR_ALIGNMENT_BYTES == 0 else 0)
            reading.tickets.append(self._read(stored, 0, slot[at : at + stored.nbytes]))
            reading.parts.append(view_of(slot, at, stored))
            cursor = at + stored.nbytes


@dataclass
class _Reading:
    of: int  # id of its map: it must not keep the model alive
    recipes: Sequence[Recipe]
    parts: list[torch.Tensor] = field(default_factory=list)
    tickets: list[Any] = field(default_factory=list)

    def ready(self, device: torch.device) -> list[torch.Tensor]:
        wait_for_all(self.tickets)
        parts = iter([part.to(device) for part in self.parts])
        with torch.inference_mode(False), torch.no_grad():
            return [recipe.from_parts([next(parts) for _ in recipe.parts]) for recipe in self.recipes]

    def settle(self) -> None:
        """Wait for a read that may be in flight, before the memory is reused."""
        for ticket in self.tickets:
            ticket.exception()


def multiply_by_parts(linear: RowPartitionedLinear, parts: RowPrefetcher, device: torch.device) -> None:
    """Make the module multiply by parts, on `device`, until `stop_cutting`."""

    own = linear.module.weight

    @not_traced
    def forward(x: torch.Tensor) -> torch.Tensor:
        if linear.module.weight is not own:  # torch.func.functional_call passes another one
            return type(linear.module).forward(linear.module, x)
        if torch.is_grad_enabled() and x.requires_grad:
            refuse_gradient()
        check_place(x, device)
        return parts.multiply(linear, x)

    linear.module.__dict__["forward"] = forward


def stop_cutting(module: nn.Module) -> None:
    if getattr(module.__dict__.get("forward"), "__module__", "") == __name__:
        del module.__dict__["forward"]
