"""Where the content of sections comes from when they are filled: the user's model and optimizer, or an earlier layout of the run.

The model and the optimizer give it when they are offloaded. When more is trained later (train/session/relayout.py),
everything that there was is read from where the layout before has it in its files, however it is divided there; only
what is new comes from the optimizer. `iter_section_pages` goes through a section outside of the order of a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from swapper.durability.copying import CopyRange, checksums_of
from swapper.errors import CheckpointError, InvariantError
from swapper.io import beneath
from swapper.io.engines import open_engine
from swapper.io.waiting import all_over
from swapper.paging.pager import Pager
from swapper.paging.planning.layout import SectionPlan, Slot, TensorSpec
from swapper.paging.planning.schedule import Access
from swapper.paging.section import EXTERNAL, Page, Section
from swapper.train.layout.inventory import MASTER
from swapper.train.layout.slices import TensorLocation

STAGING_BYTES = 4 << 20


class SectionSource(Protocol):
    """What fills sections."""

    def begin(self, parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
        """These parameters, with their qualified names, and what the optimizer has for them are asked for next."""

    def state(self, name: str) -> Mapping[str, Any]:
        """Return what the user's optimizer has for a parameter."""

    def fill(self, spec: TensorSpec, begin: int, end: int, view: torch.Tensor) -> None:
        """Give `view`, which is zeros, elements [begin, end) of a tensor. It stays zeros where there is nothing yet."""

    def is_external(self, plan: SectionPlan) -> bool:
        """Whether the content of a section that a file of the user's lends is that file's: then it is not filled."""

    def has(self, spec: TensorSpec) -> bool:
        """Whether there are values of a tensor that is lent, to compare them with."""

    def compare(self, plan: SectionPlan, spec: TensorSpec, begin: int, end: int, view: torch.Tensor) -> None:
        """Compare elements [begin, end) of a tensor with `view`, which is what the section was lent.

        Raises:
            CheckpointError: they are others.
        """


class GivenSource:
    """What the user's model and optimizer have.

    Args:
        optimizer: the user's own.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._values: dict[str, torch.Tensor] = {}
        self._states: dict[str, Mapping[str, Any]] = {}

    def begin(self, parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
        self._states = {name: dict(self._optimizer.state.get(parameter, {})) for name, parameter in parameters}
        self._values = {name: parameter.data.contiguous() for name, parameter in parameters if not parameter.is_meta}

    def state(self, name: str) -> Mapping[str, Any]:
        return self._states[name]

    def fill(self, spec: TensorSpec, begin: int, end: int, view: torch.Tensor) -> None:
        is_value = spec.kind in ("param", MASTER)
        value = self._values.get(spec.owner) if is_value else self._states[spec.owner].get(spec.kind)
        if value is not None:
            view.copy_(torch.as_tensor(value).reshape(-1)[begin:end])

    def is_external(self, plan: SectionPlan) -> bool:
        return True

    def has(self, spec: TensorSpec) -> bool:
        return spec.owner in self._values

    def compare(self, plan: SectionPlan, spec: TensorSpec, begin: int, end: int, view: torch.Tensor) -> None:
        value = self._values.get(spec.owner)
        if value is None:
            return
        ours = value.detach().reshape(-1)[begin:end].cpu().view(torch.uint8)
        if not torch.equal(ours, view.view(torch.uint8)):
            path = None if plan.external is None else plan.external.path
            raise CheckpointError(
                f"frozen parameter {spec.owner} has other values in the model than in {path}, where external= says that they "
                "are: load the file's values into the model, or build it on the meta device; or leave external= out, and the "
                "model's own values are copied to the swap files"
            )


class CarriedSource:
    """What the sections of an earlier layout have in their files, and for the rest what the optimizer has.

    Args:
        optimizer: the user's own.
        sections: of parameters and optimizer state; only their places in files are looked at.
        files: of that layout, by number: the parts of each, by drive.
    """

    def __init__(self, optimizer: Optimizer, sections: Sequence[Section], files: Mapping[int, Sequence[Path]]) -> None:
        self._given = GivenSource(optimizer)
        self._places = {
            (slot.spec.owner, slot.spec.kind): TensorLocation(s, slot) for s in sections for slot in s.plan.slots
        }
        self._paths = files
        self._files: dict[Path, Any] = {}
        self._compared: set[Page] = set()
        self._engine: Any = None

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
        for file in self._files.values():
            file.close()
        self._files.clear()

    def begin(self, parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
        self._given.begin([(name, p) for name, p in parameters])

    def state(self, name: str) -> Mapping[str, Any]:
        return self._given.state(name)

    def fill(self, spec: TensorSpec, begin: int, end: int, view: torch.Tensor) -> None:
        place = self._places.get((spec.owner, spec.kind))
        if place is not None:
            self._read(place, begin, end, view)
        elif spec.kind == MASTER:
            rounded = self._places[spec.owner, "param"]
            value = torch.empty(end - begin, dtype=rounded.slot.spec.dtype)
            self._read(rounded, begin, end, value)
            view.copy_(value)
        else:
            self._given.fill(spec, begin, end, view)

    def is_external(self, plan: SectionPlan) -> bool:
        """Unless something of it was changed since."""
        places = [self._places[slot.spec.owner, "param"] for slot in plan.slots]
        pieces = [p for at in places for p in at.section.pages_of(at.slot.offset, at.slot.end) or [at.section.piece]]
        return all(piece.location == EXTERNAL for piece in pieces)

    def has(self, spec: TensorSpec) -> bool:
        return False

    def compare(self, plan: SectionPlan, spec: TensorSpec, begin: int, end: int, view: torch.Tensor) -> None:
        raise InvariantError(f"{spec.owner} is compared with an earlier layout, which was lent the same")

    def _read(self, place: TensorLocation, begin: int, end: int, target: torch.Tensor) -> None:
        """Read elements [begin, end) of what is at `place` into `target`, each piece from the file that has its newest content."""
        section, slot = place.section, place.slot
        first, last = (slot.offset + n * slot.spec.dtype.itemsize for n in (begin, end))
        if self._engine is None:  # not the run's: what small tensors go through is gone with it
            self._engine = open_engine([next(iter(self._paths.values()))[0].parent], staging_bytes=STAGING_BYTES)
        with all_over() as tickets:
            for piece in section.pages_of(first, last) or [section.piece]:
                at, stop = max(first, piece.offset), min(last, piece.offset + piece.nbytes)
                if at >= stop:
                    continue
                if piece.location is None:
                    raise InvariantError(f"{piece} is in no file")
                address, where = target.data_ptr() + at - first, piece.stored_offset + at - piece.offset
                external = section.plan.external if piece.location == EXTERNAL else None
                file = self._file(self._paths[piece.location][piece.drive] if external is None else external.path)
                self._compare(piece, file)
                tickets.append(self._engine.read(file, where, address, stop - at, keep=target))

    def _compare(self, piece: Page, file: Any) -> None:
        """Compare a piece with its checksum before something of it is taken: what is written anew gets a checksum of its own."""
        if piece.crc32 is not None and piece not in self._compared:
            run = CopyRange(file, piece.stored_offset, piece.stored_bytes, piece.crc32, ", ".join(piece.tensors[:3]))
            checksums_of(self._engine, [run])
            self._compared.add(piece)

    def _file(self, path: Path) -> Any:
        if path not in self._files:
            self._files[path] = beneath.open_for_transfers(path, read_only=True)
        return self._files[path]


def iter_section_pages(
    section: Section, pager: Pager, *, write: bool = False, fresh: bool = False, only: Sequence[Slot] | None = None
) -> Iterator[tuple[Slot, int, int, torch.Tensor]]:
    """Yield (slot, begin, end, flat view of its elements [begin, end)) for all that the section holds.

    Each page is in memory once and, if it is changed, written once, however many tensors meet on it.

    Args:
        section: resident or paged.
        pager: brings pages in and writes them back.
        write: the views may be changed.
        fresh: all of the content is made anew, so nothing is read; gaps become zeros. Implies `write`.
        only: some of its slots, in order, instead of all; other pages are left alone.
    """
    slots = section.plan.slots if only is None else only
    if section.resident:
        if fresh:
            section.memory.zero_()
        for slot in slots:
            yield slot, 0, slot.spec.numel, section.tensor(slot).view(-1)
        return
    first = 0  # the first slot that may reach into the page
    for page in section.pages:
        itself = frozenset({page.index})
        access = Access(
            None,
            (page.index,),
            fresh=itself if fresh else frozenset(),
            writes=itself if write or fresh else frozenset(),
        )
        page_end = page.offset + page.nbytes
        while first < len(slots) and slots[first].end <= page.offset:
            first += 1
        if only is not None and (first == len(slots) or slots[first].offset >= page_end):
            continue
        pager.acquire(access)
        try:
            for slot in slots[first:]:
                if slot.offset >= page_end:
                    break
                itemsize = slot.spec.dtype.itemsize
                begin = max(page.offset - slot.offset, 0) // itemsize
                end = (min(slot.end, page_end) - slot.offset) // itemsize
                yield slot, begin, end, section.tensor(slot).view(-1)[begin:end]
        finally:
            pager.release(access, access.writes)


def compare(section: Section, pager: Pager, content: SectionSource) -> None:
    """Have `content` compare what it has of the section, which lies where it was lent, with what that is.

    Raises:
        CheckpointError: it is something else.
    """
    if not any(content.has(slot.spec) for slot in section.plan.slots):
        return
    for slot, begin, end, view in iter_section_pages(section, pager):
        content.compare(section.plan, slot.spec, begin, end, view)


def fill(section: Section, pager: Pager, content: SectionSource) -> None:
    """Have `content` make all that the section holds."""
    for slot, begin, end, view in iter_section_pages(section, pager, fresh=True):
        content.fill(slot.spec, begin, end, view)
