"""Defines the page store of inference: the user's own checkpoint files, which are read and never written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from swapper._C import File
from swapper.errors import CheckpointError, InvariantError, IoError
from swapper.formats.sources import FileStamp, Source
from swapper.io.copying import CopyRange, checksums_of
from swapper.io.engines import Engine, Transfer, open_for, shared_engine
from swapper.paging.section import Page, Section
from swapper.paging.store.page_files import ExternalFiles
from swapper.paging.store.page_store import PageStore


class WeightFiles(PageStore):
    """Owns the open files of one model. The engine outlives it.

    Args:
        engine: does the transfers.
        source: the files, and the size and time of each when its header was read.
        runs: the file that each section is a part of, from its file_offset on.

    Raises:
        IoError: a file cannot be opened.
        CheckpointError: a file was changed since its header was read.
    """

    def __init__(self, engine: Engine, source: Source, runs: Mapping[Section, Path]) -> None:
        self._engine = engine
        self._source = source
        self._paths = runs
        self._files = ExternalFiles(source.stamps)
        self._known: dict[Path, int] = {}  # CRC-32 of files, once verified
        for path, stamp in source.stamps.items():
            if self._files.direct[path].nbytes != stamp.nbytes:
                self.close()
                raise CheckpointError(f"{path} was changed while it was being opened: load the model again")
        for page in (page for section in runs for page in section.pages):
            page.location = 0  # a file has its content

    def read(self, page: Page, address: int, after: Transfer | None = None) -> Transfer:
        """Submit a read of `page` into memory at `address`, up to the file's end; return its ticket."""
        path = self._paths[page.section]
        nbytes = min(page.nbytes, self._source.nbytes_of(path) - page.file_offset)
        return self._submit(path, page.file_offset, address, nbytes, None, after)

    def read_into(self, path: Path, offset: int, memory: torch.Tensor) -> Transfer:
        """Submit a read of any bytes of a file that fill `memory`, contiguous; return its ticket."""
        return self._submit(path, offset, memory.data_ptr(), memory.nbytes, memory, None)

    def _submit(
        self, path: Path, offset: int, address: int, nbytes: int, keep: object, after: Transfer | None
    ) -> Transfer:
        tickets: list[Transfer] = []
        try:
            for at, extent in self._source.extents(path, offset, nbytes):
                file = self._files.direct[extent.path]
                tickets.append(
                    self._engine.read(file, extent.offset, address + at, extent.nbytes, keep=keep, after=after)
                )
        except BaseException:
            AllOf(tickets).exception()  # the caller reuses the memory
            raise
        return tickets[0] if len(tickets) == 1 else AllOf(tickets)

    def file_of(self, page: Page) -> File | None:
        """Return the file that serves reads of a cold page's addresses; None if it ends within the page."""
        path = self._paths[page.section]
        whole = path in self._files.cached and page.file_offset + page.nbytes <= self._source.nbytes_of(path)
        return self._files.cached[path] if whole else None

    def write(self, page: Page, address: int) -> Transfer:
        raise InvariantError(f"{page} of a checkpoint would be written")

    def written(self, page: Page, ticket: Transfer) -> None:
        raise InvariantError(f"{page} of a checkpoint was written")

    @property
    def io_mode(self) -> str:
        """The modes in which files are open: "direct", or "buffered" and the reason."""
        modes = ("direct" if file.direct else f"buffered ({file.reason})" for file in self._files.direct.values())
        return ", ".join(dict.fromkeys(modes))

    def check_unchanged(self, files: Iterable[Path] | None = None) -> None:
        """Raise CheckpointError if one of the files (all, if None) was changed since its header was read.

        A file whose time alone is new, by `touch` or a backup, is read and compared, if its checksum is known.
        """
        paths = list(self._source.stamps if files is None else files)
        try:
            self._source.check_unchanged(paths)
        except CheckpointError:
            if not all(self._has_same_bytes(path) for path in paths):
                raise

    def _has_same_bytes(self, path: Path) -> bool:
        """Return whether a file has the bytes that it had; remember its time."""
        before = self._source.stamps[path]
        try:
            now = FileStamp.of(path)
            if now == before:
                return True
            is_alike = replace(now, changed_ns=before.changed_ns) == before and path in self._known
            if not is_alike or _crc32(path, now.nbytes) != self._known[path] or FileStamp.of(path) != now:
                return False
        except IoError:
            return False
        self._source.stamps[path] = now
        return True

    def verify(self) -> dict[Path, int]:
        """Read all files and return their CRC-32, by path. Uses COPY_BYTES of memory.

        Each pass checks size and modification time. A decaying drive, or somebody who restores the time, leaves those as
        they were. Most formats have no checksums, so later calls are compared with the first.

        Raises:
            CheckpointError: a file has changed since its header was read, or since the last call.
            IoError: a file cannot be read.
        """
        self.check_unchanged()
        found = {path: _crc32(path, stamp.nbytes) for path, stamp in self._source.stamps.items()}
        self._source.check_unchanged()
        for path, crc32 in found.items():
            before = self._known.setdefault(path, crc32)
            if crc32 != before:
                raise CheckpointError(
                    f"{path} was changed while its weights are in use: the CRC-32 of its bytes was {before:08x} and is "
                    f"{crc32:08x}, with size and time as before. Take another copy of it, and load the model again"
                )
        return found

    def close(self) -> None:
        self._files.close()


def _crc32(path: Path, nbytes: int) -> int:
    file = open_for(path, read_only=True)
    try:
        return checksums_of(shared_engine(path), [CopyRange(file, 0, nbytes, None, str(path))]).get(0, 0)
    finally:
        file.close()


class AllOf:
    """The completion of several reads, as one Transfer."""

    def __init__(self, tickets: Sequence[Transfer]) -> None:
        self._tickets = tickets

    @property
    def done(self) -> bool:
        return all(ticket.done for ticket in self._tickets)

    @property
    def error(self) -> IoError | None:
        return next((ticket.error for ticket in self._tickets if ticket.error is not None), None)

    @property
    def nbytes(self) -> int:
        return sum(ticket.nbytes for ticket in self._tickets)

    @property
    def crc32(self) -> int:
        raise ValueError("no checksum was asked for")

    @property
    def submitted_s(self) -> float:
        return min((ticket.submitted_s for ticket in self._tickets), default=0.0)

    @property
    def completed_s(self) -> float:
        return max((ticket.completed_s for ticket in self._tickets), default=0.0)

    def exception(self) -> IoError | None:
        """Wait for all, and return the first error."""
        found = [ticket.exception() for ticket in self._tickets]
        return next((error for error in found if error is not None), None)

    def wait(self) -> None:
        """Wait for all. Raises IoError: one failed; the others are over too."""
        error = self.exception()
        if error is not None:
            raise error
