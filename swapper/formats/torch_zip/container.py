"""Makes a container, a swap file that plain torch.load reads: all of its bytes except the payloads.

It is a stored zip, as torch.save writes it, with two liberties that every reader allows. The payload records come
first, so that their offsets are known before any payload byte; and data.pkl, the other small records and the central
directory come last: the **tail**. A live swap file has no tail, so that nothing loads it by accident; publishing writes
it. Payloads and everything else fill whole, disjoint runs of 4096 bytes, so that all transfers can be direct. Nothing
here opens a file.

Sources of the format: caffe2/serialize/inline_container.cc, torch/serialization.py, PKWARE's APPNOTE.TXT. Decision:
docs/decisions/container-format.md.
"""

from __future__ import annotations

import ctypes
import re
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from swapper.errors import CheckpointError
from swapper.formats.torch_zip.manifest import MANIFEST_NAME, ChecksumChunk, Manifest, TensorPlace, seal_tail
from swapper.formats.torch_zip.pickle_writer import Pickled, StorageRef, pickle_state
from swapper.formats.torch_zip.zip_writer import (
    Entry,
    descriptor,
    descriptor_nbytes,
    directory,
    leading_records,
    local_header,
    payload_offset,
    serialization_id,
)
from swapper.io.elements import device_errors

ALIGNMENT = 4096
"""Bytes. Payload offsets and sizes, header chunks and tails are multiples of this, as direct I/O needs."""

ITEMS_NAME = "swapper/items"
_ROOT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")


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

    root: str  # the zip folder of all records
    records: tuple[Record, ...]
    tail_offset: int  # bytes; the end of the last payload, a multiple of ALIGNMENT

    @classmethod
    def plan(cls, sizes: Sequence[int], root: str = "archive") -> ContainerLayout:
        """Lay out payload records of `sizes` bytes, in that order, each a positive multiple of ALIGNMENT.

        Raises:
            CheckpointError: a size or the root's name is not allowed.
        """
        if not _ROOT.fullmatch(root):
            raise CheckpointError(f"container root {root!r}: use up to 200 of A-Z a-z 0-9 _ . -, not . or - first")
        records: list[Record] = []
        cursor = 0
        for index, nbytes in enumerate(sizes):
            if nbytes <= 0 or nbytes % ALIGNMENT:
                raise CheckpointError(f"record {index} of {nbytes} bytes: sizes are positive multiples of {ALIGNMENT}")
            record = Record(str(index), nbytes, cursor, payload_offset(cursor, _name(root, index), nbytes, ALIGNMENT))
            records.append(record)
            cursor = record.end + descriptor_nbytes(cursor, nbytes)
        return cls(root, tuple(records), records[-1].end if records else 0)

    def headers(self) -> Iterator[tuple[int, bytes]]:
        """Yield (file offset, bytes) of everything before and between the payloads.

        Offsets and lengths are multiples of ALIGNMENT. Each chunk ends where a payload begins: it holds the data
        descriptor of the previous payload and the local header. The descriptors state a CRC of 0, so that the chunks
        never change in the life of a swap file; readers take the CRC from the central directory.
        """
        before = b""
        begin = 0
        for record in self.records:
            name = _name(self.root, record.key)
            yield begin, before + local_header(record.header_offset, name, record.nbytes, ALIGNMENT)
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
            requires_grad are read. All tensors of one record must have one dtype.
        items: makes one more record, of items of torch.distributed.checkpoint (formats/dcp_items.py). It gets the
            record's offset in the file and the directory's entries of the payloads by key.

    Raises:
        CheckpointError: the default torch.load could not read `obj`, or a tensor is not at the place that `locate`
            returns.
    """

    def __init__(
        self,
        layout: ContainerLayout,
        obj: object,
        locate: Callable[[torch.Tensor], StorageRef | None],
        items: Callable[[int, Mapping[str, Entry]], bytes] | None = None,
    ) -> None:
        self._layout = layout
        self._items = items
        pickled = pickle_state(obj, {record.key: record.nbytes for record in layout.records}, locate)
        self._data = pickled.data
        self._in_file_order = _in_file_order(pickled)
        self._resident = {key: _bytes_of(storage) for key, storage in pickled.resident.items()}

    def build(
        self,
        crc32s: Mapping[str, int],
        pieces: Sequence[ChecksumChunk] | None = None,
        tensors: Mapping[str, Sequence[TensorPlace]] | None = None,
        left_out: Collection[str] = (),
    ) -> bytes:
        """Make the whole tail of a container: all bytes from `layout.tail_offset` to the end of the file.

        Their number is a multiple of ALIGNMENT. The file must end there: truncate a longer old tail.

        Args:
            crc32s: CRC-32 of the whole payload of each record, by key.
            pieces: the same by pieces that together are all payloads. With them, the tail gets a manifest and a seal,
                which verify every byte of the file.
            tensors: the tensors of each record, by key, for the manifest.
            left_out: keys of records to omit, though the layout has space for them.

        Raises:
            CheckpointError: `crc32s` or `pieces` do not fit the layout.
        """
        if crc32s.keys() != {record.key for record in self._layout.records}:
            raise CheckpointError(
                f"need one CRC-32 for each of {len(self._layout.records)} records, got {sorted(crc32s)}"
            )
        tail = _Tail(self._layout, crc32s, left_out)
        for key, content in self._resident.items():
            tail.add(f"data/{key}", content)
        for name, content in leading_records(self._data, ALIGNMENT):
            if name != ".format_version" or self._in_file_order:
                tail.add(name, content)
        if self._items is not None:
            tail.add(ITEMS_NAME, self._items(tail.next_offset(ITEMS_NAME), tail.payloads))
        tail.add("version", b"3\n")
        tail.add(".data/serialization_id", serialization_id(tail.entries))
        if pieces is None:
            return tail.finish()
        headers = [ChecksumChunk(offset, len(data), zlib.crc32(data)) for offset, data in self._layout.headers()]
        tail.add(MANIFEST_NAME, Manifest.make([*headers, *pieces], self._layout.tail_offset, tensors or {}).encode())
        return seal_tail(tail.finish(), self._layout.tail_offset, ALIGNMENT)


class _Tail:
    """The tail under construction: the bytes so far, and the directory entry of every record of the file."""

    def __init__(self, layout: ContainerLayout, crc32s: Mapping[str, int], left_out: Collection[str] = ()) -> None:
        self._root = layout.root
        self._begin = layout.tail_offset
        self.entries = [
            Entry(_name(layout.root, record.key), record.header_offset, record.nbytes, crc32s[record.key])
            for record in layout.records
        ]
        self._bytes = bytearray()
        if self.entries:  # the last payload's descriptor; the others are in the header chunks
            last = self.entries[-1]
            self._bytes += descriptor(last.header_offset, last.nbytes, last.crc32)
        self.payloads = {record.key: entry for record, entry in zip(layout.records, self.entries, strict=True)}
        absent = {_name(layout.root, key) for key in left_out}
        self.entries = [entry for entry in self.entries if entry.name not in absent]

    def next_offset(self, name: str) -> int:
        """Return the offset in the file of the content of a record that is added next, of less than 4 GiB."""
        return payload_offset(self._begin + len(self._bytes), f"{self._root}/{name}", 0, ALIGNMENT)

    def add(self, name: str, content: bytes) -> None:
        cursor = self._begin + len(self._bytes)
        entry = Entry(f"{self._root}/{name}", cursor, len(content), zlib.crc32(content))
        self.entries.append(entry)
        self._bytes += local_header(cursor, entry.name, len(content), ALIGNMENT)
        self._bytes += content
        self._bytes += descriptor(cursor, len(content), entry.crc32)

    def finish(self) -> bytes:
        self._bytes += directory(self.entries, self._begin + len(self._bytes), ALIGNMENT)
        return bytes(self._bytes)


def _in_file_order(pickled: Pickled) -> bool:
    # ".format_version" allows a reader to compute offsets instead of looking them up, from the order in which it meets
    # the storages (`_get_offset` in torch/serialization.py). That is right only if it meets them in file order.
    return pickled.keys == tuple(str(index) for index in range(len(pickled.keys)))


def _name(root: str, key: int | str) -> str:
    return f"{root}/data/{key}"


def _bytes_of(storage: torch.UntypedStorage) -> bytes:
    with device_errors(storage.device, "copying a tensor for a checkpoint"):
        on_host: torch.UntypedStorage = storage.cpu()  # type: ignore[no-untyped-call]
    return ctypes.string_at(on_host.data_ptr(), on_host.nbytes())
