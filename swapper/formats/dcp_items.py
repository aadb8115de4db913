"""Makes items of torch.distributed.checkpoint: a single tensor as torch.save writes it, at some offset of a file.

Everything except the payload is made here, so that the payload can be transferred directly. Inside, offsets count from
the item's own beginning and torch's alignment of 64 bytes holds; `head_gap` aligns the payload in the file.

[Note: items of a container] A tensor that lies in a payload record of a container is an item without a copy of it: the
bytes from 0 to the end of a small zip directory of its own, which lists the payload record where it is and a data.pkl
of this tensor alone. These directories are a record of the container's tail. torch's own reader loads the whole payload
record for each item; `swapper.checkpoint.dcp.StorageReader` reads the tensor's bytes alone.
"""

from __future__ import annotations

import ctypes
import io
import sys
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

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


class ContainerItems:
    """The items of a container, as a record of its tail. See [Note: items of a container].

    Attributes:
        places: (offset, nbytes) in the file of each item, by the index that `add` was given. Filled by `build`.
    """

    def __init__(self) -> None:
        self._contents: dict[object, bytes | tuple[str, bytes]] = {}
        self.places: dict[object, tuple[int, int]] = {}

    def add(self, index: object, value: Any, place: StorageRef | None, record_nbytes: int) -> None:
        """Add an item.

        Args:
            value: a plain tensor, or bytes that torch.load reads.
            place: of the tensor in a payload record of `record_nbytes` bytes; None copies it.
        """
        if isinstance(value, bytes):
            self._contents[index] = value
        elif place is None:
            self._contents[index] = _saved(value)
        else:
            grad = value.requires_grad
            pickled = _pickled(place, record_nbytes, value.dtype, tuple(value.shape), value.stride(), grad)
            self._contents[index] = (place.key, pickled)

    def build(self, begin: int, payloads: Mapping[str, Entry]) -> bytes:
        """Return the record's content, which begins at offset `begin` of the file.

        Args:
            payloads: directory entries of the payload records, by key.
        """
        data = bytearray()
        for index, content in self._contents.items():
            at = begin + len(data)
            if isinstance(content, bytes):
                data += content
                self.places[index] = at, len(content)
                continue
            key, pickled = content
            item = RecordBytes(_ALIGNMENT, at, [payloads[key]])
            for name, record in (("data.pkl", pickled), ("byteorder", sys.byteorder.encode()), ("version", b"3\n")):
                item.add(name, record)
            data += item.finish(1)
            self.places[index] = 0, begin + len(data)
        return bytes(data)


@lru_cache(maxsize=8192)
def _pickled(
    place: StorageRef,
    record_nbytes: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    grad: bool,
) -> bytes:
    """Return the pickle of a plain tensor at `place`. Each snapshot of a run has the same."""
    tensor = torch.empty_strided(shape, stride, dtype=dtype, device="meta", requires_grad=grad)
    return pickle_state(tensor, {place.key: record_nbytes}, lambda _: place).data


def _saved(value: object) -> bytes:
    """Return the item of a tensor, made of a copy."""
    if type(value) is not torch.Tensor or value.layout is not torch.strided or value.is_quantized:
        file = io.BytesIO()
        torch.save(value, file)
        return file.getvalue()
    flat = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
    item = item_of(value.dtype, tuple(value.shape))
    payload = ctypes.string_at(flat.data_ptr(), item.nbytes) if item.nbytes else b""
    return item.head + payload + item.tail(zlib.crc32(payload))
