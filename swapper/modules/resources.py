"""The resources of a model's pages: memory, engine, files, frames and pager, opened and closed in one order.

[Note: order of opening and closing] Opened: memory, engine, files, frames, and the pager, which knows all of them. Closed: the
pager, which waits for all transfers; the engine, whose thread ends; the registration with an accelerator; the files; the memory.
No pages may be leased any more by then, and copies out of frames are over. Tensors of resident sections get ordinary memory
(paging/host_memory.py).

[Note: who still refers to a window] Code may keep what it was shown of a page: an array, a view, `to_local()`, an output, a
graph. By the time of `close` nothing of swapper's refers to the addresses of windows, nor does a cold parameter. So where somebody
does, these pages get ordinary memory with their bytes, at the same addresses: from their frames, or from the file.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch

from swapper.device.device import Device
from swapper.device.device_memory import HostSide
from swapper.errors import IoError
from swapper.io.engines import Engine, open_engine
from swapper.paging.host_memory import HostMemory, MappedFrame, Pool
from swapper.paging.layout import PoolSize
from swapper.paging.pager import Pager
from swapper.paging.residency import COLD
from swapper.paging.schedule import Schedule
from swapper.paging.section import Page, Section
from swapper.paging.store.page_files import PageStore
from swapper.runtime.counters import Counters
from swapper.runtime.free_memory import headroom_bytes
from swapper.runtime.interrupts import close_all
from swapper.runtime.sizes import format_bytes

log = logging.getLogger("swapper")


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

    def close(self) -> None:
        """Close what is open. [Note: order of opening and closing]"""
        opened, kept = vars(self), list[MappedFrame]()
        endings: list[Callable[[], object]] = []
        if "pager" in opened:
            pages = self._referenced_pages()
            endings += [partial(self.pager.settle, pages), partial(self._keep_bytes, pages, kept)]
            endings.append(partial(self.pager.discard, {page.index for page in pages}))
        endings.append(self.count_bytes)
        parts = (self.engine, self.host_side, opened.get("store"))
        endings += [part.close for part in parts if part is not None]
        close_all([*endings, self._forget, partial(self.memory.close, kept)])

    def _referenced_pages(self) -> list[Page]:
        """Return the pages that keep their bytes. [Note: who still refers to a window]"""
        pages = [page for section in self._sections for page in section.referenced_pages() if self._has_content(page)]
        if not pages:
            return []
        nbytes, free = sum(page.nbytes for page in pages if not page.shown), headroom_bytes()
        names = ", ".join(dict.fromkeys(name for page in pages[:2] for name in page.tensors))
        if nbytes > free // 2:
            log.error(
                "close: tensors, arrays or graphs of yours still refer to %s on NVMe (%s and others), for which %s of free memory "
                "are not enough: do not use them, which would end the process; keep copies instead",
                format_bytes(nbytes), names, format_bytes(free),
            )  # fmt: skip
            return [page for page in pages if page.shown]
        kept = format_bytes(sum(page.nbytes for page in pages))
        log.info("close: tensors, arrays or graphs of yours keep %s in memory (%s and others)", kept, names)
        return pages

    def _has_content(self, page: Page) -> bool:
        """Whether anything has the page's bytes: no, if a transient one was never written, or its content was forgotten."""
        is_empty = page.residency is COLD and not page.kept and self.pager.file_of(page) is None
        return not (is_empty and page.section.transient)

    def _keep_bytes(self, pages: Sequence[Page], kept: list[MappedFrame]) -> None:
        """Have ordinary memory with their bytes take the place of pages that are not in memory; add the others to `kept`."""
        kept += [self._mapped(page) for page in pages if page.shown]
        lost: list[str] = []
        for page in pages:
            try:
                if not page.shown and not page.section.window.fill(page.offset, page.nbytes):
                    lost.append(f"{page}: nothing has its bytes")
            except IoError as error:  # an earlier one was raised, or the bytes are needed no more
                lost.append(f"{page}: {error}")
        if lost:
            log.error(
                "close: do not use tensors, arrays or graphs of yours that show %s (of %d pages), which would end the process",
                lost[0],
                len(lost),
            )

    def _mapped(self, page: Page) -> MappedFrame:
        return MappedFrame(weakref.ref(page.section.window), page.offset, page.frame.offset, page.nbytes)

    def _forget(self) -> None:
        """Drop all references to memory, in case this object lives on, as in a traceback."""
        for section in self._sections:
            section.detach()
        self._sections, self._pages, self.engine, self.host_side = [], [], None, None
        for name in ("pager", "pool", "store"):
            self.__dict__.pop(name, None)
