"""Locates the content of a commit: which bytes of which files have each section, and each tensor of it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from swapper.durability.commit import CommitRecord
from swapper.formats.stored import StoredTensor
from swapper.formats.torch_zip.container import ContainerLayout
from swapper.io.drives import read_drives
from swapper.paging.section import EXTERNAL

_SLOT = re.compile(r"(.+) (\S+): (\w+) \[([0-9, ]*)\] at ([0-9]+)")


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor of a section: `kind` is "param", "master" or a key of the optimizer's state; `offset` counts from the section."""

    owner: str
    kind: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def name(self) -> str:
        return self.owner if self.kind == "param" else f"{self.owner} {self.kind}"

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class StoredPiece:
    """Bytes of a section: `path` is None for external content, which has no checksum."""

    path: Path | None
    offset: int
    nbytes: int
    crc32: int


@dataclass(frozen=True)
class StoredSection:
    """A section's tensors, and its pieces in order; `offset` is that of its payload in a container."""

    name: str
    offset: int
    tensors: Sequence[PlannedTensor]
    pieces: Sequence[StoredPiece]

    def parts(self, tensor: PlannedTensor) -> tuple[StoredTensor, ...] | None:
        """Return the runs of bytes that have the tensor's elements, in order; None: they are external."""
        found = []
        begin, end = self.offset + tensor.offset, self.offset + tensor.offset + tensor.nbytes
        at = self.offset
        for piece in self.pieces:
            first, last = max(begin, at), min(end, at + piece.nbytes)
            if first < last:
                if piece.path is None:
                    return None
                shape = ((last - first) // tensor.dtype.itemsize,)
                found.append(StoredTensor(tensor.name, piece.path, first, last - first, tensor.dtype, shape))
            at += piece.nbytes
        return tuple(found)


def stored_sections(directory: Path, record: CommitRecord) -> Iterator[StoredSection]:
    """Yield the sections of a commit in `directory`.

    Raises:
        LookupError, AttributeError, TypeError, ValueError: the record contradicts itself.
    """
    layout = ContainerLayout.plan([section.nbytes for section in record.sections])
    drives = read_drives(directory)
    assigned = iter(drives.assign_to_drives([nbytes for section in record.sections for nbytes in section.sizes]))
    for place, section, (name, tensors) in zip(layout.records, record.sections, parse_plans(record.plans), strict=True):
        pieces, offset = [], place.offset
        for number, crc32, nbytes in zip(section.files, section.crc32s, section.sizes, strict=True):
            folder = drives.directories[next(assigned)]
            pieces.append(
                StoredPiece(None if number == EXTERNAL else folder / record.files[number], offset, nbytes, crc32)
            )
            offset += nbytes
        yield StoredSection(name, place.offset, tensors, pieces)


def parse_plans(plans: Sequence[str]) -> list[tuple[str, list[PlannedTensor]]]:
    """Return (name, its tensors) of each section, from the lines of `describe_plans`."""
    sections: list[tuple[str, list[PlannedTensor]]] = []
    for line in plans:
        match = _SLOT.fullmatch(line)
        if match is None:
            sections.append((line.rpartition(":")[0], []))
            continue
        owner, kind, dtype, sizes, offset = match.groups()
        shape = tuple(int(size) for size in sizes.split(", ") if size)
        sections[-1][1].append(PlannedTensor(owner, kind, getattr(torch, dtype), shape, int(offset)))
    return sections
