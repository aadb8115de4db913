"""The store of inference: the user's own checkpoint files, which are read and never written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from swapper import _C
from swapper.checkpoint.sources import FileStamp
from swapper.core.section import Page, Section
from swapper.errors import CheckpointError, InvariantError


class WeightFiles:
    """Owns the open files of one model. The engine outlives it.

    Args:
        engine: does the transfers.
        stamps: the files, and what each looked like when its header was read.

    Raises:
        IoError: a file cannot be opened.
        CheckpointError: a file was changed since its header was read.
    """

    def __init__(self, engine: Any, stamps: Mapping[Path, FileStamp]) -> None:
        self._engine = engine
        self._files: dict[Path, Any] = {}
        self._backing: dict[Path, Any] = {}  # the same files through the page cache, for reads of any place
        self._paths: dict[Section, Path] = {}
        self._sizes = {path: stamp.nbytes for path, stamp in stamps.items()}
        try:
            for path, stamp in stamps.items():
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
        nbytes = min(page.nbytes, self._sizes[path] - page.file_offset)
        return self._engine.read(self._files[path], page.file_offset, address, nbytes, after=after)

    def read_into(self, path: Path, offset: int, address: int, nbytes: int) -> Any:
        """Submit a read of any bytes of a file; returns its ticket."""
        return self._engine.read(self._files[path], offset, address, nbytes)

    def file_of(self, page: Page) -> Any:
        """Return the file that answers reads of the page's addresses while it is away; None if it ends within the page."""
        path = self._paths[page.section]
        return self._backing[path] if page.file_offset + page.nbytes <= self._sizes[path] else None

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
