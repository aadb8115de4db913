"""Locates the records of a stored zip, as torch writes them, without trusting it.

The counterpart of torch_writer.py. Python's `zipfile` trusts what it reads (overlapping records, impossible sizes). Here
every number is checked against the file before it is used, so that a hostile or damaged file ends in a
`CheckpointError`. No payload is read. The structures cite sections of PKWARE's APPNOTE.TXT.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from swapper.errors import CheckpointError
from swapper.formats.sources import read_filled
from swapper.formats.torch_writer import (
    DIRECTORY_ENTRY,
    END,
    LOCAL_HEADER,
    ZIP64_END,
    ZIP64_LIMIT,
    ZIP64_LOCATOR,
    payload_offset,
)

_LONGEST_COMMENT = 0xFFFF  # bytes; its size is a u16
_FLAGS_REFUSED = 0x2061
"""Encrypted, patch data, strongly encrypted, masked: torch refuses them too."""
_IS_DIRECTORY = 0x10  # MS-DOS attribute bit of an entry
_STORED, _DEFLATED = 0, 8
_UNPACKED_BYTES = 1 << 20  # unpacked at once
_MAX_DIRECTORY_BYTES = 1 << 30  # of a sane directory; it is read whole
_END_BYTES = 2048


@dataclass(frozen=True, slots=True)
class ZipRecord:
    """One file of the zip. All numbers are checked against the file; `offset` is where its bytes begin."""

    name: str
    header_offset: int
    offset: int
    nbytes: int
    crc32: int
    compressed: bool  # then `nbytes` counts the bytes in the file
    unpacked_nbytes: int

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


@dataclass(frozen=True)
class ZipIndex:
    """The records of one zip, by name, in the directory's order."""

    path: Path
    records: Mapping[str, ZipRecord]

    def read(self, descriptor: int, record: ZipRecord) -> bytes:
        """Return a record's bytes. For the small ones."""
        return _read_at(descriptor, self.path, record.offset, record.nbytes)


@dataclass(frozen=True, slots=True)
class _FileBytes:
    """The bytes of an open file from `base` on."""

    descriptor: int
    path: Path
    base: int
    known: list[tuple[int, bytes]]  # (offset, bytes) that were read before

    def read(self, offset: int, nbytes: int) -> bytes:
        for begin, data in self.known:
            if begin <= offset and offset + nbytes <= begin + len(data):
                return data[offset - begin : offset - begin + nbytes]
        return _read_at(self.descriptor, self.path, self.base + offset, nbytes)


def _ends(descriptor: int, path: Path, base: int, nbytes: int) -> list[tuple[int, bytes]]:
    """Return the beginning and the end of an item, which have everything except payload."""
    at_end = max(nbytes - _END_BYTES, 0)
    return [
        (0, _read_at(descriptor, path, base, min(nbytes, _END_BYTES))),
        (at_end, _read_at(descriptor, path, base + at_end, nbytes - at_end)),
    ]


def read_index(
    descriptor: int, path: Path, *, calculate: bool = False, span: tuple[int, int] | None = None
) -> ZipIndex:
    """Locate the records of the zip that is open as `descriptor`.

    Args:
        path: for messages.
        calculate: if the file states its alignment, as torch's do since 2.7, calculate the payloads' offsets instead of
            reading their local headers, as `torch.utils.serialization.config.load.calculate_storage_offsets` requests.
        span: (offset, bytes) of the zip in the file, if it is not the whole. Records' offsets still count from the
            beginning of the file.

    Raises:
        CheckpointError: it is not a zip, is truncated, or has impossible numbers.
        IoError: it cannot be read.
    """
    base, file_nbytes = span or (0, os.fstat(descriptor).st_size)
    ends = _ends(descriptor, path, base, file_nbytes) if span else []
    part = _FileBytes(descriptor, path, base, ends)
    begin, nbytes, count = _find_directory(part, file_nbytes)
    if nbytes > _MAX_DIRECTORY_BYTES:
        raise _bad(path, f"its directory claims {nbytes} bytes")
    listing = part.read(begin, nbytes)
    records: dict[str, ZipRecord] = {}
    cursor = 0
    for _ in range(count):
        entry, cursor = _parse_entry(path, listing, cursor, begin)
        if entry.name in records:
            raise _bad(path, f"it lists {entry.name!r} twice")
        records[entry.name] = entry
    if cursor != nbytes:
        raise _bad(path, f"its directory has {nbytes} bytes, of which {count} entries take {cursor}")
    alignment = _stated_alignment(part, records) if calculate else None
    located = {
        name: _locate(part, entry, alignment if name.split("/")[1:-1] == ["data"] else None)
        for name, entry in records.items()
    }
    _check_apart(path, located, begin)
    if base:
        located = {
            name: replace(record, header_offset=base + record.header_offset, offset=base + record.offset)
            for name, record in located.items()
        }
    return ZipIndex(path, located)


def _find_directory(part: _FileBytes, file_nbytes: int) -> tuple[int, int, int]:
    """Return offset, bytes and number of entries of the central directory."""
    longest = _END_BYTES if part.known else END.size + _LONGEST_COMMENT + ZIP64_LOCATOR.size
    span = min(file_nbytes, longest)
    tail_offset = file_nbytes - span
    tail = part.read(tail_offset, span)
    at = len(tail) - END.size + 1
    while True:
        at = tail.rfind(b"PK\x05\x06", 0, at + 3)
        if at < 0:
            raise _bad(part.path, "it has no end record: it is cut off, or no zip")
        if at + END.size <= len(tail):
            end = END.unpack_from(tail, at)
            if at + END.size + end[7] == len(tail):
                break
    _, disk, first_disk, count_here, count, nbytes, begin, _ = end
    limit = tail_offset + at
    locator_at = at - ZIP64_LOCATOR.size
    if locator_at >= 0 and tail[locator_at : locator_at + 4] == b"PK\x06\x07":
        _, locator_disk, end64_offset, disks = ZIP64_LOCATOR.unpack_from(tail, locator_at)
        if locator_disk or disks != 1:
            raise _bad(part.path, "it is a part of a zip of several parts")
        if end64_offset > limit - ZIP64_LOCATOR.size - ZIP64_END.size:
            raise _bad(part.path, f"its zip64 end record is said to be at {end64_offset}, where it cannot be")
        end64 = ZIP64_END.unpack(part.read(end64_offset, ZIP64_END.size))
        if end64[0] != b"PK\x06\x06" or not ZIP64_END.size - 12 <= end64[1] < 1 << 32:
            raise _bad(part.path, f"there is no zip64 end record at {end64_offset}, where one is said to be")
        _, _, _, _, disk, first_disk, count_here, count, nbytes, begin = end64
        limit = end64_offset
    if disk or first_disk or count_here != count:
        raise _bad(part.path, "it is a part of a zip of several parts")
    if begin > limit or nbytes > limit - begin:
        raise _bad(part.path, f"its directory is said to be {nbytes} bytes at {begin}, which do not fit before {limit}")
    if count * DIRECTORY_ENTRY.size > nbytes:
        raise _bad(part.path, f"its directory of {nbytes} bytes is said to have {count} entries")
    return begin, nbytes, count


def _parse_entry(path: Path, listing: bytes, cursor: int, directory_offset: int) -> tuple[ZipRecord, int]:
    """Return the entry at `cursor`, its `offset` still unknown (0), and the offset of the next one."""
    if cursor + DIRECTORY_ENTRY.size > len(listing):
        raise _bad(path, "its directory is cut off")
    fields = DIRECTORY_ENTRY.unpack_from(listing, cursor)
    if fields[0] != b"PK\x01\x02":
        raise _bad(path, f"its directory is damaged at byte {cursor}")
    flags, method, crc32, packed, nbytes = fields[3], fields[4], fields[7], fields[8], fields[9]
    name_bytes, extra_bytes, comment_bytes, disk, header_offset = *fields[10:14], fields[16]
    name_at = cursor + DIRECTORY_ENTRY.size
    extra_at = name_at + name_bytes
    after = extra_at + extra_bytes + comment_bytes
    if after > len(listing):
        raise _bad(path, "its directory is cut off")
    name = _name(path, listing[name_at:extra_at])
    if ZIP64_LIMIT in (nbytes, packed, header_offset):
        extra = listing[extra_at : extra_at + extra_bytes]
        nbytes, packed, header_offset = _zip64_values(path, name, extra, nbytes, packed, header_offset)
    if flags & _FLAGS_REFUSED or disk or method not in (_STORED, _DEFLATED):
        raise _bad(path, f"{name!r} is encrypted, in another part, or compressed in a way that torch does not know")
    if fields[15] & _IS_DIRECTORY and nbytes:
        raise _bad(path, f"{name!r} is said to be a directory")
    if method == _STORED and packed != nbytes:
        raise _bad(path, f"{name!r} is stored, yet has {nbytes} bytes in {packed}")
    if header_offset > directory_offset or packed > directory_offset - header_offset:
        raise _bad(path, f"{name!r} is said to be {packed} bytes from {header_offset} on, which the file does not have")
    return ZipRecord(name, header_offset, 0, packed, crc32, method != _STORED, nbytes), after


def _zip64_values(path: Path, name: str, extra: bytes, nbytes: int, packed: int, offset: int) -> tuple[int, int, int]:
    """Return the values that a zip64 extra field (4.5.3) gives for the saturated ones."""
    at = 0
    while at + 4 <= len(extra):
        tag, length = struct.unpack_from("<2H", extra, at)
        body = extra[at + 4 : at + 4 + length]
        if tag == 1 and len(body) == length:
            numbers = list(struct.unpack_from(f"<{length // 8}Q", body))
            try:
                nbytes = numbers.pop(0) if nbytes == ZIP64_LIMIT else nbytes
                packed = numbers.pop(0) if packed == ZIP64_LIMIT else packed
                offset = numbers.pop(0) if offset == ZIP64_LIMIT else offset
            except IndexError:
                break
            return nbytes, packed, offset
        at += 4 + length
    raise _bad(path, f"{name!r} lacks its zip64 sizes")


def unpacked_crc32(descriptor: int, path: Path, record: ZipRecord) -> int | None:
    """Return the checksum of a compressed record's unpacked bytes, in bounded memory; None if their size is wrong.

    Args:
        descriptor: of the file.
        path: for messages.
        record: deflated.
    """
    unpacker = zlib.decompressobj(-zlib.MAX_WBITS)
    checksum = nbytes = 0
    try:
        for begin in range(record.offset, record.end, _UNPACKED_BYTES):
            packed = _read_at(descriptor, path, begin, min(_UNPACKED_BYTES, record.end - begin))
            while packed and nbytes <= record.unpacked_nbytes:
                data = unpacker.decompress(packed, _UNPACKED_BYTES)
                checksum, nbytes = zlib.crc32(data, checksum), nbytes + len(data)
                packed = unpacker.unconsumed_tail
    except zlib.error:
        return None
    return checksum if nbytes == record.unpacked_nbytes and unpacker.eof else None


def _stated_alignment(part: _FileBytes, records: Mapping[str, ZipRecord]) -> int | None:
    """Return the alignment that the file's `.storage_alignment` states, in bytes; None without a valid one."""
    for name, record in records.items():
        if name.endswith("/.storage_alignment") and record.nbytes < 8 and not record.compressed:
            located = _locate(part, record, None)
            text = part.read(located.offset, located.nbytes)
            return int(text) if text.isdigit() and int(text) > 0 else None
    return None


def _locate(part: _FileBytes, entry: ZipRecord, alignment: int | None) -> ZipRecord:
    """Return the record with its `offset`."""
    if alignment is not None:
        offset = payload_offset(entry.header_offset, entry.name, entry.nbytes, alignment)
    else:
        header = LOCAL_HEADER.unpack(part.read(entry.header_offset, LOCAL_HEADER.size))
        if header[0] != b"PK\x03\x04":
            raise _bad(part.path, f"there is no header of {entry.name!r} at {entry.header_offset}, its stated offset")
        offset = entry.header_offset + LOCAL_HEADER.size + header[9] + header[10]
    return replace(entry, offset=offset)


def _check_apart(path: Path, records: Mapping[str, ZipRecord], directory_offset: int) -> None:
    """Raise CheckpointError if two records have bytes in common, or one reaches into the directory."""
    end, before = 0, ""
    for record in sorted(records.values(), key=lambda record: record.header_offset):
        if record.header_offset < end:
            raise _bad(path, f"{record.name!r} begins at {record.header_offset}, inside {before!r}")
        end, before = record.end, record.name
    if end > directory_offset:
        raise _bad(path, f"{before!r} reaches to {end}, beyond the {directory_offset} bytes before the directory")


def _name(path: Path, encoded: bytes) -> str:
    try:
        name = encoded.decode()
    except UnicodeDecodeError:
        raise _bad(path, f"the name {encoded!r} of a record is no text") from None
    if name.startswith("/") or "\\" in name or "\0" in name or ".." in name.split("/"):
        raise _bad(path, f"the name {name!r} of a record leads out of the archive")
    return name


def _read_at(descriptor: int, path: Path, offset: int, nbytes: int) -> bytes:
    data = read_filled(descriptor, path, offset, nbytes)
    if len(data) < nbytes:
        raise _bad(path, f"it ends at {offset + len(data)}, before what it says to have there")
    return data


def _bad(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path} is not a sound torch checkpoint: {what}. Take another copy of it")
