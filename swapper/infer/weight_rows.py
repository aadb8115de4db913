"""Reads some rows of a weight instead of all of it: rows of an embedding, and matrices larger than the budget.

The weight stays cold, unless another module uses it too (a tied output projection). torch hands F.embedding and
F.linear of a cold weight to its fault handler, which calls these operators: the modules are not changed, and whatever a
user puts in place of a forward, a weight, a bias or a class counts.

An embedding reads the rows that a pass looks up, a few of a table of 32,000. A linear map is multiplied by some rows at
a time, read while the previous ones are in use: rows of a matrix are outputs of the map, so each part gives its own
columns of the result, and no sum changes. In bf16 and fp16 the result has the bits of the whole matrix; in wider types
torch may choose another kernel for another number of rows, and the last bits may differ.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, islice, repeat

import torch
import torch.nn.functional as F
from torch import nn

from swapper.device.copies import NewCopies, NewCopy
from swapper.errors import DeviceError
from swapper.formats.stored import Empty, StoredTensor
from swapper.infer.adoption import view_of
from swapper.infer.matching import Recipe, Weight
from swapper.infer.weights import refuse_gradient
from swapper.io.engines import Transfer, wait_for_all
from swapper.io.tensor_bytes import SECTOR_BYTES, TENSOR_ALIGNMENT_BYTES, round_up
from swapper.modules.cold import is_cold
from swapper.modules.groups import hooks_read_weights
from swapper.modules.module_hooks import outside_transforms
from swapper.runtime.interrupts import defer_signals

ReadInto = Callable[[StoredTensor, int, torch.Tensor], Transfer]
"""Submits a read of a stored tensor: (tensor, offset in it, contiguous memory to fill); returns the ticket."""

PARTS_IN_MEMORY = 4
"""Parts of matrices that are read or in use at once: a choice."""
MAX_PART_BYTES = 2 << 20  # a choice
ROWS_MULTIPLE = 64
"""Rows. Kernels process rows in groups of this many, or a divisor of it: other cuts treat the last ones differently."""


def check_place(tensor: torch.Tensor, device: torch.device) -> None:
    """Refuse an input on another device than the model's."""
    if tensor.device != device:
        raise DeviceError(
            f"an input is on {tensor.device}, and the model was loaded with device={str(device)!r}: move it there"
        )


# --- embeddings -------------------------------------------------------------------------------------------------------


def can_look_up(module: nn.Module, recipe: Recipe) -> bool:
    """Return True if `module` is an embedding whose rows can be read one by one, and nothing more."""
    is_plain = type(module) is nn.Embedding and module.max_norm is None and not hooks_read_weights(module)
    return is_plain and recipe.rows(0, 1) is not None


@dataclass(frozen=True)
class RowLookup:
    """F.embedding of one table, of which the requested rows are read.

    Attributes:
        table: of shape (rows, columns).
        read: submits reads.
        device: of the indices and the result.
        copies: to `device`; None: it is the CPU.
        wait: for reads; other callers of the model run meanwhile.
    """

    table: Weight
    read: ReadInto
    device: torch.device
    copies: NewCopies | None = None
    wait: Callable[[list[Transfer]], None] = wait_for_all

    def __call__(
        self, input: torch.Tensor, weight: torch.Tensor, padding_idx: int | None = None, max_norm: float | None = None,
        *of_gradients: object, **also: object,
    ) -> object:  # fmt: skip
        """Return the rows of the table at `input`, as F.embedding does; NotImplemented if it would change the table.

        Raises:
            IndexError: an index is out of range.
        """
        if max_norm is not None:
            return NotImplemented
        if input.dtype not in (torch.int64, torch.int32):
            return F.embedding(input, torch.empty(0, 0, device=input.device))  # torch's own error
        check_place(input, self.device)
        with torch.no_grad():
            unique, places = torch.unique(input, return_inverse=True)
            return F.embedding(places, self._rows(unique.tolist() or [0]))

    def _rows(self, rows: list[int]) -> torch.Tensor:
        """Return these rows, which ascend."""
        row_count, recipe = self.table.parameter.shape[0], self.table.recipe
        if not 0 <= rows[0] <= rows[-1] < row_count:
            raise IndexError(f"index out of range: {rows[0]} to {rows[-1]} in an embedding of {row_count} rows")
        empty = _empty if self.copies is None else self.copies.device.empty_on_host
        tables, tickets = [], []
        for stored in recipe.parts:
            row_bytes = stored.nbytes // row_count
            table = empty(len(rows) * row_bytes)
            tickets += [
                self.read(stored, begin * row_bytes, table[number * row_bytes : (number + count) * row_bytes])
                for number, begin, count in _runs(rows)
            ]
            tables.append(table)
        self.wait(tickets)
        if self.copies is not None:
            tables = _there(self.copies, tables)
        shaped = [
            table.view(stored.dtype).view(len(rows), *stored.shape[1:])
            for table, stored in zip(tables, recipe.parts, strict=True)
        ]
        return recipe.from_parts(shaped)


def _empty(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


def _there(copies: NewCopies, tables: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the bytes of `tables` on the device, for kernels that are queued next. Nobody waits here."""
    copy, device = copies.send(tables), copies.device
    device.let_wait(device.current_stream(), copy.filled_at)
    return [copy.memory[at : at + table.numel()] for at, table in zip(copy.offsets, tables, strict=True)]


def _runs(rows: list[int]) -> list[tuple[int, int, int]]:
    """Return (position in `rows`, first row, number of rows) of each run of neighbors; `rows` ascend."""
    found: list[tuple[int, int, int]] = []
    for number, row in enumerate(rows):
        if found and row == found[-1][1] + found[-1][2]:
            found[-1] = (found[-1][0], found[-1][1], found[-1][2] + 1)
        else:
            found.append((number, row, 1))
    return found


# --- linear maps ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RowPart:
    """Rows [begin, end) of a linear map, which are read together: of the matrix, and of the bias if that streams."""

    begin: int
    end: int
    recipes: Sequence[Recipe]
    sources: Sequence[tuple[int, StoredTensor]]  # with the offset of each in a slot


@dataclass(frozen=True)
class RowPartitionedLinear:
    """A linear map that is multiplied by parts.

    Attributes:
        weight: its matrix of shape (out, in).
        bias: of shape (out,), if it streams too; None if it is in memory or there is none.
        part_rows: rows that are read together; the last part may have fewer.
    """

    weight: Weight
    bias: Weight | None
    part_rows: int

    @property
    def row_count(self) -> int:
        return int(self.weight.parameter.shape[0])

    @property
    def columns(self) -> int:
        return int(self.weight.parameter.shape[1])

    @property
    def stored_bytes(self) -> int:
        return sum(recipe.stored_bytes for recipe in self._whole)

    @property
    def part_bytes(self) -> list[int]:
        """The stored bytes of each part."""
        return [sum(stored.nbytes for _, stored in part.sources) for part in self.parts]

    @property
    def slot_bytes(self) -> int:
        """The stored bytes of one part, with each of its tensors anywhere in a sector."""
        return sum(round_up(stored.nbytes, SECTOR_BYTES) + SECTOR_BYTES for _, stored in self.parts[0].sources)

    @property
    def made_bytes(self) -> int:
        """The bytes computed from one part while it is in use."""
        made = [recipe for recipe in self._whole if recipe.make is not None]
        return sum(self.part_rows * self.columns * recipe.dtype.itemsize for recipe in made)

    @cached_property
    def parts(self) -> list[RowPart]:
        """All parts, in order."""
        return [self._part(begin) for begin in range(0, self.row_count, self.part_rows)]

    def _part(self, begin: int) -> RowPart:
        """Return a part. Each tensor lies in its slot as in its sector, if that suits the kernels."""
        end = min(begin + self.part_rows, self.row_count)
        found = [recipe.rows(begin, end) for recipe in self._whole]
        recipes = [recipe for recipe in found if recipe is not None]  # all of them: `cut` has checked it
        sources, cursor = [], 0
        for stored in (part for recipe in recipes for part in recipe.parts):
            in_sector = stored.offset % SECTOR_BYTES
            at = round_up(cursor, SECTOR_BYTES) + (in_sector if in_sector % TENSOR_ALIGNMENT_BYTES == 0 else 0)
            sources.append((at, stored))
            cursor = at + stored.nbytes
        return RowPart(begin, end, recipes, sources)

    @property
    def _whole(self) -> list[Recipe]:
        return [self.weight.recipe] if self.bias is None else [self.weight.recipe, self.bias.recipe]


def cut(module: nn.Module, weight: Weight, bias: Weight | None) -> RowPartitionedLinear | None:
    """Return the partition of `module`; None if it is not a plain linear map of rows."""
    if type(module) is not nn.Linear or hooks_read_weights(module):
        return None
    if any(w is not None and w.recipe.rows(0, 1) is None for w in (weight, bias)):
        return None
    row_count, nbytes = weight.parameter.shape[0], weight.recipe.stored_bytes
    rows = max(min(MAX_PART_BYTES, nbytes // 8) // max(nbytes // row_count, 1), 1)
    number = -(-row_count // rows)  # of about equal size, so that the last part is not a small one
    part_rows = min(round_up(-(-row_count // number), ROWS_MULTIPLE), row_count)
    return RowPartitionedLinear(weight, bias, part_rows)


@dataclass(frozen=True)
class PartialProduct:
    """F.linear with one matrix, by `parts` of it, on `device`."""

    linear: RowPartitionedLinear
    parts: RowPrefetcher
    device: torch.device

    def __call__(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> object:
        """Return the product, as F.linear does; NotImplemented if it is not one of rows.

        Args:
            bias: any: the map's own one is read by parts, too, if it streams.
        """
        own = self.linear.bias
        is_own = own is not None and bias is own.parameter
        if is_cold(input) or not (is_own or bias is None or (not is_cold(bias) and bias.shape == weight.shape[:1])):
            return NotImplemented
        if torch.is_grad_enabled() and (input.requires_grad or (bias is not None and bias.requires_grad)):
            refuse_gradient()
        check_place(input, self.device)
        return self.parts.multiply(self.linear, input, None if is_own else bias, is_own)


@dataclass
class Reading:
    """Reads into one piece of memory; they may be in flight, perhaps prefetched and never used."""

    tickets: list[Transfer] = field(default_factory=list, kw_only=True)

    @property
    def is_read(self) -> bool:
        return all(ticket.done and ticket.error is None for ticket in self.tickets)

    def wait(self) -> None:
        wait_for_all(self.tickets)
        self.tickets = []

    def settle(self) -> None:
        """Wait until all are over, whatever their outcome: the memory is used next, or freed."""
        for ticket in self.tickets:
            ticket.exception()


@dataclass
class _PartRead(Reading):
    """A part that is read, or was, and is used next."""

    of: int  # id of its map: it must not keep the model alive
    part: RowPart
    slot: int
    copy: NewCopy | None = None  # to the device

    def matrices(self, memory: torch.Tensor, offsets: Iterable[int], empty: Empty = torch.empty) -> list[torch.Tensor]:
        """Return the results of the recipes, whose parts `memory` has at `offsets`, in memory from `empty`."""
        recipes = self.part.recipes
        views = [view_of(memory, at, stored) for at, (_, stored) in zip(offsets, self.part.sources, strict=True)]
        if len(views) == len(recipes) and all(recipe.make is None for recipe in recipes):
            return views
        parts = iter(views)
        with torch.inference_mode(False), torch.no_grad():  # its memory may be written again in another mode
            return [recipe.from_parts(list(islice(parts, len(recipe.parts))), empty) for recipe in recipes]


class RowPrefetcher:
    """Owns the memory into which parts are read, one map at a time.

    Parts are used in the order of their requests, and use the slots in turn. When the last ones of a map are in flight,
    the first ones of the map that followed it last time are requested, so that the drive does not idle between maps.

    Args:
        memory: of all slots.
        read: submits reads.
        copies: to the device of the maps; a part is copied while the kernels of the one before run. None: they run on the CPU.
        empty: memory for parts that are computed from what is stored.
    """

    def __init__(
        self, memory: torch.Tensor, read: ReadInto, copies: NewCopies | None = None, empty: Empty = torch.empty
    ) -> None:
        self._copies = copies
        self._empty = empty
        self._copied: dict[int, torch.Event] = {}  # by slot: the event of the last copy from it
        self._slots = memory.view(PARTS_IN_MEMORY, -1)
        self._read = read
        self._number = 0  # of requested parts
        self._reading: deque[_PartRead] = deque()  # requested and not used up
        self._last: RowPartitionedLinear | None = None
        self._after: dict[int, RowPartitionedLinear] = {}  # by id: the map that followed it

    def multiply(
        self, linear: RowPartitionedLinear, x: torch.Tensor, bias: torch.Tensor | None = None, own_bias: bool = False
    ) -> torch.Tensor:
        """Return the product of the whole matrix with `x`, on its device, plus `bias`, or the map's own streamed one."""
        if any(part.of != id(linear) for part in self._reading):
            self._forget()  # another map was expected
        if self._last is not None:
            self._after[id(self._last)] = linear
        self._last = linear
        following = self._after.get(id(linear))
        ahead = [] if following is None else zip(repeat(following), following.parts)
        wanted = chain(zip(repeat(linear), linear.parts[len(self._reading) :]), ahead)
        outputs = []
        try:
            for part in linear.parts:
                self._request(wanted)
                weight, *read = self._matrices()
                added = read[0] if own_bias else None if bias is None else bias[part.begin : part.end]
                outputs.append(F.linear(x, weight, added))
                del weight, read, added
                self._reading.popleft()
            self._request(wanted)
        except BaseException:
            self._forget()
            raise
        return torch.cat(outputs, dim=-1)

    def _matrices(self) -> list[torch.Tensor]:
        """Return the oldest part, for kernels that are queued next."""
        part = self._reading[0]
        part.wait()
        if self._copies is None:
            return part.matrices(self._slots[part.slot], [at for at, _ in part.part.sources], self._empty)
        copy = self._send(self._copies, part)
        if len(self._reading) > 1 and self._reading[1].of == part.of and self._reading[1].is_read:
            self._send(self._copies, self._reading[1])
        device = self._copies.device
        device.let_wait(device.current_stream(), copy.filled_at)
        return part.matrices(copy.memory, copy.offsets, self._empty)

    def _send(self, copies: NewCopies, part: _PartRead) -> NewCopy:
        if part.copy is None:
            slot = self._slots[part.slot]
            part.copy = copies.send([slot[at : at + stored.nbytes] for at, stored in part.part.sources])
            self._copied[part.slot] = part.copy.filled_at
        return part.copy

    def _request(self, wanted: Iterator[tuple[RowPartitionedLinear, RowPart]]) -> None:
        """Begin to read the next parts, as long as there are free slots."""
        while len(self._reading) < PARTS_IN_MEMORY and (following := next(wanted, None)) is not None:
            linear, part = following
            with defer_signals, outside_transforms():
                # an unrecorded read would fill a slot that another part uses next
                slot = self._number % PARTS_IN_MEMORY
                if self._copies is not None and slot in self._copied:
                    self._copies.device.wait_for(self._copied.pop(slot))
                self._reading.append(_PartRead(id(linear), part, slot))
                self._submit(self._reading[-1])
                self._number += 1

    def _forget(self) -> None:
        """Drop all parts; wait for reads in flight, since their slots are used next."""
        for part in self._reading:
            part.settle()
        for copy in (part.copy for part in self._reading if part.copy is not None):
            if self._copies is not None:
                with contextlib.suppress(DeviceError):
                    self._copies.device.let_wait(copy.stream, copy.filled_at)  # its memory is dropped
        self._reading.clear()

    def _submit(self, reading: _PartRead) -> None:
        """Begin to read a part."""
        slot = self._slots[reading.slot]
        for at, stored in reading.part.sources:
            reading.tickets.append(self._read(stored, 0, slot[at : at + stored.nbytes]))
