"""Locates the tensors of a torch checkpoint: of torch.save, of `save`, or a snapshot; loads a small untrusted one whole.

Reads the zip's directory and data.pkl, and no payload. Trusts neither: the zip's numbers are checked against the file
(zip_reader.py), nothing that the pickle names is run (pickle_reader.py), and tensors are checked against their records.

torch unpickles it in the end, which alone is not bounded: a few bytes name a nest without end, or memory by a number. So the
pickle is read by pickle_reader.py before, and torch gets the records that this has located, and no others.
"""

from __future__ import annotations

import io
import os
import sys
import zipfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from swapper.errors import CheckpointError
from swapper.formats.pickle_reader import Skeleton, StorageId, TensorView, is_other_tensor, read_skeleton
from swapper.formats.sources import FileStamp, Source, opened
from swapper.formats.stored import StoredTensor
from swapper.formats.torch_writer import ROOT
from swapper.formats.zip_reader import ZipIndex, ZipRecord, read_index

_MAX_PICKLE_BYTES = 1 << 30  # of a sane file; it is read whole
_MAX_SETTING_BYTES = 100
"""Bytes of a record that is a word or a number."""


@dataclass(frozen=True)
class TorchFile:
    """A torch checkpoint's directory and skeleton.

    Attributes:
        root: the folder in the zip that holds them.
        skeleton: the content of its data.pkl.
        byteorder: "little" or "big"; None if not stated (files of torch before 2.1).
        alignment: stated alignment of its payloads, in bytes. None if not stated.
    """

    zip: ZipIndex
    root: str
    skeleton: Skeleton
    pickle: bytes
    byteorder: str | None
    alignment: int | None
    stamp: FileStamp

    @property
    def path(self) -> Path:
        return self.zip.path

    def record(self, storage: StorageId) -> ZipRecord:
        """Return the record of a storage.

        Raises:
            CheckpointError: it is missing, or does not have the storage's size.
        """
        name = f"{self.root}/data/{storage.key}"
        record = self.zip.records.get(name)
        if record is None:
            raise CheckpointError(f"{self.path} has no record {name!r}, which data.pkl names: take another copy of it")
        nbytes = record.unpacked_nbytes
        if nbytes < storage.nbytes or (record.compressed and nbytes > storage.nbytes):
            raise CheckpointError(
                f"{self.path}: record {name!r} has {nbytes} bytes, and its data.pkl says {storage.nbytes}: take another "
                "copy of it"
            )
        return record

    def stored(self, name: str, view: TensorView) -> StoredTensor:
        """Return the location of a tensor of the skeleton.

        Raises:
            CheckpointError: its record is missing, too small, or compressed.
        """
        record = self.record(view.storage)
        if record.compressed:
            raise CheckpointError(
                f"{self.path}: {record.name} is compressed, so it cannot be read in place: load it and save it again"
            )
        offset = record.offset + (view.element_offset * view.dtype.itemsize if view.nbytes else 0)
        stride = None if view.is_contiguous else view.stride
        return StoredTensor(name, self.path, offset, view.nbytes, view.dtype, view.shape, stride)


def read_torch_file(path: Path, *, calculate: bool = False) -> TorchFile:
    """Return the directory and the skeleton of a torch checkpoint.

    Raises:
        CheckpointError: it is damaged, or not a torch checkpoint.
        IoError: it cannot be read.
    """
    with opened(path) as descriptor:
        return read_open_file(descriptor, path, calculate=calculate)


def read_open_file(descriptor: int, path: Path, *, calculate: bool = False) -> TorchFile:
    """As `read_torch_file`, for an open file; `path` is for messages.

    Args:
        descriptor: of the file.
        path: for messages.
        calculate: as of `read_torch_file`.
    """
    return _read_zip(descriptor, path, read_index(descriptor, path, calculate=calculate))


def read_item(descriptor: int, path: Path, offset: int, nbytes: int) -> TorchFile:
    """As `read_torch_file`, for [offset, offset + nbytes) of an open file. Offsets count from the file's start.

    Args:
        descriptor, path: as of `read_open_file`.
        offset, nbytes: of the item in the file, in bytes.
    """
    return _read_zip(descriptor, path, read_index(descriptor, path, span=(offset, nbytes)))


def _read_zip(descriptor: int, path: Path, index: ZipIndex) -> TorchFile:
    root = _root(index)
    pickle = _content(index, descriptor, f"{root}/data.pkl", _MAX_PICKLE_BYTES)
    if pickle is None:
        raise CheckpointError(f"{path} is a zip, and not a torch checkpoint: it has no {root}/data.pkl")
    byteorder = _content(index, descriptor, f"{root}/byteorder")
    stated = _content(index, descriptor, f"{root}/.storage_alignment")
    return TorchFile(
        zip=index,
        root=root,
        skeleton=read_skeleton(pickle, f"{path}: {root}/data.pkl"),
        pickle=pickle,
        byteorder=None if byteorder is None else byteorder.decode(errors="replace"),
        alignment=None if stated is None else _alignment(stated, f"{path}: {root}/.storage_alignment"),
        stamp=FileStamp.of(descriptor),
    )


def _alignment(stated: bytes, where: str) -> int | None:
    """Return the alignment in bytes; None without a usable one. Raises CheckpointError for what torch.load does not read."""
    try:
        alignment = int(stated)
    except ValueError:
        raise CheckpointError(f"{where} has {stated!r}, which is not a number: take another copy of it") from None
    return alignment if 0 < alignment < 10**9 else None


def read(path: Path) -> Source:
    """Return the locations of the tensors in the torch checkpoint `path`.

    Raises:
        CheckpointError: it is damaged, or compressed, or of another byte order.
        IoError: it cannot be read.
    """
    file = read_torch_file(path)
    if file.byteorder not in (None, sys.byteorder):
        raise CheckpointError(f"{path} has {file.byteorder}-endian numbers: load it and save it again on this machine")
    tensors: dict[str, StoredTensor] = {}
    for name, view in file.skeleton.tensors():
        if name in tensors:
            raise CheckpointError(f"{path} has two tensors named {name!r}")
        tensors[name] = file.stored(name, view)
    metadata = {"alignment": str(file.alignment)} if file.alignment else {}
    in_file_order = dict(sorted(tensors.items(), key=lambda item: item[1].offset))
    others = {name: str(value.made) for name, value in file.skeleton.leaves() if is_other_tensor(value)}
    return Source(path, "torch", in_file_order, {path: file.stamp}, metadata, other_tensors=others)


def _root(index: ZipIndex) -> str:
    first = next(iter(sorted(index.records.values(), key=lambda record: record.header_offset)), None)
    root = first.name.partition("/")[0] if first is not None and "/" in first.name else ""
    if not root:
        raise CheckpointError(f"{index.path} is a zip, and not a torch checkpoint: its records are in no folder")
    return root


def _content(index: ZipIndex, descriptor: int, name: str, max_bytes: int = _MAX_SETTING_BYTES) -> bytes | None:
    record = index.records.get(name)
    if record is None:
        return None
    if record.nbytes > max_bytes:
        raise CheckpointError(f"{index.path}: {name} has {record.nbytes} bytes, more than such a record needs")
    if record.compressed:
        raise CheckpointError(f"{index.path}: {name} is compressed: unpack it and pack it again with `zip -0`")
    return index.read(descriptor, record)


def load_bytes(data: bytes, path: Path, *, nested: Collection[str] = (), names: frozenset[str] | None = None) -> object:
    """Return the content of the checkpoint `data`, as torch.load(weights_only=True) does.

    Args:
        path: for messages.
        names: classes and functions that it may name; None leaves that to torch.
        nested: keys of the outermost dict whose values may have any nesting: nothing of swapper's walks them.

    Raises:
        CheckpointError: it is damaged or hostile.
    """
    descriptor = os.memfd_create("checkpoint", os.MFD_CLOEXEC)
    try:
        with os.fdopen(descriptor, "wb", closefd=False) as memory:
            memory.write(data)
        file = read_open_file(descriptor, path)
        _check(file, nested, names)
        keys = {storage.key for storage in file.skeleton.storages}
        records = {key: file.zip.read(descriptor, file.zip.records[f"{file.root}/data/{key}"]) for key in keys}
    finally:
        os.close(descriptor)
    try:
        return torch.load(repacked(file, records), map_location="cpu", weights_only=True, mmap=False)
    except Exception as error:  # a damaged pickle can make it raise anything
        raise CheckpointError(f"{path} cannot be loaded: {str(error)[:500]}") from error


def repacked(file: TorchFile, records: Mapping[str, bytes]) -> io.BytesIO:
    """Return a checkpoint as torch reads it: the pickle of `file`, and the contents of storages by key."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr(f"{ROOT}/data.pkl", file.pickle)
        archive.writestr(f"{ROOT}/byteorder", file.byteorder or sys.byteorder)
        archive.writestr(f"{ROOT}/version", b"3\n")
        for key, content in records.items():
            archive.writestr(f"{ROOT}/data/{key}", content)
    packed.seek(0)
    return packed


def _check(file: TorchFile, nested: Collection[str], names: frozenset[str] | None) -> None:
    strange = frozenset() if names is None else file.skeleton.globals - names
    if strange:
        raise CheckpointError(
            f"{file.path} names {min(strange)[:200]}, which has no place in such a file: it is hostile"
        )
    for storage in file.skeleton.storages:
        if file.record(storage).compressed:
            raise CheckpointError(f"{file.path}: {storage.key[:60]} is compressed, which torch.save never does")
    tree = file.skeleton.tree
    if isinstance(tree, dict):
        tree = {key: value for key, value in tree.items() if key not in nested}
    for _ in Skeleton(tree, (), file.skeleton.nbytes, file.skeleton.globals).leaves():
        pass
