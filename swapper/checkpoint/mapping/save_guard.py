"""Keeps torch.save and the like from losing a file that this process has mapped: torch.save(model.state_dict(), the_same_file).

They truncate a file before they read the tensors, which may be mapped from it. Onto such a file they write another one, which
is renamed.
"""

from __future__ import annotations

import functools
import os
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from swapper.checkpoint.mapping.mapped_files import FileChanges
from swapper.checkpoint.replacing import replacing
from swapper.runtime.process import is_off

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
    def guarded(*args: Any, **kwargs: Any) -> Any:
        mode = args[place + 1] if len(args) > place + 1 else kwargs.get("mode", "w")
        if len(args) <= place or (isinstance(mode, str) and "w" not in mode):
            return write(*args, **kwargs)

        def write_to(target: Any) -> Any:
            return write(*args[:place], target, *args[place + 1 :], **kwargs)

        is_context = write.__name__ != "serialize_file"
        return _in_context(write_to, args[place]) if is_context else _in_call(write_to, args[place])

    return guarded


def _in_call(write_to: Function, target: Any) -> Any:
    with _to_write(target) as now:
        return write_to(now)


@contextmanager
def _in_context(write_to: Function, target: Any) -> Iterator[Any]:
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
