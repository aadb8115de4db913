"""The store: the swap files, and which of them has the newest content of each page.

All files have one layout, and two of them are written in turns. A page's newest content is in file `location`; the last commit
names file `committed` for it. A page is written to the turn that the commit does not name for it, so that what the commit names
stays whole while a step is under way, at no extra I/O: a step rewrites what it touches anyway.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from swapper import _C
from swapper.core.section import Page
from swapper.errors import CheckpointError, InvariantError

TURNS = 2
"""How many files are written in turns, so that one of them stays as the last commit has it."""


class Store:
    """Owns the swap files of one run. The engine outlives it.

    Args:
        engine: does the transfers.
        directory: the run's.
        headers: (file offset, bytes) of everything before the tail that is not payload.
        nbytes: size of a file, without a tail.
        existing: names of the files of a run that goes on, by number; empty for a new run.
        turns: how many files are written in turns: TURNS, or 1 for a run that never commits.

    Raises:
        IoError: the drive is full, or the directory refuses. Files that were created are removed again.
        CheckpointError: a file of a run that goes on is missing or too short.
    """

    def __init__(
        self,
        engine: Any,
        directory: Path,
        headers: Iterable[tuple[int, bytes]],
        nbytes: int,
        existing: Mapping[int, str],
        turns: int,
    ) -> None:
        self._engine = engine
        self._directory = directory
        self.nbytes = nbytes
        self._headers = list(headers)
        self._files: dict[int, Any] = {}
        self._written: list[Page] = []  # since the last commit
        created: list[Path] = []
        try:
            for number, name in existing.items():
                self._files[number] = self._open(directory / name)
            while len(self._files) < turns:
                number = max(self._files, default=-1) + 1
                path = directory / f"turn-{number}.swap"
                path.unlink(missing_ok=True)  # of a run that was killed before its first commit
                self._files[number] = self.create_file(path)
                created.append(path)
        except BaseException:
            self.close()
            for path in created:
                path.unlink(missing_ok=True)
            raise
        self._turns = sorted(self._files)

    @property
    def names(self) -> dict[int, str]:
        """Names of the files by number."""
        return {number: Path(file.path).name for number, file in self._files.items()}

    @property
    def io_mode(self) -> str:
        """How the files are opened: "direct", or "buffered" and the reason."""
        first = self._files[self._turns[0]]
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

    def read(self, page: Page, address: int, after: Any = None, checksum: bool = False) -> Any:
        """Submit a read of `page`, or of a resident section's piece, into memory at `address`; returns its ticket."""
        if page.location is None:
            raise InvariantError(f"{page} is read but was never written")
        file = self._files[page.location]
        return self._engine.read(file, page.file_offset, address, page.nbytes, after=after, checksum=checksum)

    def write(self, page: Page, address: int) -> Any:
        """Submit a write of `page` from memory at `address`; returns its ticket, which carries the CRC-32."""
        file = self._files[self._target(page)]
        return self._engine.write(file, page.file_offset, address, page.nbytes, checksum=True)

    def written(self, page: Page, ticket: Any) -> None:
        """Note that `ticket`, a write of `page`, is done."""
        page.location = self._target(page)
        page.crc32 = ticket.crc32
        self._written.append(page)

    def commit(self) -> None:
        """What is written is what the commit names from now on. Call when no write is in flight."""
        for page in self._written:
            page.committed = page.location
        self._written.clear()

    def sync(self) -> None:
        """Have the drive keep what was written to it."""
        for file in self._files.values():
            file.sync()

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def _target(self, page: Page) -> int:
        return next(number for number in self._turns if number != page.committed)

    def _open(self, path: Path) -> Any:
        try:
            nbytes = path.stat().st_size
        except FileNotFoundError:
            nbytes = -1
        if nbytes < self.nbytes:
            state = "missing" if nbytes < 0 else f"cut off ({nbytes} of {self.nbytes} bytes)"
            raise CheckpointError(
                f"{path}, a swap file of the run, is {state}: the run cannot go on. "
                "Say resume='discard' and load the last snapshot"
            )
        return _C.File(str(path))


def _write_all(descriptor: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        done = os.pwrite(descriptor, view, offset)
        view, offset = view[done:], offset + done
