"""Loads a small untrusted checkpoint that is in memory, all of it, in time and memory in proportion to its bytes.

torch unpickles it in the end, which alone is not bounded: a few bytes name a nest without end, or memory by a number. So the
pickle is read by pickle_reader.py before, and torch gets the records that this has located, and no others.
"""

from __future__ import annotations

import io
import os
import sys
import zipfile
from collections.abc import Collection, Mapping
from pathlib import Path

import torch

from swapper.errors import CheckpointError
from swapper.formats.torch_zip.pickle_reader import Skeleton
from swapper.formats.torch_zip.torch_file import TorchFile, read_open_file
from swapper.formats.torch_zip.zip_writer import ROOT


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
