"""Reads the header of a safetensors file. Streaming needs raw offsets, which the safetensors library does not give.

The format: 8 bytes, little-endian, with the header's size; the header, a JSON object {name: {"dtype", "shape",
"data_offsets": [begin, end]}} with an optional "__metadata__" of text; then the data, from which the offsets count. The
checks are the format's own rules: no duplicate key, no overlap, no hole, nothing behind the last tensor, sizes that
agree with dtype and shape.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch

from swapper.errors import CheckpointError
from swapper.formats.sources import FileStamp, Source, opened, parse_object, read_at
from swapper.formats.stored import MAX_DIMENSIONS, StoredTensor, are_sizes

SIZE_BYTES = 8  # of the header's size, by the format
MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""
METADATA_KEY = "__metadata__"
FIELDS = {"dtype", "shape", "data_offsets"}

DTYPES = {
    name: getattr(torch, attribute)
    for name, attribute in {
        "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
        "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
        "C64": "complex64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
        "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
    }.items()
    if hasattr(torch, attribute)
}  # fmt: skip


def read(path: Path) -> Source:
    """Return the locations of the tensors in the safetensors file `path`.

    Raises:
        CheckpointError: the file breaks a rule of the format; names it.
        IoError: it cannot be read.
    """
    with opened(path) as descriptor:
        stamp = FileStamp.of(descriptor)
        size = read_at(descriptor, path, 0, SIZE_BYTES)
        header_bytes = int.from_bytes(size, "little")
        _check_header_size(path, len(size), header_bytes, stamp.nbytes)
        text = read_at(descriptor, path, SIZE_BYTES, header_bytes)
    if len(text) != header_bytes:
        raise CheckpointError(f"{path} is cut off: its header of {header_bytes} bytes is not all there")
    header = parse_object(f"{path}: its header", text)
    metadata = header.pop(METADATA_KEY, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{path}: {METADATA_KEY} is not a map from text to text")
    begin = SIZE_BYTES + header_bytes
    tensors = [_tensor(path, name, entry, begin) for name, entry in header.items()]
    _check_cover(path, tensors, begin, stamp.nbytes)
    return Source(path, "safetensors", {tensor.name: tensor for tensor in tensors}, {path: stamp}, metadata)


def _check_header_size(path: Path, size_bytes: int, header_bytes: int, file_bytes: int) -> None:
    if size_bytes < SIZE_BYTES:
        raise CheckpointError(f"{path} is cut off: {file_bytes} bytes are less than a safetensors file has")
    if header_bytes > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{path} is not a safetensors file: it states a header of {header_bytes} bytes, more than the format's "
            f"limit of {MAX_HEADER_BYTES}"
        )
    if header_bytes > file_bytes - SIZE_BYTES:
        raise CheckpointError(f"{path} is cut off: its header has {header_bytes} bytes, the file {file_bytes}")


def _tensor(path: Path, name: str, entry: object, begin: int) -> StoredTensor:
    def refuse(reason: str) -> CheckpointError:
        return CheckpointError(f"{path}: tensor {name[:200]!r} {reason}")

    if not isinstance(entry, dict) or not entry.keys() >= FIELDS:
        raise refuse(f"does not have {', '.join(sorted(FIELDS))}")
    if not isinstance(entry["dtype"], str) or entry["dtype"] not in DTYPES:
        raise refuse(f"has the dtype {str(entry['dtype'])[:100]!r}, which is not known: known are {', '.join(DTYPES)}")
    dtype = DTYPES[entry["dtype"]]
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not are_sizes(shape):
        raise refuse(f"has the shape {str(shape)[:100]}, which is not a list of at most {MAX_DIMENSIONS} sizes")
    if not are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise refuse(f"has the data_offsets {str(offsets)[:100]}, which are not [begin, end]")
    nbytes = math.prod(shape) * dtype.itemsize
    if offsets[1] - offsets[0] != nbytes:
        raise refuse(f"has {offsets[1] - offsets[0]} bytes, but {entry['dtype']} {shape} takes {nbytes}")
    return StoredTensor(name, path, begin + offsets[0], nbytes, dtype, tuple(shape))


def _check_cover(path: Path, tensors: list[StoredTensor], begin: int, file_bytes: int) -> None:
    """Check that the data is one tensor after the other, without hole or overlap, to the end of the file."""
    cursor, before = begin, "the header"
    for tensor in sorted(tensors, key=lambda tensor: (tensor.offset, tensor.offset + tensor.nbytes)):
        if tensor.offset < cursor:
            raise CheckpointError(f"{path}: tensors {before!r} and {tensor.name!r} overlap")
        if tensor.offset > cursor:
            raise CheckpointError(f"{path}: {tensor.offset - cursor} bytes before {tensor.name!r} belong to none")
        cursor, before = tensor.offset + tensor.nbytes, tensor.name
    if cursor > file_bytes:
        raise CheckpointError(f"{path} is cut off: tensor {before!r} ends at {cursor}, the file at {file_bytes}")
    if cursor < file_bytes:
        raise CheckpointError(f"{path}: {file_bytes - cursor} bytes at its end belong to no tensor")
