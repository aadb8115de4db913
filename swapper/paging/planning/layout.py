"""The layout of tensors in sections and of sections in pages. Pure: no I/O, no memory, no state.

A *section* is one storage of the container: the tensors of one group that share a family ("param", "state", "grad"), laid out
one after the other. Parameters and gradients of a section share a dtype too. A *page* is a fixed-size piece of a section, the
unit of I/O and of residency; the last page of a section may be shorter. Every size is a multiple of SECTOR_BYTES, so that all
transfers can be direct.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from swapper.io.tensor_bytes import LARGE_TENSOR_BYTES, SECTOR_BYTES, TENSOR_ALIGNMENT_BYTES, round_up

MIXED = "mixed"
"""In the name of a section, in place of its dtype: its tensors have several."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor to be placed: `owner` is the parameter's qualified name, `kind` its role ("param", "exp_avg", ...).

    `padded_numel`: the minimum of elements to reserve.
    """

    owner: str
    kind: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    padded_numel: int = 0

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Slot:
    """A tensor's place: `offset` bytes from the start of its section."""

    spec: TensorSpec
    offset: int

    @property
    def end(self) -> int:
        return self.offset + self.spec.nbytes


@dataclass(frozen=True, slots=True)
class ExternalBytes:
    """Bytes [offset, offset + nbytes) of a user's file, with which a section begins. Never written."""

    path: Path
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class SectionPlan:
    """The tensors of one section, with their places. `nbytes` is a multiple of SECTOR_BYTES.

    `dtype`: of all tensors; None if they have several, as encoded state does.
    `external`: the content's place if it is read from a user's file; shorter than `nbytes` if that file ends before.
    """

    group: int
    family: str
    dtype: torch.dtype | None
    slots: tuple[Slot, ...]
    nbytes: int
    external: ExternalBytes | None = None

    @property
    def transient(self) -> bool:
        """Whether the content matters only within a step: it is never committed, and written only when its frame is needed."""
        return self.family == "grad"

    @property
    def name(self) -> str:
        return f"group {self.group} {self.family} {str(self.dtype or MIXED).removeprefix('torch.')}"

    @property
    def where(self) -> str:
        """The name, and that of the innermost module with all the tensors."""
        owners = [slot.spec.owner for slot in self.slots]
        first = owners[0].split(".") if owners else []
        common = [
            part for n, part in enumerate(first) if all(owner.split(".")[n : n + 1] == [part] for owner in owners)
        ]
        return f"{self.name} ({'.'.join(common)})" if common else self.name

    def pages(self, page_bytes: int) -> list[tuple[int, int]]:
        """Return (offset, nbytes) of each page; together they are the whole section."""
        return [(at, min(page_bytes, self.nbytes - at)) for at in range(0, self.nbytes, page_bytes)]


def plan_section(group: int, family: str, specs: Sequence[TensorSpec]) -> SectionPlan:
    """Return a section of `specs`, in the order given.

    Args:
        group: its number.
        family: "param", "state" or "grad".
        specs: one at least.
    """
    slots = []
    cursor = 0
    for spec in specs:
        alignment = SECTOR_BYTES if spec.nbytes >= LARGE_TENSOR_BYTES else TENSOR_ALIGNMENT_BYTES
        cursor = round_up(cursor, alignment)
        slots.append(Slot(spec, cursor))
        cursor += max(spec.numel, spec.padded_numel) * spec.dtype.itemsize
    dtype = specs[0].dtype if len({spec.dtype for spec in specs}) == 1 else None
    return SectionPlan(group, family, dtype, tuple(slots), max(round_up(cursor, SECTOR_BYTES), SECTOR_BYTES))


def plan_group(group: int, family: str, specs: Sequence[TensorSpec]) -> list[SectionPlan]:
    """Return one section for each dtype among `specs`, dtypes in order of first appearance; of state one for all dtypes.

    Encoded state has many small tensors of several dtypes. A section for each would leave a sixth of the pool's frames
    empty, as a short last page occupies a whole frame.

    Args: as of `plan_section`.
    """
    by_dtype = [[s for s in specs if s.dtype == dtype] for dtype in dict.fromkeys(spec.dtype for spec in specs)]
    if family == "state" and specs:
        by_dtype = [list(itertools.chain(*by_dtype))]
    return [plan_section(group, family, part) for part in by_dtype]


HUGE_PAGE_BYTES = 2 << 20
"""A page of whole huge pages is mapped into its window by one entry of the page table for each. Any other takes 0.09 CPU seconds a
GB, of the thread that computes, and about as much once more to be hidden and guarded."""
HUGE_PAGES_SHARE = 0.1
"""Of all frames: this much waste is worth it."""


def choose_page_bytes(section_bytes: Sequence[int], pool_bytes: int) -> int:
    """Return the page size for a pool of `pool_bytes`: large for the drive, small enough for many in flight, with little waste.

    A short last page occupies a whole frame, so sizes that divide the sections well are worth more than round ones, but for whole
    huge pages. Candidates lie between a 16th of a target and the target, which is a 40th of the pool, or the whole huge pages next
    to that, at least 256 KiB and at most 32 MiB.
    """
    share = max(pool_bytes // 40, 256 << 10)
    if share >= HUGE_PAGE_BYTES:
        share = (share + HUGE_PAGE_BYTES // 2) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    target = min(share, 32 << 20, max([*section_bytes, SECTOR_BYTES]))
    step = 64 << 10 if target < (8 << 20) else HUGE_PAGE_BYTES
    target = max(round_up(target, SECTOR_BYTES) if target < step else target // step * step, SECTOR_BYTES)
    counts = Counter(section_bytes).items()  # most sections are of a few sizes
    best = target
    best_cost = math.inf
    for candidate in range(target, max(target // 16, SECTOR_BYTES) - 1, -step):
        framed = sum(-(-nbytes // candidate) * candidate * count for nbytes, count in counts)
        # Smaller pages cost Python and give the drive shorter runs: halving the size must save 15 % of the frames.
        cost = framed * (1 + 0.15 * math.log2(target / candidate))
        if candidate % HUGE_PAGE_BYTES == 0:
            cost *= 1 - HUGE_PAGES_SHARE
        if cost < best_cost:
            best, best_cost = candidate, cost
    return best
