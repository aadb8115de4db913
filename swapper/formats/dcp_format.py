"""The format of torch.distributed.checkpoint: locates a directory's tensors, and makes a tensor as torch.save writes it.

Of an item everything except the payload is made here, so that the payload can be transferred directly. Inside, offsets count from
the item's own beginning and torch's alignment of 64 bytes holds; `head_gap` aligns the payload in the file.

[Note: items of a container] A tensor that lies in a payload record of a container is an item without a copy of it: the
bytes from 0 to the end of a small zip directory of its own, which lists the payload record where it is and a data.pkl
of this tensor alone. These directories are a record of the container's tail. torch's own reader loads the whole payload
record for each item; `swapper.checkpoint.dcp.StorageReader` reads the tensor's bytes alone.

A directory's `.metadata` is a pickle that torch runs; here nothing of it is run (pickle_reader.py), and its content is checked
against the files. Each tensor is one or more chunks, each chunk an item: a torch.save of its own within a file.
"""

from __future__ import annotations

import ctypes
import io
import re
import sys
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from swapper.errors import CheckpointError
from swapper.formats.pickle_reader import TensorView, read_skeleton
from swapper.formats.sources import FileStamp, Source, is_plain_name, opened, read_whole
from swapper.formats.stored import Chunk, ChunkedTensor, ConcatenatedFile, Extent, StoredTensor, are_sizes
from swapper.formats.torch_file import read_item
from swapper.formats.torch_writer import (
    ROOT,
    Entry,
    RecordBytes,
    StorageRef,
    descriptor,
    leading_records,
    local_header,
    pickle_state,
)
from swapper.formats.unpickling import Opaque
from swapper.io.tensor_bytes import SECTOR_BYTES

_ALIGNMENT = 64  # bytes; torch's own


@dataclass(frozen=True)
class Item:
    """The item of one contiguous tensor of `nbytes` bytes: `head`, the payload, `tail(crc32)`."""

    head: bytes
    nbytes: int
    tail_nbytes: int
    _entries: tuple[Entry, ...]
    _cursor: int  # offset of the payload's local header

    @classmethod
    def of(cls, dtype: torch.dtype, shape: tuple[int, ...]) -> Item:
        stand_in = torch.empty(shape, dtype=dtype, device="meta")
        nbytes = stand_in.numel() * dtype.itemsize
        pickled = pickle_state(stand_in, {"0": nbytes}, lambda tensor: StorageRef("0", 0)).data
        head = RecordBytes(_ALIGNMENT)
        for name, content in leading_records(pickled, _ALIGNMENT):
            head.add(name, content)
        cursor = len(head.data)
        head.data += local_header(cursor, f"{ROOT}/data/0", nbytes, _ALIGNMENT)
        item = cls(bytes(head.data), nbytes, 0, tuple(head.entries), cursor)
        return replace(item, tail_nbytes=len(item.tail(0)))

    def tail(self, crc32: int) -> bytes:
        """Return the bytes after a payload with this CRC-32. Their length is always the same."""
        payload = Entry(f"{ROOT}/data/0", self._cursor, self.nbytes, crc32)
        tail = RecordBytes(_ALIGNMENT, len(self.head) + self.nbytes, [*self._entries, payload])
        tail.data += descriptor(self._cursor, self.nbytes, crc32)
        tail.add_trailing()
        return tail.finish(1)

    def head_gap(self, position: int) -> int:
        """Return the bytes to skip at `position` of the file so that the payload lies at a multiple of 4096."""
        return -(position + len(self.head)) % SECTOR_BYTES

    @property
    def total_nbytes(self) -> int:
        return len(self.head) + self.nbytes + self.tail_nbytes


@lru_cache(maxsize=4096)
def item_of(dtype: torch.dtype, shape: tuple[int, ...]) -> Item:
    return Item.of(dtype, shape)


class ContainerItems:
    """The items of a container, as a record of its tail. See [Note: items of a container].

    Attributes:
        places: (offset, nbytes) in the file of each item, by the index that `add` was given. Filled by `build`.
    """

    def __init__(self) -> None:
        self._contents: dict[object, bytes | tuple[str, bytes]] = {}
        self.places: dict[object, tuple[int, int]] = {}

    def add(self, index: object, value: Any, place: StorageRef | None, record_nbytes: int) -> None:
        """Add an item.

        Args:
            value: a plain tensor, or bytes that torch.load reads.
            place: of the tensor in a payload record of `record_nbytes` bytes; None copies it.
        """
        if isinstance(value, bytes):
            self._contents[index] = value
        elif place is None:
            self._contents[index] = _saved(value)
        else:
            grad = value.requires_grad
            pickled = _pickled(place, record_nbytes, value.dtype, tuple(value.shape), value.stride(), grad)
            self._contents[index] = (place.key, pickled)

    def build(self, begin: int, payloads: Mapping[str, Entry]) -> bytes:
        """Return the record's content, which begins at offset `begin` of the file.

        Args:
            payloads: directory entries of the payload records, by key.
        """
        data = bytearray()
        for index, content in self._contents.items():
            at = begin + len(data)
            if isinstance(content, bytes):
                data += content
                self.places[index] = at, len(content)
                continue
            key, pickled = content
            item = RecordBytes(_ALIGNMENT, at, [payloads[key]])
            for name, record in (("data.pkl", pickled), ("byteorder", sys.byteorder.encode()), ("version", b"3\n")):
                item.add(name, record)
            data += item.finish(1)
            self.places[index] = 0, begin + len(data)
        return bytes(data)


@lru_cache(maxsize=8192)
def _pickled(
    place: StorageRef,
    record_nbytes: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    grad: bool,
) -> bytes:
    """Return the pickle of a plain tensor at `place`. Each snapshot of a run has the same."""
    tensor = torch.empty_strided(shape, stride, dtype=dtype, device="meta", requires_grad=grad)
    return pickle_state(tensor, {place.key: record_nbytes}, lambda _: place).data


def _saved(value: object) -> bytes:
    """Return the item of a tensor, made of a copy."""
    if type(value) is not torch.Tensor or value.layout is not torch.strided or value.is_quantized:
        file = io.BytesIO()
        torch.save(value, file)
        return file.getvalue()
    flat = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
    item = item_of(value.dtype, tuple(value.shape))
    payload = ctypes.string_at(flat.data_ptr(), item.nbytes) if item.nbytes else b""
    return item.head + payload + item.tail(zlib.crc32(payload))


METADATA_NAME = ".metadata"
METADATA_VERSION = "1.0.0"  # which torch.distributed.checkpoint writes into it
_SEAL = re.compile(rb"swapper-seal crc32 ([0-9a-f]{8})\n\Z")
MAX_METADATA_BYTES = 1 << 30  # of a sane file; it is read whole


@dataclass(frozen=True)
class DcpDirectory:
    """The content of a directory."""

    path: Path
    tensors: dict[str, ChunkedTensor]
    others: tuple[str, ...]  # names of entries that are not tensors
    within: dict[str, str]  # of an entry of a nested state, the outermost key, as torch's planner says
    stamps: dict[Path, FileStamp]


def seal_metadata(pickled: bytes) -> bytes:
    """Return the content of a `.metadata` with a checksum. It is behind the pickle, where no reader looks."""
    return pickled + b"swapper-seal crc32 %08x\n" % zlib.crc32(pickled)


def metadata_is_whole(data: bytes) -> bool | None:
    """Return whether the content of a `.metadata` is as `seal_metadata` made it; None if it has no checksum."""
    found = _SEAL.search(data)
    return None if found is None else zlib.crc32(data[: found.start()]) == int(found[1], 16)


def read(path: Path) -> Source:
    """Return the tensors' locations. Chunks along the first dimension are joined under the directory's own path.

    Raises:
        CheckpointError: it is damaged.
        IoError: it cannot be read.
    """
    directory = read_directory(path)
    tensors: dict[str, StoredTensor] = {}
    grids: dict[str, ChunkedTensor] = {}
    joined = ConcatenatedFile()
    for name, tensor in directory.tensors.items():
        if len(tensor.chunks) == 1:
            tensors[name] = tensor.chunks[0].stored
        elif tensor.in_rows():
            parts = [chunk.stored for chunk in tensor.chunks]
            offset = joined.add([Extent(part.path, part.offset, part.nbytes) for part in parts])
            nbytes = sum(part.nbytes for part in parts)
            tensors[name] = StoredTensor(name, path, offset, nbytes, tensor.dtype, tensor.shape)
        else:
            grids[name] = tensor
    return Source(path, "dcp", tensors, directory.stamps, {}, {path: joined} if joined.nbytes else {}, grids)


def read_directory(path: Path) -> DcpDirectory:
    """Return all chunks of all tensors in the directory `path`.

    Raises:
        CheckpointError: the metadata is damaged, or a chunk is not at its stated location.
        IoError: something cannot be read.
    """
    data = read_whole(path / METADATA_NAME, MAX_METADATA_BYTES)
    tree = read_skeleton(data, str(path / METADATA_NAME)).tree
    try:
        described = {_name(name): entry for name, entry in _fields(tree)["state_dict_metadata"].items()}
        places = {_index(index): _fields(info) for index, info in _fields(tree)["storage_data"].items()}
        tensors = {name: entry for name, entry in described.items() if "chunks" in _fields(entry)}
        found = {name: _chunked(path, name, _fields(entry), places) for name, entry in tensors.items()}
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(
            f"{path / METADATA_NAME} is not one of torch.distributed.checkpoint ({type(error).__name__}: {error})"
        ) from error
    files = sorted({chunk.stored.path for tensor in found.values() for chunk in tensor.chunks})
    stamps = {file: FileStamp.of(file) for file in files}
    others = tuple(name for name in described if name not in tensors)
    return DcpDirectory(path, found, others, _within(_fields(tree).get("planner_data")), stamps)


def _within(said: object) -> dict[str, str]:
    """Return the outermost keys of nested entries: torch's planner has their paths. Of another's remarks nothing is known."""
    paths = said.items() if isinstance(said, dict) else ()
    nested = [(name, path[0]) for name, path in paths if isinstance(path, tuple) and len(path) > 1]
    return {name: key for name, key in nested if isinstance(name, str) and isinstance(key, str)}


def _fields(obj: object) -> dict[str, Any]:
    """Return the attributes of an instance in the pickle."""
    state = obj.state if isinstance(obj, Opaque) else None
    if state is None and isinstance(obj, Opaque):
        return {}
    if not isinstance(state, dict):
        raise TypeError(f"{str(type(obj).__name__)[:60]} has no attributes")
    return state


def _index(index: object) -> tuple[str, tuple[int, ...] | None]:
    fields = _fields(index)
    offset = fields.get("offset")
    return _name(fields["fqn"]), None if offset is None else _sizes(offset)


def _name(said: object) -> str:
    if not isinstance(said, str):
        raise TypeError("the name of an entry is no text")
    return said


def _chunked(path: Path, name: str, entry: dict[str, Any], places: dict[Any, dict[str, object]]) -> ChunkedTensor:
    dtype, shape = entry["properties"].state[0], _sizes(entry["size"])
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"tensor {name!r} has no dtype")
    chunks = []
    for described in entry["chunks"]:
        fields = _fields(described)
        offsets, sizes = _sizes(fields["offsets"]), _sizes(fields["sizes"])
        if 0 in sizes and 0 not in shape:
            continue  # a rank that got none of it: its offsets may be another chunk's
        place = places.get((name, offsets)) or places[name, None]
        stored = _locate(path, name, dtype, sizes, place)
        chunks.append(Chunk(offsets, stored))
    chunks.sort(key=lambda chunk: chunk.offsets)
    if not chunks:
        raise ValueError(f"{name} has no chunks")
    tensor = ChunkedTensor(name, path, dtype, shape, tuple(chunks[:1] if 0 in shape else chunks))
    tensor.check()
    return tensor


def _locate(
    path: Path, name: str, dtype: torch.dtype, sizes: tuple[int, ...], place: dict[str, object]
) -> StoredTensor:
    relative, offset, length = place["relative_path"], place["offset"], place["length"]
    if not isinstance(relative, str) or not is_plain_name(relative):
        raise ValueError("a chunk's file is not in the directory")
    if place.get("transform_descriptors"):
        raise ValueError(f"{name} was transformed when it was saved")
    if type(offset) is not int or type(length) is not int or offset < 0 or length < 0:
        raise ValueError(f"{name} has no size or offset")
    with opened(path / relative) as descriptor:
        item = read_item(descriptor, path / relative, offset, length)
    view = item.skeleton.tree
    if not isinstance(view, TensorView) or (view.dtype, view.shape) != (dtype, sizes):
        raise CheckpointError(f"{path / relative}: at {offset} there is not {name}, a tensor of {dtype} {sizes}")
    return replace(item.stored(name, view), path=path / relative)


def _sizes(values: object) -> tuple[int, ...]:
    if not are_sizes(values):
        raise ValueError("sizes or offsets of a tensor are impossible")
    return tuple(values)
