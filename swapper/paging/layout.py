"""Plans, pure: the layout of tensors in sections and of sections in pages, and the division of the host budget among them.

A *section* is one storage of the container: the tensors of one group that share a family ("param", "state", "grad"; "kv" is
keys and values of attention), laid out one after the other. Parameters and gradients of a section share a dtype too. A *page* is
a fixed-size piece of a section, the unit of I/O and of residency; the last page of a section may be shorter. Every size is a
multiple of SECTOR_BYTES, so that all transfers can be direct.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from swapper.errors import BudgetError
from swapper.io.tensor_bytes import LARGE_TENSOR_BYTES, SECTOR_BYTES, TENSOR_ALIGNMENT_BYTES, round_up
from swapper.runtime.sizes import format_bytes

TRANSIENT_FAMILIES = ("grad", "kv")
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
        """Whether the content matters only while the process lives: never committed, and written only when its frame is needed."""
        return self.family in TRANSIENT_FAMILIES

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


OR_PLACE_MORE = ', or place more on NVMe (params, optimizer_state, gradients="nvme")'
"""Of errors of a budget that is too small: what else helps."""
ARENA_ALIGNMENT_BYTES = 2 << 20
"""Frames begin at a huge page, and an arena consists of whole huge pages."""

READ_AHEAD_BYTES = 128 << 20
"""Reads and the writes that they wait for, in flight, that keep a drive busy in both directions."""

RESIDENT_SLICE_BYTES = 32 << 20
"""The page size by which updates are cut if nothing is paged."""

SMALL_SECTION_BYTES = 64 << 10
"""A section this small (step counters) always stays in memory: a page of its own would waste a frame."""


@dataclass(frozen=True, slots=True)
class PoolSize:
    """The size of a page in bytes, and the number of frames."""

    page_bytes: int
    frame_count: int

    @property
    def pool_bytes(self) -> int:
        return self.page_bytes * self.frame_count


SizeT = TypeVar("SizeT", bound=PoolSize)


@dataclass(frozen=True, slots=True)
class Budget(PoolSize):
    """The division of a host budget: resident bytes and the pool, together at most the budget.

    Attributes:
        spare_frames: of the pool, beyond what a step needs at once.
    """

    resident_bytes: int
    spare_frames: int = 0


def divide(
    host_bytes: int,
    kept_bytes: int,
    paged: Sequence[int],
    frames_needed: Callable[[int], int],
    explain: str,
    page_bytes: int | None = None,
    min_frames: Callable[[int], int] = lambda page_bytes: 0,
) -> Budget:
    """Return how `host_bytes` are used.

    Args:
        host_bytes: the budget.
        kept_bytes: of what stays in memory, gradients included.
        paged: sizes of the other sections.
        frames_needed: for a page size, how many frames a step needs at once so that it can never deadlock.
        explain: of `kept_bytes`, for the error message.
        page_bytes: the size of a page if it is given, as in a resumed run.
        min_frames: at most as many as `frames_needed`, found sooner.

    Raises:
        BudgetError: with the smallest budget that works.
    """
    rest = f"stay in memory ({explain}); raise host_memory{OR_PLACE_MORE}"
    frames_needed = functools.cache(frames_needed)  # which goes through slices; the search asks for few sizes
    min_frames = functools.cache(min_frames)

    def is_enough(frames: int, size: int) -> bool:
        return frames >= min_frames(size) and frames >= frames_needed(size)

    def fit(pool_bytes: int) -> PoolSize | None:
        if paged:
            return _fit(pool_bytes, paged, frames_needed, is_enough, page_bytes)
        return PoolSize(page_bytes or RESIDENT_SLICE_BYTES, 0) if pool_bytes >= 0 else None

    size = divide_host_memory(host_bytes, kept_bytes, fit, "this model and optimizer need", lambda: rest)
    spare_frames = size.frame_count - frames_needed(size.page_bytes) if paged else 0
    return Budget(size.page_bytes, size.frame_count, kept_bytes, spare_frames)


def divide_host_memory(
    host_bytes: int, fixed_bytes: int, fit: Callable[[int], SizeT | None], who: str, rest: Callable[[], str]
) -> SizeT:
    """Return how `fit` divides the memory that a budget leaves for a pool.

    Args:
        host_bytes: the budget.
        fixed_bytes: of the budget, not for the pool.
        fit: divides a pool of a multiple of ARENA_ALIGNMENT_BYTES; None if it is too small.
        who: "this model needs", for the message.
        rest: returns what the fixed bytes are and what the user can do, for the message.

    Raises:
        BudgetError: with the smallest budget that works.
    """
    # An arena takes whole ones.
    pool_bytes = (host_bytes - fixed_bytes) // ARENA_ALIGNMENT_BYTES * ARENA_ALIGNMENT_BYTES
    found = fit(pool_bytes)
    if found is None:
        smallest = fixed_bytes + _smallest_pool(fit)
        raise BudgetError(
            f"host_memory={format_bytes(host_bytes)} is too small: {who} at least {format_bytes(smallest)} "
            f"({smallest} bytes), of which {format_bytes(fixed_bytes)} {rest()}",
            smallest_bytes=smallest,
        )
    return found


def _smallest_pool(fit: Callable[[int], object]) -> int:
    if fit(0) is not None:
        return 0
    low, high = 0, ARENA_ALIGNMENT_BYTES
    while fit(high) is None:
        low, high = high, 2 * high
    while high - low > ARENA_ALIGNMENT_BYTES:
        middle = (low + high) // 2 // ARENA_ALIGNMENT_BYTES * ARENA_ALIGNMENT_BYTES
        low, high = (low, middle) if fit(middle) is not None else (middle, high)
    return high


def read_ahead_pages(budget: Budget) -> int:
    """Return how many pages a training may read early at the cost of others ([Note: what stays], paging/prefetcher.py).

    That is an eighth of the pool, for phases of computing that alternate with phases of transfers, and at least READ_AHEAD_BYTES.
    """
    return max(budget.frame_count // 8, -(-READ_AHEAD_BYTES // budget.page_bytes))


def resident_bytes(sections: Sequence[int]) -> int:
    """Return the bytes that resident sections of these sizes take in an arena, up to the first frame."""
    return round_up(sum(round_up(nbytes, SECTOR_BYTES) for nbytes in sections), ARENA_ALIGNMENT_BYTES)


def _fit(
    pool_bytes: int,
    paged: Sequence[int],
    frames_needed: Callable[[int], int],
    is_enough: Callable[[int, int], bool],
    page_bytes: int | None,
) -> PoolSize | None:
    """Return what a pool of `pool_bytes` consists of, or None if it is too small. No more frames than pages."""
    if pool_bytes < SECTOR_BYTES:
        return None
    size = page_bytes or choose_page_bytes(paged, pool_bytes)
    while not is_enough(pool_bytes // size, size):
        size = max(round_up(size // 2, SECTOR_BYTES), SECTOR_BYTES)
        if page_bytes is not None or size < SMALL_SECTION_BYTES:
            return None
    pages = sum(-(-nbytes // size) for nbytes in paged)
    return PoolSize(size, max(min(pool_bytes // size, pages), frames_needed(size)))
