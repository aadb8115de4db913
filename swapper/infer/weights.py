"""Makes a group's parameters available while it is leased, for inference. They are never changed.

Most are views of their home's memory. Those that are used in another dtype than the file's are computed from such a view
at each lease, and freed after it. A group that stays as a whole is materialized from its first use on and costs nothing
more.
"""

from __future__ import annotations

import math
import mmap
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NoReturn

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from swapper.checkpoint.quantization import CHUNK_ELEMENTS
from swapper.errors import BudgetError, StateError
from swapper.formats.stored import Empty
from swapper.infer.matching import Recipe
from swapper.io.tensor_bytes import TENSOR_ALIGNMENT_BYTES, round_up
from swapper.modules.cold import materialize, set_cold, unguard
from swapper.modules.guarded import FaultHandler, guard
from swapper.modules.home import GroupHome
from swapper.modules.leased_group import LeasedGroup
from swapper.paging.layout import ARENA_ALIGNMENT_BYTES
from swapper.paging.section import Page
from swapper.runtime.sizes import format_bytes
from swapper.tensors.torch_private import count_uses

CPU = torch.device("cpu")
OTHER_MEMORY = (
    "give it other memory, which stays in host memory (`weight.data = ...`; peft: merge_adapter(safe_merge=True))"
)
FOR_INFERENCE = "this model was loaded for inference, its weights are read from the checkpoint and never written"


def refuse_gradient() -> NoReturn:
    raise StateError(
        f"a gradient would have to flow back through a model, but {FOR_INFERENCE}: run it within torch.no_grad(), or, to "
        "train, build the model in memory and use swapper.SwapManager"
    )


class MadeMemory:
    """Memory for weights that are computed at each use, which take it in turn.

    glibc's heap would keep holes of five times their size: torch asks for aligned memory, for which glibc (2.36) needs more than
    what a tensor of the same size has left. A weight that somebody still holds after its use keeps its memory.

    Args:
        nbytes: what is in use at once. More than that is taken from the heap.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes + CHUNK_ELEMENTS  # for gaps and dequantizing: a page without use costs nothing
        self._memory = mmap.mmap(-1, self._nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._used: list[tuple[int, int, StorageWeakRef]] = []  # begin, end, in order
        self._lock = threading.Lock()  # passes of several threads

    def empty(self, shape: Sequence[int], *, dtype: torch.dtype, device: torch.device = CPU) -> torch.Tensor:
        """Return a tensor as torch.empty does."""
        count = math.prod(shape)
        nbytes = count * dtype.itemsize
        if device.type == "cpu" and nbytes and (found := self._find(count, nbytes, dtype)) is not None:
            return found.view(*shape)
        return torch.empty(shape, dtype=dtype, device=device)

    def _find(self, count: int, nbytes: int, dtype: torch.dtype) -> torch.Tensor | None:
        with self._lock:
            self._used = [one for one in self._used if not one[2].expired()]
            begin = 0
            for number, (next_begin, next_end) in enumerate([*(one[:2] for one in self._used), (self._nbytes, 0)]):
                if begin + nbytes <= next_begin:
                    found = torch.frombuffer(self._memory, dtype=dtype, count=count, offset=begin)
                    reference = StorageWeakRef(found.untyped_storage())
                    self._used.insert(number, (begin, begin + nbytes, reference))
                    return found
                begin = round_up(next_end, TENSOR_ALIGNMENT_BYTES)
        return None


@dataclass(frozen=True)
class PagedWeight:
    """One streamed parameter.

    Attributes:
        parts: views of the file's bytes, not touched before their use; empty if it has others' memory at each use.
        recipe: computes the parameter's data from `parts`.
        device: of its use.
        empty: memory for the result of `recipe`.
    """

    name: str
    parameter: nn.Parameter
    parts: list[torch.Tensor]
    recipe: Recipe
    device: torch.device = CPU
    empty: Empty = torch.empty

    @cached_property
    def stands_in(self) -> bool:
        """Whether the cold parameter has a stand-in for its data: a tensor of its shape with the memory of one element."""
        return self.recipe.make is not None or not self.parts

    def data(self) -> torch.Tensor:
        """Return the data of the cold parameter: the view of its location, or a stand-in."""
        if self.stands_in:
            return torch.zeros((), dtype=self.recipe.dtype, device=self.device).expand(self.parameter.shape)
        return self.parts[0]


class GroupWeights(LeasedGroup):
    """Leases one group's streamed parameters.

    Args:
        index: the group's.
        weights: its streamed parameters; none if all are resident.
        home: brings what they are read from.
        fault_handler: called on access to a cold parameter.
    """

    def __init__(
        self, index: int, weights: Sequence[PagedWeight], home: GroupHome, fault_handler: FaultHandler
    ) -> None:
        named = [(weight.name, weight.parameter) for weight in weights]
        super().__init__(index, named, (part for weight in weights for part in weight.parts), home, bool(weights))
        self.weights: Sequence[PagedWeight] = weights
        self._addresses: list[int] = []  # of the leased parameters' data
        home.call_before_eviction(self._before_eviction)
        for parameter in self.parameters:
            guard(parameter, fault_handler)
            set_cold(parameter)
        self._uses = self._count_uses()  # by nobody but the model

    def _count_uses(self) -> dict[str, int]:
        return {weight.name: count_uses(weight.parts[0]) for weight in self.weights if weight.parts}

    def _is_referred_to(self) -> bool:
        return any(count > self._uses[name] for name, count in self._count_uses().items())

    @property
    def is_changed(self) -> bool:
        """Whether weights were written to since they were leased, except those that stay materialized."""
        return bool(self._changed())

    def unmanage(self, parameter: nn.Parameter) -> None:
        """Make `parameter` an ordinary one for good, if it is this group's. Its bytes are read with the others' all the same."""
        number = next((number for number, own in enumerate(self.parameters) if own is parameter), None)
        if number is not None:
            unguard(parameter)
            self.home.unmanage(number)
            self.weights = [weight for weight in self.weights if weight.parameter is not parameter]
            self.names = [weight.name for weight in self.weights]
            self.parameters = [weight.parameter for weight in self.weights]

    def _unmanage_moved(self) -> None:
        """Stop managing parameters that were given other data while they were leased."""
        pairs = zip(self.parameters, self._addresses, strict=False)  # none, if the lease failed
        moved = [p for p, address in pairs if type(p) is nn.Parameter and p.data_ptr() != address]
        self._addresses = []
        for parameter in moved:
            self.unmanage(parameter)

    def abandon(self, keep_cold: bool = True) -> None:
        super().abandon(keep_cold)
        self.weights, self.parameters, self.paged = (), [], False  # who still has this group keeps no memory

    def refuse_change(self, name: str | None = None) -> None:
        """Discard writes to weights that are not leased, except to those that stay materialized.

        Args:
            name: of a parameter that is known to have been changed.

        Raises:
            StateError: something was written; names the parameter.
        """
        written = [] if self._leases or self.settled else self.home.written()
        if name is None and not written:
            return
        name = name or self._owner(*written[0])
        self.home.discard_changes()
        raise StateError(
            f"parameter {name} was changed in a forward, or past its guard while it was away: {FOR_INFERENCE}. The change is undone"
        )

    def _owner(self, page: Page, at: int) -> str:
        """Return the name of the parameter that has byte `at` of the page's section, or the first one's."""
        address = page.section.memory.data_ptr() + at
        parts = [(weight.name, part) for weight in self.weights for part in weight.parts]
        found = (name for name, part in parts if 0 <= address - part.data_ptr() < max(part.nbytes, 1))
        return next(found, self.weights[0].name if self.weights else "of other memory now")

    def _changed(self) -> list[str]:
        if self.settled:
            return []
        if (changed := super()._changed()) or not (written := self.home.written()):
            return changed
        return [self._owner(page, at) for page, at in written]

    def _note_change(self, names: list[str]) -> None:
        self.refuse_change(names[0])

    def _materialize(self) -> None:
        materialize(*self.parameters)
        values, is_made = self.home.values, False
        for number, weight in enumerate(self.weights):
            if not values and weight.parameter.requires_grad:
                raise StateError(
                    f"parameter {weight.name} requires a gradient, but {FOR_INFERENCE}: to train it, build the model in memory "
                    "and use swapper.SwapManager"
                )
            if weight.stands_in:
                is_made = True
                with torch.inference_mode(False), torch.no_grad():
                    made = values[number] if values else weight.recipe.from_parts(weight.parts, weight.empty)
                    weight.parameter.data = made
        self._addresses = list(map(torch.Tensor.data_ptr, self.parameters))
        self.stays_materialized = self.home.stays and not is_made

    def _dematerialize(self) -> None:
        self._unmanage_moved()
        for weight in self.weights:
            if weight.stands_in:
                with torch.inference_mode(False):
                    materialize(weight.parameter)
                    weight.parameter.data = weight.data()
            set_cold(weight.parameter)

    def _before_eviction(self) -> None:
        if self.stays_materialized:
            self.stays_materialized = False
            self._dematerialize()


def make_room(wanted: GroupWeights, groups: Sequence[GroupWeights], frame_count: int, page_bytes: int) -> None:
    """Stream resident weights from now on, as many as `wanted` needs.

    The plan has the parameters that each module's own forward uses. A forward may also use a child's weight as a whole
    of which single rows were to be read (`x @ self.embedding.weight.T`), or the weights of several children at once.

    Args:
        wanted: could not be leased: all frames are leased.
        groups: all of the model's.
        frame_count, page_bytes: of the pool.

    Raises:
        BudgetError: no resident weights are left; says how much more memory is needed.
    """
    needed = len(wanted.home.pages)
    freed = 0
    for group in sorted(groups, key=lambda group: len(group.home.streamed_pages) - len(group.home.pages)):
        if freed >= needed:
            return
        freed += 0 if group.is_leased else group.home.stream_all()
    if freed:
        return
    in_use = sum(len(group.home.pages) for group in groups if group.is_leased)
    missing_bytes = round_up(max(needed + in_use - frame_count, 1) * page_bytes, ARENA_ALIGNMENT_BYTES)
    raise BudgetError(
        f"parameter {wanted.weights[0].name} is used as a whole, {format_bytes(needed * page_bytes)} of memory, while "
        f"{format_bytes(in_use * page_bytes)} of other weights are in use, and host_memory has room for "
        f"{format_bytes(frame_count * page_bytes)}: raise it by at least {format_bytes(missing_bytes)} ({missing_bytes} bytes)",
        missing_bytes=missing_bytes,
    )
