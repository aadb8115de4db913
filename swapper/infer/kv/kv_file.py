"""Writes and reads a saved context: the keys and values of a KVCache as a torch checkpoint, whose rows are read in place.

`torch.load(path)` returns {"kv_cache": {"format": 2, "model": ..., "position": ...}, "layers": {"0": {"keys": ..., "values": ...},
...}, "tokens": ...}. Keys and values have shape (batch, heads, tokens, width), as views of rows ([Note: rows], kv_rows.py). Their
stride from token to token is that of a row with its padding; files of format 1 have none.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from swapper.checkpoint.stream import Archive, Checksum, StreamWriter
from swapper.errors import CheckpointError
from swapper.formats.sources import FileStamp, opened
from swapper.formats.torch_file import TorchFile, read_open_file
from swapper.formats.torch_writer import StorageRef, leading_records, pickle_state
from swapper.infer.kv.kv_pages import KeyValuePages
from swapper.infer.kv.kv_rows import PADDING_BYTES, Rows, RowShape, SavedRows
from swapper.io.replacing import replacing
from swapper.io.tensor_bytes import SECTOR_BYTES
from swapper.paging.layout import ExternalBytes

FORMAT = 2
READ_FORMATS = (1, FORMAT)
COPIED_BYTES = 128 << 10
"""Bytes that are copied out of frames at once."""
_MAX_TOKENS = 1 << 40


@dataclass(frozen=True)
class SavedContext:
    """What a file has.

    Attributes:
        model: fingerprint of the model, see `KVCache.save`.
        position: how many tokens went through the model.
        tokens: int64, of shape (batch, position); None: they were not saved.
        layers: by number.
    """

    path: Path
    stamp: FileStamp
    model: str
    position: int
    tokens: torch.Tensor | None
    layers: Mapping[int, SavedRows]


def write(
    path: str | os.PathLike[str],
    owner: KeyValuePages,
    layers: Mapping[int, tuple[Rows, int]],
    *,
    model: str,
    position: int,
    tokens: torch.Tensor | None,
    overwrite: bool,
    durable: bool,
    moved: Callable[[int], None],
) -> None:
    """Write a context, whole or not at all.

    Args:
        path: of the file.
        owner: of the pages.
        layers: their rows, by number, and how many of the last ones are written.
        model, position, tokens: see `SavedContext`.
        overwrite: False refuses an existing file.
        durable: return when the file would survive a power loss.
        moved: called with the number of bytes, whenever some are written.

    Raises:
        CheckpointError: the path is not allowed.
        IoError: the drive failed, or is full. Nothing is left under the name.
    """
    places: dict[int, StorageRef] = {}
    state: dict[str, object] = {"kv_cache": {"format": FORMAT, "model": model, "position": position}}
    tensors: dict[str, dict[str, torch.Tensor]] = {}
    state["layers"] = tensors
    for key, (index, (rows, count)) in enumerate(layers.items()):
        keys, values = rows.shape.views(_on_meta(rows.shape, count), 0, count)
        tensors[str(index)] = {"keys": keys, "values": values}
        places[id(keys)], places[id(values)] = (
            StorageRef(str(key), int(part.storage_offset())) for part in (keys, values)
        )
    if tokens is not None:  # last, as torch.load may expect keys of storages in their order
        state["tokens"] = tokens.detach().to("cpu", torch.int64).contiguous().clone()
    sizes = {str(key): count * rows.shape.nbytes for key, (rows, count) in enumerate(layers.values())}
    pickled = pickle_state(state, sizes, lambda tensor: places.get(id(tensor)))
    with (
        replacing(path, overwrite=overwrite, durable=durable) as temporary,
        StreamWriter(temporary, sum(sizes.values()), moved=moved) as stream,
    ):
        archive = Archive(stream, SECTOR_BYTES)
        for name, content in leading_records(pickled.data, SECTOR_BYTES):
            archive.add(name, content)
        for key, (rows, count) in enumerate(layers.values()):
            archive.add_payload(f"data/{key}", sizes[str(key)], partial(_append, stream, owner, rows, count))
        for name, storage in pickled.resident.items():
            archive.add(f"data/{name}", bytes(storage))
        archive.finish()


def _append(stream: StreamWriter, owner: KeyValuePages, rows: Rows, count: int, checksum: Checksum) -> None:
    """Append the last `count` rows of a layer, leased piece by piece."""
    for memory in owner.pieces(rows, count):
        for begin in range(0, memory.numel(), COPIED_BYTES):
            piece = memory[begin : begin + COPIED_BYTES]
            stream.append_memory(piece.data_ptr(), piece.numel(), piece, checksum)


def read(path: str | os.PathLike[str]) -> SavedContext:
    """Read the header of a saved context, and check it.

    Raises:
        CheckpointError: it is none, or damaged.
        IoError: it cannot be read.
    """
    path = Path(path)
    with opened(path) as descriptor:
        file = read_open_file(descriptor, path)
        leaves = dict(file.skeleton.leaves())
        views = dict(file.skeleton.tensors())
        version, model, position = (leaves.get(f"kv_cache.{name}") for name in ("format", "model", "position"))
        if (
            version not in READ_FORMATS
            or not isinstance(model, str)
            or type(position) is not int
            or not 0 <= position < _MAX_TOKENS
        ):
            raise CheckpointError(f"{path} is not a saved context of a KVCache, or one of a later version of swapper")
        tokens = None
        if "tokens" in views:
            stored = file.stored("tokens", views["tokens"])
            if stored.dtype != torch.int64 or stored.stride is not None or len(stored.shape) != 2:
                raise CheckpointError(f"{path} has tokens of {stored.dtype} and shape {stored.shape}")
            data = bytearray(os.pread(descriptor, stored.nbytes, stored.offset))
            tokens = torch.frombuffer(data, dtype=torch.int64).view(stored.shape) if data else None
        layers = {}
        for name in views:
            parts = name.split(".")
            if len(parts) == 3 and parts[0] == "layers" and parts[2] == "keys" and parts[1].isdecimal():
                layers[int(parts[1])] = _saved_rows(file, f"layers.{parts[1]}")
        return SavedContext(path, FileStamp.of(descriptor), model, position, tokens, layers)


def _saved_rows(file: TorchFile, name: str) -> SavedRows:
    """Return the rows of a layer, if its keys and values are laid out as `RowShape.views` does."""
    views = dict(file.skeleton.tensors())
    keys, values = (views.get(f"{name}.{part}") for part in ("keys", "values"))
    if (
        keys is None
        or values is None
        or keys.storage != values.storage
        or len(keys.shape) != 4
        or len(values.shape) != 4
    ):
        raise CheckpointError(f"{file.path}: keys and values of {name} are not those of a saved context")
    shape = RowShape(keys.shape[0], (keys.shape[1], keys.shape[3]), (values.shape[1], values.shape[3]), keys.dtype)
    padding = (keys.stride[2] - shape.numel) * keys.dtype.itemsize
    shape = replace(shape, padding=padding if padding == PADDING_BYTES else 0)
    count, record = keys.shape[2], file.record(keys.storage)
    if count * shape.numel <= 0:
        raise CheckpointError(f"{file.path}: {name} has no tokens")
    for view, expected in zip((keys, values), shape.views(_on_meta(shape, count), 0, count), strict=True):
        has = (view.dtype, tuple(view.shape), tuple(view.stride), view.element_offset)
        if has != (expected.dtype, tuple(expected.shape), expected.stride(), expected.storage_offset()):
            raise CheckpointError(
                f"{file.path}: keys and values of {name} are laid out otherwise than in a saved context"
            )
    nbytes = count * shape.nbytes
    if record.compressed or record.nbytes != nbytes or record.offset % SECTOR_BYTES:
        raise CheckpointError(f"{file.path}: {record.name} was packed again: it cannot be read in place")
    return SavedRows(shape, count, ExternalBytes(file.path, record.offset, nbytes), record.crc32)


def _on_meta(shape: RowShape, count: int) -> torch.Tensor:
    """Return memory for `count` rows on the meta device."""
    return torch.empty(count * shape.nbytes, dtype=torch.uint8, device="meta")
