"""The store: the swap files, and which of them has the newest content of each page.

Two files of one layout take turns. A page's newest content is at its `location`; the last commit names its `committed`
file. A page is written to the file that the commit does not name for it, so that what the commit names stays whole while
a step is under way, at no extra I/O: a step rewrites what it touches anyway.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from swapper import _C
from swapper.core.section import Page
from swapper.errors import InvariantError

FILE_COUNT = 2


class Store:
    """Owns the swap files of one run. The engine outlives it."""

    def __init__(self, engine: Any, directory: Path, headers: Iterable[tuple[int, bytes]], nbytes: int) -> None:
        """Create the files.

        Args:
            headers: (file offset, bytes) of everything before the tail that is not payload.
            nbytes: size of a file, without its tail.

        Raises:
            IoError: the drive is full, or the directory refuses. Nothing is left behind.
        """
        self._engine = engine
        self.nbytes = nbytes
        self._headers = list(headers)
        self._files: list[Any] = []
        self._written: dict[int, Page] = {}  # by index: location differs from what the commit names
        try:
            for turn in range(FILE_COUNT):
                self._files.append(self.create_file(directory / f"turn-{turn}.swap"))
        except BaseException:
            self.close()
            for turn in range(FILE_COUNT):
                (directory / f"turn-{turn}.swap").unlink(missing_ok=True)
            raise

    @property
    def io_mode(self) -> str:
        """How the files are opened: "direct", or "buffered" and the reason."""
        first = self._files[0]
        return "direct" if first.direct else f"buffered ({first.reason})"

    def create_file(self, path: Path) -> Any:
        """Create a file of the store's layout: its space allocated, its headers written, its payload still empty."""
        file = _C.File(str(path), create=True)
        try:
            file.allocate(self.nbytes)
            descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
            try:
                for offset, data in self._headers:
                    _write_all(descriptor, data, offset)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except BaseException:
            file.close()
            path.unlink(missing_ok=True)
            raise
        return file

    def read(self, page: Page, address: int, after: Any = None) -> Any:
        """Submit a read of `page` into memory at `address`; returns its ticket."""
        if page.location is None:
            raise InvariantError(f"{page} is read but was never written")
        return self._engine.read(self._files[page.location], page.file_offset, address, page.nbytes, after=after)

    def write(self, page: Page, address: int) -> Any:
        """Submit a write of `page` from memory at `address`; returns its ticket, which carries the CRC-32."""
        return self._engine.write(
            self._files[self._target(page)], page.file_offset, address, page.nbytes, checksum=True
        )

    def written(self, page: Page, ticket: Any) -> None:
        """Note that `ticket`, a write of `page`, is done."""
        page.location = self._target(page)
        page.crc32 = ticket.crc32
        self._written[page.index] = page

    def commit(self) -> None:
        """What is written becomes what the commit names. Call when no write is in flight."""
        for page in self._written.values():
            page.committed = page.location
        self._written.clear()

    def sync(self) -> None:
        for file in self._files:
            file.sync()

    def close(self) -> None:
        for file in self._files:
            file.close()

    def _target(self, page: Page) -> int:
        return 0 if page.committed is None else (page.committed + 1) % FILE_COUNT


def _write_all(descriptor: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        done = os.pwrite(descriptor, view, offset)
        view, offset = view[done:], offset + done
