"""One engine, and so one I/O thread, for each drive that a handle or a run meets: a slow drive does not hold up the queue of a fast
one."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
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

    @property
    def bytes_read(self) -> int:
        return sum(engine.bytes_read for engine in self.all)

    @property
    def bytes_written(self) -> int:
        return sum(engine.bytes_written for engine in self.all)

    def close(self) -> None:
        for engine in self.all:
            engine.close()


class EngineOfDrives:
    """The engines of a run's drives behind the face of one: each transfer goes to the engine of the drive that its file is on.

    Args:
        directories: of the run's files, one a drive. Files elsewhere are the first one's.
        options: of `swapper._C.Engine`, for each.
    """

    def __init__(self, directories: Sequence[Path], options: Mapping[str, Any]) -> None:
        self._engines = Engines(options)
        try:
            self._by_directory = {os.fspath(path): self._engines.of(path.stat().st_dev) for path in directories}
        except BaseException:
            self._engines.close()
            raise

    def read(self, file: Any, offset: int, address: int, nbytes: int, **options: Any) -> Any:
        return self._of(file).read(file, offset, address, nbytes, **options)

    def write(self, file: Any, offset: int, address: int, nbytes: int, **options: Any) -> Any:
        return self._of(file).write(file, offset, address, nbytes, **options)

    def _of(self, file: Any) -> _C.Engine:
        # A Path would take longer than handing over the transfer.
        return self._by_directory.get(os.path.dirname(file.path), self._engines.first)  # noqa: PTH120

    @property
    def backend(self) -> str:
        return ", ".join(dict.fromkeys(engine.backend for engine in self._engines.all))

    @property
    def reason(self) -> str:
        return ", ".join(dict.fromkeys(engine.reason for engine in self._engines.all))

    @property
    def bytes_read(self) -> int:
        return self._engines.bytes_read

    @property
    def bytes_written(self) -> int:
        return self._engines.bytes_written

    @property
    def staging_bytes(self) -> int:
        return sum(engine.staging_bytes for engine in self._engines.all)

    @property
    def in_flight(self) -> int:
        return sum(engine.in_flight for engine in self._engines.all)

    def drain(self) -> None:
        for engine in self._engines.all:
            engine.drain()

    def close(self) -> None:
        """End each engine when its transfers are over, also those that wait for another's (`after`): none needs anybody's help."""
        self._engines.close()


def open_engine(directories: Sequence[Path], **options: Any) -> Any:
    """Return an engine for files in `directories`, one a drive."""
    return _C.Engine(**options) if len(directories) == 1 else EngineOfDrives(directories, options)


def drive_of_device(device: int) -> str:
    """The whole drive that a device number belongs to: partitions of one drive share it. Of what has none, the number itself."""
    number = f"{os.major(device)}:{os.minor(device)}"
    entry = Path("/sys/dev/block") / number
    if (entry / "partition").exists():
        return (entry.resolve().parent / "dev").read_text().strip()
    return number
