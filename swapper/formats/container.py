"""Makes a container, a swap file that plain torch.load reads: all of its bytes except the payloads.

It is a stored zip, as torch.save writes it, with two liberties that every reader allows. The payload records come
first, so that their offsets are known before any payload byte; and data.pkl, the other small records and the central
directory come last: the **tail**. A live swap file has no tail, so that nothing loads it by accident; publishing writes
it. Payloads and all else fill whole, disjoint runs of 4096 bytes, for direct transfers. Nothing here opens a file.

[Note: manifest and seal] A zip has checksums of its records, but none of the bytes between them. So a snapshot has one
record more, the **manifest** (JSON): the CRC-32 of every run of bytes before the tail, headers and padding included,
and the tensors in it. The **seal** is text at the start of the comment of the zip's end record: the tail's offset and
the CRC-32 of all bytes from there to the comment. The rest of the comment is zeros. So each byte of the file is in
exactly one checked run.

Sources of the format: caffe2/serialize/inline_container.cc, torch/serialization.py, PKWARE's APPNOTE.TXT. Decision:
docs/decisions/container-format.md.
"""

from __future__ import annotations

import ctypes
import json
import re
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from swapper import _C
from swapper.errors import CheckpointError
from swapper.formats.torch_writer import (
    ROOT,
    Entry,
    Locate,
    RecordBytes,
    descriptor,
    descriptor_nbytes,
    leading_records,
    local_header,
    payload_offset,
    pickle_state,
)
from swapper.io.tensor_bytes import device_errors
from swapper.runtime import records

ALIGNMENT = 4096
"""Bytes. Payload offsets and sizes, header chunks and tails are multiples of this, as direct I/O needs."""

ITEMS_NAME = "swapper/items"
MANIFEST_NAME = "swapper/manifest.json"
FORMAT = 1  # of the manifest; other numbers are refused
END_RECORD_BYTES = 22
"""Bytes of a zip's end record without its comment (APPNOTE 4.3.16)."""
MAX_END_BYTES = END_RECORD_BYTES + 0xFFFF
_END_SIGNATURE = b"PK\x05\x06"
_SEAL = re.compile(rb"swapper-seal from ([0-9]{20}) crc32 ([0-9a-f]{8})\n\0*", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Record:
    """One payload: the storage that torch.load finds as `<root>/data/<key>`."""

    key: str  # "0", "1", ... in file order
    nbytes: int  # a multiple of ALIGNMENT, not 0
    header_offset: int  # bytes from the start of the file to the zip local header
    offset: int  # bytes from the start of the file to the payload; a multiple of ALIGNMENT

    @property
    def end(self) -> int:
        """File offset of the first byte after the payload; a multiple of ALIGNMENT."""
        return self.offset + self.nbytes


@dataclass(frozen=True, slots=True)
class ContainerLayout:
    """The location of everything before the tail: a function of the records' sizes alone. Made by `plan`."""

    records: tuple[Record, ...]
    tail_offset: int  # bytes; the end of the last payload, a multiple of ALIGNMENT

    @classmethod
    def plan(cls, sizes: Sequence[int]) -> ContainerLayout:
        """Lay out payload records of `sizes` bytes, in that order, each a positive multiple of ALIGNMENT.

        Raises:
            CheckpointError: a size is not allowed.
        """
        records: list[Record] = []
        cursor = 0
        for index, nbytes in enumerate(sizes):
            if nbytes <= 0 or nbytes % ALIGNMENT:
                raise CheckpointError(f"record {index} of {nbytes} bytes: sizes are positive multiples of {ALIGNMENT}")
            record = Record(str(index), nbytes, cursor, payload_offset(cursor, _name(index), nbytes, ALIGNMENT))
            records.append(record)
            cursor = record.end + descriptor_nbytes(cursor, nbytes)
        return cls(tuple(records), records[-1].end if records else 0)

    def headers(self) -> Iterator[tuple[int, bytes]]:
        """Yield (file offset, bytes) of everything before and between the payloads.

        Offsets and lengths are multiples of ALIGNMENT. Each chunk ends where a payload begins: it holds the data
        descriptor of the previous payload and the local header. The descriptors state a CRC of 0, so that the chunks
        never change in the life of a swap file; readers take the CRC from the central directory.
        """
        before = b""
        begin = 0
        for record in self.records:
            yield begin, before + local_header(record.header_offset, _name(record.key), record.nbytes, ALIGNMENT)
            before = descriptor(record.header_offset, record.nbytes, 0)
            begin = record.end


class PreparedTail:
    """A tail whose content is captured before the payloads' checksums are known.

    Args:
        layout: the container's plan.
        obj: the result of torch.load: any nesting of dict, OrderedDict (with `_metadata`), list, tuple, set, plain
            values and dense plain tensors, as in state_dict().
        locate: the place of a tensor in the payload records. Tensors for which it returns None are resident: their
            whole storages are copied now, shared ones once. Of located tensors only shape, stride, dtype, layout and
            requires_grad are read. All tensors of a record have one dtype, unless it is untyped.
        items: makes one more record, of items of torch.distributed.checkpoint (formats/dcp_format.py). It gets the
            record's offset in the file and the directory's entries of the payloads by key.

    Raises:
        CheckpointError: the default torch.load could not read `obj`, or a tensor is not where `locate` says.
    """

    def __init__(
        self,
        layout: ContainerLayout,
        obj: object,
        locate: Locate,
        items: Callable[[int, Mapping[str, Entry]], bytes] | None = None,
    ) -> None:
        self._layout = layout
        self._items = items
        pickled = pickle_state(obj, {record.key: record.nbytes for record in layout.records}, locate)
        self._data = pickled.data
        # ".format_version" allows a reader to compute offsets instead of looking them up, from the order in which it
        # meets the storages (`_get_offset` in torch/serialization.py): right only if it meets them in file order.
        self._in_file_order = pickled.keys == tuple(str(index) for index in range(len(pickled.keys)))
        self._resident = {key: _bytes_of(storage) for key, storage in pickled.resident.items()}

    def build(
        self,
        chunks: Sequence[ChecksumChunk],
        tensors: Mapping[str, Sequence[TensorPlace]] | None = None,
        left_out: Collection[str] = (),
    ) -> bytes:
        """Make the whole tail of a container: all bytes from `layout.tail_offset` to the end of the file.

        Their number is a multiple of ALIGNMENT. The file must end there: truncate a longer old tail.

        Args:
            chunks: checksums that together are those of all payloads, each byte once.
            tensors: the tensors of each record, by key, for the manifest.
            left_out: keys of records to omit, though the layout has space for them.

        Raises:
            CheckpointError: `chunks` do not fit the layout.
        """
        begin, records = self._layout.tail_offset, self._layout.records
        headers = [ChecksumChunk(offset, len(data), zlib.crc32(data)) for offset, data in self._layout.headers()]
        manifest = Manifest.make([*headers, *chunks], begin, tensors or {})
        by_offset = {chunk.offset: chunk for chunk in chunks if chunk.nbytes}
        payloads = {
            record.key: Entry(_name(record.key), record.header_offset, record.nbytes, _payload_crc32(record, by_offset))
            for record in records
        }
        tail = RecordBytes(ALIGNMENT, begin, [entry for key, entry in payloads.items() if key not in left_out])
        if records:  # the last payload's descriptor; the others are in the header chunks
            last = payloads[records[-1].key]
            tail.data += descriptor(last.header_offset, last.nbytes, last.crc32)
        for key, content in self._resident.items():
            tail.add(f"data/{key}", content)
        for name, content in leading_records(self._data, ALIGNMENT):
            if name != ".format_version" or self._in_file_order:
                tail.add(name, content)
        if self._items is not None:
            tail.add(ITEMS_NAME, self._items(tail.next_offset(ITEMS_NAME), payloads))
        tail.add_trailing()
        tail.add(MANIFEST_NAME, manifest.encode())
        return _seal_tail(tail.finish(ALIGNMENT), begin)


def _name(key: int | str) -> str:
    return f"{ROOT}/data/{key}"


def _payload_crc32(record: Record, chunks: Mapping[int, ChecksumChunk]) -> int:
    """Return the CRC-32 of a payload from those of the chunks that it consists of, by offset."""
    crc32, offset = 0, record.offset
    while offset < record.end:
        chunk = chunks[offset]
        crc32, offset = _C.crc32_combine(crc32, chunk.crc32, chunk.nbytes), chunk.end
    return crc32


def _bytes_of(storage: torch.UntypedStorage) -> bytes:
    with device_errors(storage.device, "copying a tensor for a checkpoint"):
        on_host: torch.UntypedStorage = storage.cpu()
    return ctypes.string_at(on_host.data_ptr(), on_host.nbytes())


# --- [Note: manifest and seal] ---


@dataclass(frozen=True, slots=True)
class ChecksumChunk:
    """A run of bytes of the file and its CRC-32."""

    offset: int  # bytes from the start of the file
    nbytes: int
    crc32: int

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """One tensor of a record: bytes [offset, offset + nbytes) of the file."""

    name: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """Checksums of all bytes before the tail, in file order, and which tensors lie there, by record."""

    chunks: tuple[ChecksumChunk, ...]
    tensors: Mapping[str, tuple[TensorPlace, ...]]

    @classmethod
    def make(
        cls, chunks: Sequence[ChecksumChunk], nbytes: int, tensors: Mapping[str, Sequence[TensorPlace]]
    ) -> Manifest:
        """Return the manifest of `nbytes` bytes. Raises CheckpointError: the chunks do not cover them exactly once.

        Args:
            chunks: with checksums, in any order.
            nbytes: of the file.
            tensors: the places of each tensor, by name.
        """
        ordered = tuple(sorted(chunks, key=lambda chunk: chunk.offset))
        ends = [0, *(chunk.end for chunk in ordered)]
        if [chunk.offset for chunk in ordered] != ends[:-1] or ends[-1] != nbytes:
            raise CheckpointError(f"a container's checksums cover its first {nbytes} bytes without gap or overlap")
        return cls(ordered, {key: tuple(places) for key, places in tensors.items()})

    def encode(self) -> bytes:
        content = {
            "format": FORMAT,
            "chunks": [[chunk.offset, chunk.nbytes, chunk.crc32] for chunk in self.chunks],
            "tensors": {key: [[p.name, p.offset, p.nbytes] for p in places] for key, places in self.tensors.items()},
        }
        return json.dumps(content, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, data: bytes, nbytes: int) -> Manifest:
        """Return the manifest that `encode` made, of a container whose tail begins at `nbytes`.

        Raises:
            CheckpointError: it is not one, or of another version.
        """
        try:
            content = records.parse_json(data)
            if content["format"] != FORMAT:
                raise CheckpointError(f"manifest format {str(content['format'])[:20]}; this swapper reads {FORMAT}")
            chunks = [ChecksumChunk(*map(int, row)) for row in content["chunks"]]
            tensors = {
                str(key): [TensorPlace(str(name), int(offset), int(size)) for name, offset, size in rows]
                for key, rows in content["tensors"].items()
            }
            return cls.make(chunks, nbytes, tensors)
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
            raise CheckpointError(f"the manifest cannot be read ({type(error).__name__})") from error


@dataclass(frozen=True, slots=True)
class Seal:
    """The seal of a file: bytes [begin, end) have this CRC-32, and the rest of the file is the comment."""

    begin: int
    end: int
    crc32: int


def _seal_tail(tail: bytes, begin: int) -> bytes:
    """Return `tail`, all bytes of a container from offset `begin` on, with a seal in the comment of its end record."""
    end = tail.rindex(_END_SIGNATURE) + END_RECORD_BYTES
    text_nbytes = len(_seal_text(0, 0))
    comment_nbytes = len(tail) - end
    if comment_nbytes < text_nbytes:
        comment_nbytes += ALIGNMENT
    body = tail[: end - 2] + comment_nbytes.to_bytes(2, "little")
    return body + _seal_text(begin, zlib.crc32(body)).ljust(comment_nbytes, b"\0")


def find_seal(last: bytes, file_nbytes: int) -> Seal | None:
    """Return the seal of a file of `file_nbytes` bytes, of which `last` are the last MAX_END_BYTES (or all of them).

    None if there is none: the file was never sealed, or its end is damaged.
    """
    at = last.rfind(_END_SIGNATURE)
    if at < 0 or at + END_RECORD_BYTES > len(last):
        return None
    comment = last[at + END_RECORD_BYTES :]
    match = _SEAL.fullmatch(comment)
    if match is None or int.from_bytes(last[at + END_RECORD_BYTES - 2 : at + END_RECORD_BYTES], "little") != len(
        comment
    ):
        return None  # some of its zeros may be missing, or others appended
    end = file_nbytes - len(comment)
    begin = int(match[1])
    return Seal(begin, end, int(match[2], 16)) if begin < end else None


def _seal_text(begin: int, crc32: int) -> bytes:
    return b"swapper-seal from %020d crc32 %08x\n" % (begin, crc32)
