"""Reads for torch.distributed.checkpoint: `.metadata` as torch's own records; data straight into the targets of a plan.

A class that `.metadata` names is not run unless it belongs to such a file. All fields of its records are checked here.

[Note: encoded items] Where one process has a dictionary in place of a tensor of encoded optimizer state, the directory of a sharded
model's snapshot has items: `NAME.codec`, and a tensor for each part, `NAME.code` and `NAME.scale`, cut by rows as the parameter is.
An item is read by torch.load, which computes nothing, so torch's own reader has the parts. `StorageReader` has NAME too, in fp32.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from swapper import _C
from swapper.checkpoint.encoded_state import MARK
from swapper.codecs import CODECS, StateCodec
from swapper.errors import CheckpointError
from swapper.formats.dcp_format import MAX_METADATA_BYTES
from swapper.formats.pickle_reader import TensorView, read_skeleton
from swapper.formats.sources import is_plain_name, opened, read_whole
from swapper.formats.stored import StoredTensor, are_sizes
from swapper.formats.torch_file import load_bytes, read_item
from swapper.io.engines import drain, open_for, shared_engine
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

    _MODULES: ClassVar[dict[str, frozenset[str]]] = {
        "torch.distributed.checkpoint.metadata": frozenset(
            {"Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"}
            | {"TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING"}
        ),
        "torch.distributed.checkpoint.filesystem": frozenset({"_StorageInfo"}),
    }
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
        is_record = name in self._MODULES.get(module, ())
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


@dataclass
class _Read:
    """A tensor that is being read: into `memory`, of which `part` is then copied."""

    request: ReadItem
    target: torch.Tensor
    ticket: _C.Ticket
    memory: torch.Tensor | None = None  # None: straight into the target
    part: torch.Tensor | None = None  # of `memory`, for the target

    def finish(self, planner: LoadPlanner) -> None:
        self.ticket.wait()
        if self.part is not None:
            self.target.copy_(self.part)
        planner.commit_tensor(self.request, self.target)


class StorageReader(FileSystemReader):
    """Reads checkpoints of torch's FileSystemWriter or `StorageWriter`, and snapshots of sharded models: encoded state in fp32."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        self._encoded: dict[str, EncodedTensor] = {}
        self._metadata: Metadata

    def read_metadata(self, *args: Any, **named: Any) -> Metadata:
        """Read the metadata.

        Raises:
            CheckpointError: the metadata is damaged, or names a foreign class.
            IoError: it cannot be read.
        """
        path = Path(self._get_metadata_path(named.get("rank")))
        metadata = read_metadata(path)
        if metadata.storage_meta is not None:
            metadata.storage_meta.load_id = self.load_id
        self._encoded, self._metadata = find_encoded(metadata), metadata
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of a plan.

        Raises:
            CheckpointError: a file does not match the metadata.
            IoError: a file cannot be read.
        """
        self._read([item for item in plan.items if item.storage_index.fqn not in self._encoded], planner)
        for item in plan.items:
            if item.storage_index.fqn in self._encoded:
                read_encoded(item, self._encoded[item.storage_index.fqn], self._metadata, planner, self._read)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read(self, items: Sequence[ReadItem], planner: LoadPlanner) -> None:
        per_file: dict[str, list[ReadItem]] = {}
        for request in items:
            if request.storage_index not in self.storage_data:
                raise CheckpointError(f"{self.path}: the metadata does not say where {request.storage_index} is")
            per_file.setdefault(self.storage_data[request.storage_index].relative_path, []).append(request)
        for name, requests in per_file.items():
            requests.sort(key=lambda request: self.storage_data[request.storage_index].offset)
            with _OpenFile(Path(self.path) / name) as file:
                for request in requests:
                    file.read(request, self.storage_data[request.storage_index], planner)


class _OpenFile:
    """One file of a checkpoint, with reads in flight. A context: at its end all is read and delivered."""

    MAX_READS = 64

    def __init__(self, path: Path) -> None:
        self._path = path
        self._engine = shared_engine(path)
        self._stack = contextlib.ExitStack()
        self._descriptor = self._stack.enter_context(opened(path))
        self._file = open_for(path, read_only=True)
        self._reads: list[_Read] = []
        self._planner: LoadPlanner | None = None

    def __enter__(self) -> _OpenFile:
        return self

    def __exit__(self, kind: object, *exception: object) -> None:
        try:
            if kind is None:
                self._finish(0)
        finally:
            for one in self._reads:
                drain(one.ticket)
            self._file.close()
            self._stack.close()

    def read(self, request: ReadItem, info: Any, planner: LoadPlanner) -> None:
        self._planner = planner
        if getattr(info, "transform_descriptors", None):
            raise CheckpointError(
                f"{self._path}: an item was transformed ({info.transform_descriptors}) when it was saved: use torch's reader"
            )
        if info.offset + info.length > os.fstat(self._descriptor).st_size:
            raise CheckpointError(f"{self._path} ends before {request.storage_index.fqn}, at {info.offset}: it was cut")
        if request.type == LoadItemType.BYTE_IO:
            planner.load_bytes(request, io.BytesIO(self._bytes(info)))
            return
        target = planner.resolve_tensor(request).detach()
        stored = self._locate(info)
        if stored is None:
            target.copy_(self._narrowed(request, self._unpickled(request, info), request.storage_offsets))
            planner.commit_tensor(request, target)
        else:
            self._begin(request, target, stored)
            self._finish(self.MAX_READS)

    def _begin(self, request: ReadItem, target: torch.Tensor, stored: StoredTensor) -> None:
        lengths = tuple(request.lengths)
        if target.shape != torch.Size(lengths):
            raise CheckpointError(
                f"{self._path}: {request.dest_index.fqn} is {tuple(target.shape)}, to be read as {lengths}"
            )
        if stored.stride is not None:
            self._begin_part(request, target, stored, stored.offset, stored.nbytes, 0)
            return
        self._expect_within(request, stored.shape)
        row_bytes = stored.nbytes // stored.shape[0] if stored.shape and stored.shape[0] else stored.nbytes
        first, rows = (request.storage_offsets[0], lengths[0]) if lengths else (0, 1)
        offset, nbytes = stored.offset + first * row_bytes, rows * row_bytes
        whole_rows = lengths[1:] == stored.shape[1:]
        direct = target.device.type == "cpu" and target.is_contiguous() and target.dtype == stored.dtype
        if whole_rows and direct:
            ticket = self._engine.read(self._file, offset, target.data_ptr(), nbytes, keep=target)
            self._reads.append(_Read(request, target, ticket))
        else:
            self._begin_part(request, target, stored, offset, nbytes, first)

    def _begin_part(
        self, request: ReadItem, target: torch.Tensor, stored: StoredTensor, offset: int, nbytes: int, first: int
    ) -> None:
        """Read rows from `first` on into a buffer, and copy the target's part from it."""
        memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        rows = memory.view(stored.dtype)
        if stored.stride is not None:
            rows = rows.as_strided(stored.shape, stored.stride)
        else:
            rows = rows.view(-1, *stored.shape[1:]) if stored.shape else rows.view(())
        begins = list(request.storage_offsets)
        begins[:1] = [begin - first for begin in begins[:1]]
        rows = self._narrowed(request, rows, begins)
        ticket = self._engine.read(self._file, offset, memory.data_ptr(), nbytes, keep=memory)
        self._reads.append(_Read(request, target, ticket, memory, rows))

    def _finish(self, leave: int) -> None:
        """Deliver the oldest reads, until `leave` are in flight."""
        while len(self._reads) > leave and self._planner is not None:
            self._reads[0].finish(self._planner)
            del self._reads[0]

    def _locate(self, info: Any) -> StoredTensor | None:
        """Return the location of an item's payload; None if torch has to load it."""
        item = read_item(self._descriptor, self._path, info.offset, info.length)
        view = item.skeleton.tree
        is_native = item.byteorder in (None, sys.byteorder)
        return item.stored("", view) if isinstance(view, TensorView) and is_native else None

    def _unpickled(self, request: ReadItem, info: object) -> torch.Tensor:
        """Return an item as torch reads it."""
        whole = load_bytes(self._bytes(info), self._path)
        if not isinstance(whole, torch.Tensor):
            raise CheckpointError(f"{self._path}: {request.storage_index.fqn} is no tensor")
        return whole

    def _narrowed(self, request: ReadItem, tensor: torch.Tensor, begins: Sequence[int]) -> torch.Tensor:
        self._expect_within(request, tensor.shape, begins)
        for dim, (begin, length) in enumerate(zip(begins, request.lengths, strict=True)):
            tensor = tensor.narrow(dim, begin, length)
        return tensor

    def _expect_within(self, request: ReadItem, shape: Sequence[int], begins: Sequence[int] | None = None) -> None:
        begins = request.storage_offsets if begins is None else begins
        if not len(shape) == len(begins) == len(request.lengths) or any(
            begin < 0 or begin + length > size
            for begin, length, size in zip(begins, request.lengths, shape, strict=True)
        ):
            raise CheckpointError(
                f"{self._path}: {request.dest_index.fqn} is {tuple(shape)} there: {tuple(request.lengths)} from {tuple(begins)} on "
                "are beyond its end"
            )

    def _bytes(self, info: Any) -> bytes:
        memory = torch.empty(info.length, dtype=torch.uint8, device="cpu")
        self._engine.read(self._file, info.offset, memory.data_ptr(), info.length, keep=memory).wait()
        return memory.numpy().tobytes()


@dataclass(frozen=True)
class EncodedTensor:
    """A tensor that is stored in parts, `names`, in the order of the codec's layout."""

    codec: StateCodec
    names: tuple[str, ...]

    def decode(self, request: ReadItem, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return what `request` asks for, of parts with its rows."""
        rows = torch.empty(parts[0].shape, dtype=torch.float32, device="cpu")
        self.codec.decode([part.view(-1) for part in parts], rows.view(-1))
        for dim, (begin, length) in enumerate(zip(request.storage_offsets, request.lengths, strict=True)):
            rows = rows.narrow(dim, begin, length) if dim else rows
        return rows


def find_encoded(metadata: Metadata) -> dict[str, EncodedTensor]:
    """Return the encoded tensors by name, and add them to the metadata in fp32.

    A master, which is completed by its parameter, is left out.

    Raises:
        CheckpointError: the parts of one are of no known codec, or do not fit together.
    """
    entries, found = metadata.state_dict_metadata, {}
    for name in [mark.removesuffix(MARK) for mark in entries if mark.endswith(MARK)]:
        parts = {key.removeprefix(f"{name}."): entries[key] for key in entries if key.startswith(f"{name}.")}
        tensors = {suffix: part for suffix, part in parts.items() if isinstance(part, TensorStorageMetadata)}
        dtypes = {suffix: part.properties.dtype for suffix, part in tensors.items()}
        codec = next((c for c in CODECS.values() if {part.suffix: part.dtype for part in c.layout} == dtypes), None)
        if codec is None:
            raise CheckpointError(f"{name} is encoded, in parts that this swapper does not know: {sorted(tensors)}")
        of = [tensors[part.suffix] for part in codec.layout]
        rows = [[(*chunk.offsets[:1], *chunk.sizes[:1]) for chunk in part.chunks] for part in of]
        if not all(part.size for part in of) or any(each != rows[0] for each in rows) or name in entries:
            raise CheckpointError(f"the parts of {name}, which is encoded, do not fit together")
        if not codec.needs_parameter:
            found[name] = EncodedTensor(codec, tuple(f"{name}.{part.suffix}" for part in codec.layout))
            entries[name] = TensorStorageMetadata(TensorProperties(torch.float32), of[0].size, of[0].chunks)
    return found


class _Targets:
    """A planner for parts of encoded tensors."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def resolve_tensor(self, request: ReadItem) -> torch.Tensor:
        return self._tensors[request.dest_index.fqn]

    def commit_tensor(self, request: ReadItem, tensor: torch.Tensor) -> None: ...


def read_encoded(
    request: ReadItem,
    encoded: EncodedTensor,
    metadata: Metadata,
    planner: LoadPlanner,
    read: Callable[[list[ReadItem], Any], None],
) -> None:
    """Read the rows of one request, and decode them into the planner's target.

    Args:
        read: reads items for a planner.
    """
    first, rows = request.storage_offsets[0], request.lengths[0]
    targets, items = {}, []
    for name in encoded.names:
        part: Any = metadata.state_dict_metadata[name]
        columns = tuple(part.size[1:])
        begin = torch.Size([request.storage_index.offset[0], *[0] * len(columns)])  # type: ignore[index]
        targets[name] = torch.empty((rows, *columns), dtype=part.properties.dtype, device="cpu")
        zeros = [0] * len(columns)
        items.append(
            ReadItem(
                LoadItemType.TENSOR,
                MetadataIndex(name),
                torch.Size([0, *zeros]),
                MetadataIndex(name, begin),
                torch.Size([first, *zeros]),
                torch.Size([rows, *columns]),
            )
        )
    read(items, _Targets(targets))
    target = planner.resolve_tensor(request).detach()
    target.copy_(encoded.decode(request, list(targets.values())))
    planner.commit_tensor(request, target)
