"""Writes torch.save's format: a stored zip as torch's own writer lays it out, and data.pkl, a pickle that names storages.

The pickle: torch.save needs the storages; swapper's lie in a swap file, and the tensors that represent them may alias unreadable
memory. So a tensor is reduced here from its shape, stride, dtype and requires_grad, and its storage is named by its
record. The bytes equal those of torch.save for the same object. What the default `torch.load` (weights_only=True) would
refuse is refused here, at the write and not at the load.

The zip: pure functions of names, sizes and file offsets; no torch, no files. swapper must know a payload's location before any
of its bytes exist, and writes the directory long after the payload. The rules are those of `getPadding` in
caffe2/serialize/inline_container.cc and of the zip writer below it (third_party/miniz); PKWARE's APPNOTE.TXT defines
the fields, and each function names its section. All integers are little-endian.
"""

from __future__ import annotations

import codecs
import hashlib
import io
import pickle
import re
import struct
import sys
import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch

from swapper.errors import CheckpointError

_PROTOCOL = 2  # torch.save's; the weights_only unpickler knows only the opcodes of this one
_PAYLOAD_LOCATION = "cpu"  # location of payloads in torch.load without a map_location

LEGACY_STORAGES: Mapping[torch.dtype, type] = {
    torch.float64: torch.DoubleStorage,
    torch.float32: torch.FloatStorage,
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.complex128: torch.ComplexDoubleStorage,
    torch.complex64: torch.ComplexFloatStorage,
    torch.int64: torch.LongStorage,
    torch.int32: torch.IntStorage,
    torch.int16: torch.ShortStorage,
    torch.int8: torch.CharStorage,
    torch.uint8: torch.ByteStorage,
    torch.bool: torch.BoolStorage,
}
"""The storage class by which a checkpoint states a dtype; other dtypes are stated with an UntypedStorage."""

QUANTIZED_STORAGES: Mapping[torch.dtype, type] = {
    torch.qint8: torch.QInt8Storage,
    torch.quint8: torch.QUInt8Storage,
    torch.qint32: torch.QInt32Storage,
    torch.quint4x2: torch.QUInt4x2Storage,
    torch.quint2x4: torch.QUInt2x4Storage,
}


def _rebuild_function(dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    """Return the function by which a checkpoint rebuilds a tensor: what torch itself writes for an empty one."""
    empty = torch.empty(0, dtype=dtype, device="cpu")
    function: Callable[..., torch.Tensor] = empty.__reduce_ex__(_PROTOCOL)[0]
    return function


_REBUILD_LEGACY = _rebuild_function(torch.float32)
_REBUILD_UNTYPED = _rebuild_function(torch.uint16)

_PLAIN_TYPES = (OrderedDict, Counter, complex, bytearray, torch.Size, torch.device, torch.dtype)
_PLAIN_GLOBALS = frozenset(
    {
        *(OrderedDict, Counter, complex, bytearray, set, torch.Size, torch.device, codecs.encode),
        *(_REBUILD_LEGACY, _REBUILD_UNTYPED, torch.UntypedStorage, *LEGACY_STORAGES.values()),
    }
)


def plain_global_names() -> frozenset[str]:
    """Return the names of what `pickle_state` writes, as pickles have them: plain classes, and what the user allows torch."""
    entries: list[Any] = [*_PLAIN_GLOBALS, *torch.serialization.get_safe_globals()]
    names = {e[1] if isinstance(e, tuple) else f"{e.__module__}.{e.__qualname__}" for e in entries}
    return frozenset(names | {re.sub(r"^builtins\.", "__builtin__.", name) for name in names})


@dataclass(frozen=True, slots=True)
class StorageRef:
    """The location of a tensor in a container: a record's key, and an index in elements of the tensor's dtype.

    `untyped`: the record has tensors of several dtypes.
    """

    key: str
    element_offset: int
    untyped: bool = False


Locate = Callable[[torch.Tensor], StorageRef | None]
"""Returns the place of a tensor in the payload records, or None if it is in none."""


@dataclass(frozen=True, slots=True)
class Pickled:
    """The result of `pickle_state`."""

    data: bytes  # data.pkl
    resident: Mapping[str, torch.UntypedStorage]  # to write next to it, by key, in the order of the keys
    keys: tuple[str, ...]  # all keys, in the order in which a reader meets them


def pickle_state(state: object, payload_nbytes: Mapping[str, int], locate: Locate) -> Pickled:
    """Pickle `state`: any nesting of dict, OrderedDict, list, tuple, set, plain values and tensors.

    Args:
        state: the result of torch.load.
        payload_nbytes: size of each payload record, by key; the keys are "0", "1", ... without a gap.
        locate: the place of a tensor in the payload records, or None for a resident tensor, whose whole storage becomes
            a record of its own. Of a located tensor only shape, stride, dtype, layout and requires_grad are read.

    Raises:
        CheckpointError: something in `state` cannot be written, or could not be read with weights_only=True; or the
            place that `locate` returns does not hold the tensor.
    """
    file = io.BytesIO()
    pickler = _StatePickler(file, payload_nbytes, locate)
    pickler.dump(state)
    return Pickled(file.getvalue(), dict(pickler.resident), tuple(pickler.storage_classes))


@dataclass(frozen=True, slots=True)
class _Storage:
    """Represents a storage in the pickle: torch.save's persistent id."""

    persistent_id: tuple[str, type, str, str, int]


class _StatePickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, payload_nbytes: Mapping[str, int], locate: Locate) -> None:
        super().__init__(file, protocol=_PROTOCOL)
        self._payload_nbytes = payload_nbytes
        self._payload_keys = {key: key for key in payload_nbytes}  # a pickle shares strings by identity
        self._locate = locate
        self._resident_keys: dict[int, str] = {}  # by id of the storage, which `resident` keeps alive
        self._user_globals = frozenset(
            entry[0] if isinstance(entry, tuple) else entry for entry in torch.serialization.get_safe_globals()
        )
        self.resident: dict[str, torch.UntypedStorage] = {}
        self.storage_classes: dict[str, type] = {}  # by key, in the order of first use

    def persistent_id(self, obj: object) -> tuple[str, type, str, str, int] | None:
        return obj.persistent_id if isinstance(obj, _Storage) else None

    def reducer_override(self, obj: object) -> Any:
        # Called for everything except the builtin containers and scalars, which pickle writes by itself.
        if isinstance(obj, torch.Tensor):
            return self._reduce_tensor(obj)
        if isinstance(obj, (type, FunctionType, BuiltinFunctionType)):
            allowed = obj in _PLAIN_GLOBALS or obj in self._user_globals
        else:
            allowed = type(obj) in _PLAIN_TYPES or type(obj) in self._user_globals
        if not allowed:
            raise CheckpointError(
                f"{_name_of(obj)} cannot be in a container, since torch.load would refuse it: use tensors, "
                "numbers, strings, lists, tuples and dicts, or allow it with "
                "torch.serialization.add_safe_globals, here and wherever the file is loaded"
            )
        return NotImplemented

    def _reduce_tensor(self, tensor: torch.Tensor) -> tuple[object, ...]:
        _check_plain(tensor)
        ref = self._locate(tensor)
        untyped = tensor.dtype not in LEGACY_STORAGES or (ref is not None and ref.untyped)
        if ref is None:
            storage, element_offset = self._resident_storage(tensor, untyped), tensor.storage_offset()
        else:
            storage, element_offset = self._payload_storage(tensor, ref, untyped), ref.element_offset
        args: tuple[object, ...] = (
            storage,
            element_offset,
            tuple(tensor.size()),
            tensor.stride(),
            tensor.requires_grad,
            OrderedDict(),  # backward hooks: never any
        )
        return (_REBUILD_UNTYPED, (*args, tensor.dtype)) if untyped else (_REBUILD_LEGACY, args)

    def _payload_storage(self, tensor: torch.Tensor, ref: StorageRef, untyped: bool) -> _Storage:
        key = self._payload_keys.get(ref.key)
        if key is None:
            raise CheckpointError(f"there is no payload record {ref.key!r} for {_describe(tensor)}")
        nbytes = self._payload_nbytes[key]
        end = (ref.element_offset + span(tensor.size(), tensor.stride())) * tensor.element_size()
        if ref.element_offset < 0 or end > nbytes:
            raise CheckpointError(
                f"{_describe(tensor)} at element {ref.element_offset} is not within the {nbytes} bytes "
                f"of record {key!r}"
            )
        return self._storage(tensor, untyped, key, _PAYLOAD_LOCATION, nbytes)

    def _resident_storage(self, tensor: torch.Tensor, untyped: bool) -> _Storage:
        if tensor.device.type == "meta":
            raise CheckpointError(f"{_describe(tensor)} is on the meta device and in no payload record: it has no data")
        if vars(tensor):
            raise CheckpointError(f"{_describe(tensor)} has attributes {sorted(vars(tensor))}; pass a detached tensor")
        storage = tensor.untyped_storage()
        key = self._resident_keys.get(id(storage))
        if key is None:
            key = str(len(self._payload_nbytes) + len(self.resident))
            self._resident_keys[id(storage)] = key
            self.resident[key] = storage
        return self._storage(tensor, untyped, key, torch.serialization.location_tag(storage), storage.nbytes())

    def _storage(self, tensor: torch.Tensor, untyped: bool, key: str, location: str, nbytes: int) -> _Storage:
        storage_class = torch.UntypedStorage if untyped else LEGACY_STORAGES[tensor.dtype]
        known = self.storage_classes.setdefault(key, storage_class)
        if known is not storage_class:
            # A reader gives a record the first class that it meets, and would read this tensor as that.
            raise CheckpointError(f"{_describe(tensor)} shares record {key!r} with another dtype ({known.__name__})")
        numel = nbytes if untyped else nbytes // tensor.element_size()
        return _Storage(("storage", storage_class, key, location, numel))


def _check_plain(tensor: torch.Tensor) -> None:
    if type(tensor) is not torch.Tensor:
        raise CheckpointError(f"{_name_of(tensor)} cannot be in a container: pass a plain tensor, as in state_dict()")
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.dtype in QUANTIZED_STORAGES:
        raise CheckpointError(f"a tensor of {tensor.dtype} is sparse, nested or quantized: containers take dense ones")
    if tensor.is_conj() or tensor.is_neg():
        raise CheckpointError(f"{_describe(tensor)} is a lazy conjugate or negation: pass tensor.clone()")


def span(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Return the elements from a tensor's first to its last in memory, both included; 0 for none."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def _name_of(obj: object) -> str:
    if isinstance(obj, (type, FunctionType, BuiltinFunctionType)):
        return f"{obj.__module__}.{obj.__qualname__}"
    return f"an object of type {type(obj).__module__}.{type(obj).__qualname__}"


def _describe(tensor: torch.Tensor) -> str:
    return f"a tensor of {tensor.dtype} and shape {tuple(tensor.shape)}"


ROOT = "archive"
"""The folder in the zip that holds all records."""

SERIALIZATION_ID_BYTES = 40
ZIP64_LIMIT = 0xFFFFFFFF
"""Bytes. From this size or offset on, the 32-bit fields of a zip do not suffice (APPNOTE 4.4.1.4)."""

LOCAL_HEADER = struct.Struct("<4s5H3I2H")  # 4.3.7
DIRECTORY_ENTRY = struct.Struct("<4s6H3I5H2I")  # 4.3.12
ZIP64_END = struct.Struct("<4sQ2H2I4Q")  # 4.3.14
ZIP64_LOCATOR = struct.Struct("<4sIQI")  # 4.3.15
END = struct.Struct("<4s4H2IH")  # 4.3.16

_HAS_DESCRIPTOR = 0x0008  # general purpose bit 3: CRC and sizes follow the data
_UTF8_NAME = 0x0800  # bit 11
_ZIP64_EXTRA = 0x0001  # header id of the zip64 extra field (APPNOTE 4.5.3)
_MADE_BY = 0x031E  # the value of torch's zip writer in the zip64 end record: Unix, version 3.0
_ZIP64_VERSION = 45  # version needed for zip64: 4.5 (APPNOTE 4.4.3)


@dataclass(frozen=True, slots=True)
class Entry:
    """One file of the zip, as the central directory lists it."""

    name: str
    header_offset: int  # bytes from the start of the file to the local header
    nbytes: int
    crc32: int


def leading_records(pickled: bytes, alignment: int) -> Iterator[tuple[str, bytes]]:
    """Yield the records that torch.save puts before the payloads: names and contents; data.pkl is `pickled`."""
    yield "data.pkl", pickled
    yield ".format_version", b"1"
    yield ".storage_alignment", str(alignment).encode()
    yield "byteorder", sys.byteorder.encode()


def serialization_id(entries: Sequence[Entry]) -> bytes:
    """Return 40 decimal digits, as in torch's files: 20 for the names of the records, 20 for their contents."""
    names = "\n".join(entry.name for entry in entries)
    contents = "\n".join(f"{entry.nbytes} {entry.crc32}" for entry in entries)
    digests = (hashlib.blake2b(text.encode(), digest_size=8).digest() for text in (names, contents))
    return "".join(f"{int.from_bytes(digest, 'little'):020d}" for digest in digests).encode()


def payload_offset(cursor: int, name: str, nbytes: int, alignment: int) -> int:
    """Return the file offset of the data whose local header begins at `cursor`; a multiple of `alignment`.

    Args:
        cursor: offset of the local header, in bytes.
        name, nbytes: of the record.
        alignment: of its data, in bytes.
    """
    unpadded = cursor + LOCAL_HEADER.size + len(name.encode()) + len(_local_zip64(cursor, nbytes)) + 4
    return -(-unpadded // alignment) * alignment


def local_header(cursor: int, name: str, nbytes: int, alignment: int) -> bytes:
    """Return the local file header (APPNOTE 4.3.7), padded so that the data begins at `payload_offset`.

    CRC and sizes are zero, as bit 3 of the flags allows; an "FB" extra field of 'Z' characters is the padding.

    Args: as of `payload_offset`.
    """
    encoded = name.encode()
    zip64 = _local_zip64(cursor, nbytes)
    start = cursor + LOCAL_HEADER.size + len(encoded) + len(zip64) + 4
    padding = payload_offset(cursor, name, nbytes, alignment) - start
    extra = zip64 + b"FB" + struct.pack("<H", padding) + b"Z" * padding
    fixed = LOCAL_HEADER.pack(b"PK\x03\x04", 0, _flags(nbytes), 0, 0, 0, 0, 0, 0, len(encoded), len(extra))
    return fixed + encoded + extra


def descriptor_nbytes(cursor: int, nbytes: int) -> int:
    """Return the bytes of the data descriptor after the data; torch's writer gives empty files none."""
    if nbytes == 0:
        return 0
    return 24 if _needs_zip64(cursor, nbytes) else 16


def descriptor(cursor: int, nbytes: int, crc32: int) -> bytes:
    """Return the data descriptor (APPNOTE 4.3.9), with signature.

    Args:
        cursor: offset of the local header, in bytes.
        nbytes, crc32: of the data.
    """
    if nbytes == 0:
        return b""
    sizes = "QQ" if _needs_zip64(cursor, nbytes) else "II"
    return struct.pack(f"<4sI{sizes}", b"PK\x07\x08", crc32, nbytes, nbytes)


def directory(entries: Sequence[Entry], offset: int, alignment: int) -> bytes:
    """Return central directory and end records, for `offset`, up to a file size that is a multiple of `alignment`.

    As in torch's writer, the zip64 end record and its locator (APPNOTE 4.3.14, 4.3.15) are always there. The zip
    comment of the end record (APPNOTE 4.3.16) rounds the size up: zero bytes, fewer than `alignment` of them, which
    must be at most 65536.

    Args:
        entries: of all records.
        offset: where the directory begins, in bytes.
        alignment: of the file's size, in bytes.
    """
    listing = b"".join(_directory_entry(entry) for entry in entries)
    count, end = len(entries), offset + len(listing)
    zip64_end = ZIP64_END.pack(
        b"PK\x06\x06", ZIP64_END.size - 12, _MADE_BY, _ZIP64_VERSION, 0, 0, count, count, len(listing), offset
    )
    locator = ZIP64_LOCATOR.pack(b"PK\x06\x07", 0, end, 1)
    file_nbytes = end + ZIP64_END.size + ZIP64_LOCATOR.size + END.size
    comment = bytes(-file_nbytes % alignment)
    count, nbytes, begin = min(count, 0xFFFF), min(len(listing), ZIP64_LIMIT), min(offset, ZIP64_LIMIT)
    end_record = END.pack(b"PK\x05\x06", 0, 0, count, count, nbytes, begin, len(comment))
    return listing + zip64_end + locator + end_record + comment


class RecordBytes:
    """Small records under construction: the bytes of a file from offset `begin` on.

    Attributes:
        data: the bytes so far.
        entries: of the records so far, for the directory; those before `begin` are passed.
    """

    def __init__(self, alignment: int, begin: int = 0, entries: Sequence[Entry] = ()) -> None:
        self._alignment = alignment
        self._begin = begin
        self.data = bytearray()
        self.entries = list(entries)

    def next_offset(self, name: str) -> int:
        """Return the offset in the file of the content of a record that is added next, of less than 4 GiB."""
        return payload_offset(self._begin + len(self.data), f"{ROOT}/{name}", 0, self._alignment)

    def add(self, name: str, content: bytes) -> None:
        cursor = self._begin + len(self.data)
        entry = Entry(f"{ROOT}/{name}", cursor, len(content), zlib.crc32(content))
        self.data += local_header(cursor, entry.name, len(content), self._alignment)
        self.data += content
        self.data += descriptor(cursor, len(content), entry.crc32)
        self.entries.append(entry)

    def add_trailing(self) -> None:
        """Add the records that torch.save puts after the payloads."""
        self.add("version", b"3\n")
        self.add(".data/serialization_id", serialization_id(self.entries))

    def finish(self, alignment: int) -> bytes:
        """Return all bytes with the directory, up to a file size that is a multiple of `alignment`."""
        return bytes(self.data) + directory(self.entries, self._begin + len(self.data), alignment)


def _needs_zip64(cursor: int, nbytes: int) -> bool:
    return nbytes >= ZIP64_LIMIT or cursor >= ZIP64_LIMIT


def _flags(nbytes: int) -> int:
    return _UTF8_NAME | (_HAS_DESCRIPTOR if nbytes else 0)


def _zip64_extra(values: Sequence[int]) -> bytes:
    if not values:
        return b""
    return struct.pack(f"<2H{len(values)}Q", _ZIP64_EXTRA, 8 * len(values), *values)


def _local_zip64(cursor: int, nbytes: int) -> bytes:
    # APPNOTE 4.5.3 has no offset here, and would have the size twice; torch's writer does it this way, and its readers
    # rely on the length.
    sizes = [nbytes, 0] if nbytes >= ZIP64_LIMIT else []
    return _zip64_extra(sizes + ([cursor] if cursor >= ZIP64_LIMIT else []))


def _directory_entry(entry: Entry) -> bytes:
    """Return a central directory header (APPNOTE 4.3.12), with zip64 extended information (4.5.3) if needed."""
    name = entry.name.encode()
    long_sizes = [entry.nbytes, entry.nbytes] if entry.nbytes >= ZIP64_LIMIT else []
    long_offset = [entry.header_offset] if entry.header_offset >= ZIP64_LIMIT else []
    extra = _zip64_extra(long_sizes + long_offset)
    nbytes, begin = min(entry.nbytes, ZIP64_LIMIT), min(entry.header_offset, ZIP64_LIMIT)
    sizes = (entry.crc32, nbytes, nbytes, len(name), len(extra))
    fixed = DIRECTORY_ENTRY.pack(b"PK\x01\x02", 0, 0, _flags(entry.nbytes), 0, 0, 0, *sizes, 0, 0, 0, 0, begin)
    return fixed + name + extra
