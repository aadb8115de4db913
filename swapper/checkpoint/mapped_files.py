"""Maps files of the user's, which somebody may truncate meanwhile; and keeps torch.save and the like from losing one.

An access beyond a file's end would end the process (SIGBUS): it finds zeros, and is noted (csrc/memory/truncation.h). So who
shows mapped memory checks its files before and after each use.

torch.save and the like truncate a file before they read the tensors, which may be mapped from it:
torch.save(model.state_dict(), the_same_file). Onto such a file they write another one, which is renamed.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import stat
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from swapper import _C
from swapper.errors import LIMITS, CheckpointError, IoError
from swapper.formats.stored import StoredTensor
from swapper.io.replacing import replacing
from swapper.runtime.process import is_off
from swapper.tensors.guarded_tensor import TensorWatch

MAP_NORESERVE = 0x4000
"""A mapping larger than memory must not reserve it (Linux; Python's mmap names it from 3.13 on)."""
PRIVATE = mmap.MAP_PRIVATE | MAP_NORESERVE
BOTH = mmap.PROT_READ | mmap.PROT_WRITE


class WatchedMemory(mmap.mmap):
    """Memory into which files are mapped. Writes to it stay in memory."""

    _watches: list[_C.TruncationWatch]  # go before the memory does

    @classmethod
    def reserved(cls, nbytes: int) -> WatchedMemory:
        """Return memory of zeros to map files over."""
        memory = cls(-1, nbytes, flags=PRIVATE | mmap.MAP_ANONYMOUS, prot=BOTH)
        memory._watches = []
        return memory

    @property
    def address(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self))

    def watch(self, offset: int, nbytes: int) -> None:
        """Have accesses to these bytes, which are mapped from a file, find zeros beyond its end."""
        self._watches.append(_C.TruncationWatch(self.address + offset, nbytes))

    @property
    def is_lost(self) -> bool:
        """Whether anybody has accessed bytes beyond their file's end."""
        return any(watch.is_lost for watch in self._watches)


_mappings: weakref.WeakSet[FileMapping] = weakref.WeakSet()


class FileMapping(WatchedMemory):
    """A file, mapped as a whole, and kept open.

    Args:
        path: the file.
        is_fixed: nobody but the user writes to it.

    Attributes:
        descriptor: of the open file.
        changed_ns: its modification time when it was mapped.

    Raises:
        IoError: it cannot be opened or mapped.
    """

    path: Path
    descriptor: int
    changed_ns: int
    is_fixed: bool

    def __new__(cls, path: Path, is_fixed: bool) -> FileMapping:
        descriptor = -1
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self = super().__new__(cls, descriptor, 0, flags=PRIVATE, prot=BOTH)
        except (OSError, ValueError) as error:  # ValueError: it is empty
            if descriptor >= 0:
                os.close(descriptor)
            number = getattr(error, "errno", 0) or 0
            why = () if number in LIMITS else (str(error),)  # a limit's error names what to do
            raise IoError("map", str(path), 0, 0, number, *why) from error
        weakref.finalize(self, os.close, descriptor)
        self.path, self.descriptor, self._watches = path, descriptor, []
        self.is_fixed = is_fixed
        self.changed_ns = os.fstat(descriptor).st_mtime_ns
        self.watch(0, len(self))
        _mappings.add(self)
        return self

    def is_of_file(self) -> bool:
        """Return whether it maps what its path names now, all of it, unchanged."""
        try:
            now = self.path.stat()
        except OSError:
            return False
        is_same = os.path.samestat(now, os.fstat(self.descriptor)) and now.st_size == len(self)
        return is_same and now.st_mtime_ns == self.changed_ns

    def state(self) -> tuple[int, int]:
        """Return the file's size, and its modification time if nobody but the user writes to it."""
        status = os.fstat(self.descriptor)
        return status.st_size, status.st_mtime_ns if self.is_fixed else 0

    def problem(self, end: int, is_fixed: bool) -> str | None:
        """Return what happened to the file since it was mapped, if it has not all bytes up to `end` any more.

        Args:
            is_fixed: nobody may write to the file.
        """
        status = os.fstat(self.descriptor)
        if status.st_size < end:
            return f"{self.path} was truncated to {status.st_size} bytes"
        return f"{self.path} was written to" if is_fixed and status.st_mtime_ns != self.changed_ns else None


class FileChanges:
    """What happens to mapped files from its creation on.

    Each mapping is compared by itself: another one, of a file that had the same path, may have changed before.
    """

    def __init__(self) -> None:
        self._before, self._lost = _file_states(), _C.ranges_lost()

    @contextmanager
    def refused(self, target: object) -> Iterator[None]:
        """Raise CheckpointError if what is written to `target` within this may be wrong."""
        try:
            yield
        except Exception as error:  # torch's or the drive's, of a write from memory beyond a file's end
            if not isinstance(error, CheckpointError) and (files := self._files()):
                raise _not_whole(target, files) from error
            raise
        files = self._files()
        if files or _C.ranges_lost() != self._lost:
            raise _not_whole(target, files)

    def _files(self) -> set[Path]:
        """Return the files that became shorter, or were written to and must not be."""
        changed = (mapping for mapping, state in _file_states().items() if state != self._before.get(mapping))
        return {mapping.path for mapping in changed if mapping.problem(len(mapping), mapping.is_fixed)}


def _file_states() -> dict[FileMapping, tuple[int, int]]:
    return {mapping: mapping.state() for mapping in list(_mappings)}


def _not_whole(target: object, files: Iterable[Path]) -> CheckpointError:
    names = ", ".join(map(str, files)) or "a file"
    return CheckpointError(
        f"{names} was truncated or written to while tensors that were mapped from it were written to {target}, which is not whole"
    )


@dataclass(frozen=True, slots=True)
class FilePart:
    """Bytes of a file in memory.

    Attributes:
        file: the file.
        memory: has the bytes.
        end: offset in the file behind the last of them.
        is_fixed: nobody but the user writes to the file.
    """

    file: FileMapping
    memory: WatchedMemory
    end: int
    is_fixed: bool


def check_parts(parts: Iterable[FilePart], what: str) -> None:
    """Raise CheckpointError if a file lost bytes of `parts`, or was written to; `what` was mapped from it."""
    for part in parts:
        problem = part.file.problem(part.end, part.is_fixed)
        if problem is None and part.memory.is_lost:
            problem = f"{part.file.path} was truncated for a while"
        if problem is not None:
            raise CheckpointError(
                f"{problem} while {what} was mapped from it: state_dict() shows files. To write onto one of them use "
                "torch.save(state, path), or swapper.checkpoint.save(..., overwrite=True), which write another file and rename it"
            )


class ShownFile(TensorWatch):
    """Watches tensors that are mapped from a file: of state_dict() of a loaded model, and reads of its weights.

    Writes to them stay in memory.

    Args:
        mapping: the file's.
        stored: what is shown of it.
    """

    is_mapped = True
    locks_arrays = False

    def __init__(self, mapping: FileMapping, stored: StoredTensor) -> None:
        self._name = stored.name
        self._part = FilePart(mapping, mapping, stored.offset + stored.nbytes, is_fixed=True)

    def use(self, tensor: torch.Tensor) -> None:
        check_parts([self._part], self._name)

    used = use


Function = Callable[..., Any]
Target = str | os.PathLike[str]

WRITERS = (
    ("torch.serialization", "_open_zipfile_writer", 0),  # of torch.save
    ("torch.serialization", "_open_file_like", 0),  # of torch.save in its old format
    ("safetensors.torch", "serialize_file", 1),
    ("torch.distributed.checkpoint.filesystem", "FileSystem.create_stream", 1),
)
"""Functions that write a file, or whose context does: module, name, and the place of the path among their arguments.

torch.save itself may have been imported by name before.
"""
_guarded: set[str] = set()


def guard_saves() -> None:
    """Have WRITERS write another file first, from now on, as far as their modules are imported."""
    _import_safetensors()
    for name, function, place in WRITERS:
        if name not in sys.modules or function in _guarded or is_off("save"):
            continue
        _guarded.add(function)
        owner = import_module(name)
        *path, last = function.split(".")
        for part in path:
            owner = getattr(owner, part)
        if hasattr(owner, last):  # private names come and go
            setattr(owner, last, _guard(getattr(owner, last), place))


@functools.cache
def _import_safetensors() -> None:
    """Import what is installed, and might be imported only between this call and a save."""
    with suppress(ImportError):
        import_module("safetensors.torch")


def _guard(write: Function, place: int) -> Function:
    @functools.wraps(write)
    def guarded(*args: object, **kwargs: object) -> object:
        mode = args[place + 1] if len(args) > place + 1 else kwargs.get("mode", "w")
        if len(args) <= place or (isinstance(mode, str) and "w" not in mode):
            return write(*args, **kwargs)

        def write_to(target: object) -> object:
            return write(*args[:place], target, *args[place + 1 :], **kwargs)

        is_context = write.__name__ != "serialize_file"
        return _in_context(write_to, args[place]) if is_context else _in_call(write_to, args[place])

    return guarded


def _in_call(write_to: Function, target: object) -> object:
    with _to_write(target) as now:
        return write_to(now)


@contextmanager
def _in_context(write_to: Function, target: object) -> Iterator[object]:
    with _to_write(target) as now, write_to(now) as writer:
        yield writer


@contextmanager
def _to_write(target: Any) -> Iterator[Any]:
    """Yield `target`, a path or a file object, or another path. Raises CheckpointError if what was written may be wrong."""
    changes = FileChanges()
    is_mapped = isinstance(target, str | os.PathLike) and _is_mapped(target)
    with _elsewhere(target) if is_mapped else nullcontext(target) as now, changes.refused(target):
        yield now


@contextmanager
def _elsewhere(target: Target) -> Iterator[Target]:
    """Yield a path in another directory, with the same name, which torch writes into the file; then rename the file."""
    with (
        replacing(target, overwrite=True, durable=False) as temporary,
        tempfile.TemporaryDirectory(dir=temporary.parent, prefix=".swapper-") as folder,
    ):
        written = Path(folder, Path(target).name)
        yield str(written) if isinstance(target, str) else written
        written.replace(temporary)


def _is_mapped(target: Target) -> bool:
    """Return whether this process has mapped any of an existing file: its name or its inode tells."""
    try:
        status, path = Path(target).stat(), os.path.realpath(target)
        maps = Path("/proc/self/maps").read_bytes()
    except OSError:
        return False
    if not stat.S_ISREG(status.st_mode):
        return False
    inode = f" {os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x} {status.st_ino} ".encode()
    return inode in maps or b" " + os.fsencode(path) + b"\n" in maps
