"""Writes a file or directory that appears under its name when it is whole; knows mounts, and makes missing directories.

A missing name next to mounted drives may be a drive that is misspelt, and an empty directory there one that is not mounted.
Nothing is made there: it would fill the system's drive, and a run would begin from scratch in place of being resumed.

What is replaced is written next to that under another name, synced, renamed, and the directory around it is synced: a reader
sees the old file or the new one, even after a power loss. After any failure, Ctrl-C included, what was written is removed.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import stat
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path

from swapper.errors import CheckpointError, IoError, SwapperError, remedy
from swapper.runtime.process import naming_limits

IN_MEMORY = {"tmpfs", "ramfs"}
_NETWORKS = "nfs nfs4 cifs smb3 ceph lustre gpfs beegfs 9p afs fuse.sshfs fuse.glusterfs"
OVER_NETWORK = frozenset(_NETWORKS.split())
MOUNT_PARENTS = {Path("/"), Path("/mnt"), Path("/media")}
"""Directories in which drives are mounted by convention, even if none is now."""


def mount_points(kinds: Collection[str] | None = None) -> list[Path]:
    """Return the directories on which filesystems are mounted; or those of some kinds."""
    mounts = [line.split(b" ") for line in Path("/proc/self/mounts").read_bytes().splitlines()]
    places = [mount[1] for mount in mounts if kinds is None or mount[2].decode() in kinds]
    return [Path(os.fsdecode(place.decode("unicode_escape").encode("latin-1"))) for place in places]


def is_on(kinds: Collection[str], path: Path) -> bool:
    """Return True if `path`'s directory is on a filesystem of one of these kinds, none of which is on a drive of this machine."""
    try:
        device = path.parent.stat().st_dev
    except OSError as error:
        raise IoError("open", str(path), 0, 0, error.errno or 0) from error
    return not os.major(device) and any(_device_of(place) == device for place in mount_points(kinds))


def _device_of(directory: Path) -> int | None:
    with contextlib.suppress(OSError):
        return directory.stat().st_dev
    return None


def make_parents(path: Path, refusal: type[SwapperError]) -> list[Path]:
    """Make the missing directories above `path`, and return them, the outermost first.

    Raises:
        refusal: the outermost may be, or lie on, a drive that is not mounted; or one cannot be made.
    """
    exists = os.path.exists
    missing = [*takewhile(lambda above: not exists(above), path.absolute().parents)][::-1]
    if missing and _may_lack_a_drive(missing[0].parent.resolve()):
        raise refusal(
            f"{path} lies beneath {missing[0]}, which does not exist: perhaps a drive is misspelt or not mounted. Correct the "
            f"path, mount the drive, or make the directory (mkdir -p {path.parent})"
        )
    try:
        for directory in missing:
            directory.mkdir(exist_ok=True)
    except OSError as error:
        raise refusal(f"directory {path.parent} cannot be made ({error.strerror}): choose another path") from error
    return missing


def _may_lack_a_drive(directory: Path) -> bool:
    """Return True if drives are mounted in `directory`, or it is empty, as a mount point without its drive, and beside some."""
    mounts = mount_points()
    parents = MOUNT_PARENTS.union(mount.parent for mount in mounts)
    if directory in parents:
        return True
    return directory.parent in parents and directory not in mounts and _is_empty(directory)


def _is_empty(directory: Path) -> bool:
    try:
        return not any(directory.iterdir())
    except OSError:
        return False  # nor can anything be made there


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
    temporary = temporary_name(target)
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
    temporary = temporary_name(target)
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


def temporary_name(target: Path) -> Path:
    """Return a name in the same directory for what becomes `target`: no other thread's or process's."""
    return target.with_name(f".{target.name[:200]}.{os.getpid()}-{secrets.token_hex(4)}.partial")
