"""Writes a file, or a directory, that appears under its name when it is whole, or not at all.

It is written next to that under another name, synced, renamed, and the directory around it is synced: a reader sees the
old file or the new one, even after a power loss. After any failure, Ctrl-C included, what was written is removed.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from swapper.errors import CheckpointError, IoError, remedy
from swapper.io.mounts import make_parents
from swapper.runtime.limits import naming_limits


@contextmanager
def replacing(path: str | os.PathLike[str], *, overwrite: bool | None, durable: bool = True) -> Iterator[Path]:
    """Yield the path of an empty file to be written; at the end it gets its name.

    Args:
        path: the name. Links are followed: their target is replaced; other names of a file keep its old content.
        overwrite: allow an existing file; None: no, and the caller has no such option. A write-protected one stays.
        durable: sync file and directory, so that a power loss costs at most the new file.

    The new file has the permissions of the one that it replaces.

    Raises:
        CheckpointError: an existing `path` must not be replaced, or there is no such directory.
        IoError: the directory cannot be written to.
    """
    target = Path(os.path.realpath(os.fspath(path)))
    check_target(target, overwrite)
    temporary = _temporary_name(target)
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
    """Make missing directories above `target`. Raise CheckpointError unless a file may be published there.

    `overwrite`: None if the caller has no such option.
    """
    try:
        status = target.lstat()
    except FileNotFoundError:
        make_parents(target, CheckpointError)
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
            sync(temporary)
        if overwrite:
            with contextlib.suppress(FileNotFoundError):
                temporary.chmod(stat.S_IMODE(target.stat().st_mode))
            temporary.rename(target)
        else:
            _rename_to_new(temporary, target)
        if durable:
            sync(target.parent)
    except OSError as error:
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


def sync(path: Path) -> None:
    """Sync a file or directory to the drive. Raises IoError: the drive failed, or is full."""
    with naming_limits("open", path):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        raise IoError("sync", str(path), 0, 0, error.errno or 0) from error
    finally:
        os.close(descriptor)


@contextmanager
def new_directory(target: Path) -> Iterator[Path]:
    """Yield a directory to fill; at the end it is synced and gets the name `target`. Nothing may exist there.

    Raises:
        CheckpointError: something exists there.
        IoError: the directory cannot be made.
    """
    if os.path.lexists(target):
        raise CheckpointError(f"{target} exists already: choose another name, or remove it")
    make_parents(target, CheckpointError)
    temporary = _temporary_name(target)
    try:
        temporary.mkdir()
    except OSError as error:
        raise IoError("open", str(temporary), 0, 0, error.errno or 0) from error
    try:
        yield temporary
        for file in [*temporary.iterdir(), temporary]:
            sync(file)
        if os.path.lexists(target):
            raise CheckpointError(f"{target} appeared meanwhile, and was not changed")
        temporary.rename(target)
        sync(target.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _temporary_name(target: Path) -> Path:
    return target.with_name(f".{target.name[:200]}.{os.getpid()}-{secrets.token_hex(4)}.partial")
