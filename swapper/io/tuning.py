"""Stores the results of `swapper tune`, for handles and managers.

They are in one JSON file per user, `$XDG_CONFIG_HOME/swapper/drives.json`, with an entry for each drive, by an identity
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

from swapper.errors import ConfigError
from swapper.io.drives import Drives

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
        log.warning("%s is not used: its entry for the drive of %s is wrong (%s)", tuning_path(), directory, error)
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
