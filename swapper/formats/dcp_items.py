"""Makes items of torch.distributed.checkpoint: a single tensor as torch.save writes it, at some offset of a file.

Everything except the payload is made here, so that the payload can be transferred directly. Inside, offsets count from
the item's own beginning and torch's alignment of 64 bytes holds; `head_gap` finds a beginning that aligns the payload
in the file.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from swapper.formats.torch_zip.pickle_writer import StorageRef, pickle_state
from swapper.formats.torch_zip.zip_writer import ROOT, Entry, RecordBytes, descriptor, leading_records, local_header
from swapper.io.alignment import SECTOR_BYTES

_ALIGNMENT = 64  # bytes; torch's own


@dataclass(frozen=True)
class Item:
    """The item of one contiguous tensor of `nbytes` bytes: `head`, the payload, `tail(crc32)`."""

    head: bytes
    nbytes: int
    tail_nbytes: int
    _entries: tuple[Entry, ...]
    _cursor: int  # offset of the payload's local header

    @classmethod
    def of(cls, dtype: torch.dtype, shape: tuple[int, ...]) -> Item:
        stand_in = torch.empty(shape, dtype=dtype, device="meta")
        nbytes = stand_in.numel() * dtype.itemsize
        pickled = pickle_state(stand_in, {"0": nbytes}, lambda tensor: StorageRef("0", 0)).data
        head = RecordBytes(_ALIGNMENT)
        for name, content in leading_records(pickled, _ALIGNMENT):
            head.add(name, content)
        cursor = len(head.data)
        head.data += local_header(cursor, f"{ROOT}/data/0", nbytes, _ALIGNMENT)
        item = cls(bytes(head.data), nbytes, 0, tuple(head.entries), cursor)
        return replace(item, tail_nbytes=len(item.tail(0)))

    def tail(self, crc32: int) -> bytes:
        """Return the bytes after a payload with this CRC-32. Their length is always the same."""
        payload = Entry(f"{ROOT}/data/0", self._cursor, self.nbytes, crc32)
        tail = RecordBytes(_ALIGNMENT, len(self.head) + self.nbytes, [*self._entries, payload])
        tail.data += descriptor(self._cursor, self.nbytes, crc32)
        tail.add_trailing()
        return tail.finish(1)

    def head_gap(self, position: int) -> int:
        """Return the bytes to skip at `position` of the file so that the payload lies at a multiple of 4096."""
        return -(position + len(self.head)) % SECTOR_BYTES

    @property
    def total_nbytes(self) -> int:
        return len(self.head) + self.nbytes + self.tail_nbytes


@lru_cache(maxsize=4096)
def item_of(dtype: torch.dtype, shape: tuple[int, ...]) -> Item:
    return Item.of(dtype, shape)
