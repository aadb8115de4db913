"""A section at run time: its layout, its memory and, if it is paged, its pages.

On a CPU a section has a fixed range of addresses. A *resident* section's range always has memory. A *paged* one's range is a
window: its pages have memory while they have a frame. The guard on cold parameters (modules/cold.py) prevents touches of the
others; code that goes past it faults and reads the file (csrc/memory/fault.h).
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from typing import Any, NoReturn, Protocol, cast

import numpy
import torch

from swapper._C import File, View
from swapper.errors import InvariantError, IoError
from swapper.io.engines import Transfer
from swapper.paging.layout import SectionPlan, Slot
from swapper.paging.residency import COLD, Resident
from swapper.tensors.torch_private import count_uses

EXTERNAL = -2
"""In place of the number of a swap file: the content is in the user's file that the section's plan names."""


class Window(Protocol):
    """What a paged section needs of `swapper._C.Window`."""

    def map(self, window_offset: int, arena_offset: int, nbytes: int, guarded: bool = False, /) -> bool: ...
    def unmap(
        self, window_offset: int, nbytes: int, source: File | View | None = None, source_offset: int = 0, /
    ) -> None: ...
    def promise(
        self, window_offset: int, nbytes: int, arena_offset: int, write: Any, source: Any, source_offset: int, /
    ) -> None: ...
    def guard(self, window_offset: int, nbytes: int, /) -> None: ...
    def written_at(self, window_offset: int, /) -> int: ...
    def fill(self, window_offset: int, nbytes: int, /) -> bool: ...


class NoWindow:
    """The window of a section whose pages are only used in their frames: it maps nothing."""

    def map(self, *place: Any) -> bool:
        return False

    def unmap(self, *place: object) -> None: ...
    def promise(self, *place: object) -> None: ...
    def guard(self, *place: object) -> None: ...

    def written_at(self, window_offset: int, /) -> int:
        return -1

    def fill(self, *place: object) -> bool:
        return False


class _Missing:
    """In place of a window or a frame that is not there: each use is a bug, which `message` names."""

    def __init__(self, message: str) -> None:
        self._message = message

    def __getattr__(self, name: str) -> NoReturn:
        raise InvariantError(self._message)


@dataclass(frozen=True, slots=True)
class Frame:
    """A page-sized slot of the pool: its number, from 0 on, and the offset of its first byte in the arena, and its address."""

    number: int
    offset: int
    address: int


NO_FRAME = cast(Frame, _Missing("a page without a frame has no place in memory"))


@dataclass(eq=False, repr=False, slots=True)
class Page(Resident):
    """A fixed-size piece of a paged section, `nbytes` from `offset` of the section on. Only the pager changes one."""

    index: int
    section: Section
    offset: int
    nbytes: int
    file_offset: int = field(init=False)
    frame: Frame = NO_FRAME
    leases: int = 0
    next_use: int = 0  # position in the schedule
    eviction_rank: int | None = None  # of its entry in the queue of victims: see Frames.enqueue_for_eviction
    ticket: Transfer | None = None  # of the read or write in flight
    error: IoError | None = None  # COLD: of the read that a lease waited for
    fresh: bool = False  # READING or DIRTY, but not read: it is about to be overwritten
    kept: bool = False  # not in a frame, or about to be: the victim cache has its content, see frames.py
    shown: bool = False  # mapped in its window
    guarded: bool = False  # mapped read-only: see Frames.guard
    next_owner: Page | None = None  # WRITING: the page that gets this frame when the write is done
    previous_owner: Page | None = None  # READING: the page whose write the read waits for
    drive: int = 0  # which of the run's drives it belongs to
    location: int | None = None  # which of the store's files has the newest content; or EXTERNAL
    committed: int | None = None  # which file the last commit names for it
    committed_crc32: int | None = None  # of the content there
    crc32: int | None = None  # of the content at `location`
    torn: bool = False  # its last write met an unannounced one: `location` may have a mix, see frames.py

    def __post_init__(self) -> None:
        Resident.__init__(self, COLD)
        self.file_offset = self.section.file_offset + self.offset

    @property
    def stored_offset(self) -> int:
        """Where its newest content begins in the file that has it, in bytes."""
        external = self.section.plan.external
        return self.file_offset if external is None or self.location != EXTERNAL else external.offset + self.offset

    @property
    def stored_bytes(self) -> int:
        """How much of it that file has: the user's file may end within the last page."""
        external = self.section.plan.external
        if external is None or self.location != EXTERNAL:
            return self.nbytes
        return min(self.nbytes, external.nbytes - self.offset)

    @property
    def tensors(self) -> list[str]:
        """Names of the tensors that it has bytes of."""
        end = self.offset + self.nbytes
        slots = [slot for slot in self.section.plan.slots if slot.offset < end and slot.end > self.offset]
        return [s.spec.owner if s.spec.kind == "param" else f"{s.spec.owner} {s.spec.kind}" for s in slots]

    def __repr__(self) -> str:
        frame = None if self.frame is NO_FRAME else self.frame.number
        return (
            f"page {self.index} ({self.section.plan.name} at {self.offset}, {self.nbytes} bytes, "
            f"{self.residency.name}, frame {frame}, {self.leases} leases)"
        )


class Section:
    """One section, with memory once `attach` was called.

    Args:
        file_offset: of its payload in the container, in bytes.
        page_bytes: size of a page; None for a resident section.
        first_page: index of its first page.

    Attributes:
        page_count: number of its pages; 0 for a resident section.
    """

    def __init__(self, plan: SectionPlan, file_offset: int, page_bytes: int | None, first_page: int = 0) -> None:
        self.plan = plan
        self.file_offset = file_offset
        self.resident = page_bytes is None
        self.transient = plan.transient
        self.page_bytes = page_bytes
        self.page_count = 0 if page_bytes is None else -(-plan.nbytes // page_bytes)
        self._first_page = first_page
        # The whole of a resident section: only its places in the store are used.
        self.piece = Page(-1, self, 0, plan.nbytes)
        self.guards_writes = False  # the user sees its tensors, and may change them without a lease for writing
        self.in_frames = False  # its pages are mostly used in their frames: [Note: lazy windows], frames.py
        self._memory: torch.Tensor | None = None
        self.window = self._no_window = cast(Window, _Missing(f"{plan.name} has no window"))
        self.view: View | None = None
        self._own: weakref.WeakValueDictionary[tuple[int, int, int], numpy.ndarray[Any, Any]] = (
            weakref.WeakValueDictionary()
        )  # by begin, end and a number: what storages of their own hold
        self._numbers = count()
        self._uses = 1

    @cached_property
    def pages(self) -> list[Page]:
        """The pages, made when they are first needed: a plan only counts most of those that it considers."""
        pieces = [] if self.page_bytes is None else self.plan.pages(self.page_bytes)
        return [Page(self._first_page + i, self, offset, nbytes) for i, (offset, nbytes) in enumerate(pieces)]

    def attach(self, memory: torch.Tensor, window: Window | None, view: View | None = None, uses: int = 1) -> None:
        """Give the section its memory.

        Args:
            memory: uint8 of shape (plan.nbytes,).
            window: that has it, if the section is paged.
            view: of an arena, that has it, if it is resident.
            uses: how often the storage is held by this alone, as `count_uses` counts.
        """
        self._memory = memory
        self.window = self._no_window if window is None else window
        self.view = view
        self._uses = uses

    def detach(self) -> None:
        """Drop the section's memory, window and view."""
        self._memory = self.view = None
        self.window = self._no_window

    def hold_writers(self, write: Transfer) -> None:
        """Have every thread that changes resident memory wait until `write`, from it, is over. Call `admit_writers` then."""
        if self.view is not None and self.plan.nbytes:
            self.view.watch(cast(Any, write))

    def admit_writers(self) -> None:
        """End `hold_writers`, if it was called."""
        if self.view is not None:
            self.view.unwatch()

    @property
    def memory(self) -> torch.Tensor:
        if self._memory is None:
            raise InvariantError(f"{self.plan.name} has no memory yet")
        return self._memory

    def tensor(self, slot: Slot) -> torch.Tensor:
        """Return `slot`'s tensor, a view of the section's memory. Does not access it."""
        flat = self.memory[slot.offset : slot.end].view(slot.spec.dtype)
        return flat.view(slot.spec.shape)

    def own_tensor(self, slot: Slot) -> torch.Tensor:
        """Return the same with a storage of its own, as a parameter has in plain torch."""
        if slot.spec.numel == 0:
            return self.tensor(slot)  # an empty tensor has no address of its own
        return self.own_bytes(slot.offset, slot.end).view(slot.spec.dtype).view(slot.spec.shape)

    def own_bytes(self, begin: int, end: int) -> torch.Tensor:
        """Return bytes [begin, end) of its memory with a storage that begins and ends with them. Does not access them."""
        array = self.memory[begin:end].numpy()
        self._own[begin, end, next(self._numbers)] = array
        return torch.from_numpy(array)

    @property
    def is_shown(self) -> bool:
        """Whether tensors or arrays with storages of their own show it, as parameters do that are not on a device."""
        return bool(self._own)

    def referenced_pages(self, going: int = 0) -> list[Page]:
        """Return the pages to whose addresses a tensor, an array or a graph refers, besides its own memory.

        Args:
            going: how many uses of its memory are ending just now, and do not count.
        """
        if self.resident or self._memory is None:
            return []
        ranges = [(begin, end) for begin, end, _ in list(self._own)]
        if count_uses(self._memory) > self._uses + len(ranges) + going:
            ranges = [(0, self.plan.nbytes)]
        return list(dict.fromkeys(page for begin, end in ranges for page in self.pages_of(begin, end)))

    def owner_at(self, at: int) -> str:
        """Return the name of the parameter that has the byte at offset `at`; else that of the section."""
        owners = (slot.spec.owner for slot in self.plan.slots if slot.offset <= at < slot.end)
        return next(owners, f"in {self.plan.name}")

    def pages_of(self, begin: int, end: int) -> list[Page]:
        """Return the pages that bytes [begin, end) of the section touch."""
        found, first = self.indices_of(begin, end), self._first_page
        return self.pages[found.start - first : found.stop - first] if found else []

    def indices_of(self, begin: int, end: int) -> range:
        """Return the indices of these pages."""
        if self.page_bytes is None or begin >= end:
            return range(0)
        first = self._first_page
        return range(first + begin // self.page_bytes, first + (end - 1) // self.page_bytes + 1)


def pieces_of(section: Section) -> list[Page]:
    """Return the pieces that the store has of a section: its pages, or a resident one as a whole."""
    return [section.piece] if section.resident else section.pages
