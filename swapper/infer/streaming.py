"""The resources of one loaded model: memory, engine, files, pager, and the sections that its runs are read into."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from swapper import _C
from swapper.checkpoint.sources import Source, StoredTensor
from swapper.core.layout import SectionPlan
from swapper.core.memory import HostMemory
from swapper.core.pager import Pager
from swapper.core.pool import Pool
from swapper.core.schedule import Access, Schedule
from swapper.core.section import Page, Section
from swapper.counters import Counters
from swapper.errors import InvariantError
from swapper.infer.adoption import view_of
from swapper.infer.blueprint import Blueprint
from swapper.infer.files import WeightFiles
from swapper.infer.matching import Recipe
from swapper.infer.placement import Placement
from swapper.infer.runs import Run

HEAD_BYTES = 32 << 20
"""Of the frames' memory, what is taken before the first read; the rest is taken while the first pass reads."""


class Streaming:
    """Opens everything in order, and closes it backwards. Nothing of the model is touched.

    Attributes:
        sections: for each group, a paged section for each of its runs.
        small: a resident section for each of the small runs.
        cycle: the accesses of a pass in module order, first uses.
    """

    def __init__(
        self,
        source: Source,
        blueprint: Blueprint,
        placement: Placement,
        backend: str,
        counters: Counters,
    ) -> None:
        self._small_runs = (
            blueprint.small_runs
        )  # and not the blueprint, which has the modules: nothing here may keep them

        self.sections, pages = _paged_sections(blueprint, placement.page_bytes)
        self.small: list[Section] = [_section(0, run, None, 0) for run in blueprint.small_runs]
        self.cycle = [
            Access(("param", group), tuple(page.index for section in sections for page in section.pages))
            for group, sections in enumerate(self.sections)
            if sections and group in blueprint.used_groups
        ]
        self._source = source
        self._memory = HostMemory()
        self.engine: Any = None
        self._files: WeightFiles | None = None
        self._pager: Pager | None = None
        try:
            everything = [*self.small, *(section for sections in self.sections for section in sections)]
            arena, pool_offset = self._memory.attach(everything, placement.pool_bytes, head_bytes=HEAD_BYTES)
            self.engine = _C.Engine(backend=backend, arena=arena, staging_bytes=blueprint.staging_bytes)
            self._files = WeightFiles(self.engine, source.stamps)
            for group, sections in zip(blueprint.groups, self.sections, strict=True):
                for run, section in zip(group.runs, sections, strict=True):
                    self._files.place(section, run.path)
            pool = Pool(arena.address, pool_offset, placement.page_bytes, placement.frame_count, growth=arena)
            self._pager = Pager(pages, pool, self._files, Schedule(self.cycle), counters)
            source.check_unchanged()
        except BaseException:
            self.close()
            raise

    @property
    def pager(self) -> Pager:
        if self._pager is None:
            raise InvariantError("the pager is asked for before it was made")
        return self._pager

    def begin(self, buffers: Sequence[Recipe]) -> list[torch.Tensor]:
        """Read what stays in memory, and begin to read ahead. Returns `buffers` as tensors of their own."""
        if self._files is None:
            raise InvariantError("the files are asked for before they were opened")
        tickets = []
        for run, section in zip(self._small_runs, self.small, strict=True):
            nbytes = min(run.nbytes, self._source.stamps[run.path].nbytes - run.file_offset)
            tickets.append(self._files.read_into(run.path, run.file_offset, section.memory.data_ptr(), nbytes))
        tensors = []
        for stored in (part for recipe in buffers for part in recipe.parts):
            memory = torch.empty(stored.nbytes, dtype=torch.uint8)
            tickets.append(self._files.read_into(stored.path, stored.offset, memory.data_ptr(), stored.nbytes))
            tensors.append(view_of(memory, 0, stored))
        self.pager.read_ahead()
        for ticket in tickets:
            ticket.wait()
        parts = iter(tensors)
        return [recipe.from_parts([next(parts) for _ in recipe.parts]) for recipe in buffers]

    def take_memory(self, nbytes: int) -> torch.Tensor:
        """Return memory for transfers, beside the frames: uint8 of shape (nbytes,)."""
        return self._memory.take(nbytes)

    def read_part(self, stored: StoredTensor, offset: int, address: int, nbytes: int) -> Any:
        """Submit a read of some bytes of a stored tensor; returns its ticket."""
        if self._files is None:
            raise InvariantError("the files are asked for before they were opened")
        return self._files.read_into(stored.path, stored.offset + offset, address, nbytes)

    def describe(self) -> str:
        """Say how transfers are done, for the log."""
        modes = ", ".join(self._files.modes) if self._files is not None else ""
        return f"{self.engine.backend} ({self.engine.reason}), {modes}; memory {self._memory.describe()}"

    def close(self) -> None:
        if self._pager is not None:
            self._pager.discard()
        if self.engine is not None:
            self.engine.close()
        if self._files is not None:
            self._files.close()
        self._memory.close()
        for section in (*self.small, *(section for sections in self.sections for section in sections)):
            section.detach()
        self.sections, self.small, self._pager = [], [], None


def _paged_sections(blueprint: Blueprint, page_bytes: int) -> tuple[list[list[Section]], list[Page]]:
    sections: list[list[Section]] = []
    pages: list[Page] = []
    for group in blueprint.groups:
        sections.append([])
        for run in group.runs:
            section = _section(group.index, run, page_bytes, len(pages))
            sections[-1].append(section)
            pages += section.pages
    return sections, pages


def _section(group: int, run: Run, page_bytes: int | None, first_page: int) -> Section:
    plan = SectionPlan(group, "param", torch.uint8, (), run.nbytes)
    return Section(plan, run.file_offset, page_bytes, first_page)
