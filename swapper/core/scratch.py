"""Where transient pages live: one file without a name, that no commit and no snapshot knows, gone with the process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from swapper import _C
from swapper.core.section import Page
from swapper.core.store import Store
from swapper.errors import InvariantError


class ScratchFile:
    """Owns a file for transient pages. The engine outlives it.

    Args:
        engine: does the transfers.
        directory: on the drive that shall hold it.
        nbytes: its size; the space is taken now.

    Raises:
        IoError: the drive is full, or the directory refuses.
    """

    def __init__(self, engine: Any, directory: Path, nbytes: int) -> None:
        self._engine = engine
        path = directory / f"scratch-{os.getpid()}.swap"
        path.unlink(missing_ok=True)
        self._file = _C.File(str(path), create=True)
        try:
            self._file.allocate(nbytes)
        except BaseException:
            self._file.close()
            raise
        finally:
            path.unlink(missing_ok=True)

    def read(self, page: Page, address: int, after: Any = None) -> Any:
        if page.location is None:
            raise InvariantError(f"{page} is read but was never written")
        return self._engine.read(self._file, page.file_offset, address, page.nbytes, after=after)

    def write(self, page: Page, address: int) -> Any:
        return self._engine.write(self._file, page.file_offset, address, page.nbytes)

    def written(self, page: Page, ticket: Any) -> None:
        page.location = 0

    def file_of(self, page: Page) -> Any:
        return None if page.location is None else self._file

    def close(self) -> None:
        self._file.close()


class Stores:
    """The store and the scratch file as one, for the pager: each page goes where its section belongs."""

    def __init__(self, store: Store, scratch: ScratchFile | None) -> None:
        self._store = store
        self._scratch = scratch

    def _of(self, page: Page) -> Any:
        return self._scratch if page.section.transient else self._store

    def read(self, page: Page, address: int, after: Any = None) -> Any:
        return self._of(page).read(page, address, after=after)

    def write(self, page: Page, address: int) -> Any:
        return self._of(page).write(page, address)

    def written(self, page: Page, ticket: Any) -> None:
        self._of(page).written(page, ticket)

    def file_of(self, page: Page) -> Any:
        return self._of(page).file_of(page)
