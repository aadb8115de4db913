"""Opens every engine, with the settings that `swapper tune` found for its drive.

A drive needs many direct transfers in flight, from one thread: each drive of a run or a handle has its own engine, so
that a slow drive does not block the queue of a fast one. A filesystem in memory has no drive: a transfer is a copy by
the processor. Several threads are then faster, also for writing, if the file has its final length before it is written
(`csrc/io/filler.h`); if the kernel forbids that, one writes at a time. Bypassing the page cache gains nothing there.

It also waits for tickets: for all of them, whatever one raises, so that their memory can be reused.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from swapper import _C
from swapper.errors import ConfigError, IoError
from swapper.io.drives import find_tuning
from swapper.io.replacing import IN_MEMORY, is_on
from swapper.runtime.process import naming_limits

log = logging.getLogger("swapper")

_MEMORY_SETTINGS = {"backend": "threads", "depth": min(4, os.cpu_count() or 1), "piece_bytes": 2 << 20}
"""More threads or other pieces were not faster: docs/decisions/files-in-memory.md."""

PAGES_DEPTH = 8
"""Transfers of 1 MiB in flight, of pages on a drive that was not tuned: a drive divides its speed among them, so that with more
the next page comes later, and no sooner is all read (docs/decisions/measured-and-not-better.md)."""

_shared: dict[tuple[object, ...], _C.Engine] = {}
_lock = threading.Lock()


class Transfer(Protocol):
    """The completion of a submitted transfer, or of several as one: what is asked of a `swapper._C.Ticket`."""

    @property
    def done(self) -> bool: ...
    @property
    def error(self) -> IoError | None: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def crc32(self) -> int: ...
    @property
    def submitted_s(self) -> float: ...
    @property
    def completed_s(self) -> float: ...
    def exception(self) -> IoError | None: ...
    def wait(self) -> object: ...


class Engine(Protocol):
    """What submits transfers: a `swapper._C.Engine`, or those of several drives as one."""

    @property
    def backend(self) -> str: ...
    @property
    def reason(self) -> str: ...
    @property
    def bytes_read(self) -> int: ...
    @property
    def bytes_written(self) -> int: ...
    def read(
        self,
        file: _C.File,
        offset: int,
        address: int,
        nbytes: int,
        *,
        keep: object = None,
        after: Any = None,
        checksum: bool = False,
        expected: int | None = None,
    ) -> Transfer:
        """Submit a read; return its ticket. Args: as of `swapper._C.Engine.read`."""

    def write(
        self,
        file: _C.File,
        offset: int,
        address: int,
        nbytes: int,
        *,
        keep: object = None,
        after: Any = None,
        checksum: bool = False,
    ) -> Transfer:
        """Submit a write; return its ticket. Args: as of `swapper._C.Engine.write`."""

    def drain(self) -> None: ...
    def close(self) -> None: ...


def tuned_settings(directory: Path, backend: str = "auto") -> dict[str, Any]:
    """Return options of `swapper._C.Engine` for files in `directory`: the result of `swapper tune`, or nothing.

    Args:
        backend: the user's choice. A tuning for another backend is not applied.
    """
    tuning = find_tuning(directory)
    if tuning is None or backend not in ("auto", tuning.backend):
        return {"backend": backend}
    return tuning.engine_options()


def open_engine(directories: Sequence[Path], backend: str = "auto", **options: object) -> Engine:
    """Open an engine for pages in files in `directories`, one a drive, with each drive's tuning.

    Args:
        backend: "auto", "uring", "aio" or "threads".
        options: others of `swapper._C.Engine`; `depth` is PAGES_DEPTH by default.
    """
    options = {"depth": PAGES_DEPTH, **options}
    if len(directories) == 1:
        return _open(directories[0], backend, options)
    return EngineOfDrives(directories, backend, options)


def _open(directory: Path, backend: str, options: Mapping[str, Any]) -> _C.Engine:
    settings = tuned_settings(directory, backend)
    try:
        with naming_limits("open"):
            return _C.Engine(**{**options, **settings})
    except ConfigError as error:
        if settings["backend"] == backend:
            raise
        log.warning("the tuning of the drive of %s is not used, since it does not work here: %s", directory, str(error))
        return _C.Engine(backend=backend, **options)


def shared_engine(path: Path) -> _C.Engine:
    """Return this process's engine for files in the directory of `path`. Python closes it at exit."""
    in_memory = is_in_memory(path)
    settings = _MEMORY_SETTINGS if in_memory else tuned_settings(path.parent)
    key = (os.getpid(), *settings.items())
    with _lock:
        engine = _shared.get(key)
        if engine is None:
            for old in [k for k in _shared if k[0] != key[0]]:  # of the parent process, before a fork
                del _shared[old]
            engine = _shared[key] = _C.Engine(**settings) if in_memory else _open(path.parent, "auto", {})
        return engine


def open_for(path: Path, *, read_only: bool) -> _C.File:
    """Open an existing file, direct or buffered as suits its filesystem."""
    return _C.File(path, read_only=read_only, direct=False if is_in_memory(path) else None)


def reserve(file: _C.File, nbytes: int) -> None:
    """Prepare an empty file for about `nbytes`: reserves its space on a drive; in memory, lets threads fill it."""
    if file.direct:
        file.allocate(nbytes)
    else:
        file.truncate(nbytes)


def is_in_memory(path: Path) -> bool:
    """Return True if `path`'s directory is on a filesystem in memory."""
    return is_on(IN_MEMORY, path)


class SeveralEngines(ABC):
    """Adds up what several engines count, and closes them."""

    @property
    @abstractmethod
    def all(self) -> list[_C.Engine]: ...

    @property
    def bytes_read(self) -> int:
        return sum(engine.bytes_read for engine in self.all)

    @property
    def bytes_written(self) -> int:
        return sum(engine.bytes_written for engine in self.all)

    def close(self) -> None:
        """Close the engines. Transfers that wait for another engine's (`after`) finish too."""
        for engine in self.all:
            engine.close()


class Engines(SeveralEngines):
    """The engines of one handle, by drive. The first is opened at once, to check the options."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        """`options` are those of `swapper._C.Engine`, for each."""
        self._options = dict(options)
        self.first = _C.Engine(**self._options)
        self._by_drive: dict[str, _C.Engine] = {}
        self._drives: dict[int, str] = {}
        self._lock = threading.Lock()

    @property
    def all(self) -> list[_C.Engine]:
        with self._lock:
            return list(dict.fromkeys([self.first, *self._by_drive.values()]))

    def of(self, device: int) -> _C.Engine:
        """Return the engine of the drive under a filesystem, by its device number (`st_dev`)."""
        with self._lock:
            drive = self._drives.get(device)
            if drive is None:
                drive = self._drives[device] = drive_of_device(device)
            engine = self._by_drive.get(drive)
            if engine is None:
                engine = self._by_drive[drive] = _C.Engine(**self._options) if self._by_drive else self.first
            return engine


class EngineOfDrives(SeveralEngines):
    """The engines of a run's drives, with the interface of one: each transfer goes to the engine of its file's drive.

    Args:
        directories: of the run's files, one a drive. Files elsewhere use the first one's.
        backend: of all of them.
        options: of `swapper._C.Engine`, for each.
    """

    def __init__(self, directories: Sequence[Path], backend: str, options: Mapping[str, object]) -> None:
        by_drive: dict[str, _C.Engine] = {}
        self._by_directory: dict[str, _C.Engine] = {}
        try:
            for directory in directories:
                drive = drive_of_device(directory.stat().st_dev)
                if drive not in by_drive:
                    by_drive[drive] = _open(directory, backend, options)
                self._by_directory[os.fspath(directory)] = by_drive[drive]
        except BaseException:
            for engine in by_drive.values():
                engine.close()
            raise
        self._engines = list(by_drive.values())

    @property
    def all(self) -> list[_C.Engine]:
        return self._engines

    def read(self, file: _C.File, offset: int, address: int, nbytes: int, **options: Any) -> _C.Ticket:
        return self._of(file).read(file, offset, address, nbytes, **options)

    def write(self, file: _C.File, offset: int, address: int, nbytes: int, **options: Any) -> _C.Ticket:
        return self._of(file).write(file, offset, address, nbytes, **options)

    def _of(self, file: _C.File) -> _C.Engine:
        # Converting to a Path would take longer than submitting the transfer.
        return self._by_directory.get(os.path.dirname(file.path), self._engines[0])  # noqa: PTH120

    @property
    def backend(self) -> str:
        return ", ".join(dict.fromkeys(engine.backend for engine in self._engines))

    @property
    def reason(self) -> str:
        return ", ".join(dict.fromkeys(engine.reason for engine in self._engines))

    def drain(self) -> None:
        for engine in self._engines:
            engine.drain()


def drive_of_device(device: int) -> str:
    """Return the whole drive of a device number: partitions of one drive share it. Without one, the number itself."""
    number = f"{os.major(device)}:{os.minor(device)}"
    entry = Path("/sys/dev/block") / number
    if (entry / "partition").exists():
        return (entry.resolve().parent / "dev").read_text().strip()
    return number


def wait_for_all(tickets: Iterable[Transfer]) -> None:
    """Wait for every ticket, even after one has failed, since others may use their memory. Raises the first error."""
    failures: list[BaseException] = []
    for ticket in tickets:
        try:
            ticket.wait()
        except BaseException as error:
            failures.append(error)
            drain(ticket)
    if failures:
        try:
            raise failures[0]
        finally:
            failures.clear()  # its traceback refers to this frame: see runtime/interrupts.py


@contextlib.contextmanager
def all_over() -> Iterator[list[Transfer]]:
    """Yield a list for tickets. At the end of the context all are over, whatever happened. Raises the first error.

    For transfers whose memory others use next. (The engine itself keeps the memory alive until they are over.)
    """
    tickets: list[Transfer] = []
    try:
        yield tickets
    except BaseException:
        for ticket in tickets:
            drain(ticket)
        raise
    wait_for_all(tickets)


def drain(ticket: Transfer) -> None:
    """Wait until the engine has released the ticket's memory, whatever its outcome."""
    while not ticket.done:
        with contextlib.suppress(Exception):
            ticket.wait()
