"""One engine, and so one I/O thread, for each drive that a handle meets: a slow drive does not hold up the queue of a fast one."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from swapper import _C


class Engines:
    """The engines of one handle, by drive. The first is made at once, to know whether the options work; the others when needed."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        """`options` are those of `swapper._C.Engine`, for each."""
        self._options = dict(options)
        self._first = _C.Engine(**self._options)
        self._by_drive: dict[str, _C.Engine] = {}
        self._drives: dict[int, str] = {}
        self._lock = threading.Lock()

    @property
    def first(self) -> _C.Engine:
        return self._first

    @property
    def all(self) -> list[_C.Engine]:
        with self._lock:
            return list(dict.fromkeys([self._first, *self._by_drive.values()]))

    def of(self, device: int) -> _C.Engine:
        """The engine of the drive under a filesystem, by its device number (`st_dev`)."""
        with self._lock:
            drive = self._drives.get(device)
            if drive is None:
                drive = self._drives[device] = drive_of_device(device)
            engine = self._by_drive.get(drive)
            if engine is None:
                engine = self._by_drive[drive] = _C.Engine(**self._options) if self._by_drive else self._first
            return engine

    def close(self) -> None:
        for engine in self.all:
            engine.close()


def drive_of_device(device: int) -> str:
    """The whole drive that a device number belongs to: partitions of one drive share it. Of what has none, the number itself."""
    number = f"{os.major(device)}:{os.minor(device)}"
    entry = Path("/sys/dev/block") / number
    if (entry / "partition").exists():
        return (entry.resolve().parent / "dev").read_text().strip()
    return number
