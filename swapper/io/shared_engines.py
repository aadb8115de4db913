"""The engines of `save`, `load`, export and torch.distributed.checkpoint: one for drives and some for memory, in each process.

A drive wants many direct transfers in flight, from one thread. A filesystem in memory has no drive: a transfer is a copy by the
processor. Several threads are then faster, also in writing a file that is made as long as it will be before it is written
(`csrc/io/filler.h`); where the kernel does not permit that, one writes at a time. Going around the page cache gains nothing there.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from swapper import _C
from swapper.errors import IoError

_IN_MEMORY = {"tmpfs", "ramfs"}
_MEMORY_THREADS = 4
_MEMORY_PIECE_BYTES = 2 << 20

_engines: dict[tuple[int, int], _C.Engine] = {}
_lock = threading.Lock()


def engine_for(path: Path) -> _C.Engine:
    """Return this process's engine for files in the directory of `path`. Never closed: Python does that when it ends."""
    threads = min(_MEMORY_THREADS, os.cpu_count() or 1) if is_in_memory(path) else 0
    key = (os.getpid(), threads)
    with _lock:
        engine = _engines.get(key)
        if engine is None:
            for old in [k for k in _engines if k[0] != key[0]]:  # of the parent, which forked
                del _engines[old]
            engine = _engines[key] = _new_engine(threads)
        return engine


def _new_engine(memory_threads: int) -> _C.Engine:
    if memory_threads:
        return _C.Engine(backend="threads", depth=memory_threads, piece_bytes=_MEMORY_PIECE_BYTES)
    return _C.Engine()


def open_for(path: Path, *, read_only: bool) -> _C.File:
    """Open an existing file as its filesystem is served best."""
    return _C.File(path, read_only=read_only, direct=False if is_in_memory(path) else None)


def reserve(file: _C.File, nbytes: int) -> None:
    """Make an empty file ready for about `nbytes`: on a drive its space is taken; in memory threads can then fill it."""
    if file.direct:
        file.allocate(nbytes)
    else:
        file.truncate(nbytes)


def is_in_memory(path: Path) -> bool:
    """Whether `path`'s directory is on a filesystem that has no drive behind it."""
    try:
        device = path.parent.stat().st_dev
    except OSError as error:
        raise IoError("open", str(path), 0, 0, error.errno or 0) from error
    if os.major(device):
        return False
    mounts = [line.split(" ") for line in Path("/proc/self/mounts").read_text().splitlines()]
    places = [mount[1].encode().decode("unicode_escape") for mount in mounts if mount[2] in _IN_MEMORY]
    return any(_device_of(place) == device for place in places)


def _device_of(directory: str) -> int | None:
    with contextlib.suppress(OSError):
        return Path(directory).stat().st_dev
    return None


def wait_for_all(tickets: Iterable[Any]) -> None:
    """Wait for every ticket, also where one has failed: the others may still use their memory. Raises the first error."""
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
            failures.clear()  # its traceback has this frame: see runtime/teardown.py


@contextlib.contextmanager
def all_over() -> Iterator[list[Any]]:
    """Within it tickets are appended to what it gives. At its end all are over, whatever happened. Raises the first error.

    For transfers from and into memory that others use next. (That it does not go before they are over, the engine sees to.)
    """
    tickets: list[Any] = []
    try:
        yield tickets
    except BaseException:
        for ticket in tickets:
            drain(ticket)
        raise
    wait_for_all(tickets)


def drain(ticket: Any) -> None:
    """Wait until the engine has let go of the ticket's memory, well or not."""
    while not ticket.done:
        with contextlib.suppress(Exception):
            ticket.wait()
