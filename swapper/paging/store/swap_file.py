"""A swap file: a part on each drive of the run, all of one name and one layout.

A page has the same offset in whichever part it lies, so that only who opens, allocates or removes files need know of drives. On
several drives each part takes space for the pages of its own drive alone, and is a hole elsewhere; the first one has what is not
pages too, and can become a snapshot when the other drives' pages are brought over to it.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path

from swapper._C import File
from swapper.errors import CheckpointError, ChecksumError
from swapper.io import beneath
from swapper.io.drives import Drives
from swapper.paging.section import Page

FileStatus = tuple[int, int, int]
"""Size of a file in bytes, time of the last change of its bytes, and of that of anything about it, in nanoseconds. Whoever changes
bytes can put the former back, and not the latter."""


def status_of(file: int | Path) -> FileStatus:
    """Of a path or an open descriptor."""
    status = os.fstat(file) if isinstance(file, int) else beneath.status(file)
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


class SwapFile:
    """Owns its parts, open.

    Args:
        parts: `swapper._C.File`, one a drive.
    """

    def __init__(self, parts: Sequence[File]) -> None:
        self._parts = list(parts)

    def of(self, page: Page) -> File:
        """Return the part that has `page`."""
        return self._parts[page.drive]

    @property
    def first(self) -> File:
        return self._parts[0]

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def path(self) -> Path:
        """Of the first part, which can become a snapshot."""
        return Path(self._parts[0].path)

    @property
    def paths(self) -> list[Path]:
        return [Path(part.path) for part in self._parts]

    @property
    def io_mode(self) -> str:
        """How the parts are opened: "direct", or "buffered" and the reason."""
        modes = ["direct" if part.direct else f"buffered ({part.reason})" for part in self._parts]
        return ", ".join(dict.fromkeys(modes))

    def check_size(self, nbytes: int) -> None:
        """Raise ChecksumError if a part has not `nbytes` bytes any more."""
        for part in self._parts:
            try:
                size = status_of(Path(part.path))[0]
            except FileNotFoundError:
                size = 0
            if size < nbytes:
                detail = (
                    f"another program cut it off: {size} of {nbytes} bytes are there. No step is committed now. "
                    "Close the manager and begin again with resume='auto', or, where that is refused, from a snapshot"
                )
                raise ChecksumError("stat", part.path, size, nbytes - size, errno.EBADMSG, detail)

    def sync(self) -> None:
        for part in self._parts:
            part.sync()

    def close(self) -> None:
        for part in self._parts:
            part.close()

    def remove(self) -> None:
        """Close it, and let its names go. A snapshot keeps its own."""
        paths = self.paths
        self.close()
        for path in paths:
            beneath.unlink(path)


def create(
    drives: Drives, name: str, nbytes: int, headers: Iterable[tuple[int, bytes]], pages: Sequence[Page]
) -> SwapFile:
    """Create a swap file: its space is allocated, its headers are written, its pages are still empty.

    Args:
        drives: of the run.
        name: of each part. Parts of that name that are there are removed: no commit names them.
        nbytes: size of a part, without a tail.
        headers: (file offset, bytes) of what is not pages.
        pages: all that have a place in it.

    Raises:
        IoError: a drive is full, or a directory refuses. What was created is removed again.
    """
    parts: list[File] = []
    paths = drives.paths(name)
    for path in paths:
        beneath.unlink(path)
    try:
        for drive, path in enumerate(paths):
            part = beneath.open_for_transfers(path, create=True)
            parts.append(part)
            for begin, end in _room(drive, nbytes, pages):
                part.allocate(end - begin, offset=begin)
            part.truncate(nbytes)
        write_headers(paths[0], headers)
    except BaseException:
        SwapFile(parts).remove()
        raise
    return SwapFile(parts)


def reopen(
    drives: Drives, name: str, nbytes: int, headers: Iterable[tuple[int, bytes]], is_needed: bool
) -> tuple[SwapFile, FileStatus | None]:
    """Open a swap file of a run that goes on; returns the status of its first part too, if that is frozen.

    See [Note: frozen files], swap_files.py.

    Args:
        is_needed: the commit has something in it.

    Raises:
        CheckpointError: a part is missing, or too short where it is needed.
    """
    paths = drives.paths(name)
    status = [_checked_status(path, nbytes if is_needed else 0) for path in paths]
    frozen = is_frozen(paths[0])
    if not frozen:  # a snapshot or a power loss may have come between its making and its use
        for path in paths:
            _truncate(path, nbytes)
        write_headers(paths[0], headers)
    parts: list[File] = []
    try:
        for path in paths:
            parts.append(beneath.open_for_transfers(path, read_only=frozen))
    except BaseException:
        SwapFile(parts).close()
        raise
    return SwapFile(parts), status[0] if frozen else None


def is_frozen(path: Path) -> bool:
    """Whether the file is, or is about to be, a snapshot's too. [Note: frozen files], swap_files.py"""
    try:
        status = beneath.status(path)
    except FileNotFoundError:
        return False
    return status.st_nlink > 1 or not status.st_mode & 0o222


def _truncate(path: Path, nbytes: int) -> None:
    descriptor = beneath.open_file(path, os.O_WRONLY)
    try:
        os.ftruncate(descriptor, nbytes)
    finally:
        os.close(descriptor)


def write_headers(path: Path, headers: Iterable[tuple[int, bytes]]) -> None:
    descriptor = beneath.open_file(path, os.O_WRONLY)
    try:
        for offset, data in headers:
            write_all(descriptor, data, offset)
    finally:
        os.close(descriptor)


def _room(drive: int, nbytes: int, pages: Sequence[Page]) -> list[tuple[int, int]]:
    """Return the runs (begin, end) of a part that need space: its pages; in the first part, all but the others' pages.

    What is lent takes none. [Note: what is lent], swap_files.py
    """
    if drive > 0:
        return _runs(page for page in pages if page.drive == drive and page.section.plan.external is None)
    others = _runs(page for page in pages if page.drive > 0 or page.section.plan.external is not None)
    begins, ends = [0, *(end for _, end in others)], [*(begin for begin, _ in others), nbytes]
    return [(begin, end) for begin, end in zip(begins, ends, strict=True) if begin < end]


def _runs(pages: Iterable[Page]) -> list[tuple[int, int]]:
    """Return where `pages` lie in a part: neighbours as one run."""
    runs: list[tuple[int, int]] = []
    for begin, end in sorted((page.file_offset, page.file_offset + page.nbytes) for page in pages):
        first = runs.pop()[0] if runs and runs[-1][1] == begin else begin
        runs.append((first, end))
    return runs


def _checked_status(path: Path, nbytes: int) -> FileStatus:
    state = "missing"
    try:
        status = beneath.status(path)
    except FileNotFoundError:
        pass
    else:
        if not stat.S_ISREG(status.st_mode):
            state = "not a file"
        elif status.st_size >= nbytes:
            return status_of(path)
        else:
            state = f"cut off ({status.st_size} of {nbytes} bytes)"
    raise CheckpointError(
        f"{path}, a swap file of the run, is {state}: the run cannot go on. "
        "Say resume='discard' and load the last snapshot"
    )


def write_all(descriptor: int, data: bytes, offset: int) -> None:
    """Write `data` at `offset` of an open file."""
    view = memoryview(data)
    while view:
        done = os.pwrite(descriptor, view, offset)
        view, offset = view[done:], offset + done
