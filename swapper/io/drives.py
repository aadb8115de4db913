"""Describes the drives of a run: its directory on each, and the assignment of pages to drives.

A run over several drives has a directory on each of them. The first has the lock, the commit records and those parts of
the swap files that become snapshots; the others have only their pages. Pages are assigned by weight, so that a drive of
twice the speed gets twice the bytes. A record in each directory, `drives.json`, names the run and the weights; it is
made with the run, and a resumed run uses it. A run on one drive has no such record.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from swapper.errors import DirectoryError
from swapper.io import beneath
from swapper.runtime import records

RECORD_NAME = "drives.json"
_FORMAT = 2  # of drives.json; other numbers are refused
_SHAPE = records.fields(
    {
        "format": records.exactly(_FORMAT),
        "run": records.text,
        "index": records.whole(),
        "directories": records.listing(records.path, 1),
        "weights": records.listing(records.positive, 1),
    }
)


@dataclass(frozen=True)
class Drives:
    """A value, and pure; `read_drives` makes it from files.

    Attributes:
        directories: the run's directory on each drive.
        weights: share of the bytes of each drive, in proportion.
        id: of the run, which each of its directories has; "" on one drive.
        ranks: how many ranks of the job use each drive; empty: this one alone.
    """

    directories: tuple[Path, ...]
    weights: tuple[float, ...] = (1.0,)
    id: str = ""
    ranks: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.directories)

    def assign_to_drives(self, sizes: Sequence[int]) -> list[int]:
        """Return the drive's number for each piece. Equal arguments always give equal results."""
        return assign_to_drives(sizes, self.weights)

    def paths(self, name: str) -> list[Path]:
        """Return the paths of the parts of the file called `name`."""
        return [directory / name for directory in self.directories]


def assign_to_drives(sizes: Sequence[int], weights: Sequence[float]) -> list[int]:
    """Assign each piece to the drive that is furthest behind its share of the bytes; return the drives' numbers."""
    if len(weights) == 1:
        return [0] * len(sizes)
    shares = [weight / sum(weights) for weight in weights]
    assigned_bytes = [0] * len(weights)
    total_bytes = 0
    drives = []
    for nbytes in sizes:
        total_bytes += nbytes
        behind = [share * total_bytes - has for share, has in zip(shares, assigned_bytes, strict=True)]
        drives.append(behind.index(max(behind)))
        assigned_bytes[drives[-1]] += nbytes
    return drives


@dataclass(frozen=True)
class DrivesRecord:
    """The content of `drives.json`."""

    drives: Drives
    index: int

    def write(self) -> None:
        """Write it into its directory, whole or not at all. Raises DirectoryError: it cannot be written."""
        directories = [os.fspath(directory) for directory in self.drives.directories]
        content = {"format": _FORMAT, "run": self.drives.id, "index": self.index, "directories": directories}
        sealed = records.seal({**content, "weights": list(self.drives.weights)})
        path = self.drives.directories[self.index] / RECORD_NAME
        try:
            beneath.replace_file(path, sealed)
        except OSError as error:
            raise DirectoryError(
                f"cannot write {path}: {error.strerror}. Choose a directory that you may write to"
            ) from error


def read_record(directory: Path) -> DrivesRecord | None:
    """Read the record of `directory`, if it belongs to a run over several drives; else return None.

    Raises:
        DirectoryError: the record cannot be read.
    """
    path = directory / RECORD_NAME
    try:
        content = records.unseal(beneath.read_small(path, records.MAX_RECORD_BYTES), _SHAPE)
        directories = tuple(Path(name) for name in content["directories"])
        weights = tuple(float(weight) for weight in content["weights"])
        if not content["index"] < len(directories) == len(weights):
            raise ValueError(f"drive {content['index']} of {len(directories)}, with {len(weights)} weights")
        return DrivesRecord(Drives(directories, weights, content["run"]), content["index"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, OverflowError) as error:
        raise DirectoryError(
            f"{path}, the record of the run's drives, cannot be read ({error}): restore a whole copy of it, or pass "
            "resume='discard'"
        ) from error


def read_drives(directory: Path) -> Drives:
    """Return the drives of the run whose first directory is `directory`."""
    record = read_record(directory)
    if record is None:
        return Drives((directory,))
    directories = (directory, *record.drives.directories[1:])  # a copied directory is read where it is
    return replace(record.drives, directories=directories)
