"""Plans the reads of a group's tensors. Pure: places in files -> runs of bytes.

A *run* is a range of one file that is read as one and lies in memory as it lies in the file: its tensors are views at
the addresses of their offsets. If those addresses suit the kernels, the run begins at a sector, and its reads go from
the drive straight to their target. If not, the whole run is shifted until they do; the engine then stages reads in its
slots if the drive cannot transfer to such addresses.

[Note: alignment] Kernels in fp32 give other bits at addresses that are no multiple of 16 (matrix times vector), so wide
elements lie at multiples of 64, as in torch's own allocations. Elements of two bytes and less gave the same bits at
every address: they only need their own alignment.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from swapper.formats.stored import StoredTensor
from swapper.io.alignment import SECTOR_BYTES, TENSOR_ALIGNMENT_BYTES, round_up

LOOSE_ITEM_BYTES = 2  # see [Note: alignment]
MAX_GAP_BYTES = 64 << 10
"""Bytes. Tensors closer than this are read together, with the gap: reading it costs less than another transfer."""


@dataclass(frozen=True, slots=True)
class FileRange:
    """Bytes [file_offset, file_offset + nbytes) of a file, as far as it goes; `nbytes` is a multiple of SECTOR_BYTES.

    `places`: each tensor's offset in the run, by its position in the planned tensors.
    """

    path: Path
    file_offset: int
    nbytes: int
    places: tuple[tuple[int, int], ...]


def plan_runs(tensors: Iterable[StoredTensor]) -> list[FileRange]:
    """Return runs that hold all `tensors`, in the order of files and offsets. Empty tensors are in none."""
    ordered = sorted(
        ((number, tensor) for number, tensor in enumerate(tensors) if tensor.nbytes),
        key=lambda item: (item[1].path, item[1].offset),
    )
    runs = []
    run: _GrowingRange | None = None
    for number, tensor in ordered:
        if run is None or not run.add(number, tensor):
            if run is not None:
                runs.append(run.planned())
            run = _GrowingRange(number, tensor)
    if run is not None:
        runs.append(run.planned())
    return runs


class _GrowingRange:
    """A run that grows by tensors with ascending offsets. It may begin at any offset that is `rest` modulo `alignment`."""

    def __init__(self, number: int, tensor: StoredTensor) -> None:
        self._members = [(number, tensor)]
        self._end = tensor.offset + tensor.nbytes
        self._alignment = _alignment(tensor)
        self._rest = tensor.offset % self._alignment

    def add(self, number: int, tensor: StoredTensor) -> bool:
        """Add a tensor, unless it is far away, or cannot be aligned together with the others."""
        if tensor.path != self._members[0][1].path or tensor.offset - self._end > MAX_GAP_BYTES:
            return False
        alignment = _alignment(tensor)
        least, most = sorted((alignment, self._alignment))
        rest = self._rest if self._alignment == most else tensor.offset % alignment
        if (tensor.offset - rest) % alignment or (self._rest - rest) % least or self._begin(most, rest) < 0:
            return False
        self._members.append((number, tensor))
        self._end = max(self._end, tensor.offset + tensor.nbytes)
        self._alignment, self._rest = most, rest
        return True

    def planned(self) -> FileRange:
        begin = self._begin(self._alignment, self._rest)
        places = tuple((number, tensor.offset - begin) for number, tensor in self._members)
        return FileRange(self._members[0][1].path, begin, round_up(self._end - begin, SECTOR_BYTES), places)

    def _begin(self, alignment: int, rest: int) -> int:
        """Return the file offset at which it begins: that of a sector if it suits, else the last before the first tensor."""
        first = self._members[0][1].offset
        if rest == 0:  # alignments divide sectors
            return first // SECTOR_BYTES * SECTOR_BYTES
        return first - (first - rest) % alignment


def _alignment(tensor: StoredTensor) -> int:
    """Return the alignment that a tensor's memory must have, in bytes. [Note: alignment]"""
    itemsize = tensor.dtype.itemsize
    return itemsize if itemsize <= LOOSE_ITEM_BYTES else TENSOR_ALIGNMENT_BYTES
