"""Finds what is mounted where; makes missing directories, but not where a drive may be missing.

A missing name next to mounted drives may be a drive that is misspelt, and an empty directory there one that is not mounted.
Nothing is made there: it would fill the system's drive, and a run would begin from scratch in place of being resumed.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
from itertools import takewhile
from pathlib import Path

from swapper.errors import IoError, SwapperError

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
