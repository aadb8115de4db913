"""The protocol of page stores, and the files that have pages: swap files, and the user's external ones.

Stores are: swap files, a scratch file, both as one, a checkpoint's files that are only read, and the dry run's, which only counts.
They share one contract (tests/contract/test_page_stores.py).

All parts of a swap file have one name and one layout: a page has the same offset in every part, so that only opening, allocation
and removal depend on drives. A part takes space for the pages of its drive alone, and is a hole elsewhere. The first part also
has what is not pages, and can become a snapshot when the other drives' pages are copied to it.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from swapper import _C
from swapper._C import File
from swapper.errors import CheckpointError, ChecksumError, IoError
from swapper.io import beneath
from swapper.io.drives import Drives
from swapper.io.engines import Transfer
from swapper.paging.section import EXTERNAL, Page

CUT_OFF = "unexpected end of file"
"""The engine's message if a file ends before the page does (csrc/io/progress.cpp)."""
MAX_NAMED = 3
"""Tensors of a page that a message names."""


class PageStore(Protocol):
    """Reads and writes pages. Called with the pager's lock held; nothing here waits for a transfer."""

    def read(self, page: Page, address: int, after: Transfer | None = None) -> Transfer:
        """Submit a read of the newest content of `page` into memory at `address`, to begin once `after` is done.

        Args:
            page: with a `location`.
            address: of page-locked memory, `page.nbytes` long.
            after: a transfer in flight, of any engine; None: begin at once.

        Raises:
            InvariantError: nothing was written of it.
        """

    def write(self, page: Page, address: int) -> Transfer:
        """Submit a write of `page` from memory at `address`.

        What the last commit names stays whole. Newer content may be overwritten: after a write that fails, the page stays in
        memory until another succeeds, or `roll_back`.
        """

    def written_to(self, page: Page) -> File | None:
        """Return the file that the write in flight goes to."""
        return None

    def written(self, page: Page, ticket: Transfer) -> None:
        """Note that the write of `ticket` succeeded: `page.location` names its file from now on."""

    def explain(self, page: Page, error: IoError) -> IoError:
        """Return the error to raise for a read of `page` that failed with `error`."""
        return error

    def file_of(self, page: Page) -> File | None:
        """Return the file to read from `page.stored_offset` when the addresses of a cold page are touched; None: there is none."""


@dataclass
class _Damage:
    location: int | None
    error: ChecksumError
    again: Transfer | None = None  # ticket of the newest read since

    @property
    def is_over(self) -> bool:
        """Whether it was read without error since: the first read was to blame, not the drive."""
        return self.again is not None and self.again.done and self.again.error is None


class Damages:
    """Pages that were found changed, and the file of each. `note` and `read_again` are called with the pager's lock held.

    The engine compares what it reads with the checksum of what was written ([Note: checksums], swap_files.py). It does not compare
    reads of a cold window past the guard (csrc/memory/fault.h), nor tensors of a `state_dict` that are mapped.
    """

    def __init__(self) -> None:
        self._found: dict[Page, _Damage] = {}

    def note(self, page: Page, error: ChecksumError) -> None:
        self._found[page] = _Damage(page.location, error)

    def read_again(self, page: Page, ticket: Transfer) -> None:
        """Note another read of `page`, by `ticket`."""
        if page in self._found:
            self._found[page].again = ticket

    def written(self, page: Page) -> None:
        """Note that `page` was written to its `location`."""
        if page in self._found and self._found[page].location == page.location:
            del self._found[page]

    def check(self, places: Mapping[Page, int | None] | None = None) -> None:
        """Raise the ChecksumError of a page that is damaged in its file of `places`. Any thread may call this.

        Args:
            places: the file of each page; None: those that have the newest content.
        """
        for page, damage in list(self._found.items()):
            place = page.location if places is None else places.get(page)
            if place == damage.location and not damage.is_over:
                raise damage.error


def as_changed(page: Page, error: IoError, remedy: str) -> ChecksumError | None:
    """Return the error for a read of `page` that failed because its bytes were changed; None if it failed otherwise.

    Args:
        page: that was read.
        error: of the read.
        remedy: what the user can do, a sentence.
    """
    if error.errno != errno.EBADMSG and error.detail != CUT_OFF:
        return None
    names = page.tensors
    named = f"{', '.join(names[:MAX_NAMED])}{' and more' if len(names) > MAX_NAMED else ''}"
    detail = (
        f"{error.detail}: {named}, page {page.index} of {page.section.plan.where}. The drive, memory or another program changed "
        f"them: see the system's log, and check the drive. {remedy}"
    )
    return ChecksumError(error.op, error.path, page.stored_offset, page.stored_bytes, errno.EBADMSG, detail)


FileStatus = tuple[int, int, int]
"""Size of a file in bytes, mtime and ctime in nanoseconds. A program that changes bytes can restore mtime, but not ctime."""


def status_of(file: int | Path) -> FileStatus:
    """Return the status of a path or an open descriptor."""
    status = os.fstat(file) if isinstance(file, int) else beneath.status(file)
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


class SwapFile:
    """Owns its open parts, one a drive."""

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
        """Path of the first part, which can become a snapshot."""
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
        """Raise ChecksumError if a part has fewer than `nbytes` bytes."""
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

    def extend(self, nbytes: int) -> None:
        """Make each part `nbytes` long; what is new is a hole."""
        for part in self._parts:
            part.truncate(nbytes)

    def sync(self) -> None:
        for part in self._parts:
            part.sync()

    def close(self) -> None:
        for part in self._parts:
            part.close()

    def remove(self) -> None:
        """Close it and unlink its names. A snapshot keeps its own."""
        paths = self.paths
        self.close()
        for path in paths:
            beneath.unlink(path)


def create(
    drives: Drives, name: str, nbytes: int, headers: Iterable[tuple[int, bytes]], pages: Sequence[Page]
) -> SwapFile:
    """Create a swap file: allocate its space and write its headers. Its pages are empty.

    Args:
        name: of each part. Existing parts of that name are removed: no commit names them.
        nbytes: size of a part, without a tail.
        headers: (file offset, bytes) of what is not pages.
        pages: all that have an offset in it.

    Raises:
        IoError: a drive is full, or a directory refuses. What was created is removed again.
    """
    parts: list[File] = []
    remove(drives, name)
    try:
        for drive, path in enumerate(drives.paths(name)):
            part = beneath.open_for_transfers(path, create=True)
            parts.append(part)
            for begin, end in _room(drive, nbytes, pages):
                part.allocate(end - begin, offset=begin)
            part.truncate(nbytes)
        write_headers(drives.paths(name)[0], headers)
    except BaseException:
        SwapFile(parts).remove()
        raise
    return SwapFile(parts)


def reopen(
    drives: Drives, name: str, nbytes: int, headers: Iterable[tuple[int, bytes]], is_needed: bool
) -> tuple[SwapFile, FileStatus | None]:
    """Open a swap file of a resumed run; returns the status of its first part too, if that is frozen.

    [Note: frozen files], swap_files.py

    Args:
        is_needed: the commit names it for some page.

    Raises:
        CheckpointError: a part is missing, or too short where it is needed.
    """
    paths = drives.paths(name)
    status = [_checked_status(path, nbytes if is_needed else 0) for path in paths]
    frozen = is_frozen(paths[0])
    if not frozen:  # a snapshot or a power loss may have come between its creation and its use
        for path in paths:
            with os.fdopen(beneath.open_file(path, os.O_WRONLY), "wb") as file:
                file.truncate(nbytes)
        write_headers(paths[0], headers)
    parts: list[File] = []
    try:
        for path in paths:
            parts.append(beneath.open_for_transfers(path, read_only=frozen))
    except BaseException:
        SwapFile(parts).close()
        raise
    return SwapFile(parts), status[0] if frozen else None


def exists(drives: Drives, name: str) -> bool:
    """Return whether all parts of a swap file are there."""
    return all(beneath.exists(path) for path in drives.paths(name))


def remove(drives: Drives, name: str) -> None:
    """Unlink what is there of a swap file's parts."""
    for path in drives.paths(name):
        beneath.unlink(path)


def is_frozen(path: Path) -> bool:
    """Return whether the file is, or is about to be, a snapshot too. [Note: frozen files], swap_files.py"""
    try:
        status = beneath.status(path)
    except FileNotFoundError:
        return False
    return status.st_nlink > 1 or not status.st_mode & 0o222


def write_headers(path: Path, headers: Iterable[tuple[int, bytes]]) -> None:
    with os.fdopen(beneath.open_file(path, os.O_WRONLY), "wb") as file:
        for offset, data in headers:
            write_all(file.fileno(), data, offset)


def _room(drive: int, nbytes: int, pages: Sequence[Page]) -> list[tuple[int, int]]:
    """Return the runs (begin, end) of a part that need space: its pages; in the first part, all but the others' pages.

    External sections need none. [Note: external sections], swap_files.py
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
    """Write `data` at `offset` of an open file.

    Args:
        descriptor: of the file.
        data: all of it is written.
        offset: in bytes.
    """
    view = memoryview(data)
    while view:
        done = os.pwrite(descriptor, view, offset)
        view, offset = view[done:], offset + done


class ExternalFiles:
    """Owns the user's files that external sections are read from. They are never written.

    Attributes:
        direct: for transfers.
        cached: the same through the page cache, for unaligned reads.

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
        """Return the file that has `page`, at `page.stored_offset`, for transfers."""
        return self.direct[_path(page)]

    def file_of(self, page: Page) -> _C.File:
        """Return the same file for reads when the addresses of a cold page are touched."""
        return self.cached[_path(page)]

    def close(self) -> None:
        for file in (*self.direct.values(), *self.cached.values()):
            file.close()


def checksum_of(page: Page, address: int) -> int | None:
    """Return the CRC-32 of `page` in memory at `address` if it is external, to find out later whether it was changed; else None."""
    return _C.crc32_address(address, page.nbytes) if page.location == EXTERNAL else None


def _path(page: Page) -> Path:
    assert page.section.plan.external is not None
    return page.section.plan.external.path
