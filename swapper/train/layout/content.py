"""Provides the content of new sections: the user's model and optimizer, an earlier layout of the run, or earlier ranks.

The model and the optimizer provide it at `offload`. When more is trained later (train/session/replacement.py), existing
content is read from the files of the earlier layout, however it is divided there; only new content comes from the
optimizer. `iter_section_pages` walks a section outside of the order of a step.

[Note: other ranks] A run may go on with another number of ranks. A rank of a sharded model has some rows of each tensor; it
reads them where the earlier ranks have them, bit for bit. A tensor that is not in rows (a step counter, or anything of a model
that is whole on each rank) is the first rank's that has it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from swapper import _C
from swapper.durability.beginning import CommittedRank
from swapper.errors import CheckpointError, InvariantError, UnsupportedError
from swapper.io import beneath
from swapper.io.copying import CopyRange, checksums_of
from swapper.io.engines import Engine, all_over, open_engine
from swapper.io.tensor_bytes import has_same_bits
from swapper.paging.layout import SectionPlan, Slot, TensorSpec
from swapper.paging.pager import Pager
from swapper.paging.schedule import Access
from swapper.paging.section import EXTERNAL, Page, Section
from swapper.runtime.interrupts import close_all
from swapper.train.layout.inventory import find_places
from swapper.train.layout.slices import TensorLocation
from swapper.train.layout.state_codecs import MASTER
from swapper.train.optimizer.optimizer_set import OptimizerSet

STAGING_BYTES = 4 << 20  # a choice


class SectionSource(Protocol):
    """Provides content for sections."""

    def begin(self, parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Announce that these parameters, with their qualified names, and their state are needed next."""
        return

    def state(self, name: str) -> Mapping[str, Any]:
        """Return the user's optimizer state of a parameter."""

    def fill(self, spec: TensorSpec, begin: int, end: int, view: torch.Tensor) -> None:
        """Copy elements [begin, end) of a tensor into `view`, which stays zeros if there is no content yet."""

    def is_external(self, plan: SectionPlan) -> bool:
        """Return True if an external section's content is its file's: then it is not filled."""
        return True

    def value(self, name: str) -> torch.Tensor | None:
        """Return the model's value of an external parameter, to be compared with the file's; None without one."""
        return None


class GivenSource(SectionSource):
    """Takes content from the user's model and optimizers."""

    def __init__(self, optimizers: OptimizerSet) -> None:
        self._optimizers = optimizers
        self._values: dict[str, torch.Tensor] = {}
        self._states: dict[str, Mapping[str, object]] = {}

    def begin(self, parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
        self._states = {name: dict(self._optimizers.state_of(parameter)) for name, parameter in parameters}
        self._values = {name: parameter.data.contiguous() for name, parameter in parameters if not parameter.is_meta}

    def state(self, name: str) -> Mapping[str, Any]:
        return self._states[name]

    def fill(self, spec: TensorSpec, begin: int, end: int, view: torch.Tensor) -> None:
        is_value = spec.kind in ("param", MASTER)
        value = self._values.get(spec.owner) if is_value else self._states[spec.owner].get(spec.kind)
        if value is not None:
            value = as_tensor(value)
            if value.is_meta:
                raise UnsupportedError(
                    f"the optimizer has {spec.kind!r} of {spec.owner} on the meta device, without values, as one does whose "
                    "constructor makes state (Adagrad): make it of a model that has values"
                )
            view.copy_(value.reshape(-1)[begin:end])

    def value(self, name: str) -> torch.Tensor | None:
        return self._values.get(name)


def as_tensor(value: object) -> torch.Tensor:
    """Return `value`, a tensor or a number, as a tensor; a number on the CPU, whatever torch's default device is."""
    return value if isinstance(value, torch.Tensor) else torch.tensor(value, device="cpu")


class CommittedFiles:
    """Reads tensors from the swap files of an earlier layout, or of another rank. Owns what it opens until `close`.

    Args:
        sections: of parameters and optimizer state; only their locations in files are used.
        files: by number: the parts of each, by drive.

    Attributes:
        places: of all tensors, by name of the parameter and kind.
    """

    def __init__(self, sections: Sequence[Section], files: Mapping[int, Sequence[Path]]) -> None:
        self.places = find_places(sections)
        self._paths = files
        self._files: dict[Path, _C.File] = {}
        self._compared: set[Page] = set()
        self._engine: Engine | None = None

    def close(self) -> None:
        if self._engine is not None:
            close_all([self._engine.close, *(file.close for file in self._files.values())])

    def read(self, place: TensorLocation, begin: int, end: int, target: torch.Tensor) -> None:
        """Read elements [begin, end) at `place` into `target`, each piece from the file with its newest content.

        Raises:
            IoError: they cannot be read, or are not what was written.
        """
        section, slot = place.section, place.slot
        first, last = (slot.offset + n * slot.spec.dtype.itemsize for n in (begin, end))
        if self._engine is None:  # not the session's: its staging buffer is freed with it
            self._engine = open_engine([next(iter(self._paths.values()))[0].parent], staging_bytes=STAGING_BYTES)
        engine = self._engine
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
                self._compare(engine, piece, file)
                tickets.append(engine.read(file, where, address, stop - at, keep=target))

    def _compare(self, engine: Engine, piece: Page, file: _C.File) -> None:
        """Compare a piece with its checksum before copying from it, since the copy gets a new checksum."""
        if piece.crc32 is not None and piece not in self._compared:
            run = CopyRange(file, piece.stored_offset, piece.stored_bytes, piece.crc32, ", ".join(piece.tensors[:3]))
            checksums_of(engine, [run])
            self._compared.add(piece)

    def _file(self, path: Path) -> _C.File:
        if path not in self._files:
            self._files[path] = beneath.open_for_transfers(path, read_only=True)
        return self._files[path]


class CarriedSource(SectionSource):
    """Takes content from the files of an earlier layout, and the rest from the optimizers."""

    def __init__(self, optimizers: OptimizerSet, files: CommittedFiles) -> None:
        self._given = GivenSource(optimizers)
        self._files = files
        self._places = files.places

    def close(self) -> None:
        self._files.close()

    def begin(self, parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
        self._given.begin([(name, p) for name, p in parameters])

    def state(self, name: str) -> Mapping[str, Any]:
        return self._given.state(name)

    def fill(self, spec: TensorSpec, begin: int, end: int, view: torch.Tensor) -> None:
        place = self._places.get((spec.owner, spec.kind))
        if place is not None:
            self._files.read(place, begin, end, view)
        elif spec.kind == MASTER:
            rounded = self._places[spec.owner, "param"]
            value = torch.empty(end - begin, dtype=rounded.slot.spec.dtype, device="cpu")
            self._files.read(rounded, begin, end, value)
            view.copy_(value)
        else:
            self._given.fill(spec, begin, end, view)

    def is_external(self, plan: SectionPlan) -> bool:
        """Return True unless something of it was changed since."""
        places = [self._places[slot.spec.owner, "param"] for slot in plan.slots]
        pieces = [p for at in places for p in at.section.pages_of(at.slot.offset, at.slot.end) or [at.section.piece]]
        return all(piece.location == EXTERNAL for piece in pieces)


def iter_section_pages(
    section: Section, pager: Pager, *, write: bool = False, fresh: bool = False, only: Sequence[Slot] | None = None
) -> Iterator[tuple[Slot, int, int, torch.Tensor]]:
    """Yield (slot, begin, end, flat view of its elements [begin, end)) for everything in the section.

    Each page is in memory once and, if it is changed, written once, however many tensors share it.

    Args:
        section: resident or paged.
        pager: loads pages and writes them back.
        write: the views may be changed.
        fresh: all content is new, so nothing is read; gaps become zeros. Implies `write`.
        only: some of its slots, in order, instead of all; other pages are not touched.
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
        none: frozenset[int] = frozenset()
        access = Access(None, (page.index,), itself if fresh else none, itself if write or fresh else none)
        page_end = page.offset + page.nbytes
        while first < len(slots) and slots[first].end <= page.offset:
            first += 1
        if only is not None and (first == len(slots) or slots[first].offset >= page_end):
            continue
        with pager.leased(access):
            for slot in slots[first:]:
                if slot.offset >= page_end:
                    break
                itemsize = slot.spec.dtype.itemsize
                begin = max(page.offset - slot.offset, 0) // itemsize
                end = (min(slot.end, page_end) - slot.offset) // itemsize
                yield slot, begin, end, section.tensor(slot).view(-1)[begin:end]


def copy_of(place: TensorLocation, pager: Pager) -> torch.Tensor:
    """Return a copy of the tensor at a location; on an accelerator, of what its copy there was made from."""
    copied = torch.empty(place.slot.spec.shape, dtype=place.slot.spec.dtype, device="cpu")
    for _, begin, end, view in iter_section_pages(place.section, pager, only=[place.slot]):
        copied.view(-1)[begin:end] = view
    return copied


def compare(section: Section, pager: Pager, content: SectionSource) -> None:
    """Compare `content` with the external content of the section. Raises CheckpointError: they differ."""
    values = {slot.spec.owner: content.value(slot.spec.owner) for slot in section.plan.slots}
    if all(value is None for value in values.values()):
        return
    for slot, begin, end, view in iter_section_pages(section, pager):
        value = values[slot.spec.owner]
        if value is None:
            continue
        if not has_same_bits(value.detach().reshape(-1)[begin:end].cpu(), view):
            path = None if section.plan.external is None else section.plan.external.path
            raise CheckpointError(
                f"frozen parameter {slot.spec.owner} has other values in the model than in {path}, contrary to external= "
                ": load the file's values into the model, or build it on the meta device; or leave external= out, and the "
                "model's own values are copied to the swap files"
            )


def fill(section: Section, pager: Pager, content: SectionSource) -> None:
    for slot, begin, end, view in iter_section_pages(section, pager, fresh=True):
        content.fill(slot.spec, begin, end, view)


Rows = Mapping[str, tuple[int, int]]
"""The first row of a rank's part of each sharded parameter, and the rows of the whole, by name."""
NOT_BY_ROWS = (0, 0)
"""Stands there for a part that is not some whole rows."""
Form = tuple[torch.dtype, tuple[int, ...]]


@dataclass(frozen=True)
class _RankPart:
    """The elements of a whole tensor from `begin` on that one rank has."""

    begin: int
    place: TensorLocation
    files: CommittedFiles


class ReshardedSource(SectionSource):
    """Reads this rank's content from the files of the earlier ranks. The model's values do not count.

    Args:
        earlier: all ranks of the run that is continued.
        plans: of this rank's sections.
        rows: of its shards.

    Raises:
        CheckpointError: they are of another model or optimizer; lists the differences.
        UnsupportedError: the earlier ranks read parameters from files of the user's, or there is tensor parallelism.
    """

    def __init__(self, earlier: Sequence[CommittedRank], plans: Sequence[SectionPlan], rows: Rows) -> None:
        self._rows = _RowsOf(plans, rows)
        self._parts: dict[tuple[str, str], list[_RankPart]] = {}
        theirs: dict[tuple[str, str], Form] = {}
        self._files: list[CommittedFiles] = []
        for rank in earlier:
            if rank.record.external:
                raise UnsupportedError("a run with external= cannot be resharded: load a snapshot (resume='discard')")
            files = CommittedFiles(rank.sections, rank.files)
            self._files.append(files)
            of = _RowsOf([section.plan for section in rank.sections], rank.record.shards)
            for slot in of.slots():
                key = slot.spec.owner, slot.spec.kind
                theirs[key] = of.form(slot.spec)
                self._parts.setdefault(key, []).append(_RankPart(of.begin(slot.spec), files.places[key], files))
        ours = {(slot.spec.owner, slot.spec.kind): self._rows.form(slot.spec) for slot in self._rows.slots()}
        _check_forms({key: form for key, form in theirs.items() if self._rows.has_some(key[0])}, ours)

    def state(self, name: str) -> Mapping[str, Any]:
        """Return nothing: all of it is in sections."""
        return {}

    def fill(self, spec: TensorSpec, begin: int, end: int, view: torch.Tensor) -> None:
        first = self._rows.begin(spec)
        at, stop = first + begin, first + end
        for part in self._parts.get((spec.owner, spec.kind), ()):
            low, high = max(at, part.begin), min(stop, part.begin + part.place.slot.spec.numel)
            if low < high:
                part.files.read(part.place, low - part.begin, high - part.begin, view[low - at : high - at])
                if (low, high) == (at, stop):
                    return

    def close(self) -> None:
        close_all([files.close for files in self._files])


class _RowsOf:
    """The parts of tensors that one rank has."""

    def __init__(self, plans: Sequence[SectionPlan], rows: Rows) -> None:
        self._plans, self._rows = plans, rows
        self._counts = {
            slot.spec.owner: slot.spec.shape[0]
            for plan in plans
            for slot in plan.slots
            if slot.spec.kind == "param" and slot.spec.owner in rows
        }
        if any(count and rows[name] == NOT_BY_ROWS for name, count in self._counts.items()):
            raise UnsupportedError(
                "a run with tensor parallelism cannot be resharded: take a snapshot of it, and load that by "
                "torch.distributed.checkpoint, with resume='discard'"
            )

    def has_some(self, name: str) -> bool:
        """Return True unless this rank has no row of that sharded parameter."""
        return self._counts.get(name, 1) > 0

    def slots(self) -> Iterator[Slot]:
        """Yield the tensors of which this rank has some."""
        for plan in self._plans:
            yield from (slot for slot in plan.slots if self.has_some(slot.spec.owner))

    def _in_rows(self, spec: TensorSpec) -> bool:
        return bool(spec.shape) and spec.shape[0] == self._counts.get(spec.owner)

    def begin(self, spec: TensorSpec) -> int:
        """Return the first element that this rank has of a tensor."""
        return self._rows[spec.owner][0] * (spec.numel // spec.shape[0]) if spec.numel and self._in_rows(spec) else 0

    def form(self, spec: TensorSpec) -> Form:
        """Return dtype and shape of the whole tensor."""
        shape = (self._rows[spec.owner][1], *spec.shape[1:]) if self._in_rows(spec) else spec.shape
        return spec.dtype, shape


def _check_forms(theirs: Mapping[tuple[str, str], Form], ours: Mapping[tuple[str, str], Form]) -> None:
    """Raise CheckpointError if a tensor of this rank is not in the run, or the other way round."""
    lines = []
    for key in dict.fromkeys([*theirs, *ours]):
        if theirs.get(key) == ours.get(key):
            continue
        was, now = (
            "not there" if form is None else f"{str(form[0]).removeprefix('torch.')} {list(form[1])}"
            for form in (theirs.get(key), ours.get(key))
        )
        lines.append(f"- {' '.join(key)}: {was} in the run, {now} here")
    if lines:
        shown = "\n".join(lines[:20]) + (f"\n- and {len(lines) - 20} more" if len(lines) > 20 else "")
        raise CheckpointError(
            f"the run to be resharded is of another model or optimizer, or has other options:\n{shown}\n"
            "Build the same model and optimizer with the same options, or start over with resume='discard'"
        )
