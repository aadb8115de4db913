"""What a run's pages lie in and go through: swap files and a scratch file beside what all models have."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from swapper.durability.directory import RunDirectory
from swapper.io.engines import Engine
from swapper.modules.resources import Resources
from swapper.paging.planning.schedule import Schedule
from swapper.paging.section import Page, Section, pieces_of
from swapper.paging.store.scratch import ScratchFile, Stores
from swapper.paging.store.swap_files import Store
from swapper.train.session.plan import Plan


class SessionResources(Resources[Stores]):
    """Owns all that. Its store is swap files, and a scratch file of gradients where they are on NVMe."""

    def open_session(
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
        schedule: Schedule,
    ) -> None:
        """Open everything in order.

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
            schedule: the order of use.

        Raises:
            DirectoryError: the drive has not enough room.
        """
        drives = directory.drives

        def open_stores(engine: Engine) -> Stores:
            headers, tail_offset = plan.layout.headers(), plan.layout.tail_offset
            pieces = stored_pieces(sections)
            store = Store(
                engine, drives, headers, tail_offset, files, plan.turns, pieces, first_file, needed, check_reads
            )
            pages = [page for section in paged_grads for page in section.pages]
            return Stores(store, ScratchFile(engine, drives, pages, check_reads) if pages else None)

        directory.require_space(plan.space_by_drive(plan.turns - len(files)))
        self.open(
            [*sections, *paged_grads],
            plan.budget,
            drives.directories,
            backend,
            open_stores,
            schedule,
            None if plan.request.device is None else plan.request.device.device,
            window_pages=plan.window_pages,
            lazy=plan.lazy,
            max_deferred_writes=plan.max_deferred_writes,
        )

    def add_memory(self, sections: Sequence[Section]) -> None:
        """Give resident sections their memory."""
        arena, nbytes = self.memory.attach(sections, 0)
        self._sections += sections
        if self.host_side is not None:
            self.host_side.add(arena, nbytes)


def stored_pieces(sections: Sequence[Section]) -> list[Page]:
    """Return all that is stored."""
    return [piece for section in sections for piece in pieces_of(section)]
