"""The resources of a model's pages: memory, engine, files, frames and pager, opened and closed in one order.

[Note: order of opening and closing] Opened: memory, engine, files, frames, and the pager, which knows all of them. Closed: the
pager, which waits for all transfers; the engine, whose thread ends; the registration with an accelerator; the files; the memory.
No pages may be leased any more by then, and copies out of frames are over. Tensors of resident sections get ordinary memory
(paging/host_memory.py).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch

from swapper.device.device import Device
from swapper.device.registered_memory import HostSide
from swapper.io.engines import Engine, open_engine
from swapper.paging.host_memory import HostMemory, MappedFrame, Pool
from swapper.paging.layout import PoolSize
from swapper.paging.pager import Pager
from swapper.paging.schedule import Schedule
from swapper.paging.section import Page, Section
from swapper.paging.store.page_files import PageStore
from swapper.runtime.counters import Counters
from swapper.runtime.interrupts import close_all


class OwnedStore(PageStore, Protocol):
    """A store with open files."""

    @property
    def io_mode(self) -> str:
        """How they are opened: "direct", or "buffered" and the reason."""

    def close(self) -> None: ...


StoreT = TypeVar("StoreT", bound=OwnedStore)


class Resources(Generic[StoreT]):
    """Owns them, from `open` to `close`; also what an `open` that failed has left.

    Args:
        near: an accelerator that the memory is near to, if that can be.

    Attributes:
        engine: None before `open` and after `close`.
        host_side: the memory's registration with an accelerator, if there is one.
    """

    engine: Engine | None = None
    store: StoreT
    pool: Pool
    pager: Pager
    host_side: HostSide | None = None

    def __init__(self, counters: Counters, near: Device | None = None) -> None:
        self.counters = counters
        self.memory = HostMemory(None if near is None else near.node)
        self._bytes_before = counters.bytes_read, counters.bytes_written
        self._sections: list[Section] = []
        self._pages: list[Page] = []

    def open(
        self,
        sections: Iterable[Section],
        size: PoolSize,
        directories: Sequence[Path],
        backend: str,
        open_store: Callable[[Engine], StoreT],
        schedule: Schedule,
        device: Device | None = None,
        *,
        head_bytes: int | None = None,
        windows: bool = True,
        filled_once: bool = False,
        staging_bytes: int | None = None,
        **pager_options: Any,
    ) -> None:
        """Open everything in order.

        Args:
            sections: all; they get memory, or windows.
            size: of the pool.
            directories: of the files, one a drive.
            backend: of the engine.
            open_store: given the engine, opens the files.
            device: an accelerator that frames are copied to and from.
            head_bytes, windows, filled_once: see `HostMemory.attach`.
            staging_bytes: of the engine; None: its default.
            pager_options: see `Pager`.
        """
        self._sections += sections
        arena, frames_offset = self.memory.attach(self._sections, size.pool_bytes, head_bytes, windows, filled_once)
        slots = {} if staging_bytes is None else {"staging_bytes": staging_bytes}
        self.engine = open_engine(directories, backend=backend, arena=arena, **slots)
        self.store = open_store(self.engine)
        growth = None if head_bytes is None else arena
        view = None if device is None else arena.view(0, arena.nbytes)
        self.pool = Pool(arena.address, frames_offset, size.page_bytes, size.frame_count, growth, view)
        if device is not None:
            self.host_side = HostSide(device, arena, frames_offset, self.pool)
        self._pages = [page for section in self._sections for page in section.pages]
        self.pager = Pager(self._pages, self.pool, self.store, schedule, self.counters, **pager_options)

    def add_pages(self, sections: Sequence[Section]) -> None:
        """Give paged sections their windows, and their pages to the pager, after `open`."""
        self.memory.attach_windows(sections)
        self._sections += sections
        pages = [page for section in sections for page in section.pages]
        self._pages += pages
        self.pager.add_pages(pages)

    def add_memory(self, sections: Sequence[Section]) -> None:
        """Give resident sections their memory, after `open`."""
        arena, nbytes = self.memory.attach(sections, 0)
        self._sections += sections
        if self.host_side is not None:
            self.host_side.add(arena, nbytes)

    def take(self, nbytes: int) -> torch.Tensor:
        """Return memory for transfers, registered with the accelerator, if any: uint8 of shape (nbytes,)."""
        arena, memory = self.memory.take(nbytes)
        if self.host_side is not None:
            self.host_side.add(arena, nbytes)
        return memory

    def count_bytes(self) -> None:
        """Bring the counters up to date."""
        if self.engine is not None:
            read_bytes, written_bytes = self._bytes_before
            self.counters.bytes_read = read_bytes + self.engine.bytes_read
            self.counters.bytes_written = written_bytes + self.engine.bytes_written
        if self.host_side is not None:
            self.counters.registered_bytes = self.host_side.registered_bytes

    def describe(self) -> str:
        """Describe transfers and memory, for people."""
        registered = "" if self.host_side is None else f", for the device {self.host_side.describe()}"
        assert self.engine is not None
        how = f"{self.engine.backend} ({self.engine.reason}), {self.store.io_mode}"
        return f"transfers by {how}; memory {self.memory.describe()}{registered}"

    def close(self, stay: Collection[int] = ()) -> None:
        """Close what is open. [Note: order of opening and closing]

        Args:
            stay: pages that keep their bytes as long as a tensor of them is alive.
        """
        kept = [self._mapped(self._pages[index]) for index in stay]
        opened = vars(self)
        endings: list[Callable[[], object]] = [self.count_bytes]
        if "pager" in opened:
            endings.insert(0, partial(self.pager.discard, frozenset(stay)))
        parts = (self.engine, self.host_side, opened.get("store"))
        endings += [part.close for part in parts if part is not None]
        close_all([*endings, self._forget, partial(self.memory.close, kept)])

    def _mapped(self, page: Page) -> MappedFrame:
        assert page.frame is not None
        return MappedFrame(weakref.ref(page.section.window), page.offset, self.pool.offset(page.frame), page.nbytes)

    def _forget(self) -> None:
        """Drop all references to memory, in case this object lives on, as in a traceback."""
        for section in self._sections:
            section.detach()
        self._sections, self._pages, self.engine, self.host_side = [], [], None, None
        for name in ("pager", "pool", "store"):
            self.__dict__.pop(name, None)
