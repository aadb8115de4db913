"""The commit before: where a run goes on if a snapshot that is a swap file too is damaged.

Where a filesystem cannot reflink, a snapshot is a second name of a swap file (publication.py), and whoever writes into it or cuts
it off changes what the last commit names. So before a snapshot is published the record of the commit before is put beside that of
the last one, and until the next commit the store writes nowhere that it names (`Store.spare`). A run that goes on while it is there
compares what the last commit has in shared files with its checksums; where that is not whole it goes on from the one before. So
the damage costs the snapshot and one step.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from swapper.checkpoint.commit import CommitRecord, encode_commit, files_of, publish_commit, read_commit
from swapper.checkpoint.verify import Fault, find_damage
from swapper.directory import FALLBACK_NAME
from swapper.errors import CheckpointError

log = logging.getLogger("swapper")


@dataclass(frozen=True)
class Commit:
    """A commit that was published.

    Attributes:
        step: of which it is.
        data: the record's file.
        files: numbers of the swap files that it needs.
    """

    step: int
    data: bytes
    files: frozenset[int]

    @classmethod
    def of(cls, record: CommitRecord, data: bytes) -> Commit:
        return cls(record.step, data, files_of(record))


def keep_fallback(directory: Path, before: Commit, durable: bool) -> None:
    """Put the record of the commit before beside that of the last one."""
    publish_commit(directory, before.data, durable, FALLBACK_NAME)


def drop_fallback(directory: Path) -> None:
    """There is a newer commit, which shares nothing with a snapshot; or the one before cannot be gone back to."""
    (directory / FALLBACK_NAME).unlink(missing_ok=True)


def find_whole_commit(directory: Path) -> tuple[CommitRecord | None, Commit | None]:
    """Return the commit to go on from, None if there is none, and the one before it, if that is still a way back.

    Raises:
        CheckpointError: the last commit's record is damaged, or of another version.
    """
    record, before = read_commit(directory), _read_fallback(directory)
    if record is None or before is None:
        return record, None
    needed = files_of(before)
    faults = find_damage(directory, record)
    if not faults and needed <= record.files.keys():
        return record, Commit.of(before, encode_commit(before))
    if faults and not find_damage(directory, before):
        log.warning("%s; the run goes on from step %d instead of %d", _say(faults), before.step, record.step)
        # Other files are not what they were.
        record = dataclasses.replace(before, files={n: name for n, name in before.files.items() if n in needed})
        publish_commit(directory, encode_commit(record), durable=True)
    drop_fallback(directory)
    return record, None


def _read_fallback(directory: Path) -> CommitRecord | None:
    try:
        return read_commit(directory, FALLBACK_NAME)
    except CheckpointError as error:  # it may never be needed
        log.warning("there is no way back to the commit before: %s", str(error))
        return None


def _say(faults: Sequence[Fault]) -> str:
    names = sorted({name for fault in faults for name in fault.tensors})
    return (
        f"{faults[0].path}, the same file as a snapshot, was changed from outside ({faults[0].what}), which lost "
        f"{', '.join(names[:3])}{' and more' if len(names) > 3 else ''}"
    )
