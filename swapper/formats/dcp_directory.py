"""Locates the tensors of a torch.distributed.checkpoint directory.

Its `.metadata` is a pickle that torch runs; here nothing of it is run (pickle_reader.py), and its content is checked
against the files. Each tensor is one or more chunks, each chunk an item: a torch.save of its own within a file.
"""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from swapper.errors import CheckpointError
from swapper.formats.sources import FileStamp, Source, is_plain_name, opened, read_whole
from swapper.formats.stored import Chunk, ChunkedTensor, ConcatenatedFile, Extent, StoredTensor, are_sizes
from swapper.formats.torch_zip.pickle_reader import TensorView, read_skeleton
from swapper.formats.torch_zip.torch_file import read_item
from swapper.formats.torch_zip.unpickling import Opaque

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
        described = _fields(tree)["state_dict_metadata"]
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
    if not isinstance(fields["fqn"], str):
        raise TypeError("a tensor's name is no text")
    return fields["fqn"], None if offset is None else _sizes(offset)


def _chunked(path: Path, name: object, entry: dict[str, Any], places: dict[Any, dict[str, object]]) -> ChunkedTensor:
    if not isinstance(name, str):
        raise TypeError("a tensor's name is no text")
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
