"""Implements save: torch.save through the engine, whole or not at all.

The file is torch's own: the same data.pkl, byte for byte, the same records in the same order, at offsets that torch
calculates. All offsets are known before a byte is written; payloads are written from where they lie, many transfers at
a time, while their checksums are computed; and the file gets its name when it is complete and on the drive.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch.utils.serialization import config

from swapper.checkpoint.mapped_files import FileChanges
from swapper.checkpoint.stream import Archive, Checksum, StreamWriter
from swapper.errors import CheckpointError, ConfigError
from swapper.formats.torch_writer import (
    LEGACY_STORAGES,
    QUANTIZED_STORAGES,
    ROOT,
    descriptor_nbytes,
    leading_records,
    payload_offset,
)
from swapper.io.replacing import replacing
from swapper.io.tensor_bytes import SECTOR_BYTES

SMALL_MEAN_BYTES = 32 << 10
"""Bytes. With a smaller mean storage torch's own alignment is kept: gaps would exceed 6 % of the file."""
MAX_ALIGNMENT = 1 << 16  # bytes; a choice


def save(
    obj: object, path: str | os.PathLike[str], *, overwrite: bool = True, pickle_protocol: int = 2, durable: bool = True
) -> None:
    """Save `obj` as torch.save does: `torch.load(path)` returns it, with its views and shared storages.

    An existing file is replaced at the end, in one step, as torch.save would overwrite it: until then the old one is
    there. `torch.utils.serialization.config.save` is honored: `compute_crc32`, `storage_alignment` (if more than 4096),
    `use_pinned_memory_for_d2h`. It takes 16 MiB of memory in addition to the tensors on the CPU; do not change them meanwhile.

    Args:
        obj: anything that can be pickled.
        path: a file name. Missing directories above it are made.
        overwrite: False refuses an existing file. A write-protected one, such as a snapshot, is always refused.
        pickle_protocol: torch.load's default, `weights_only=True`, reads 2.
        durable: return when the file would survive a power loss.

    Raises:
        CheckpointError: the path is not allowed, two tensors see the same memory as different types, or a file from which
            tensors are mapped was changed meanwhile.
        IoError: the drive failed, or is full. Nothing is left under the name.
        DeviceError: the device of a tensor failed. Nothing is left under the name.
        Any error of pickling your objects.
    """
    alignment = config.save.storage_alignment
    if not isinstance(alignment, int) or not 0 < alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise ConfigError(f"config.save.storage_alignment={alignment!r} must be a power of two up to {MAX_ALIGNMENT}")
    changes, file = FileChanges(), io.BytesIO()
    pickler = _Pickler(file, pickle_protocol)
    pickler.dump(obj)
    storages = list(pickler.storages.values())
    sizes = [storage.nbytes() for storage in storages]
    if len(sizes) == 0 or sum(sizes) >= SMALL_MEAN_BYTES * len(sizes):
        alignment = max(alignment, SECTOR_BYTES)
    with replacing(path, overwrite=overwrite, durable=durable) as temporary, changes.refused(path):
        _write(temporary, file.getvalue(), storages, sizes, alignment)


class _Pickler(pickle.Pickler):
    """Pickles as torch.save does: storages are named, everything else is pickled normally."""

    def __init__(self, file: io.BytesIO, protocol: int) -> None:
        super().__init__(file, protocol)
        self.storages: dict[int, torch.UntypedStorage] = {}  # by id, which is unique while they are in here
        self._keys: dict[int, str] = {}
        self._dtypes: dict[int, torch.dtype] = {}  # by address

    def persistent_id(self, obj: object) -> tuple[str, type, str, str, int] | None:
        if isinstance(obj, torch.storage.TypedStorage):
            storage, dtype = obj._untyped_storage, obj.dtype
            kind = LEGACY_STORAGES.get(dtype) or QUANTIZED_STORAGES[dtype]
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


def _write(
    path: Path, pickled: bytes, storages: Sequence[torch.UntypedStorage], sizes: Sequence[int], alignment: int
) -> None:
    checksums, on_device = bool(config.save.compute_crc32), any(storage.device.type == "cuda" for storage in storages)
    pinned = on_device and bool(config.save.use_pinned_memory_for_d2h)
    with StreamWriter(path, _nbytes(pickled, sizes, alignment), checksums=checksums, pinned=pinned) as stream:
        archive = Archive(stream, alignment)
        for name, content in leading_records(pickled, alignment):
            archive.add(name, content)
        for key, (storage, nbytes) in enumerate(zip(storages, sizes, strict=True)):
            archive.add_payload(f"data/{key}", nbytes, partial(_append, stream, storage, nbytes))
        archive.finish()


def _nbytes(pickled: bytes, sizes: Sequence[int], alignment: int) -> int:
    """Return the bytes from the beginning of the file to the end of the last payload."""
    records = [(name, len(content)) for name, content in leading_records(pickled, alignment)]
    records += [(f"data/{key}", nbytes) for key, nbytes in enumerate(sizes)]
    cursor = 0
    for name, nbytes in records:
        begin = payload_offset(cursor, f"{ROOT}/{name}", nbytes, alignment)
        cursor = begin + nbytes + descriptor_nbytes(cursor, nbytes)
    return cursor


def _append(stream: StreamWriter, storage: torch.UntypedStorage, nbytes: int, checksum: Checksum) -> None:
    if storage.nbytes() != nbytes:
        raise CheckpointError("a tensor's storage was resized while it was saved: save it when nothing runs")
    if storage.device.type == "cpu":
        stream.append_memory(storage.data_ptr(), nbytes, storage, checksum)
    else:
        stream.append_device(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage), checksum)
