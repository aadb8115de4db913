"""Chooses a command's swap directory if the user names none, and checks its free space."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import psutil

from swapper.errors import DirectoryError
from swapper.runtime.sizes import format_bytes

IN_MEMORY = {"tmpfs", "ramfs"}


def filesystem_of(directory: Path) -> str:
    """Return the type of the filesystem of `directory`: "ext4", "tmpfs"; "" if unknown."""
    resolved = directory.resolve()
    mounts = [m for m in psutil.disk_partitions(all=True) if resolved.is_relative_to(m.mountpoint)]
    return max(mounts, key=lambda m: len(m.mountpoint)).fstype if mounts else ""


def choose_directory() -> Path:
    """Return the first of the current directory and the temporary ones that is on a drive and writable.

    Raises:
        DirectoryError: none is.
    """
    tried = []
    for directory in (Path.cwd(), Path(tempfile.gettempdir()), Path("/var/tmp")):
        if directory.is_dir() and os.access(directory, os.W_OK | os.X_OK) and filesystem_of(directory) not in IN_MEMORY:
            return directory
        tried.append(str(directory))
    raise DirectoryError(f"none of {', '.join(tried)} is a writable directory on a drive; name one with --directory")


def check_directory(directory: Path, needed_bytes: int) -> None:
    """Raise DirectoryError if `directory` is missing, not writable, or short of `needed_bytes`."""
    if not directory.is_dir():
        raise DirectoryError(f"{directory} is not a directory; make it, or name another with --directory")
    if not os.access(directory, os.W_OK | os.X_OK):
        raise DirectoryError(f"{directory} cannot be written; name another with --directory")
    free_bytes = shutil.disk_usage(directory).free
    if free_bytes < needed_bytes:
        raise DirectoryError(
            f"{directory} has {format_bytes(free_bytes)} free and this needs {format_bytes(needed_bytes)}: "
            "free some, name a directory on another drive with --directory, or lower --parameters"
        )
