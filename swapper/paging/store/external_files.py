"""Files of the user's that have what sections were lent: opened to be read, and never written. See Lent, layout.py."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from swapper import _C
from swapper.paging.section import EXTERNAL, Page


class ExternalFiles:
    """Owns the open files.

    Args:
        paths: of all of them.

    Attributes:
        direct: for transfers.
        cached: the same through the page cache, for reads of any place.

    Raises:
        IoError: one cannot be opened.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self.direct: dict[Path, _C.File] = {}
        self.cached: dict[Path, _C.File] = {}
        try:
            for path in dict.fromkeys(paths):
                self.direct[path] = _C.File(str(path), read_only=True)
                self.cached[path] = _C.File(str(path), read_only=True, direct=False)
        except BaseException:
            self.close()
            raise

    def file(self, page: Page) -> _C.File:
        """Return the file that has `page`, at `page.stored_offset`, as far as the file goes."""
        return self.direct[_path(page)]

    def file_of(self, page: Page) -> _C.File:
        """Return the file that answers reads of the page's addresses while it is away."""
        return self.cached[_path(page)]

    def close(self) -> None:
        for file in (*self.direct.values(), *self.cached.values()):
            file.close()


def checksum_of(page: Page, address: int) -> int | None:
    """Return the CRC-32 of what `page` has in memory, at `address`, if it is lent: to know later whether it was changed."""
    return _C.crc32_address(address, page.nbytes) if page.location == EXTERNAL else None


def _path(page: Page) -> Path:
    assert page.section.plan.external is not None
    return page.section.plan.external.path
