"""Opens, renames and removes files of a run's directory beneath the very directory that was checked.

Anybody who may write to a directory can put a link in place of a file, or replace the run's directory. So only its user
may write to it. It is opened once and checked (`hold`); from then on its files are opened, renamed and removed through
its descriptor, whatever its path leads to by now. No link is followed, held or not.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import pwd
import stat
from pathlib import Path

from swapper import _C
from swapper.errors import DirectoryError, IoError, remedy
from swapper.runtime.process import naming_limits

SOLID_BYTES = 64 << 20
"""What may be read of a file whatever it has on the drive: a choice."""
MAX_HOLES = 64
"""Bytes that a file may have for each that is on the drive; some programs leave out zeros as they copy."""
HOLLOW = "nearly all are holes: it is no such file, or a copy without its zeros (cp --sparse=never keeps them)"

_AT_FDCWD, _RENAME_EXCHANGE, _WRITE_AND_WAIT = -100, 2, 7
"""From <linux/fcntl.h> and <linux/fs.h>."""
_libc = ctypes.CDLL(None, use_errno=True)

_held: dict[Path, int] = {}
"""Descriptors of the directories that runs of this process have open."""


def hold(directory: Path) -> int:
    """Open `directory`, check it, and find its files through the returned descriptor, until `release`.

    Raises:
        DirectoryError: it is a link or no directory, belongs to another user, or others may write to it.
        OSError: it cannot be opened.
    """
    try:
        with naming_limits("open", directory):
            descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENOTDIR):
            raise
        raise DirectoryError(
            f"{directory} is a link, or no directory: a run's directory is made by swapper itself. Remove it, or choose another "
            "directory"
        ) from None
    try:
        _check(directory, os.fstat(descriptor))
    except BaseException:
        os.close(descriptor)
        raise
    _held[directory] = descriptor
    return descriptor


def release(directory: Path) -> None:
    """Find the files in `directory` by its path again."""
    descriptor = _held.pop(directory, None)
    if descriptor is not None:
        os.close(descriptor)


def _check(directory: Path, status: os.stat_result) -> None:
    if status.st_uid != os.geteuid():
        raise DirectoryError(
            f"{directory} belongs to {_name_of(status.st_uid)}, who could change the run's files: remove it, or choose "
            "another directory"
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise DirectoryError(
            f"others may write to {directory} (mode {stat.S_IMODE(status.st_mode):04o}), and change the run's files: look "
            f"at its files, then `chmod go-w {directory}`"
        )


def _name_of(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def _at(path: Path) -> tuple[str | Path, int | None]:
    descriptor = _held.get(path.parent)
    return (path, None) if descriptor is None else (path.name, descriptor)


# --- named like the functions of os ----------------------------------------------------------------------------------


def open_file(path: Path, flags: int, mode: int = 0o600) -> int:
    """Open a file below a checked directory, never through a link; return its descriptor.

    Args:
        path: of the file; its directory may be held (`hold`).
        flags: of os.open; O_NOFOLLOW and O_CLOEXEC are added.
        mode: of a file that is made.
    """
    name, directory = _at(path)
    with naming_limits("open", path):
        return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=directory)


def create_file(path: Path, mode: int = 0o600) -> int:
    """Create or truncate a file, and open it for writing."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        return open_file(path, flags, mode)
    except FileExistsError:
        unlink(path)
        return open_file(path, flags, mode)


def replace_file(path: Path, data: bytes, durable: bool = False, mode: int = 0o600, spare: Path | None = None) -> None:
    """Replace a file's content, whole or not at all.

    Args:
        path: of the file; it may be missing.
        data: the content.
        durable: sync file and directory, so that the content survives a power loss.
        mode: of the file.
        spare: of a file in the same directory that is written over and takes the name, and the one that had it becomes the spare:
            so none is removed. Where a filesystem discards what is freed at once (mounted with `discard`), removing a file waits
            for the drive, a second while much is written. A directory of that name stays, and is not used.

    Raises:
        IoError: it cannot be replaced, and the old content is there; or it is not durable.
    """
    temporary, is_published = path.with_name(f"{path.name}.partial"), False
    reopened = None if spare is None else _open_spare(spare, mode)
    if spare is not None and reopened is not None:
        temporary = spare
    try:
        with os.fdopen(create_file(temporary, mode) if reopened is None else reopened, "wb") as file:
            file.write(data)
            file.truncate()
            file.flush()
            if durable:
                os.fsync(file.fileno())
            elif reopened is not None:
                _write_out(file.fileno())
        if reopened is None or not _exchange(temporary, path):
            rename(temporary, path)
        is_published = True
        if durable:
            sync(path.parent)
    except OSError as error:
        raise IoError("replace", str(path), 0, len(data), error.errno or 0, remedy(error.errno)) from error
    finally:
        if not is_published:
            with contextlib.suppress(OSError):
                unlink(temporary)


def _open_spare(path: Path, mode: int) -> int | None:
    """Open a file of this user that has no other name, to write over it, or else create one. None: neither is possible."""
    with contextlib.suppress(OSError):
        descriptor = open_file(path, os.O_WRONLY | os.O_NONBLOCK)
        found = os.fstat(descriptor)
        if stat.S_ISREG(found.st_mode) and found.st_nlink == 1 and found.st_uid == os.geteuid():
            return descriptor
        os.close(descriptor)
    with contextlib.suppress(OSError):
        return create_file(path, mode)
    return None


def _write_out(descriptor: int) -> None:
    """Have the drive get a file's content before its name, as filesystems do for a new file and not for one that is written over.

    Raises:
        OSError: it cannot be written.
    """
    if _libc.sync_file_range(descriptor, ctypes.c_int64(0), ctypes.c_int64(0), _WRITE_AND_WAIT):
        number = ctypes.get_errno()
        if number != errno.ENOSYS:  # of sandboxes
            raise OSError(number, os.strerror(number))


def _exchange(one: Path, other: Path) -> bool:
    """Exchange the names of two files. False: it was not possible, as where `other` is no file; renaming tells why."""
    if not exists(other) or not stat.S_ISREG(status(other).st_mode) or not hasattr(_libc, "renameat2"):
        return False
    names = [(_AT_FDCWD if held is None else held, os.fsencode(name)) for name, held in map(_at, (one, other))]
    return not _libc.renameat2(*names[0], *names[1], _RENAME_EXCHANGE)


def open_for_transfers(path: Path, *, create: bool = False, read_only: bool = False) -> _C.File:
    """Open a file for the engine.

    Args:
        path: as of `open_file`.
        create: make it; it must not exist.
        read_only: writes to it are refused.
    """
    return _C.File(str(path), create=create, read_only=read_only, at=_held.get(path.parent, -1))


def where(directory: Path) -> Path:
    """Return a path that leads to `directory`, for functions that need a path."""
    return Path(f"/proc/self/fd/{_held[directory]}") if directory in _held else directory


def unlink(path: Path) -> None:
    """Remove a file, if there is one. Raises IoError: it cannot be removed, as a directory cannot."""
    name, directory = _at(path)
    try:
        os.unlink(name, dir_fd=directory)
    except FileNotFoundError:
        return
    except OSError as error:
        raise IoError("remove", str(path), 0, 0, error.errno or 0, remedy(error.errno)) from error


def rename(path: Path, to: Path) -> None:
    (name, directory), (new_name, new_directory) = _at(path), _at(to)
    os.rename(name, new_name, src_dir_fd=directory, dst_dir_fd=new_directory)


def link(path: Path, to: Path) -> None:
    """Give a file another name."""
    (name, directory), (new_name, new_directory) = _at(path), _at(to)
    os.link(name, new_name, src_dir_fd=directory, dst_dir_fd=new_directory, follow_symlinks=False)


def status(path: Path) -> os.stat_result:
    name, directory = _at(path)
    return os.stat(name, dir_fd=directory, follow_symlinks=False)


def make_read_only(path: Path) -> None:
    """Make a run's file read-only; nobody else can exchange it meanwhile."""
    with os.fdopen(open_file(path, os.O_RDONLY)) as file:
        os.fchmod(file.fileno(), 0o400)


def exists(path: Path) -> bool:
    """Return True if the name exists, a dangling link too."""
    try:
        status(path)
    except FileNotFoundError:
        return False
    return True


def files(directory: Path) -> list[Path]:
    """Return the sorted paths of the files in `directory`."""
    return sorted(directory / name for name in os.listdir(_held.get(directory, directory)))  # noqa: PTH208


def sync(directory: Path) -> None:
    """Sync the directory's entries to the drive."""
    name, held = (".", _held[directory]) if directory in _held else (directory, None)
    with naming_limits("open", directory):
        descriptor = os.open(name, os.O_RDONLY, dir_fd=held)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_hollow(descriptor: int, offset: int, nbytes: int) -> bool:
    """Return True if nearly all of `nbytes` at `offset` of an open file are holes: memory for them would have no bytes to it.

    Args:
        descriptor: of the file.
        offset, nbytes: of the range, in bytes.
    """
    at, filled = offset, 0
    while nbytes > SOLID_BYTES and filled * MAX_HOLES < nbytes:
        try:
            begin = os.lseek(descriptor, at, os.SEEK_DATA)
            at = os.lseek(descriptor, begin, os.SEEK_HOLE)
        except OSError as error:
            return error.errno == errno.ENXIO  # no bytes follow; else the file system does not tell
        if begin >= offset + nbytes:
            return True
        filled += min(at, offset + nbytes) - begin
    return False


def read_small(path: Path, max_bytes: int, follow: bool = False) -> bytes:
    """Return the content of a small file.

    Args:
        max_bytes: a larger file is refused, as not being what it claims.
        follow: follow links; for files that are not a run's.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not a file, or too large.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC  # opening a FIFO would wait for a writer
    with naming_limits("open", path):
        descriptor = os.open(path, flags) if follow else open_file(path, flags)
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("it is not a file")
        if found.st_size > max_bytes:
            raise ValueError(f"it has {found.st_size} bytes, more than the maximum of {max_bytes}")
        if is_hollow(descriptor, 0, found.st_size):
            raise ValueError(f"of its {found.st_size} bytes {HOLLOW}")
        os.lseek(descriptor, 0, os.SEEK_SET)
        return file.read(found.st_size + 1)  # not max_bytes, for which it would take memory
