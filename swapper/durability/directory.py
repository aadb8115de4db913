"""Opens and locks the run directory, `<directory>/rank-R-of-W/`; over several drives, one such directory on each.

Weights are private: directories are 0700 and files 0600, and existing content is trusted only if nobody else may write
to it (io/beneath.py). A directory that holds a run, or a part of one, is never overwritten unasked.

[Note: whose directories they are] A run over several drives must never resume with a directory of another run in place
of its own, nor delete one. Each directory's `drives.json` has the run's id. A new run gets a new id, written only when
no directory has swap files any more. So directories that have swap files and the same id belong to one run, wherever a
kill interrupted it.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import secrets
import shutil
import stat
import weakref
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from swapper.durability.ranks import Ranks, boot_id
from swapper.errors import ConfigError, DirectoryError, UnsupportedError, remedy
from swapper.io import beneath
from swapper.io.drives import RECORD_NAME, Drives, DrivesRecord, read_record
from swapper.io.engines import drive_of_device
from swapper.io.replacing import IN_MEMORY, OVER_NETWORK, is_on, make_parents
from swapper.runtime.process import after_fork_in_child
from swapper.runtime.sizes import format_bytes

log = logging.getLogger("swapper")

RESUME_CHOICES = ("error", "auto", "reshard", "discard")

COMMIT_NAME = "commit.pt"
FALLBACK_NAME = "commit-before.pt"
SPARE_NAME = "commit-spare.pt"
"""Had the record before the last one, and gets the next: `spare` of `beneath.replace_file`. Nobody reads it."""
RETENTION_NAME = "snapshots.json"


_open: weakref.WeakSet[LockedDirectory] = weakref.WeakSet()


def _release_in_child() -> None:
    """Release the run's lock in a forked child (a DataLoader worker), which may outlive a killed run."""
    for directory in list(_open):
        directory.close()


after_fork_in_child(_release_in_child)


class LockedDirectory:
    """One directory of a run. Owns its lock from construction until `close`.

    Args:
        directory: the user's directory. It is made if it is missing, with those above it (io/replacing.py).

    Raises:
        DirectoryError: it cannot be made, is no directory, not writable, or in use; or others may write to it.
    """

    def __init__(self, directory: str | os.PathLike[str], name: str) -> None:
        self._lock = -1
        self._is_held = False
        parent = Path(directory).absolute()
        self._made = _make(parent)
        self.path = parent / name
        try:
            self.path.mkdir(mode=0o700, exist_ok=True)
            beneath.hold(self.path)
            self._is_held = True
            self._lock = self._open_lock()
            _open.add(self)
            self._take()
        except DirectoryError:
            self.give_up()
            raise
        except OSError as error:
            self.give_up()
            raise _unwritable(parent, error) from error

    def _open_lock(self) -> int:
        path = self.path / "lock"
        try:
            lock = beneath.open_file(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK)
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
                raise
        else:
            status = os.fstat(lock)
            if stat.S_ISREG(status.st_mode) and status.st_nlink == 1:
                return lock
            os.close(lock)
        raise DirectoryError(f"{path} is a link, or no file, and was not made by swapper: remove it")

    def _take(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.pread(self._lock, 64, 0).decode(errors="replace").strip() or "unknown"
            if holder == str(os.getpid()):
                raise DirectoryError(
                    f"{self.path} is in use by another run of this process (a notebook cell again?): call its manager's close(), "
                    "or use `with SwapManager(...) as manager:`. If no variable has it any more its model still does: `del model, "
                    "optimizer; import gc; gc.collect()`"
                ) from None
            raise DirectoryError(
                f"{self.path} is in use by another run (process {holder}): wait for it, or choose another directory"
            ) from None
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, str(os.getpid()).encode(), 0)

    @property
    def has_commit(self) -> bool:
        return any(beneath.exists(self.path / name) for name in (COMMIT_NAME, FALLBACK_NAME))

    def held(self) -> list[Path]:
        """Return the files of the run in the directory."""
        there = beneath.files(self.path)
        commits = [self.path / name for name in (COMMIT_NAME, FALLBACK_NAME)]
        return [*(file for file in commits if file in there), *(file for file in there if file.suffix == ".swap")]

    def clear(self) -> None:
        """Delete the run in the directory, or its part of one."""
        for file in self.held():  # the commit records first: they must never name missing files
            beneath.unlink(file)
        for name in (SPARE_NAME, RETENTION_NAME, RECORD_NAME):
            beneath.unlink(self.path / name)

    def remove_strays(self, kept: Collection[str]) -> None:
        """Remove swap files that are not in `kept`."""
        for file in beneath.files(self.path):
            if file.suffix == ".swap" and file.name not in kept:
                beneath.unlink(file)

    def give_up(self) -> None:
        """Close, and remove the directories that were made for this run, which does not begin."""
        if self._made:
            with suppress(OSError):
                if self._lock >= 0:
                    beneath.unlink(self.path / "lock")
                self.path.rmdir()
                for made in reversed(self._made):
                    made.rmdir()
        self.close()

    def close(self) -> None:
        """Release the lock. Idempotent."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
        if self._is_held:
            beneath.release(self.path)
            self._is_held = False

    def __reduce__(self) -> NoReturn:
        raise UnsupportedError(f"the lock of {self.path} cannot be copied or pickled: keep it outside of what is")

    def __del__(self) -> None:
        if os is not None:  # else Python ends, and the system releases the lock
            self.close()


def _make(directory: Path) -> list[Path]:
    """Make a missing user's directory, and those above it. Return the made ones, the outermost first."""
    parents = make_parents(directory, DirectoryError)
    try:
        directory.mkdir()
    except FileExistsError:
        if not directory.is_dir():
            raise DirectoryError(f"{directory} is not a directory: give a directory on the drive for the run") from None
        return parents
    except NotADirectoryError:
        raise DirectoryError(f"{directory.parent} is not a directory, for {directory}: correct the path") from None
    except OSError as error:
        if directory.is_dir():  # a read-only filesystem reports this first
            return parents
        raise _unwritable(directory.parent, error) from error
    log.info("made directory %s", directory)
    return [*parents, directory]


def _unwritable(directory: Path, error: OSError) -> DirectoryError:
    return DirectoryError(
        f"cannot write to {directory}: {error.strerror}. Choose a directory that you may write to, or {remedy(error.errno)}"
    )


def ranks_by_size(directory: Path) -> dict[int, list[int]]:
    """Return the ranks that have a run in a user's directory, by the number of ranks of their job."""
    found: dict[int, list[int]] = {}
    for path in sorted(directory.glob("rank-*-of-*")):
        name = re.fullmatch(r"rank-(\d{1,9})-of-(\d{1,9})", path.name)
        if name is not None and any((path / record).exists() for record in (COMMIT_NAME, FALLBACK_NAME)):
            found.setdefault(int(name[2]), []).append(int(name[1]))
    return found


def committed_runs(path: Path) -> list[Path]:
    """Return the directories of committed runs: `path` itself, or those of ranks in a user's directory."""
    if (path / COMMIT_NAME).exists():
        return [path]
    return sorted(record.parent for record in path.glob(f"rank-*-of-*/{COMMIT_NAME}"))


def _refuse_other_sizes(directory: Path, size: int) -> None:
    """Raise DirectoryError if `directory` holds a run of another number of ranks, and none of this one."""
    sizes = ranks_by_size(directory)
    if sizes and size not in sizes:
        held = " and ".join(
            f"of {other} rank{'s' * (other > 1)} ({len(sizes[other])} of them here)" for other in sorted(sizes)
        )
        raise DirectoryError(
            f"{directory} holds a run {held}, and this job has {size}: a run resumes with the same number of ranks. Start "
            "that many (torchrun --nproc-per-node), or pass resume='reshard' to go on with this number, or choose another "
            "directory, or pass resume='discard' to start over, for example from a snapshot of that run; then rank-*-of-* of the "
            "other size stay, and you may remove them"
        )


class RunDirectory:
    """Owns the locks of the run's directories from construction until `close`.

    Args:
        directories: the user's directory, or several, one a drive; a missing one is made (io/replacing.py).
        resume: "error" refuses a directory that holds a run, "auto" resumes it, "reshard" too or one of another number of
            ranks, "discard" deletes it.
        ranks: this process's place in the job.
        weigh: returns each drive's share of the bytes, in proportion. Called for a new run.

    Attributes:
        job: the run's, which all its ranks share; "" for a rank alone. Set by the code that opens it.

    Raises:
        ConfigError: no directory, or one of them twice.
        DirectoryError: one cannot be made, is no directory, not writable, in use, holds a run, or belongs to another run.
    """

    def __init__(
        self,
        directories: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        resume: str,
        ranks: Ranks,
        weigh: Callable[[Sequence[Path]], Sequence[float]],
    ) -> None:
        self.ranks = ranks
        self.job = ""
        self._weigh = weigh
        self._locked: list[LockedDirectory] = []
        given = [directories] if isinstance(directories, (str, os.PathLike)) else list(directories)
        if not given or len({Path(directory).resolve() for directory in given}) < len(given):
            raise ConfigError("directory= takes a directory, or a list of directories, each of them once")
        if not all(os.fspath(directory) for directory in given):
            raise DirectoryError('"" names no directory: give one on the drive for the run ("." is the working one)')
        try:
            for directory in given:
                if resume not in ("reshard", "discard"):
                    _refuse_other_sizes(Path(directory), ranks.size)
                self._locked.append(LockedDirectory(directory, f"rank-{ranks.rank}-of-{ranks.size}"))
            self.drives = self._settle(resume)
            self._warn_of_place()
        except BaseException:
            for locked in self._locked:
                locked.give_up()
            raise

    @property
    def path(self) -> Path:
        return self._locked[0].path

    def drive_names(self) -> list[str]:
        """Return the name of each of `drives`: ranks that use a drive, and they alone, have the same name for it."""
        machine = boot_id()
        return [f"{machine} {drive_of_device(path.stat().st_dev)}" for path in self.drives.directories]

    def share_drives(self, names: Sequence[Collection[str]]) -> None:
        """Note how many ranks use each of `drives`, from the `drive_names` of all ranks."""
        self.drives = replace(self.drives, ranks=tuple(sum(name in of for of in names) for name in self.drive_names()))

    # --- ownership of directories

    def start_over(self) -> None:
        """Delete the run in the directory: a new one begins."""
        self._clear()
        self.drives = self._begin()

    def _warn_of_place(self) -> None:
        """Not refused: what is paged over a network or in memory is exact, and a machine may have no drive."""
        for path in (locked.path for locked in self._locked):
            if is_on(IN_MEMORY, path / "file"):
                log.warning(
                    "%s is on a file system in memory: what is paged there takes memory in addition to host_memory, and is gone "
                    "when the machine restarts: give a directory on a drive",
                    path,
                )
            if is_on(OVER_NETWORK, path / "file"):
                log.warning(
                    "%s is on a network file system, and every step reads and writes there, at the speed of the network, "
                    "which the ranks of all machines share: give a directory on a drive of this machine",
                    path,
                )

    def _clear(self) -> None:
        for locked in self._locked:
            locked.clear()

    def _settle(self, resume: str) -> Drives:
        """Return the drives of the resumed run, or of a new one. See [Note: whose directories they are]."""
        if resume == "discard":
            self._clear()
        if resume == "error":
            self._refuse_runs()
        records = [read_record(locked.path) if locked.held() else None for locked in self._locked]
        if self._locked[0].has_commit:
            return self._drives_of_run(records)
        self._check_leftovers(records)
        return self._begin()

    def _refuse_runs(self) -> None:
        for locked in self._locked:
            if held := locked.held():
                names, known = ", ".join(file.name for file in held), any(one.has_commit for one in self._locked)
                resumed = "resume from its last commit" if known else "begin a new one: it has no commit"
                raise DirectoryError(
                    f'{locked.path} holds a run ({names}): pass resume="auto" to {resumed}, resume="discard" to delete it, '
                    "or choose another directory"
                )

    def _drives_of_run(self, records: Sequence[DrivesRecord | None]) -> Drives:
        first = records[0]
        paths = tuple(locked.path for locked in self._locked)
        if first is None:
            if len(paths) > 1:
                raise DirectoryError(f"the run in {paths[0]} is in that directory alone: resume it without {paths[1]}")
            return Drives(paths)
        for index, known in enumerate(first.drives.directories):
            found = records[index] if index < len(records) else None
            if found is None or (found.drives.id, found.index) != (first.drives.id, index):
                given = f"; {paths[index]} does not have it" if index < len(paths) else ""
                raise DirectoryError(
                    f"the run in {paths[0]} lies over {len(first.drives)} drives, and its part in {known} is "
                    f"missing{given}: mount that drive, and give all directories in the order in which they were given"
                )
        if len(paths) > len(first.drives):
            raise DirectoryError(f"the run in {paths[0]} has {len(first.drives)} drives: resume it without {paths[-1]}")
        drives = Drives(paths, first.drives.weights, first.drives.id)
        if drives != first.drives:  # the same directories under other names
            for index in range(len(paths)):
                DrivesRecord(drives, index).write()
        return drives

    def _check_leftovers(self, records: Sequence[DrivesRecord | None]) -> None:
        """Check, without a commit to resume from, that leftovers of one run that never committed may be deleted."""
        ours = records[0].drives.id if records[0] is not None else ""
        for index, (locked, record) in enumerate(zip(self._locked, records, strict=True)):
            if not locked.held() or (index == 0 and (record is None or record.index == 0)):
                continue
            if locked.has_commit or record is None or record.drives.id != ours or record.index != index:
                whose = "another run: "
                if record is not None:
                    whose = f"the run in {record.drives.directories[0]}: give all of its directories in their order to resume, "
                raise DirectoryError(
                    f'{locked.path} holds a part of {whose}choose another directory, or pass resume="discard" to delete it'
                )

    def _begin(self) -> Drives:
        paths = tuple(locked.path for locked in self._locked)
        self.remove_strays(())
        for path in paths:
            beneath.unlink(path / RECORD_NAME)
        if len(paths) == 1:
            return Drives(paths)
        drives = Drives(paths, tuple(self._weigh(paths)), secrets.token_hex(8))
        for index in range(len(paths)):
            DrivesRecord(drives, index).write()
        return drives

    # ------------------------------------------------------------------------------------------------------------------

    def remove_strays(self, kept: Collection[str]) -> None:
        """Remove swap files that no commit names, left by a killed run."""
        for locked in self._locked:
            locked.remove_strays(kept)

    def require_space(self, needed: Sequence[int]) -> None:
        """Raise DirectoryError unless each drive's filesystem has the needed bytes free."""
        by_filesystem: dict[int, int] = {}
        for path, nbytes in zip(self.drives.directories, needed, strict=True):
            device = path.stat().st_dev
            by_filesystem[device] = by_filesystem.get(device, 0) + nbytes
            free = shutil.disk_usage(path).free
            if free < by_filesystem[device]:
                raise DirectoryError(
                    f"{path} needs {format_bytes(by_filesystem[device])} and its filesystem has {format_bytes(free)} free: "
                    "make room, or choose another drive"
                )

    def close(self) -> None:
        """Release the locks. Idempotent."""
        for locked in self._locked:
            locked.close()
