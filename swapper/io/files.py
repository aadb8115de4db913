"""Opens the files that a handle reads or writes: a path, or a descriptor that stays its caller's.

A file is opened for each operation, shared by those in flight on it, and then closed: a handle that kept files open
would write into removed ones, and hold the space of deleted ones.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from swapper import _C
from swapper.errors import ConfigError, IoError

Target = str | bytes | os.PathLike[str] | os.PathLike[bytes] | int
"""A path, or an open descriptor."""


class Opened(Protocol):
    """The target of an operation: one file, or one striped over several drives (`striping.py`)."""

    @property
    def path(self) -> str: ...
    @property
    def files(self) -> list[OpenFile]: ...
    @property
    def is_regular(self) -> bool: ...
    @property
    def nbytes(self) -> int: ...
    def allocate(self, nbytes: int) -> None: ...
    def truncate(self, nbytes: int) -> None: ...
    def segments(self, offset: int, nbytes: int) -> Iterator[Segment]: ...


class Segment(NamedTuple):
    """A run of bytes in one file."""

    opened: OpenFile
    offset: int
    nbytes: int


@dataclass(eq=False)
class OpenFile:
    """One open file and the number of operations that use it. The last of them closes it."""

    file: _C.File
    key: tuple[int, int, bool]
    device: int
    is_regular: bool
    users: int = 0

    @property
    def path(self) -> str:
        return self.file.path

    @property
    def files(self) -> list[OpenFile]:
        return [self]

    @property
    def nbytes(self) -> int:
        return self.file.nbytes

    def allocate(self, nbytes: int) -> None:
        self.file.allocate(nbytes)

    def truncate(self, nbytes: int) -> None:
        self.file.truncate(nbytes)

    def segments(self, offset: int, nbytes: int) -> Iterator[Segment]:
        yield Segment(self, offset, nbytes)


class OpenFiles:
    """The files with operations in flight, by inode and direction."""

    def __init__(self) -> None:
        self._files: dict[tuple[int, int, bool], OpenFile] = {}
        self._lock = threading.Lock()

    def open(self, target: Target, writing: bool) -> OpenFile:
        """Open `target`, making a missing file if `writing`. Pass the result to `release`.

        Raises:
            IoError: the system's error, or EINVAL for anything that is neither a file nor a drive; EBADF for a
                descriptor that is not open, or not in this direction.
        """
        path = _path_of(target, writing)
        for _ in range(8):  # a file may appear or disappear between the check and the open
            status = _status(path, target, writing)
            with self._lock:
                shared = self._files.get((status.st_dev, status.st_ino, writing)) if status else None
                if shared is not None:
                    shared.users += 1
                    return shared
            try:
                file = _C.File(path, create=status is None, read_only=not writing)
            except IoError as error:
                if error.errno == (errno.EEXIST if status is None else errno.ENOENT) and writing:
                    continue
                raise
            return self._adopt(file, path, writing)
        raise IoError("open", path, 0, 0, errno.EBUSY, "the file keeps appearing and disappearing")

    def _adopt(self, file: _C.File, path: str, writing: bool) -> OpenFile:
        try:
            status = os.stat(path)  # noqa: PTH116 - paths may be descriptors under /proc
        except OSError as error:
            file.close()
            raise IoError("open", path, 0, 0, error.errno or 0, "removed while it was opened") from error
        is_regular = stat.S_ISREG(status.st_mode)
        device = status.st_dev if is_regular else status.st_rdev
        opened = OpenFile(file, (status.st_dev, status.st_ino, writing), device, is_regular, users=1)
        with self._lock:
            self._files.setdefault(opened.key, opened)
        return opened

    def release(self, opened: Opened) -> None:
        """Release the result of `open`. The engine keeps the descriptor until its transfers are done."""
        for file in opened.files:
            self._release_one(file)

    def _release_one(self, opened: OpenFile) -> None:
        with self._lock:
            opened.users -= 1
            if opened.users:
                return
            if self._files.get(opened.key) is opened:
                del self._files[opened.key]
        opened.file.close()


def _path_of(target: Target, writing: bool) -> str:
    if isinstance(target, bool):
        raise ConfigError(f"{target!r} is neither a path nor a descriptor")
    if not isinstance(target, int):
        path = os.fsdecode(target)
        if "\0" in path:
            raise ConfigError(f"{path!r} is not a path: it contains a NUL")
        return path
    try:
        mode = fcntl.fcntl(target, fcntl.F_GETFL) & os.O_ACCMODE
    except (OSError, ValueError, OverflowError) as error:
        raise IoError("open", f"descriptor {target}", 0, 0, errno.EBADF, "it is not open") from error
    if mode == (os.O_RDONLY if writing else os.O_WRONLY):
        missing = "writing" if writing else "reading"
        raise IoError("open", f"descriptor {target}", 0, 0, errno.EBADF, f"it is not open for {missing}")
    # Opened again: the caller may close its own at once, and its flags and position do not change.
    return f"/proc/self/fd/{target}"


def _status(path: str, target: Target, writing: bool) -> os.stat_result | None:
    """Return the status of `path`; None if it is missing and may be made. Refuses a FIFO, whose open would block."""
    try:
        status = os.stat(path)  # noqa: PTH116
    except FileNotFoundError as error:
        if writing and not isinstance(target, int):
            return None
        raise IoError("open", path, 0, 0, errno.ENOENT) from error
    except OSError as error:
        raise IoError("open", path, 0, 0, error.errno or errno.EIO) from error
    if stat.S_ISDIR(status.st_mode):
        raise IoError("open", path, 0, 0, errno.EISDIR)
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISBLK(status.st_mode)):
        raise IoError("open", path, 0, 0, errno.EINVAL, "it is neither a file nor a drive")
    return status
