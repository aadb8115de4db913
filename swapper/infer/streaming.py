"""Opens the resources of one loaded model: its store, which is the user's own files, never written; and the sections
of its file ranges."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from swapper._C import File
from swapper.device.device import Device
from swapper.device.model_device import page_access
from swapper.errors import CheckpointError, InvariantError, IoError
from swapper.formats.sources import FileStamp, Source
from swapper.formats.stored import FileRange, StoredTensor
from swapper.infer.adoption import view_of
from swapper.infer.matching import Recipe
from swapper.infer.planning.infer_placement import Placement
from swapper.infer.planning.streaming_plan import StreamingPlan
from swapper.io.copying import CopyRange, checksums_of
from swapper.io.engines import Engine, Transfer, open_for, shared_engine, wait_for_all
from swapper.modules.resources import Resources
from swapper.paging.layout import SectionPlan
from swapper.paging.schedule import Access, Schedule
from swapper.paging.section import Page, Section
from swapper.paging.store.page_files import ExternalFiles, PageStore
from swapper.runtime.counters import Counters


class _RunFile(NamedTuple):
    """The file that has a section. `direct` and `cached`: how it is open; None if its bytes lie in several files."""

    path: Path
    nbytes: int
    direct: File | None
    cached: File | None


class WeightFiles(PageStore):
    """Owns the open files of one model. The engine outlives it.

    Args:
        engine: does the transfers.
        source: the files, and the size and time of each when its header was read.
        runs: the file that each section is a part of, from its file_offset on.

    Raises:
        IoError: a file cannot be opened.
        CheckpointError: a file was changed since its header was read.
    """

    def __init__(self, engine: Engine, source: Source, runs: Mapping[Section, Path]) -> None:
        self._engine = engine
        self._source = source
        self._files = ExternalFiles(source.stamps)
        direct, cached = self._files.direct, self._files.cached
        self._runs = {
            section: _RunFile(path, source.nbytes_of(path), direct.get(path), cached.get(path))
            for section, path in runs.items()
        }
        self._known: dict[Path, int] = {}  # CRC-32 of files, once verified
        for path, stamp in source.stamps.items():
            if self._files.direct[path].nbytes != stamp.nbytes:
                self.close()
                raise CheckpointError(f"{path} was changed while it was being opened: load the model again")
        for page in (page for section in runs for page in section.pages):
            page.location = 0  # a file has its content

    def read(self, page: Page, address: int, after: Transfer | None = None) -> Transfer:
        """Submit a read of `page` into memory at `address`, up to the file's end; return its ticket."""
        file = self._runs[page.section]
        offset, nbytes = page.file_offset, min(page.nbytes, file.nbytes - page.file_offset)
        if file.direct is None:
            return self._read_joined(file.path, offset, address, nbytes, None, after)
        return self._engine.read(file.direct, offset, address, nbytes, after=after)

    def read_into(self, path: Path, offset: int, memory: torch.Tensor) -> Transfer:
        """Submit a read of any bytes of a file that fill `memory`, contiguous; return its ticket."""
        address, nbytes = memory.data_ptr(), memory.nbytes
        if path in self._source.joined:
            return self._read_joined(path, offset, address, nbytes, memory, None)
        return self._engine.read(self._files.direct[path], offset, address, nbytes, keep=memory)

    def _read_joined(
        self, path: Path, offset: int, address: int, nbytes: int, keep: object, after: Transfer | None
    ) -> Transfer:
        """Submit reads of the extents of a file that does not exist."""
        tickets: list[Transfer] = []
        try:
            for at, extent in self._source.extents(path, offset, nbytes):
                file = self._files.direct[extent.path]
                tickets.append(
                    self._engine.read(file, extent.offset, address + at, extent.nbytes, keep=keep, after=after)
                )
        except BaseException:
            AllOf(tickets).exception()  # the caller reuses the memory
            raise
        return AllOf(tickets)

    def file_of(self, page: Page) -> File | None:
        """Return the file that serves reads of a cold page's addresses; None: its bytes lie in several. Its end reads as zeros."""
        return self._runs[page.section].cached

    def write(self, page: Page, address: int) -> Transfer:
        raise InvariantError(f"{page} of a checkpoint would be written")

    def written(self, page: Page, ticket: Transfer) -> None:
        raise InvariantError(f"{page} of a checkpoint was written")

    @property
    def io_mode(self) -> str:
        """The modes in which files are open: "direct", or "buffered" and the reason."""
        modes = ("direct" if file.direct else f"buffered ({file.reason})" for file in self._files.direct.values())
        return ", ".join(dict.fromkeys(modes))

    def check_unchanged(self, files: Iterable[Path] | None = None) -> None:
        """Raise CheckpointError if one of the files (all, if None) was changed since its header was read.

        A file whose time alone is new, by `touch` or a backup, is read and compared, if its checksum is known.
        """
        paths = list(self._source.stamps if files is None else files)
        try:
            self._source.check_unchanged(paths)
        except CheckpointError:
            if not all(self._has_same_bytes(path) for path in paths):
                raise

    def _has_same_bytes(self, path: Path) -> bool:
        """Return whether a file has the bytes that it had; remember its time."""
        before = self._source.stamps[path]
        try:
            now = FileStamp.of(path)
            if now == before:
                return True
            is_alike = replace(now, changed_ns=before.changed_ns) == before and path in self._known
            if not is_alike or _crc32(path, now.nbytes) != self._known[path] or FileStamp.of(path) != now:
                return False
        except IoError:
            return False
        self._source.stamps[path] = now
        return True

    def verify(self) -> dict[Path, int]:
        """Read all files and return their CRC-32, by path. Uses COPY_BYTES of memory.

        Each pass checks size and modification time. A decaying drive, or somebody who restores the time, leaves those as
        they were. Most formats have no checksums, so later calls are compared with the first.

        Raises:
            CheckpointError: a file has changed since its header was read, or since the last call.
            IoError: a file cannot be read.
        """
        self.check_unchanged()
        found = {path: _crc32(path, stamp.nbytes) for path, stamp in self._source.stamps.items()}
        self._source.check_unchanged()
        for path, crc32 in found.items():
            before = self._known.setdefault(path, crc32)
            if crc32 != before:
                raise CheckpointError(
                    f"{path} was changed while its weights are in use: the CRC-32 of its bytes was {before:08x} and is "
                    f"{crc32:08x}, with size and time as before. Take another copy of it, and load the model again"
                )
        return found

    def close(self) -> None:
        self._files.close()


def _crc32(path: Path, nbytes: int) -> int:
    file = open_for(path, read_only=True)
    try:
        return checksums_of(shared_engine(path), [CopyRange(file, 0, nbytes, None, str(path))]).get(0, 0)
    finally:
        file.close()


class AllOf:
    """The completion of several reads, as one Transfer."""

    def __init__(self, tickets: Sequence[Transfer]) -> None:
        self._tickets = tickets

    @property
    def done(self) -> bool:
        return all(ticket.done for ticket in self._tickets)

    @property
    def error(self) -> IoError | None:
        return next((ticket.error for ticket in self._tickets if ticket.error is not None), None)

    @property
    def nbytes(self) -> int:
        return sum(ticket.nbytes for ticket in self._tickets)

    @property
    def crc32(self) -> int:
        raise ValueError("no checksum was asked for")

    @property
    def submitted_s(self) -> float:
        return min((ticket.submitted_s for ticket in self._tickets), default=0.0)

    @property
    def completed_s(self) -> float:
        return max((ticket.completed_s for ticket in self._tickets), default=0.0)

    def exception(self) -> IoError | None:
        """Wait for all, and return the first error."""
        found = [ticket.exception() for ticket in self._tickets]
        return next((error for error in found if error is not None), None)

    def wait(self) -> None:
        """Wait for all. Raises IoError: one failed; the others are over too."""
        error = self.exception()
        if error is not None:
            raise error


HEAD_BYTES = 32 << 20
"""Bytes of the frames that are populated before the first read; the rest is while the first pass reads: a choice."""


class Streaming(Resources[WeightFiles]):
    """Opens everything, or nothing. Leaves the model unchanged.

    Args:
        source, plan, placement: the files, the model's weights, and the division of memory.
        backend: of the engine.
        counters: to update.
        device: pages are copied to it one by one; None: kernels use them in place, each group's as a whole.

    Attributes:
        sections: for each group, a paged section for each of its runs.
        small: a resident section for each of the small runs.
        cycle: the accesses of a pass in module order, first uses.
    """

    def __init__(
        self,
        source: Source,
        plan: StreamingPlan,
        placement: Placement,
        backend: str,
        counters: Counters,
        device: Device | None,
    ) -> None:
        super().__init__(counters, device)
        self._small_runs = plan.small_runs  # not the plan: it has the modules, which must not be kept alive
        self._source = source
        self.sections = paged_sections(plan, placement.page_bytes)
        self.small: list[Section] = [_section(0, run, None, 0) for run in plan.small_runs]
        self.cycle = _cycle(self.sections, plan.used_groups, one_by_one=device is not None)
        runs = {
            section: run.path
            for group, sections in zip(plan.groups, self.sections, strict=True)
            for run, section in zip(group.runs, sections, strict=True)
        }
        for section in runs:
            section.guards_writes = device is None  # on a device nobody sees its memory
        try:
            self.open(
                [*self.small, *runs],
                placement,
                [next(iter(source.stamps)).parent],
                backend,
                lambda engine: WeightFiles(engine, source, runs),
                Schedule(self.cycle),
                device,
                head_bytes=HEAD_BYTES,
                windows=device is None,
                filled_once=device is None and placement.streamed == 0,
                staging_bytes=plan.staging_bytes,
            )
            source.check_unchanged()
        except BaseException:
            self.close()
            raise

    def begin(self, buffers: Sequence[Recipe]) -> list[torch.Tensor]:
        """Read resident weights, and begin to read ahead. Return the tensors of `buffers`."""
        tickets = []
        for run, section in zip(self._small_runs, self.small, strict=True):
            nbytes = min(run.nbytes, self._source.nbytes_of(run.path) - run.file_offset)
            tickets.append(self.store.read_into(run.path, run.file_offset, section.memory[:nbytes]))
        tensors = []
        for stored in (part for recipe in buffers for part in recipe.parts):
            memory = torch.empty(stored.nbytes, dtype=torch.uint8, device="cpu")
            tickets.append(self.store.read_into(stored.path, stored.offset, memory))
            tensors.append(view_of(memory, 0, stored))
        self.pager.back_cold_pages()  # for accesses past the guard; those that are read ahead too, so before that
        self.pager.read_ahead()
        wait_for_all(tickets)
        parts = iter(tensors)
        return [recipe.from_parts([next(parts) for _ in recipe.parts]) for recipe in buffers]

    def read_part(self, stored: StoredTensor, offset: int, memory: torch.Tensor) -> Transfer:
        """Submit a read of a stored tensor's bytes from `offset` on that fill `memory`, contiguous; return its ticket."""
        return self.store.read_into(stored.path, stored.offset + offset, memory)

    def close(self) -> None:
        super().close()
        self.sections, self.small = [], []


def _cycle(sections: Sequence[Sequence[Section]], used: Collection[int], one_by_one: bool) -> list[Access]:
    cycle = []
    for group, of_group in enumerate(sections):
        pages = tuple(page.index for section in of_group for page in section.pages) if group in used else ()
        if one_by_one:
            cycle += [page_access(group, page) for page in pages]
        elif pages:
            cycle.append(Access(("param", group), pages))
    return cycle


def paged_sections(plan: StreamingPlan, page_bytes: int) -> list[list[Section]]:
    """Return for each group a paged section for each of its runs, without memory."""
    sections: list[list[Section]] = []
    page_count = 0
    for group in plan.groups:
        sections.append([])
        for run in group.runs:
            sections[-1].append(_section(group.index, run, page_bytes, page_count))
            page_count += len(sections[-1][-1].pages)
    return sections


def _section(group: int, run: FileRange, page_bytes: int | None, first_page: int) -> Section:
    plan = SectionPlan(group, "param", torch.uint8, (), run.nbytes)
    return Section(plan, run.file_offset, page_bytes, first_page)
