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
    members: list[tuple[int, StoredTensor]] = []
    for item in ordered:
        if members and not _fits(members, item[1]):
            runs.append(_run(members))
            members = []
        members.append(item)
    if members:
        runs.append(_run(members))
    return runs


def _fits(members: list[tuple[int, StoredTensor]], tensor: StoredTensor) -> bool:
    end = max(member.offset + member.nbytes for _, member in members)
    if tensor.path != members[0][1].path or tensor.offset - end > MAX_GAP_BYTES:
        return False
    return _begin([*(member for _, member in members), tensor]) is not None


def _run(members: list[tuple[int, StoredTensor]]) -> FileRange:
    tensors = [tensor for _, tensor in members]
    begin = _begin(tensors)
    if begin is None:
        raise AssertionError("a run of tensors that do not go together")  # _fits excludes it
    end = max(tensor.offset + tensor.nbytes for tensor in tensors)
    places = tuple((number, tensor.offset - begin) for number, tensor in members)
    return FileRange(tensors[0].path, begin, round_up(end - begin, SECTOR_BYTES), places)


def _begin(tensors: list[StoredTensor]) -> int | None:
    """Return a file offset at which a run of `tensors` (ascending) can begin with all aligned, or None."""
    first = tensors[0].offset
    whole_sectors = first // SECTOR_BYTES * SECTOR_BYTES
    if all((tensor.offset - whole_sectors) % _alignment(tensor) == 0 for tensor in tensors):
        return whole_sectors
    strictest = max(tensors, key=_alignment)
    begin = first - (first - strictest.offset) % _alignment(strictest)
    if begin < 0 or any((tensor.offset - begin) % _alignment(tensor) for tensor in tensors):
        return None
    return begin


def _alignment(tensor: StoredTensor) -> int:
    """See [Note: alignment]."""
    itemsize = tensor.dtype.itemsize
    return itemsize if itemsize <= LOOSE_ITEM_BYTES else TENSOR_ALIGNMENT_BYTES
