"""What a run's pages lie in and go through: host memory and its frames, swap files, a scratch file, the engine between them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from swapper.device.registered_frames import HostSide
from swapper.durability.directory import RunDirectory
from swapper.io.engines import open_engine
from swapper.paging.host_memory import HostMemory
from swapper.paging.pool import Pool
from swapper.paging.section import Page, Section, pieces_of
from swapper.paging.store.scratch import ScratchFile
from swapper.paging.store.swap_files import Store
from swapper.train.session.plan import Plan


class SessionResources:
    """Owns all that, from `open` until the last of its `endings`; also what an `open` that failed has left.

    Attributes:
        engine: None before it is opened and when it is closed.
        scratch: of gradients, where they are on NVMe.
        host_side: of the memory, where there is an accelerator.
    """

    engine: Any = None
    scratch: ScratchFile | None = None
    host_side: HostSide | None = None
    _store: Store | None = None
    _pool: Pool | None = None

    def __init__(self) -> None:
        self._memory = HostMemory()

    def open(
        self,
        plan: Plan,
        directory: RunDirectory,
        sections: Sequence[Section],
        paged_grads: Sequence[Section],
        files: Mapping[int, str],
        needed: Collection[int] | None,
        first_file: int,
        backend: str,
        check_reads: bool,
    ) -> None:
        """Open everything in order: memory, engine, swap files, scratch file, frames.

        Args:
            plan: how much.
            directory: of the swap files, on each drive.
            sections: of parameters and optimizer state.
            paged_grads: of gradients that are on NVMe.
            files: names of swap files that are there already, by number.
            needed: numbers of those that must be whole; None: all.
            first_file: number of the first one, where there is none.
            backend: of the engine.
            check_reads: see Store.

        Raises:
            DirectoryError: the drive has not enough room.
        """
        drives = directory.drives
        directory.require_space(plan.space_by_drive(plan.turns - len(files)))
        arena, frames_offset = self._memory.attach([*sections, *paged_grads], plan.budget.pool_bytes)
        self.engine = open_engine(drives.directories, backend=backend, arena=arena)
        headers, tail_offset = plan.layout.headers(), plan.layout.tail_offset
        pieces = stored_pieces(sections)
        self._store = Store(
            self.engine, drives, headers, tail_offset, files, plan.turns, pieces, first_file, needed, check_reads
        )
        if paged_grads:
            pages = [page for section in paged_grads for page in section.pages]
            self.scratch = ScratchFile(self.engine, drives, pages, check_reads)
        self._pool = Pool(arena.address, frames_offset, plan.budget.page_bytes, plan.budget.frame_count)
        if plan.request.device is not None:
            self.host_side = HostSide(plan.request.device.device, arena, frames_offset, self._pool)

    @property
    def store(self) -> Store:
        """The swap files."""
        assert self._store is not None
        return self._store

    @property
    def pool(self) -> Pool:
        """The frames."""
        assert self._pool is not None
        return self._pool

    def add_memory(self, sections: Sequence[Section]) -> None:
        """Give resident sections their memory."""
        arena, nbytes = self._memory.attach(sections, 0)
        if self.host_side is not None:
            self.host_side.add(arena, nbytes)

    def describe(self) -> str:
        """Return how transfers are made and what the memory is like, for a person."""
        transfers = f"{self.engine.backend} ({self.engine.reason}), {self.store.io_mode}"
        return f"transfers by {transfers}; memory {self._memory.describe()}"

    @property
    def endings(self) -> list[Callable[[], object]]:
        """What closes it, in order. Nobody may ask for pages any more."""
        opened = (self.engine, self.host_side, self._store, self.scratch, self._memory)
        return [*(part.close for part in opened if part is not None), self._forget]

    def _forget(self) -> None:
        self.host_side = self.engine = self._store = self.scratch = self._pool = None


def stored_pieces(sections: Sequence[Section]) -> list[Page]:
    """Return all that is stored."""
    return [piece for section in sections for piece in pieces_of(section)]
