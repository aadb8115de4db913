"""Publishes one snapshot, in a thread of its own; and SnapshotTicket, the handle of a snapshot in progress.

The frozen swap file gets the step's content of other files, and its tail; it is synced; and it is published: by
reflink, which shares its bytes until either changes, or else by hard link. On another filesystem everything is copied
through the engine. The file appears under its name when it is whole and synced, or not at all; an existing file is
never replaced. See [Note: who touches what while a snapshot is published], snapshot.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import fcntl
import os
import threading
import zlib
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from swapper import _C
from swapper.errors import CheckpointError, IoError, StateError, SwapperError
from swapper.formats.container import ChecksumChunk, ContainerLayout, PreparedTail, TensorPlace
from swapper.io import beneath
from swapper.io.copying import CopyRange, checksums_of, copy
from swapper.io.engines import Engine
from swapper.io.replacing import temporary_name
from swapper.paging.store.page_files import FileStatus, status_of, write_all


class SnapshotTicket:
    """A snapshot in progress. Made by `SwapManager.snapshot`. Awaitable: `path = await manager.snapshot(...)`.

    The next `snapshot`, or `close`, raises a failure that nobody has asked for.

    Attributes:
        path: the file appears there, whole, when the ticket succeeds.
        step: number of optimizer steps in it.
    """

    def __init__(self, path: Path, step: int, hurry: Callable[[], None]) -> None:
        self.path = path
        self.step = step
        self._hurry = hurry
        self._owner = threading.get_ident()
        self._pid = os.getpid()
        self._over = threading.Event()
        self._error: BaseException | None = None
        self._is_reported = False

    @property
    def done(self) -> bool:
        """True if it is over, successful or not."""
        return self._over.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the file has its name, synced. Returns False if `timeout_s` seconds pass first.

        In the training thread this first waits for the last step's writes; in another, for that thread to continue.

        Raises:
            IoError: a transfer failed, or a drive is full.
            CheckpointError: the path was created, or its directory removed, meanwhile.
            StateError: in a forked child.
        """
        error = self.exception(timeout_s)
        if error is not None:
            raise error
        return self.done

    def exception(self, timeout_s: float | None = None) -> BaseException | None:
        """Wait as `wait` does, and return its error for this snapshot, or None."""
        if os.getpid() != self._pid:
            raise StateError("wait for a snapshot in the process that took it, not in a forked child")
        if not self.done and threading.get_ident() == self._owner:
            self._hurry()
        if not self._over.wait(timeout_s):
            return None
        self._is_reported = True
        return self._error

    def result(self, timeout_s: float | None = None) -> Path:
        """Wait as `wait` does, and return the path.

        Raises:
            TimeoutError: not there after `timeout_s` seconds.
        """
        if not self.wait(timeout_s):
            raise TimeoutError(f"the snapshot {self.path} is not published after {timeout_s} s; it is in progress")
        return self.path

    def __await__(self) -> Generator[object, None, Path]:
        if not self.done and threading.get_ident() == self._owner:
            self._hurry()
        yield from asyncio.get_running_loop().run_in_executor(None, self._over.wait).__await__()
        return self.result()

    def __repr__(self) -> str:
        state = "in progress" if not self.done else "failed" if self._error is not None else "published"
        return f"SnapshotTicket({str(self.path)!r}, step {self.step}, {state})"

    # --- for the publisher

    def finish(self, error: BaseException | None) -> None:
        """Finish the ticket: published, or failed with `error`."""
        if not self.done:
            if error is not None:  # its frames would keep a running forward alive, with all activations
                error.__traceback__ = error.__context__ = None
            self._error = error
            self._over.set()

    def unreported_error(self) -> BaseException | None:
        """Return the error that nobody has seen yet, and mark it as reported."""
        if self._error is None or self._is_reported:
            return None
        self._is_reported = True
        return self._error


ZEROS_BYTES = 1 << 20  # written at once
PUNCH_HOLE = 0x03
"""fallocate(2): FALLOC_FL_PUNCH_HOLE and FALLOC_FL_KEEP_SIZE."""
FICLONE = 0x40049409
"""ioctl_ficlone(2): makes a file share another one's bytes."""
NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV, errno.EMLINK, errno.EACCES)
"""Errors of link(2) if the filesystem, or the permissions on it, allow no other name for this file."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong]


class Base:
    """The frozen swap file that becomes the snapshot. Made before it is frozen, which forbids opening it for writing.

    Attributes:
        status: once it is closed.
    """

    def __init__(self, number: int, path: Path) -> None:
        self.number = number
        self.path = path
        self.file = beneath.open_for_transfers(path)
        self.descriptor = beneath.open_file(path, os.O_RDWR)
        self.status: FileStatus = (0, 0, 0)

    def close(self) -> FileStatus:
        """Close it, and return its last `status`."""
        self.status = status_of(self.descriptor)
        os.close(self.descriptor)
        self.file.close()
        return self.status


class Draft:
    """A file that gets its name when it is whole. Until then it has no name, so that a kill leaves nothing behind; or a
    hidden one, if the filesystem does not support that.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._hidden: Path | None = None
        try:
            self.descriptor = os.open(path.parent, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o666)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
                raise
            self._hidden = temporary_name(path)
            self.descriptor = os.open(self._hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._place = self._hidden or Path(f"/proc/self/fd/{self.descriptor}")

    def open(self) -> _C.File:
        """Open it for transfers."""
        return _C.File(str(self._place))

    def publish(self) -> None:
        """Give the file its name, unless that exists by now."""
        directory = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:  # with a directory's descriptor this is linkat(2), which follows the link in /proc
            os.link(self._place, self._path, src_dir_fd=directory, follow_symlinks=True)
        except FileExistsError:
            raise _taken(self._path) from None
        except OSError as error:
            if error.errno not in NO_LINKS or self._hidden is None:
                raise
            if os.path.lexists(self._path):
                raise _taken(self._path) from None
            self._hidden.rename(self._path)
        finally:
            os.close(directory)

    def close(self) -> None:
        os.close(self.descriptor)
        if self._hidden is not None:
            self._hidden.unlink(missing_ok=True)


@dataclass(frozen=True)
class SnapshotContents:
    """All bytes of a snapshot: `everything` has the payload's locations, the rest makes its tail.

    `holes` are omitted payloads, as (offset, nbytes), which become zeros. `kept` is other content of the frozen file.
    `check` raises if a file that was read has changed.
    """

    tail: PreparedTail
    layout: ContainerLayout
    tensors: Mapping[str, Sequence[TensorPlace]]
    everything: Sequence[CopyRange]
    left_out: frozenset[str]
    holes: Sequence[tuple[int, int]]
    kept: Sequence[CopyRange]
    check: Callable[[], None]

    @property
    def runs(self) -> list[CopyRange]:
        return [*self.everything, *self.kept]

    def make_tail(self, found: Mapping[int, int]) -> bytes:
        """`found` has, by offset, the CRC-32 of each run whose own is None."""
        chunks = [
            ChecksumChunk(run.offset, run.nbytes, found[run.offset] if run.crc32 is None else run.crc32)
            for run in self.runs
        ]
        chunks += [ChecksumChunk(offset, nbytes, zlib.crc32(bytes(nbytes))) for offset, nbytes in self.holes]
        return self.tail.build(chunks, self.tensors, self.left_out)


@dataclass(eq=False, repr=False)
class Publication:
    """Publishes one snapshot.

    Args:
        path: its name.
        ticket: to finish at the end.
        content: its content.
        base: the frozen file; None if everything is copied.
        is_near: `path` is on the filesystem of the swap files.
        may_link: the frozen file may be completed, and be the snapshot itself.
        engine: does the transfers.
        previous: the publication to wait for first, so that only one runs at a time.
        published: called when the file has its name.

    Attributes:
        sources_read: set when nothing is read any more from files that alternate.
    """

    path: Path
    ticket: SnapshotTicket
    content: SnapshotContents
    base: Base | None
    is_near: bool
    may_link: bool
    engine: Engine
    previous: Publication | None
    published: Callable[[], None]
    _found: dict[int, int] = field(default_factory=dict)  # checksums of what was read, by offset
    sources_read: threading.Event = field(default_factory=threading.Event)
    _over: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def begin(self) -> None:
        thread = threading.Thread(target=self._run, name=f"swapper snapshot {self.path.name}")
        try:
            thread.start()
            self._thread = thread
        except RuntimeError:  # no more threads, as at the interpreter's exit
            self._run()

    @property
    def _base_path(self) -> str:
        return str(self.base.path) if self.base is not None else ""

    @property
    def is_over(self) -> bool:
        return self._over.is_set()

    def join(self) -> None:
        """Wait until it is over, and nothing of it refers to the run any more."""
        self._over.wait()
        if self._thread is not None:
            self._thread.join()

    # --- in the thread

    def _run(self) -> None:
        if self.previous is not None:
            self.previous.join()
            self.previous = None
        error: BaseException | None = None
        try:
            self._publish()
            self.published()
        except BaseException as failure:
            error = self._explain(failure)
        for run in self.content.everything:
            run.source.close()
        if self.base is not None:
            self.base.close()
        self.sources_read.set()
        self.ticket.finish(error)
        self._over.set()

    def _explain(self, failure: BaseException) -> BaseException:
        """Return it with the snapshot's name: a draft's own means nothing to users."""
        path = str(self.path)
        if isinstance(failure, IoError) and failure.path.startswith("/proc/self/fd/"):
            return IoError(failure.op, path, failure.offset, failure.nbytes, failure.errno or 0, failure.detail)
        if isinstance(failure, SwapperError) or not isinstance(failure, OSError):
            return failure
        if isinstance(failure, FileNotFoundError) and not self.path.parent.is_dir():
            return CheckpointError(f"directory {self.path.parent} was removed while snapshot {self.path} was written")
        return IoError("snapshot", path, 0, 0, failure.errno or 0, "the run continues unaffected")

    def _publish(self) -> None:
        if not (self.is_near and self._reflink()) and not (self.may_link and self._link()):
            self._copy()
        beneath.sync(self.path.parent)

    def _reflink(self) -> bool:
        """Publish a file that shares the frozen file's bytes. Return False if this filesystem cannot."""
        if self.base is None:
            return False
        with contextlib.closing(Draft(self.path)) as draft:
            try:
                fcntl.ioctl(draft.descriptor, FICLONE, self.base.descriptor)
            except OSError:
                return False
            with contextlib.closing(draft.open()) as file:
                self._copy_other_files(file)
            self._end(draft.descriptor)
            draft.publish()
        return True

    def _link(self) -> bool:
        """Publish the frozen file itself. Return False if it can have no other name here."""
        if self.base is None:
            return False
        self._copy_other_files(self.base.file)
        self._end(self.base.descriptor)
        os.fchmod(self.base.descriptor, 0o400 | 0o444 & ~_umask())  # the run's other files stay private
        try:
            beneath.link(self.base.path, self.path)
        except FileExistsError:
            raise _taken(self.path) from None
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            return False
        return True

    def _copy_other_files(self, file: _C.File) -> None:
        """Copy the step's content of other files into `file`."""
        runs = [run for run in self.content.everything if run.source.path != self._base_path]
        self._found.update(copy(self.engine, runs, file))
        self.sources_read.set()

    def _copy(self) -> None:
        """Publish a copy of all the snapshot's content, in a file of its own."""
        with contextlib.closing(Draft(self.path)) as draft:
            with contextlib.closing(draft.open()) as file:
                if not self.content.holes:
                    file.allocate(self.content.layout.tail_offset)
                self._copy_other_files(file)
                runs = [run for run in self.content.everything if run.source.path == self._base_path]
                self._found.update(copy(self.engine, [*runs, *self.content.kept], file))
            for offset, data in self.content.layout.headers():
                write_all(draft.descriptor, data, offset)
            self._end(draft.descriptor)
            draft.publish()

    def _end(self, descriptor: int) -> None:
        """Write the tail, truncate the file behind it, and make the whole file durable."""
        self.content.check()
        for hole in self.content.holes:
            _punch(descriptor, *hole)
        unknown = [run for run in self.content.runs if run.crc32 is None and run.offset not in self._found]
        self._found.update(checksums_of(self.engine, unknown))
        offset = self.content.layout.tail_offset
        tail = self.content.make_tail(self._found)
        write_all(descriptor, tail, offset)
        os.ftruncate(descriptor, offset + len(tail))
        os.fsync(descriptor)


def _umask() -> int:
    """Return the process's umask. os.umask would change it for all threads meanwhile."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    return 0o077


def _taken(path: Path) -> CheckpointError:
    return CheckpointError(f"{path} appeared while the snapshot was written: it was left as it is")


def _punch(descriptor: int, offset: int, nbytes: int) -> None:
    """Turn a run of a file into zeros that take no space."""
    if _libc.fallocate(descriptor, PUNCH_HOLE, offset, nbytes) == 0:
        return
    for begin in range(offset, offset + nbytes, ZEROS_BYTES):  # not supported by this filesystem
        write_all(descriptor, bytes(min(ZEROS_BYTES, offset + nbytes - begin)), begin)
