"""Describes the runs below a directory, and removes what dead ones have left that nothing can use.

[Note: leftovers] A swap file is a leftover if no process has the run open and no record names it: a run that never
committed can never be resumed, and a killed one may have made files that its commit does not name. A manager removes
the same files when it begins in that directory. On further drives the records of the first drive decide; without them
nothing is removed. Only names that swapper gives to swap files count, in directories that only their user may write to.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from swapper.durability.commit import CommitRecord, files_of, read_commit
from swapper.durability.directory import COMMIT_NAME, FALLBACK_NAME, LockedDirectory
from swapper.errors import CheckpointError, DirectoryError
from swapper.io import beneath
from swapper.io.drives import DrivesRecord, read_record

_RUN = re.compile(r"rank-\d{1,9}-of-\d{1,9}")
_SWAP_FILE = re.compile(r"(turn|scratch)-\d+\.swap")


@dataclass(frozen=True)
class RunOnDisk:
    """One rank's run, or its part on a further drive.

    Attributes:
        path: its directory.
        process: number of the process that has it open, or "unknown"; None: nobody.
        nbytes: of its files, as they take space.
        record: of the last commit; None: there is none, or not here.
        main: the run's directory on its first drive, if that is another.
        leftovers: files that nothing can use. See [Note: leftovers].
        problem: the reason why it cannot be read, or "".
    """

    path: Path
    process: str | None
    nbytes: int
    record: CommitRecord | None = None
    main: Path | None = None
    leftovers: tuple[Path, ...] = ()
    problem: str = ""


def find_runs(directory: Path) -> Iterator[RunOnDisk]:
    """Yield the runs in `directory`, of ranks and in all directories below, sorted. Follows no links.

    Raises:
        DirectoryError: there is no such directory, or one cannot be listed.
    """
    if not directory.is_dir():
        raise DirectoryError(f"{directory} is not a directory: name one that runs lie in or below")

    def refuse(error: OSError) -> None:
        raise DirectoryError(f"cannot list {error.filename}: {error.strerror}") from error

    for place, names, files in os.walk(directory.absolute(), onerror=refuse):
        names.sort()
        path = Path(place)
        if _RUN.fullmatch(path.name) and "lock" in files:
            names.clear()
            yield look_at(path)


def look_at(path: Path) -> RunOnDisk:
    """Describe the run in `path`. Changes nothing."""
    nbytes = 0
    try:
        process = _holder(path)
        nbytes = sum(beneath.status(file).st_blocks * 512 for file in beneath.files(path))
        record, drives = _record_of(path), read_record(path)
        main = None if drives is None or drives.index == 0 else drives.drives.directories[0]
        found = () if process is not None else tuple(_leftovers(path, drives))
    except (CheckpointError, DirectoryError, OSError) as error:
        return RunOnDisk(path, None, nbytes, problem=str(error))
    return RunOnDisk(path, process, nbytes, record, main, found)


def clean(path: Path, confirmed: Callable[[Path], bool] = lambda file: True) -> int:
    """Remove the leftovers of the run in `path`, and the directory of a run that is gone; return their bytes.

    Args:
        confirmed: returns True for a file that may be removed: what was shown to the user before.

    Raises:
        DirectoryError: it is in use, or others may write to it.
        CheckpointError: its commit cannot be read.
    """
    nbytes = 0
    with closing(LockedDirectory(path.parent, path.name)) as locked:
        for file in [file for file in _leftovers(path, read_record(path)) if confirmed(file)]:
            nbytes += beneath.status(file).st_blocks * 512
            beneath.unlink(file)
        if not locked.held():
            locked.clear()  # records beside swap files that are gone
            beneath.unlink(path / "lock")
            with suppress(OSError):  # something else is in it
                path.rmdir()
    return nbytes


def _leftovers(path: Path, drives: DrivesRecord | None) -> Iterator[Path]:
    """Yield the run's files that no record names, where the records are."""
    records = path if drives is None or drives.index == 0 else drives.drives.directories[0]
    if records != path:
        theirs = read_record(records) if records.is_dir() else None
        if theirs is None or drives is None or theirs.drives.id != drives.drives.id or _holder(records) is not None:
            return  # an unmounted drive, or another run
    named: set[str] = set()
    for name in (COMMIT_NAME, FALLBACK_NAME):
        commit = read_commit(records, name)
        if commit is not None:
            named |= {commit.files[number] for number in files_of(commit)} | set(commit.files.values())
    for file in beneath.files(path):
        if _SWAP_FILE.fullmatch(file.name) and file.name not in named and file.is_file() and not file.is_symlink():
            yield file


def _record_of(path: Path) -> CommitRecord | None:
    return read_commit(path) if beneath.exists(path / COMMIT_NAME) else None


def _holder(path: Path) -> str | None:
    """Return the number of the process that holds the run's lock; None if nobody does."""
    descriptor = beneath.open_file(path / "lock", os.O_RDONLY | os.O_NONBLOCK)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return os.pread(descriptor, 64, 0).decode(errors="replace").strip() or "unknown"
    finally:
        os.close(descriptor)
    return None
