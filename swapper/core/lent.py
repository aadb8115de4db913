"""Files of the user's that have what sections were lent: opened to be read, and never written. See Lent, layout.py."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from swapper import _C
from swapper.core.section import LENT, Page


class LentFiles:
    """Owns the open files. The engine outlives it.

    Args:
        engine: does the transfers.
        paths: of all of them.

    Raises:
        IoError: one cannot be opened.
    """

    def __init__(self, engine: Any, paths: Iterable[Path]) -> None:
        self._engine = engine
        self._files: dict[Path, Any] = {}
        self._backing: dict[Path, Any] = {}  # the same files through the page cache, for reads of any place
        try:
            for path in dict.fromkeys(paths):
                self._files[path] = _C.File(str(path), read_only=True)
                self._backing[path] = _C.File(str(path), read_only=True, direct=False)
        except BaseException:
            self.close()
            raise

    def read(self, page: Page, address: int, after: Any, checksum: bool) -> Any:
        """Submit a read of `page`, as far as the file goes; returns its ticket."""
        file, offset, nbytes = self._files[_path(page)], page.stored_offset, page.stored_bytes
        return self._engine.read(file, offset, address, nbytes, after=after, checksum=checksum)

    def file_of(self, page: Page) -> Any:
        """Return the file that answers reads of the page's addresses while it is away."""
        return self._backing[_path(page)]

    def close(self) -> None:
        for file in (*self._files.values(), *self._backing.values()):
            file.close()


def checksum_of(page: Page, address: int) -> int | None:
    """Return the CRC-32 of what `page` has in memory, at `address`, if it is lent: to know later whether it was changed."""
    return _C.crc32_address(address, page.nbytes) if page.location == LENT else None


def _path(page: Page) -> Path:
    assert page.section.plan.lent is not None
    return page.section.plan.lent.path
