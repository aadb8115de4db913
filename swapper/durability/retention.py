"""Removes old snapshots: `snapshot(path, keep=N)` removes the oldest that the run published by the same pattern.

Two names have one pattern if they lie in the same directory and differ only in runs of digits: `step-90.pt`,
`step-100.pt`. Only files that this run published with `keep=` are ever removed, and only if unchanged: the same inode,
size and time of change. A file that somebody replaced, changed or renamed is left alone, and no longer counts.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from dataclasses import dataclass
from pathlib import Path

from swapper.durability.directory import RETENTION_NAME
from swapper.io import beneath
from swapper.runtime import records

log = logging.getLogger("swapper")

_SHAPE = records.fields(
    {
        "published": records.listing(
            records.row(
                records.path, records.whole(most=(1 << 64) - 1), records.whole(), records.whole(least=-(1 << 63))
            )
        )
    }
)


@dataclass(frozen=True, slots=True)
class Published:
    """A snapshot that was published with `keep=`, and its identity."""

    path: str
    inode: int
    nbytes: int
    changed_ns: int

    @classmethod
    def look(cls, path: Path) -> Published:
        status = os.lstat(path)
        return cls(str(path), status.st_ino, status.st_size, status.st_mtime_ns)

    @property
    def pattern(self) -> str:
        path = Path(self.path)
        return str(path.with_name(re.sub(r"[0-9]+", "#", path.name)))

    def is_there(self) -> bool:
        try:
            return Published.look(Path(self.path)) == self
        except OSError:
            return False


class Retention:
    """The removable snapshots of a run, oldest first, in a file of its directory. Thread-safe.

    A snapshot published right before a kill may be missing in the file, and is then never removed.
    """

    def __init__(self, directory: Path) -> None:
        self._lock = threading.Lock()
        self._file = directory / RETENTION_NAME
        self._published: list[Published] = []
        if beneath.exists(self._file):
            try:
                found = records.unseal(beneath.read_small(self._file, records.MAX_RECORD_BYTES), _SHAPE)
                self._published = [Published(*row) for row in found["published"]]
            except (OSError, ValueError) as error:
                log.warning("%s cannot be read (%s): the snapshots that it names are kept", self._file, str(error))

    def published(self, path: Path, keep: int | None) -> None:
        """Note that `path` was published. With `keep`, remove the oldest of its pattern beyond that number."""
        if keep is None:
            return
        newest = Published.look(path)
        with self._lock:
            self._published = [*(p for p in self._published if p.is_there()), newest]
            alike = [p for p in self._published if p.pattern == newest.pattern]
            self._save()
            for old in alike[:-keep]:
                self._remove(old)
            self._save()

    def _remove(self, old: Published) -> None:
        try:
            Path(old.path).unlink()
        except OSError as error:
            log.warning("cannot remove %s for keep=: %s", old.path, error.strerror)
            return
        self._published.remove(old)

    def _save(self) -> None:
        rows = [[p.path, p.inode, p.nbytes, p.changed_ns] for p in self._published]
        beneath.replace_file(self._file, records.seal({"published": rows}))
