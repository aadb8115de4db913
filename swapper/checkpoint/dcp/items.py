"""Makes items of torch.distributed.checkpoint: a single tensor as torch.save writes it, at some offset of a file.

Everything except the payload is made here, so that the payload can be transferred directly. Inside, offsets count from
the item's own beginning and torch's alignment of 64 bytes holds; `head_gap` finds a beginning that aligns the payload
in the file.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch

from swapper.formats.torch_zip.pickle_writer import StorageRef, pickle_state
from swapper.formats.torch_zip.zip_writer import (
    ROOT,
    Entry,
    descriptor,
    directory,
    leading_records,
    local_header,
    serialization_id,
)

_ALIGNMENT = 64  # bytes; torch's own
_FILE_ALIGNMENT = 4096  # bytes; suits direct I/O on every drive


@dataclass(frozen=True)
class Item:
    """The item of one contiguous tensor of `nbytes` bytes: `head`, the payload, `tail(crc32)`."""

    head: bytes
    nbytes: int
    tail_nbytes: int
    _entries: tuple[Entry, ...]
    _cursor: int  # offset of the payload's local header

    @classmethod
    def of(cls, dtype: torch.dtype, shape: tuple[int, ...], requires_grad: bool = False) -> Item:
        stand_in = torch.empty(shape, dtype=dtype, device="meta")
        if requires_grad:
            stand_in.requires_grad_()
        nbytes = stand_in.numel() * dtype.itemsize
        pickled = pickle_state(stand_in, {"0": nbytes}, lambda tensor: StorageRef("0", 0)).data
        head = bytearray()
        entries = []
        for name, content in leading_records(pickled, _ALIGNMENT):
            entries.append(_append(head, f"{ROOT}/{name}", content))
        cursor = len(head)
        head += local_header(cursor, f"{ROOT}/data/0", nbytes, _ALIGNMENT)
        item = cls(bytes(head), nbytes, 0, tuple(entries), cursor)
        return cls(bytes(head), nbytes, len(item.tail(0)), tuple(entries), cursor)

    def tail(self, crc32: int) -> bytes:
        """Return the bytes after a payload with this CRC-32. Their length is always the same."""
        begin = len(self.head) + self.nbytes
        payload = Entry(f"{ROOT}/data/0", self._cursor, self.nbytes, crc32)
        tail = bytearray(descriptor(self._cursor, self.nbytes, crc32))
        entries = [*self._entries, payload]
        for name, content in (("version", b"3\n"), (".data/serialization_id", serialization_id(entries))):
            entries.append(_append(tail, f"{ROOT}/{name}", content, begin))
        return bytes(tail) + directory(entries, begin + len(tail), 1)

    def head_gap(self, position: int) -> int:
        """Return the bytes to skip at `position` of the file so that the payload lies at a multiple of 4096."""
        return -(position + len(self.head)) % _FILE_ALIGNMENT

    @property
    def total_nbytes(self) -> int:
        return len(self.head) + self.nbytes + self.tail_nbytes


def _append(data: bytearray, name: str, content: bytes, begin: int = 0) -> Entry:
    cursor = begin + len(data)
    entry = Entry(name, cursor, len(content), zlib.crc32(content))
    data += local_header(cursor, name, len(content), _ALIGNMENT)
    data += content
    data += descriptor(cursor, len(content), entry.crc32)
    return entry
