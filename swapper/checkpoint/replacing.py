"""Writes a file that appears under its name when it is whole, or not at all.

It is written in the same directory under another name, synced, renamed, and the directory is synced: a reader sees the
old file or the new one, even after a power loss. After any failure, Ctrl-C included, the temporary file is removed.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from swapper.errors import CheckpointError, IoError, remedy


@contextmanager
def replacing(path: str | os.PathLike[str], *, overwrite: bool | None, durable: bool = True) -> Iterator[Path]:
    """Yield the path of an empty file to be written; at the end it gets its name.

    Args:
        path: the name. Links are followed: their target is replaced, and a hard-linked file keeps its old content under
            its other names.
        overwrite: allow an existing file of that name; None: no, and the caller has no such option. A write-protected
            file always stays.
        durable: sync file and directory, so that a power loss costs at most the new file.

    Raises:
        CheckpointError: an existing `path` must not be replaced, or there is no such directory.
        IoError: the directory cannot be written to.
    """
    target = Path(os.path.realpath(os.fspath(path)))
    check_target(target, overwrite)
    temporary = target.with_name(f".{target.name[:200]}.{os.getpid()}-{secrets.token_hex(4)}.partial")
    try:
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
    except OSError as error:
        raise IoError("open", str(temporary), 0, 0, error.errno or 0, remedy(error.errno)) from error
    try:
        yield temporary
        _publish(temporary, target, overwrite, durable)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def check_target(target: Path, overwrite: bool | None) -> None:
    """Raise CheckpointError unless a file may be published as `target`. None: the caller has no option `overwrite`."""
    try:
        status = target.lstat()
    except FileNotFoundError:
        if not target.parent.is_dir():
            raise CheckpointError(f"directory {target.parent} does not exist: create it first") from None
        return
    except OSError as error:
        raise CheckpointError(f"{target} cannot be written ({error.strerror}): choose another name") from error
    if not stat.S_ISREG(status.st_mode):
        kind = "a directory" if stat.S_ISDIR(status.st_mode) else "not a file"
        raise CheckpointError(f"{target} is {kind}: choose the name of a file")
    if not overwrite:
        remedy = "or remove it" if overwrite is None else "remove it, or pass overwrite=True"
        raise CheckpointError(f"{target} exists already: choose another name, {remedy}")
    if not status.st_mode & (stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH):
        raise CheckpointError(f"{target} is write-protected, as snapshots are: choose another name, or remove it first")


def _publish(temporary: Path, target: Path, overwrite: bool | None, durable: bool) -> None:
    try:
        if durable:
            _sync(temporary, os.O_RDWR)
        if overwrite:
            temporary.rename(target)
        else:
            _rename_to_new(temporary, target)
        if durable:
            _sync(target.parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        if isinstance(error, IoError):
            raise
        raise IoError("publish", str(target), 0, 0, error.errno or 0, remedy(error.errno)) from error


def _rename_to_new(temporary: Path, target: Path) -> None:
    try:
        os.link(temporary, target)
    except FileExistsError:
        raise CheckpointError(f"{target} appeared meanwhile, and was not changed") from None
    except OSError:  # a filesystem without hard links
        if os.path.lexists(target):
            raise CheckpointError(f"{target} appeared meanwhile, and was not changed") from None
        temporary.rename(target)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
