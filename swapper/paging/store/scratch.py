"""The scratch file of transient pages, without a name: no commit or snapshot knows it, and it ends with the process."""

from __future__ import annotations

from collections.abc import Sequence

from swapper._C import File
from swapper.errors import InvariantError, IoError
from swapper.io import beneath
from swapper.io.drives import Drives
from swapper.io.engines import Engine, Transfer
from swapper.io.extents import transient_name
from swapper.paging.section import Page
from swapper.paging.store import page_files
from swapper.paging.store.page_files import PageStore, as_changed
from swapper.paging.store.swap_files import Store


class ScratchFile:
    """Owns a file for transient pages. The engine outlives it.

    Args:
        drives: each page is assigned to one.
        pages: all that have an offset in it; the space is allocated now. Those of `add_pages` take theirs when they are written.
        check_reads: compare what is read with the checksum of what was written. [Note: checksums], swap_files.py

    Raises:
        IoError: a drive is full, or a directory refuses.
    """

    def __init__(self, engine: Engine, drives: Drives, pages: Sequence[Page], check_reads: bool = True) -> None:
        self._engine = engine
        self._drives = drives
        self._checks_reads = check_reads
        nbytes = self._assign(pages)
        self._file = page_files.create(drives, transient_name("scratch"), nbytes, (), pages)
        for path in self._file.paths:
            beneath.unlink(path)

    def _assign(self, pages: Sequence[Page]) -> int:
        """Assign pages to drives; return where the last one ends, in bytes."""
        for page, drive in zip(pages, self._drives.assign_to_drives([page.nbytes for page in pages]), strict=True):
            page.drive = drive
        return max((page.file_offset + page.nbytes for page in pages), default=0)

    def add_pages(self, pages: Sequence[Page]) -> None:
        """Make the file longer for `pages`, which lie behind all others. Raises IoError: the filesystem has no such long files."""
        self._file.extend(self._assign(pages))

    def read(self, page: Page, address: int, after: Transfer | None = None) -> Transfer:
        if page.location is None:
            raise InvariantError(f"{page} is read but was never written")
        file = self._file.of(page)
        return self._engine.read(file, page.file_offset, address, page.nbytes, after=after, expected=page.crc32)

    def explain(self, page: Page, error: IoError) -> IoError:
        """As `Store.explain`."""
        remedy = (
            "Of the last commit and of snapshots it is no part: close the manager and begin again with resume='auto'"
        )
        return as_changed(page, error, remedy) or error

    def write(self, page: Page, address: int) -> Transfer:
        file = self._file.of(page)
        return self._engine.write(file, page.file_offset, address, page.nbytes, checksum=self._checks_reads)

    def written_to(self, page: Page) -> File:
        return self._file.of(page)

    def written(self, page: Page, ticket: Transfer) -> None:
        page.location = 0
        page.crc32 = ticket.crc32 if self._checks_reads else None

    def file_of(self, page: Page) -> File | None:
        return None if page.location is None else self._file.of(page)

    @property
    def io_mode(self) -> str:
        """How it is opened: "direct", or "buffered" and the reason."""
        return self._file.io_mode

    def close(self) -> None:
        self._file.close()


class Stores:
    """Swap files and a scratch file as one store for the pager: transient sections belong to the latter. Owns both."""

    def __init__(self, swap_files: Store, scratch: ScratchFile | None) -> None:
        self.swap_files = swap_files
        self.scratch = scratch

    def _of(self, page: Page) -> PageStore:
        if not page.section.transient:
            return self.swap_files
        assert self.scratch is not None
        return self.scratch

    def read(self, page: Page, address: int, after: Transfer | None = None) -> Transfer:
        return self._of(page).read(page, address, after)

    def explain(self, page: Page, error: IoError) -> IoError:
        return self._of(page).explain(page, error)

    def write(self, page: Page, address: int) -> Transfer:
        return self._of(page).write(page, address)

    def written_to(self, page: Page) -> File | None:
        return self._of(page).written_to(page)

    def written(self, page: Page, ticket: Transfer) -> None:
        self._of(page).written(page, ticket)

    def file_of(self, page: Page) -> File | None:
        return self._of(page).file_of(page)

    @property
    def io_mode(self) -> str:
        return self.swap_files.io_mode

    def close(self) -> None:
        self.swap_files.close()
        if self.scratch is not None:
            self.scratch.close()
