"""The run directory: `<directory>/rank-R-of-W/`, held by one run at a time.

Weights are their owner's: directories are 0700 and files 0600. A directory that holds a run is never overwritten unasked.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import weakref
from collections.abc import Collection
from pathlib import Path

from swapper.config import format_bytes
from swapper.errors import DirectoryError

RESUME_CHOICES = ("error", "auto", "discard")

COMMIT_NAME = "commit.pt"
FALLBACK_NAME = "commit-before.pt"
RETENTION_NAME = "snapshots.json"


_open: weakref.WeakSet[RunDirectory] = weakref.WeakSet()


def _let_go_in_child() -> None:
    """A forked child (a DataLoader worker) that outlives a killed run must not hold the run's lock."""
    for directory in list(_open):
        directory.close()


os.register_at_fork(after_in_child=_let_go_in_child)


class RunDirectory:
    """Owns the directory's lock from construction until `close`.

    Args:
        directory: the user's directory; must exist, so that a mistyped path is not filled by accident.
        resume: "error" refuses a directory that holds a run, "auto" keeps it to go on from, "discard" throws it away.
        rank, world_size: this process's place in the job.

    Raises:
        DirectoryError: missing, not a directory, not writable, in use, or holds a run.
    """

    def __init__(self, directory: str | os.PathLike[str], resume: str, rank: int, world_size: int) -> None:
        self._lock = -1
        parent = Path(directory).absolute()
        if not parent.exists():
            raise DirectoryError(f"directory {parent} does not exist: create it on the drive that shall hold the run")
        if not parent.is_dir():
            raise DirectoryError(f"{parent} is not a directory: give a directory on the drive that shall hold the run")
        self.rank = rank
        self.world_size = world_size
        self.path = parent / f"rank-{rank}-of-{world_size}"
        try:
            self.path.mkdir(mode=0o700, exist_ok=True)
            self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise DirectoryError(
                f"cannot write to {parent}: {error.strerror}. Choose a directory that you may write to"
            ) from error
        _open.add(self)
        try:
            self._take(resume)
        except BaseException:
            self.close()
            raise

    def _take(self, resume: str) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.pread(self._lock, 64, 0).decode(errors="replace").strip() or "unknown"
            raise DirectoryError(
                f"{self.path} is in use by another run (process {holder}): wait for it, or choose another directory"
            ) from None
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, str(os.getpid()).encode(), 0)
        held = [file for name in (COMMIT_NAME, FALLBACK_NAME, "*.swap") for file in sorted(self.path.glob(name))]
        if held and resume == "error":
            raise DirectoryError(
                f'{self.path} holds a run ({", ".join(f.name for f in held)}): say resume="auto" to go on from its last '
                'commit, resume="discard" to throw it away, or choose another directory'
            )
        if resume == "discard":
            for file in held:  # the commit records first: they must never name files that are gone
                file.unlink()
            (self.path / RETENTION_NAME).unlink(missing_ok=True)

    def remove_strays(self, kept: Collection[str]) -> None:
        """Remove swap files that no commit names: a run was killed before it could."""
        for file in self.path.glob("*.swap"):
            if file.name not in kept:
                file.unlink()

    def require_space(self, nbytes: int) -> None:
        """Raise DirectoryError unless the filesystem has `nbytes` free."""
        free = shutil.disk_usage(self.path).free
        if free < nbytes:
            raise DirectoryError(
                f"{self.path} needs {format_bytes(nbytes)} and its filesystem has {format_bytes(free)} free: "
                "make room, or choose another drive"
            )

    def close(self) -> None:
        """Let the lock go. Idempotent."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __del__(self) -> None:
        self.close()
