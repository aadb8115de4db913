"""Reads drives and times of a command line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from swapper.errors import ConfigError
from swapper.io.drives import Tuning, find_tuning, tuning_path
from swapper.paging.virtual_drive import DriveRates
from swapper.runtime.sizes import parse_bytes_a_second

_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(s|min|h)\s*")
_SECONDS = {"s": 1, "min": 60, "h": 3600}


def parse_seconds(value: str, option: str) -> float:
    """Return seconds: "60s", "5min". Raises ConfigError if it is no time."""
    found = _DURATION.fullmatch(value)
    if found is None or float(found[1]) == 0:
        raise ConfigError(f"{option} {value} is not a time: give a number and s, min or h, as 60s")
    return float(found[1]) * _SECONDS[found[2]]


def parse_drives(drives: Sequence[str]) -> list[DriveRates]:
    """Return the rates of each drive.

    Args:
        drives: for each "READ,WRITE", as "7GB/s,5GB/s", or a directory on a drive that `swapper tune` measured.

    Raises:
        ConfigError: a rate is none or could be bits, or a drive does not exist, or was not measured.
    """
    return [_drive(text) for text in drives]


def _drive(text: str) -> DriveRates:
    if "," in text:
        parts = text.split(",")
        if len(parts) != 2:
            raise ConfigError(f"--nvme {text}: give two rates, read and write, as 7GB/s,5GB/s; repeat --nvme for more")
        read, write = (parse_bytes_a_second(part, "--nvme") for part in parts)
        return DriveRates(read, write, read + write)
    if re.fullmatch(r"\d+(\.\d+)?\s*[KMGT]i?B(/s)?", text, re.IGNORECASE) and not Path(text).exists():
        raise ConfigError(f"--nvme {text} is one rate: give two, read and write, as {text},{text}")
    tuning = _measured(Path(text))
    rates = tuning.read_bytes_per_s, tuning.write_bytes_per_s
    return DriveRates(*rates, sum(rates))


def _measured(directory: Path) -> Tuning:
    if not directory.is_dir():
        raise ConfigError(
            f"--nvme {directory}: there is no such directory. Give a directory on the drive, or its rates, read and write, "
            "as 7GB/s,5GB/s"
        )
    tuning = find_tuning(directory)
    if tuning is None:
        raise ConfigError(
            f"--nvme {directory}: {tuning_path()} has no measurement of this drive (those of other drives do not count): run "
            f"`swapper tune {directory}`, or give its rates, read and write, as 7GB/s,5GB/s"
        )
    return tuning


def joined(drives: Sequence[DriveRates]) -> DriveRates:
    """Return the rates of several drives that each have a share of the bytes by their speed."""
    weights = [min(drive.read, drive.write) for drive in drives]
    shares = [weight / sum(weights) for weight in weights]
    read, write, both = (
        min(getattr(drive, name) / share for drive, share in zip(drives, shares, strict=True))
        for name in ("read", "write", "both")
    )
    return DriveRates(read, write, both)
