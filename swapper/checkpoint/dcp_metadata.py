"""Reads the `.metadata` of a torch.distributed.checkpoint directory as torch's own records, for torch's planner.

A class that it names is not run unless it belongs to such a file. All fields of its records are checked here.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from swapper.errors import CheckpointError
from swapper.formats.dcp_format import MAX_METADATA_BYTES
from swapper.formats.pickle_reader import read_skeleton
from swapper.formats.sources import is_plain_name, read_whole
from swapper.formats.stored import are_sizes
from swapper.tensors.torch_private import storage_info

T = TypeVar("T")


def read_metadata(path: Path) -> Metadata:
    """Return the content of the file `path`.

    Raises:
        CheckpointError: it is damaged, or names a foreign class.
        IoError: it cannot be read.
    """
    data = read_whole(path, MAX_METADATA_BYTES)
    read_skeleton(data, str(path))  # refuses endless time or memory
    try:
        metadata: Metadata = _MetadataReader(io.BytesIO(data)).load()
        _check(metadata)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    except Exception as error:  # a damaged pickle can make it raise anything
        raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {error}") from error
    return metadata


class _MetadataReader(pickle._Unpickler):
    """Reads a `.metadata`, with the classes of such a file only.

    In Python: the unpickler in C allocates memory for as many memo entries as a pickle claims.
    """

    _MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
    _OTHERS = frozenset(
        {
            *(("torch", "Size"), ("torch.serialization", "_get_layout"), ("collections", "OrderedDict")),
            *(("builtins", name) for name in ("set", "frozenset", "slice", "complex", "bytearray")),
            *((module, kind) for module in ("pathlib", "pathlib._local") for kind in ("PosixPath", "PurePosixPath")),
        }
    )

    def find_class(self, module: str, name: str) -> object:
        is_other = (module, name) in self._OTHERS
        found = super().find_class(module, name) if module in (*self._MODULES, "torch") or is_other else None
        is_record = module in self._MODULES and isinstance(found, type) and found.__module__ == module
        if is_record or isinstance(found, torch.dtype) or is_other:
            return found
        raise CheckpointError(
            f"it names {module}.{name}, which does not belong in a checkpoint's metadata: it is hostile, or of a planner of your "
            "own; if you trust it, load it with torch's FileSystemReader"
        )

    def load_build(self) -> None:
        """Give an object its attributes. A class would keep what a file gave it, for the whole process."""
        if isinstance(self.stack[-2], type):  # type: ignore[attr-defined]
            raise CheckpointError("it gives a class attributes: it is hostile")
        super().load_build()  # type: ignore[misc]

    dispatch: ClassVar[dict[int, Any]] = {**pickle._Unpickler.dispatch, pickle.BUILD[0]: load_build}


def _check(metadata: object) -> None:
    """Check that all records are there, and that their fields are of torch's types.

    Raises:
        CheckpointError: one is not.
    """
    fields = _fields(metadata, Metadata, "the content")
    for name, entry in _typed(fields, "state_dict_metadata", dict, "the metadata").items():
        if type(entry) is not BytesStorageMetadata:
            _check_tensor(name, entry)
        _expect(isinstance(name, str), "the name of an entry is no text")
    for index, place in _typed(fields, "storage_data", dict, "the metadata").items():
        _check_place(index, place)
    stored = fields.get("storage_meta")
    _expect(stored is None or type(stored) is StorageMeta, "storage_meta is of another kind")


def _check_tensor(name: object, entry: object) -> None:
    tensor = _fields(entry, TensorStorageMetadata, name)
    _typed(_fields(tensor.get("properties"), TensorProperties, name), "dtype", torch.dtype, name)
    size = _typed(tensor, "size", torch.Size, name)
    for chunk in _typed(tensor, "chunks", list, name):
        part = _fields(chunk, ChunkStorageMetadata, name)
        for sizes in (size, _typed(part, "offsets", torch.Size, name), _typed(part, "sizes", torch.Size, name)):
            _expect(are_sizes(sizes) and len(sizes) == len(size), f"{name} has impossible sizes")


def _check_place(index: object, place: object) -> None:
    key = _fields(index, MetadataIndex, "an index")
    name, offset = _typed(key, "fqn", str, "an index"), key.get("offset")
    is_place = offset is None or (isinstance(offset, torch.Size) and are_sizes(offset))
    _expect(is_place, f"{name} has an impossible offset")
    info = _fields(place, storage_info(), name)
    path, begin = _typed(info, "relative_path", str, name), _typed(info, "offset", int, name)
    _expect(is_plain_name(path), f"{name} is in a file that is not in its directory")
    _expect(min(begin, _typed(info, "length", int, name)) >= 0, f"{name} has an impossible place")


def _fields(record: object, kind: type, what: object) -> dict[str, object]:
    _expect(type(record) is kind, f"{what} is described by no {kind.__name__}")
    return vars(record)


def _typed(fields: dict[str, object], field: str, kind: type[T], what: object) -> T:
    value = fields.get(field)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise CheckpointError(f"it is damaged: {what} has no {field}")
    return value


def _expect(whole: bool, problem: str) -> None:
    if not whole:
        raise CheckpointError(f"it is damaged: {problem}")
