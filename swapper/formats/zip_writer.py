"""Makes the bytes of a stored zip as torch's own writer lays them out: local headers, descriptors, directory.

Pure functions of names, sizes and file offsets; no torch, no files. swapper must know a payload's location before any
of its bytes exist, and writes the directory long after the payload. The rules are those of `getPadding` in
caffe2/serialize/inline_container.cc and of the zip writer below it (third_party/miniz); PKWARE's APPNOTE.TXT defines
the fields, and each function names its section. All integers are little-endian.
"""

from __future__ import annotations

import hashlib
import struct
import sys
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

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
