"""Makes a group's parameters available while it is leased, for inference. They are never changed.

Most are views of the window that their range of the file is read into. Those that are used in another dtype than the
file's are computed from such a view at each lease, and freed after it. Pages that stay in memory are leased for good at
their first use; a group that stays as a whole is materialized from then on and costs nothing more.
"""

from __future__ import annotations

import math
import mmap
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from swapper.checkpoint.quantization import CHUNK_ELEMENTS
from swapper.device.tier import DeviceCopy
from swapper.errors import BudgetError, StateError
from swapper.formats.stored import Empty
from swapper.infer.mapping.matching import Recipe
from swapper.io.alignment import TENSOR_ALIGNMENT_BYTES, round_up
from swapper.modules.cold import materialize, set_cold, unguard
from swapper.modules.guarded import FaultHandler, guard
from swapper.modules.leased_group import LeasedGroup
from swapper.paging.pager import Pager
from swapper.paging.planning.budget import ARENA_ALIGNMENT_BYTES
from swapper.paging.planning.schedule import Access
from swapper.paging.section import Page
from swapper.runtime.sizes import format_bytes

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


@dataclass(frozen=True, slots=True)
class PagedWeight:
    """One streamed parameter.

    Attributes:
        parts: views of the file's bytes, not touched before their use; empty if they are read on demand.
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

    @property
    def is_made(self) -> bool:
        return self.recipe.make is not None

    def data(self) -> torch.Tensor:
        """Return the data of the cold parameter: the view of its location, or a stand-in."""
        return self.parts[0] if self.parts and not self.is_made else self.stand_in()

    def stand_in(self) -> torch.Tensor:
        """Return a tensor of the parameter's shape with the memory of one element."""
        return torch.zeros((), dtype=self.recipe.dtype, device=self.device).expand(self.parameter.shape)


class GroupWeights(LeasedGroup):
    """Leases one group's streamed parameters.

    Args:
        index: the group's.
        weights: its streamed parameters; none if all are resident.
        pages: indices of all its pages, in the order of the file.
        kept: the first of them, which stay after their first read.
        pager: reads the pages.
        fault_handler: called on access to a cold parameter.
        image: see LeasedGroup.
    """

    def __init__(
        self,
        index: int,
        weights: Sequence[PagedWeight],
        pages: Sequence[int],
        kept: Sequence[int],
        pager: Pager,
        fault_handler: FaultHandler,
        image: DeviceCopy | None = None,
    ) -> None:
        super().__init__(index, [(weight.name, weight.parameter) for weight in weights], image)
        self.paged = bool(weights)
        self.weights: Sequence[PagedWeight] = weights
        self._pager = pager
        key = ("param", index)
        self._all_pages = Access(key, tuple(pages))
        self.streamed = Access(key, tuple(pages[len(kept) :]))
        self.kept = Access(None, tuple(kept))  # the pages that stay after the first use
        self.access = self._all_pages  # of the first use; then the streamed pages
        self._was_used = False
        self._addresses: list[int] = []  # of the leased parameters' data
        for parameter in self.parameters:
            guard(parameter, fault_handler)
            set_cold(parameter)

    @property
    def storages(self) -> set[int]:
        return {part.untyped_storage()._cdata for weight in self.weights for part in weight.parts}

    @property
    def streamed_pages(self) -> Sequence[int]:
        """The pages that each pass reads, after the first."""
        return self.streamed.pages

    @property
    def accesses(self) -> list[Access]:
        """The accesses of a pass from now on, in order."""
        return [self.access] if self.access.pages else []

    @property
    def settled(self) -> bool:
        return not self.paged or (self._was_used and not self.streamed.pages and not self._makes)

    @property
    def kept_accesses(self) -> list[Access]:
        return [self.kept] if self._was_used and self.kept.pages else []

    @property
    def pages(self) -> Sequence[int]:
        return self._all_pages.pages

    def stream_all(self) -> int:
        """Stream all pages from now on. Return how many resident ones that frees: none while in use, or if written to."""
        if self._leases or not self._was_used or not self.kept.pages or self._pager.written_at(self.kept):
            return 0
        if self.settled:
            self._dematerialize()
        kept, self.kept = self.kept, Access(None, ())
        self.access = self.streamed = self._all_pages
        self._pager.release(kept)
        return len(kept.pages)

    def release(self) -> None:
        super().release()
        if not self._leases:
            self.refuse_change()

    def unmanage(self, parameter: nn.Parameter) -> None:
        """Make `parameter` an ordinary one for good, if it is this group's. Its bytes are read with the others' all the same."""
        if any(own is parameter for own in self.parameters):
            unguard(parameter)
            self.weights = [weight for weight in self.weights if weight.parameter is not parameter]
            self.names = [weight.name for weight in self.weights]
            self.parameters = [weight.parameter for weight in self.weights]

    def _note_memory(self) -> None:
        """Note where the leased parameters have their data."""
        self._addresses = [parameter.data_ptr() for parameter in self.parameters]

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

    @property
    def _makes(self) -> bool:
        return any(weight.is_made for weight in self.weights)

    def _fault_in(self) -> bool:
        if self.settled:
            return False
        if self.access.pages:  # else all stay, and the schedule knows nothing of it
            self._pager.acquire(self.access)
        return True

    def _give_back(self, changed: bool) -> None:
        if not self.settled:
            self._dematerialize()
            if self.access.pages:
                self._pager.release(self.access)

    def refuse_change(self, name: str | None = None) -> None:
        """Discard writes to weights that are not leased, except to those that stay materialized.

        Args:
            name: of a parameter that is known to have been changed.

        Raises:
            StateError: something was written; names the parameter.
        """
        written = [] if self._leases or self.settled else self._pager.written_at(self._all_pages)
        if name is None and not written:
            return
        name = name or self._owner(*written[0])
        self._forget_change()
        raise StateError(
            f"parameter {name} was changed in a forward, or past its guard while it was away: {FOR_INFERENCE}. The change is undone"
        )

    def _owner(self, page: Page, at: int) -> str:
        """Return the name of the parameter that has byte `at` of the page's section, or the first one's."""
        address = page.section.memory.data_ptr() + at
        parts = [(weight.name, part) for weight in self.weights for part in weight.parts]
        found = (name for name, part in parts if 0 <= address - part.data_ptr() < max(part.nbytes, 1))
        return next(found, self.weights[0].name if self.weights else "of other memory now")

    def _forget_change(self) -> None:
        if self.kept_accesses:
            self._pager.release(self.kept)
        self._was_used, self.access = False, self._all_pages
        self._pager.forget_written(self.pages)

    def _changed(self) -> list[str]:
        return [] if self.settled else super()._changed()

    def _note_change(self, names: list[str]) -> None:
        self.refuse_change(names[0])

    def _materialize(self) -> None:
        super()._materialize()
        for weight in self.weights:
            if weight.parameter.requires_grad:
                raise StateError(
                    f"parameter {weight.name} requires a gradient, but {FOR_INFERENCE}: to train it, build the model in memory "
                    "and use swapper.SwapManager"
                )
            if weight.is_made:
                with torch.inference_mode(False), torch.no_grad():
                    weight.parameter.data = weight.recipe.from_parts(weight.parts, weight.empty)
        self._note_memory()
        if not self._was_used:  # resident pages keep this lease for good; the next one is of the streamed pages
            self._was_used = True
            self.access = self.streamed

    def _dematerialize(self) -> None:
        self._unmanage_moved()
        for weight in self.weights:
            if weight.is_made:
                with torch.inference_mode(False):
                    materialize(weight.parameter)
                    weight.parameter.data = weight.data()
            set_cold(weight.parameter)


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
    needed = len(wanted.pages)
    freed = 0
    for group in sorted(groups, key=lambda group: len(group.kept.pages), reverse=True):
        if freed >= needed:
            return
        freed += group.stream_all()
    if freed:
        return
    in_use = sum(len(group.pages) for group in groups if group.is_leased)
    missing_bytes = round_up(max(needed + in_use - frame_count, 1) * page_bytes, ARENA_ALIGNMENT_BYTES)
    raise BudgetError(
        f"parameter {wanted.weights[0].name} is used as a whole, {format_bytes(needed * page_bytes)} of memory, while "
        f"{format_bytes(in_use * page_bytes)} of other weights are in use, and host_memory has room for "
        f"{format_bytes(frame_count * page_bytes)}: raise it by at least {format_bytes(missing_bytes)} ({missing_bytes} bytes)",
        missing_bytes=missing_bytes,
    )
