"""The resources of one loaded model: memory, engine, files, pager, and the sections that its runs are read into."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from typing import Any

import torch

from swapper.device.device import Device
from swapper.errors import InvariantError
from swapper.formats.read_plan import FileRange
from swapper.formats.sources import Source
from swapper.formats.stored import StoredTensor
from swapper.infer.mapping.adoption import view_of
from swapper.infer.mapping.matching import Recipe
from swapper.infer.planning.infer_placement import Placement
from swapper.infer.planning.streaming_plan import StreamingPlan
from swapper.infer.runtime.model_files import WeightFiles
from swapper.io.engines import open_engine
from swapper.io.registered import Registration, slabs
from swapper.io.waiting import wait_for_all
from swapper.paging.host_memory import HostMemory, Mapped
from swapper.paging.pager import Pager
from swapper.paging.planning.layout import SectionPlan
from swapper.paging.planning.schedule import Access, Schedule
from swapper.paging.pool import Pool
from swapper.paging.section import Page, Section
from swapper.runtime.counters import Counters

HEAD_BYTES = 32 << 20
"""Of the frames' memory, what is taken before the first read; the rest is taken while the first pass reads."""


class Streaming:
    """Opens everything in order, and closes it backwards. Nothing of the model is touched.

    Args:
        source, blueprint, placement: what, and where it lies.
        backend: of the engine.
        counters: to keep.
        device: where pages go on to, one by one; None: they are used where they are, each group's as a whole.

    Attributes:
        sections: for each group, a paged section for each of its runs.
        small: a resident section for each of the small runs.
        cycle: the accesses of a pass in module order, first uses.
    """

    def __init__(
        self,
        source: Source,
        blueprint: StreamingPlan,
        placement: Placement,
        backend: str,
        counters: Counters,
        device: Device | None,
    ) -> None:
        self._small_runs = blueprint.small_runs  # not the blueprint, which has the modules: nothing here may keep them
        self.sections, self._pages = _paged_sections(blueprint, placement.page_bytes)
        self.small: list[Section] = [_section(0, run, None, 0) for run in blueprint.small_runs]
        self.cycle = _cycle(self.sections, blueprint.used_groups, one_by_one=device is not None)
        self._source = source
        self._memory = HostMemory()
        self.engine: Any = None
        self._files: WeightFiles | None = None
        self._pager: Pager | None = None
        self._registration: Registration | None = None
        try:
            everything = [*self.small, *(section for sections in self.sections for section in sections)]
            arena, pool_offset = self._memory.attach(
                everything,
                placement.pool_bytes,
                head_bytes=HEAD_BYTES,
                windows=device is None,
                filled_once=device is None and placement.streamed == 0,
            )
            directory = next(iter(source.stamps)).parent
            self.engine = open_engine([directory], backend, arena=arena, staging_bytes=blueprint.staging_bytes)
            self._files = WeightFiles(self.engine, source)
            for group, sections in zip(blueprint.groups, self.sections, strict=True):
                for run, section in zip(group.runs, sections, strict=True):
                    self._files.place(section, run.path)
            self._pool = Pool(arena.address, pool_offset, placement.page_bytes, placement.frame_count, growth=arena)
            for section in (section for sections in self.sections for section in sections):
                section.guards_writes = device is None  # else nobody sees its memory
            if device is not None:
                self._frames = torch.frombuffer(arena.view(0, arena.nbytes), dtype=torch.uint8)
                parts = slabs(pool_offset, placement.frame_count * placement.page_bytes, placement.page_bytes)
                self._registration = Registration(device, arena, parts)
            self._pager = Pager(self._pages, self._pool, self._files, Schedule(self.cycle), counters)
            source.check_unchanged()
        except BaseException:
            self.close()
            raise

    @property
    def pager(self) -> Pager:
        if self._pager is None:
            raise InvariantError("the pager is asked for before it was made")
        return self._pager

    @property
    def frame_count(self) -> int:
        return self._pool.frame_count

    def frame_of(self, page: Page) -> torch.Tensor:
        """Return the memory of a leased page, where it is used by way of its frame: uint8 of shape (page.nbytes,)."""
        if page.frame is None:
            raise InvariantError(f"{page} has no frame to copy from")
        begin = self._pool.offset(page.frame)
        return self._frames[begin : begin + page.nbytes]

    def begin(self, buffers: Sequence[Recipe]) -> list[torch.Tensor]:
        """Read what stays in memory, and begin to read ahead. Returns `buffers` as tensors of their own."""
        if self._files is None:
            raise InvariantError("the files are asked for before they were opened")
        tickets = []
        for run, section in zip(self._small_runs, self.small, strict=True):
            nbytes = min(run.nbytes, self._source.nbytes_of(run.path) - run.file_offset)
            tickets.append(self._files.read_into(run.path, run.file_offset, section.memory[:nbytes]))
        tensors = []
        for stored in (part for recipe in buffers for part in recipe.parts):
            memory = torch.empty(stored.nbytes, dtype=torch.uint8)
            tickets.append(self._files.read_into(stored.path, stored.offset, memory))
            tensors.append(view_of(memory, 0, stored))
        self.pager.back_cold_pages()  # for what goes past the guard
        self.pager.read_ahead()
        wait_for_all(tickets)
        parts = iter(tensors)
        return [recipe.from_parts([next(parts) for _ in recipe.parts]) for recipe in buffers]

    def take_memory(self, nbytes: int) -> torch.Tensor:
        """Return memory for transfers, beside the frames: uint8 of shape (nbytes,)."""
        return self._memory.take(nbytes)

    def read_part(self, stored: StoredTensor, offset: int, memory: torch.Tensor) -> Any:
        """Submit a read of bytes of a stored tensor, from `offset` on, which fill `memory`, contiguous; returns its ticket."""
        if self._files is None:
            raise InvariantError("the files are asked for before they were opened")
        return self._files.read_into(stored.path, stored.offset + offset, memory)

    def describe(self) -> str:
        """Say how transfers are done, for the log."""
        modes = ", ".join(self._files.modes) if self._files is not None else ""
        registered = "" if self._registration is None else f", for the device {self._registration.describe()}"
        return f"{self.engine.backend} ({self.engine.reason}), {modes}; memory {self._memory.describe()}{registered}"

    def close(self, stay: Collection[int] = ()) -> None:
        """Copies out of the frames must be over. Pages in `stay` keep their bytes for as long as somebody has a tensor of them."""
        kept = [self._mapped_page(self._pages[index]) for index in stay]
        if self._pager is not None:
            self._pager.discard(frozenset(stay))
        if self.engine is not None:
            self.engine.close()
        if self._files is not None:
            self._files.close()
        if self._registration is not None:
            self._registration.close()
        self._frames = torch.empty(0, dtype=torch.uint8)
        for section in (*self.small, *(section for sections in self.sections for section in sections)):
            section.detach()
        self.sections, self._pages, self.small, self._pager = [], [], [], None
        self._memory.close(kept)

    def _mapped_page(self, page: Page) -> Mapped:
        assert page.frame is not None
        return Mapped(weakref.ref(page.section.window), page.offset, self._pool.offset(page.frame), page.nbytes)


def page_access(group: int, page: int) -> Access:
    """Return the use of one page by itself."""
    return Access(("param", group, page), (page,))


def _cycle(sections: Sequence[Sequence[Section]], used: Collection[int], one_by_one: bool) -> list[Access]:
    cycle = []
    for group, of_group in enumerate(sections):
        pages = tuple(page.index for section in of_group for page in section.pages) if group in used else ()
        if one_by_one:
            cycle += [page_access(group, page) for page in pages]
        elif pages:
            cycle.append(Access(("param", group), pages))
    return cycle


def _paged_sections(blueprint: StreamingPlan, page_bytes: int) -> tuple[list[list[Section]], list[Page]]:
    sections: list[list[Section]] = []
    pages: list[Page] = []
    for group in blueprint.groups:
        sections.append([])
        for run in group.runs:
            section = _section(group.index, run, page_bytes, len(pages))
            sections[-1].append(section)
            pages += section.pages
    return sections, pages


def _section(group: int, run: FileRange, page_bytes: int | None, first_page: int) -> Section:
    plan = SectionPlan(group, "param", torch.uint8, (), run.nbytes)
    return Section(plan, run.file_offset, page_bytes, first_page)
