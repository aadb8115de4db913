"""Describes the drives of a run: its directory and its share of the pages on each, and what `swapper tune` found for them.

A run over several drives has a directory on each of them. The first has the lock, the commit records and those parts of
the swap files that become snapshots; the others have only their pages. Pages are assigned by weight, so that a drive of
twice the speed gets twice the bytes. A record in each directory, `drives.json`, names the run and the weights; it is
made with the run, and a resumed run uses it. A run on one drive has no such record.

What was tuned is in one JSON file per user, `$XDG_CONFIG_HOME/swapper/drives.json`, with an entry for each drive, by an identity
that survives restarts.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from swapper.errors import ConfigError, DirectoryError
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


log = logging.getLogger("swapper")


@dataclass(frozen=True)
class Tuning:
    """The best settings of one drive, and the bytes a second that they reached.

    `both_bytes_per_s` is of reads and writes together, `busy_bytes_per_s` the same while torch computes on all its threads;
    infinite: not measured. By `slowing_byte_s`, in seconds, each byte makes computing longer that goes on meanwhile.
    """

    piece_bytes: int
    depth: int
    backend: str
    read_bytes_per_s: float
    write_bytes_per_s: float
    busy_bytes_per_s: float = math.inf
    slowing_byte_s: float = 0.0
    both_bytes_per_s: float = math.inf

    def seconds_for(self, read_bytes: int, written_bytes: int) -> float:
        """Return the minimum seconds for these bytes, reading and writing at once."""
        together_s = (read_bytes + written_bytes) / self.both_bytes_per_s
        return max(read_bytes / self.read_bytes_per_s, written_bytes / self.write_bytes_per_s, together_s)

    def checked(self) -> Tuning:
        """Raise ValueError for settings that an engine would refuse; return self."""
        if type(self.piece_bytes) is not int or not 4096 <= self.piece_bytes <= 1 << 30 or self.piece_bytes % 4096:
            raise ValueError(f"piece_bytes={self.piece_bytes!r}")
        if type(self.depth) is not int or not 1 <= self.depth <= 4096:
            raise ValueError(f"depth={self.depth!r}")
        if self.backend not in ("uring", "aio", "threads"):
            raise ValueError(f"backend={self.backend!r}")
        rates = (self.read_bytes_per_s, self.write_bytes_per_s)
        if not all(isinstance(rate, int | float) and 0 < rate < math.inf for rate in rates):
            raise ValueError(f"rates {rates}")
        for name in ("both_bytes_per_s", "busy_bytes_per_s"):
            if not isinstance(rate := getattr(self, name), int | float) or not rate > 0:
                raise ValueError(f"{name}={rate!r}")
        if not isinstance(self.slowing_byte_s, int | float) or not 0 <= self.slowing_byte_s < math.inf:
            raise ValueError(f"slowing_byte_s={self.slowing_byte_s!r}")
        return self

    def engine_options(self) -> dict[str, object]:
        """Return options for `swapper._C.Engine`."""
        return {"piece_bytes": self.piece_bytes, "depth": self.depth, "backend": self.backend}

    def deepspeed_config(self) -> dict[str, dict[str, int | bool]]:
        """Return a DeepSpeed configuration, in JSON types that its loader accepts."""
        return {
            "aio": {
                "block_size": self.piece_bytes,
                "queue_depth": self.depth,
                "intra_op_parallelism": 1,
                "single_submit": False,
                "overlap_events": True,
            }
        }


def tuning_path() -> Path:
    root = os.environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    return Path(root) / "swapper" / "drives.json"


def find_tuning(directory: Path) -> Tuning | None:
    """Return the tuning of the drive of `directory`; None without one, or if the file is wrong (logged)."""
    try:
        text = tuning_path().read_text()
    except (OSError, UnicodeDecodeError):
        return None
    try:
        entry = json.loads(text).get(drive_of(directory))
        return None if entry is None else Tuning(**entry).checked()
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        log.warning("%s is not used: its entry for the drive of %s is wrong (%s)", tuning_path(), directory, str(error))
        return None


def find_tuning_of(drives: Drives) -> Tuning | None:
    """Return the joint tuning of a run's drives, by their shares of the bytes; None if one of them was not tuned.

    Of a drive that several ranks use, each has a part of the rates.
    """
    found = [find_tuning(directory) for directory in drives.directories]
    known = [tuning for tuning in found if tuning is not None]
    if len(known) < len(found):
        return None
    ranks = drives.ranks or [1] * len(found)
    shares = [weight * of / sum(drives.weights) for weight, of in zip(drives.weights, ranks, strict=True)]
    return replace(
        known[0],
        read_bytes_per_s=min(tuning.read_bytes_per_s / share for tuning, share in zip(known, shares, strict=True)),
        write_bytes_per_s=min(tuning.write_bytes_per_s / share for tuning, share in zip(known, shares, strict=True)),
        both_bytes_per_s=min(tuning.both_bytes_per_s / share for tuning, share in zip(known, shares, strict=True)),
        busy_bytes_per_s=max(tuning.busy_bytes_per_s for tuning in known),  # which the processors set
        slowing_byte_s=min(tuning.slowing_byte_s for tuning in known),
    )


def weigh(directories: Sequence[Path]) -> list[float]:
    """Return the drives' shares of the bytes: by speed if all were tuned, else equal."""
    found = [find_tuning(directory) for directory in directories]
    speeds = [min(tuning.read_bytes_per_s, tuning.write_bytes_per_s) for tuning in found if tuning is not None]
    return speeds if len(speeds) == len(directories) and min(speeds) > 0 else [1.0] * len(directories)


def keep_tuning(directory: Path, tuning: Tuning) -> Path:
    """Store the best settings of the drive of `directory`, and keep other drives' entries. Returns the file.

    Raises:
        ConfigError: the file cannot be written, or has other content.
    """
    path = tuning_path()
    try:
        known = json.loads(path.read_text()) if path.exists() else {}
        known[drive_of(directory)] = asdict(tuning)
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as stream:
            stream.write(json.dumps(known, indent=2) + "\n")
        Path(stream.name).replace(path)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{path} cannot be written: {error}") from error
    return path


def drive_of(directory: Path) -> str:
    """Return a name of the filesystem of `directory` that survives a restart: its UUID, else its device number."""
    device = directory.stat().st_dev
    with contextlib.suppress(OSError):
        for link in Path("/dev/disk/by-uuid").iterdir():
            if link.stat().st_rdev == device:
                return f"uuid:{link.name}"
    return f"device:{os.major(device)}:{os.minor(device)}"
