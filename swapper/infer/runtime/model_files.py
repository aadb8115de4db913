"""The store of inference: the user's own checkpoint files, which are read and never written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from swapper import _C
from swapper.errors import CheckpointError, InvariantError, IoError
from swapper.formats.sources import Source
from swapper.paging.section import Page, Section


class WeightFiles:
    """Owns the open files of one model. The engine outlives it.

    Args:
        engine: does the transfers.
        source: the files, and what each looked like when its header was read.

    Raises:
        IoError: a file cannot be opened.
        CheckpointError: a file was changed since its header was read.
    """

    def __init__(self, engine: Any, source: Source) -> None:
        self._engine = engine
        self._source = source
        self._files: dict[Path, Any] = {}
        self._backing: dict[Path, Any] = {}  # the same files through the page cache, for reads of any place
        self._paths: dict[Section, Path] = {}
        try:
            for path, stamp in source.stamps.items():
                self._files[path] = _C.File(str(path), read_only=True)
                self._backing[path] = _C.File(str(path), read_only=True, direct=False)
                if self._files[path].nbytes != stamp.nbytes:
                    raise CheckpointError(f"{path} was changed while it was being opened: load the model anew")
        except BaseException:
            self.close()
            raise

    def place(self, section: Section, path: Path) -> None:
        """`section` is a run of the file at `path`, from its file_offset on."""
        self._paths[section] = path
        for page in section.pages:
            page.location = 0  # there is a file that has its content

    def read(self, page: Page, address: int, after: Any = None) -> Any:
        """Submit a read of `page` into memory at `address`, as far as the file goes; returns its ticket."""
        path = self._paths[page.section]
        nbytes = min(page.nbytes, self._source.nbytes_of(path) - page.file_offset)
        return self._submit(path, page.file_offset, address, nbytes, None, after)

    def explain(self, page: Page, error: IoError) -> IoError:
        """Return what to raise where a read of `page` failed with `error`."""
        return error

    def read_into(self, path: Path, offset: int, memory: torch.Tensor) -> Any:
        """Submit a read of any bytes of a file into `memory`, contiguous, which they fill; returns its ticket."""
        return self._submit(path, offset, memory.data_ptr(), memory.nbytes, memory, None)

    def _submit(self, path: Path, offset: int, address: int, nbytes: int, keep: object, after: Any) -> Any:
        tickets = []
        try:
            for at, extent in self._source.extents(path, offset, nbytes):
                file = self._files[extent.path]
                tickets.append(
                    self._engine.read(file, extent.offset, address + at, extent.nbytes, keep=keep, after=after)
                )
        except BaseException:
            AllOf(tickets).exception()  # the memory is the caller's again
            raise
        return tickets[0] if len(tickets) == 1 else AllOf(tickets)

    def file_of(self, page: Page) -> Any:
        """Return the file that answers reads of the page's addresses while it is away; None if it does not have all of it."""
        path = self._paths[page.section]
        whole = path in self._backing and page.file_offset + page.nbytes <= self._source.nbytes_of(path)
        return self._backing[path] if whole else None

    def write(self, page: Page, address: int) -> Any:
        raise InvariantError(f"{page} of a checkpoint would be written")

    def written(self, page: Page, ticket: Any) -> None:
        raise InvariantError(f"{page} of a checkpoint was written")

    @property
    def modes(self) -> Iterable[str]:
        """How the files are opened, each way once: "direct", or "buffered" and the reason."""
        return dict.fromkeys("direct" if f.direct else f"buffered ({f.reason})" for f in self._files.values())

    def close(self) -> None:
        for file in (*self._files.values(), *self._backing.values()):
            file.close()


class AllOf:
    """The completion of several reads: what the pager asks of a ticket."""

    def __init__(self, tickets: Sequence[Any]) -> None:
        self._tickets = tickets

    @property
    def done(self) -> bool:
        return all(ticket.done for ticket in self._tickets)

    @property
    def error(self) -> Exception | None:
        return next((ticket.error for ticket in self._tickets if ticket.error is not None), None)

    @property
    def submitted_s(self) -> float:
        return min((ticket.submitted_s for ticket in self._tickets), default=0.0)

    @property
    def completed_s(self) -> float:
        return max((ticket.completed_s for ticket in self._tickets), default=0.0)

    def exception(self) -> Exception | None:
        """Wait for all, and return the first error."""
        found = [ticket.exception() for ticket in self._tickets]
        return next((error for error in found if error is not None), None)

    def wait(self) -> None:
        """Wait for all.

        Raises:
            IoError: one failed; the others are over too.
        """
        error = self.exception()
        if error is not None:
            raise error
