"""Implements save: torch.save through the engine, whole or not at all.

The file is torch's own: the same data.pkl, byte for byte, the same records in the same order, at offsets that torch
calculates. All offsets are known before a byte is written; payloads are written from where they lie, many transfers at
a time, while their checksums are computed; and the file gets its name when it is complete and on the drive.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch.utils.serialization import config

from swapper.checkpoint.replacing import replacing
from swapper.checkpoint.stream import StreamWriter
from swapper.errors import CheckpointError, ConfigError
from swapper.formats.torch_zip.pickle_writer import LEGACY_STORAGES
from swapper.formats.torch_zip.zip_writer import (
    ROOT,
    Entry,
    descriptor,
    descriptor_nbytes,
    directory,
    leading_records,
    local_header,
    payload_offset,
    serialization_id,
)
from swapper.io.engines import open_for, reserve, shared_engine

ALIGNED = 4096
"""Bytes; alignment of payloads for direct transfers, unless that would waste much of the file."""
SMALL_MEAN_BYTES = 32 << 10
"""Bytes. With a smaller mean storage torch's own alignment is kept: gaps would exceed 6 % of the file.
"""
MAX_ALIGNMENT = 1 << 16  # bytes; a choice


def save(
    obj: object, path: str | os.PathLike[str], *, overwrite: bool = True, pickle_protocol: int = 2, durable: bool = True
) -> None:
    """Save `obj` as torch.save does: `torch.load(path)` returns it, with its views and shared storages.

    An existing file is replaced at the end, in one step, as torch.save would overwrite it: until then the old one is
    there. `torch.utils.serialization.config.save` is honored: `compute_crc32`, `storage_alignment` (if more than 4096),
    `use_pinned_memory_for_d2h`. In addition to the tensors on the CPU this takes 16 MiB of memory; do not change them
    meanwhile.

    Args:
        obj: anything that can be pickled.
        path: a file name. Its directory must exist.
        overwrite: False refuses an existing file. A write-protected one, such as a snapshot, is always refused.
        pickle_protocol: torch.load's default, `weights_only=True`, reads 2.
        durable: return when the file would survive a power loss.

    Raises:
        CheckpointError: the path is not allowed, or two tensors see the same memory as different types.
        IoError: the drive failed, or is full. Nothing is left under the name.
        DeviceError: the device of a tensor failed. Nothing is left under the name.
        Any error of pickling your objects.
    """
    alignment = config.save.storage_alignment
    if not isinstance(alignment, int) or not 0 < alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise ConfigError(f"config.save.storage_alignment={alignment!r} must be a power of two up to {MAX_ALIGNMENT}")
    pickled = _pickle(obj, pickle_protocol)
    sizes = tuple(storage.nbytes() for storage in pickled.storages)
    if len(sizes) == 0 or sum(sizes) >= SMALL_MEAN_BYTES * len(sizes):
        alignment = max(alignment, ALIGNED)
    plan = _plan(len(pickled.data), sizes, alignment)
    with replacing(path, overwrite=overwrite, durable=durable) as temporary:
        _write(temporary, pickled, plan, alignment)


@dataclass(frozen=True)
class _Pickled:
    data: bytes
    storages: Sequence[torch.UntypedStorage]  # by key


@dataclass(frozen=True, slots=True)
class _Place:
    """One record of the file."""

    name: str
    header_offset: int
    nbytes: int


def _pickle(obj: object, protocol: int) -> _Pickled:
    file = io.BytesIO()
    pickler = _Pickler(file, protocol)
    pickler.dump(obj)
    return _Pickled(file.getvalue(), tuple(pickler.storages.values()))


class _Pickler(pickle.Pickler):
    """Pickles as torch.save does: storages are named, everything else is pickled normally."""

    def __init__(self, file: io.BytesIO, protocol: int) -> None:
        super().__init__(file, protocol)
        self.storages: dict[int, torch.UntypedStorage] = {}  # by id, which is unique while they are in here
        self._keys: dict[int, str] = {}
        self._dtypes: dict[int, torch.dtype] = {}  # by address

    def persistent_id(self, obj: Any) -> tuple[str, type, str, str, int] | None:
        if isinstance(obj, torch.storage.TypedStorage):
            storage, dtype = obj._untyped_storage, obj.dtype
            kind = LEGACY_STORAGES.get(dtype) or _QUANTIZED_STORAGES[dtype]
        elif isinstance(obj, torch.UntypedStorage):
            storage, dtype, kind = obj, torch.uint8, torch.UntypedStorage
        else:
            return None
        if storage.device.type == "meta":
            raise CheckpointError("a tensor on the meta device, or a fake one, has no data to save")
        if storage.data_ptr() and self._dtypes.setdefault(storage.data_ptr(), dtype) is not dtype:
            raise CheckpointError(
                f"two tensors see the same memory as {dtype} and as {self._dtypes[storage.data_ptr()]}, which torch's format "
                "cannot express: save a clone of one"
            )
        self.storages.setdefault(id(storage), storage)
        key = self._keys.setdefault(id(storage), str(len(self._keys)))
        return "storage", kind, key, torch.serialization.location_tag(storage), storage.nbytes() // dtype.itemsize


_QUANTIZED_STORAGES: Mapping[torch.dtype, type] = {
    torch.qint8: torch.QInt8Storage,
    torch.quint8: torch.QUInt8Storage,
    torch.qint32: torch.QInt32Storage,
    torch.quint4x2: torch.QUInt4x2Storage,
    torch.quint2x4: torch.QUInt2x4Storage,
}


@dataclass(frozen=True)
class _Plan:
    """The location of everything: a function of the sizes alone."""

    payloads: tuple[_Place, ...]
    nbytes: int  # bytes from the beginning of the file to the end of the last payload


@lru_cache(maxsize=8)
def _plan(pickle_nbytes: int, sizes: tuple[int, ...], alignment: int) -> _Plan:
    """Plan a file. Cached, since a training run saves the same state dict again and again."""
    cursor = 0
    for name, content in leading_records(pickle_nbytes, alignment):
        cursor = _end(cursor, f"{ROOT}/{name}", len(content) if isinstance(content, bytes) else content, alignment)
    payloads = []
    for key, nbytes in enumerate(sizes):
        place = _Place(f"{ROOT}/data/{key}", cursor, nbytes)
        payloads.append(place)
        cursor = _end(cursor, place.name, nbytes, alignment)
    return _Plan(tuple(payloads), cursor)


def _end(cursor: int, name: str, nbytes: int, alignment: int) -> int:
    return payload_offset(cursor, name, nbytes, alignment) + nbytes + descriptor_nbytes(cursor, nbytes)


def _write(path: Path, pickled: _Pickled, plan: _Plan, alignment: int) -> None:
    file = open_for(path, read_only=False)
    checksums = bool(config.save.compute_crc32)
    try:
        reserve(file, plan.nbytes)
        writer = StreamWriter(shared_engine(path), file, checksums=checksums, pinned=_is_pinned(pickled.storages))
        try:
            archive = _Archive(writer, alignment)
            for name, content in leading_records(pickled.data, alignment):
                archive.add(name, content)
            for place, storage in zip(plan.payloads, pickled.storages, strict=True):
                archive.add_storage(place, storage)
            archive.finish()
        finally:
            writer.close()
        file.truncate(writer.position)
    finally:
        file.close()


def _is_pinned(storages: Sequence[torch.UntypedStorage]) -> bool:
    devices = {storage.device.type for storage in storages}
    return bool(config.save.use_pinned_memory_for_d2h) and "cuda" in devices


class _Archive:
    """The zip under construction: appends records to a stream and keeps the directory."""

    def __init__(self, writer: StreamWriter, alignment: int) -> None:
        self._writer = writer
        self._alignment = alignment
        self._entries: list[Entry] = []

    def add(self, name: str, content: bytes) -> None:
        cursor = self._begin(f"{ROOT}/{name}", len(content))
        self._end(f"{ROOT}/{name}", cursor, len(content), self._writer.append(content))

    def add_storage(self, place: _Place, storage: torch.UntypedStorage) -> None:
        cursor = self._begin(place.name, place.nbytes)
        if cursor != place.header_offset or storage.nbytes() != place.nbytes:
            raise CheckpointError(
                f"the storage of {place.name} was resized while it was saved: save it when nothing runs"
            )
        if storage.device.type == "cpu":
            checksum = self._writer.append_memory(storage.data_ptr(), place.nbytes, storage) if place.nbytes else 0
        else:
            checksum = self._writer.append_device(
                torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            )
        self._end(place.name, cursor, place.nbytes, checksum)

    def finish(self) -> None:
        self.add("version", b"3\n")
        self.add(".data/serialization_id", serialization_id(self._entries))
        self._writer.append(directory(self._entries, self._writer.position, self._alignment))
        self._writer.finish()

    def _begin(self, name: str, nbytes: int) -> int:
        cursor = self._writer.position
        self._writer.append(local_header(cursor, name, nbytes, self._alignment))
        return cursor

    def _end(self, name: str, cursor: int, nbytes: int, checksum: int) -> None:
        self._entries.append(Entry(name, cursor, nbytes, checksum))
        self._writer.append(descriptor(cursor, nbytes, checksum))
