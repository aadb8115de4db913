"""Opens the resources of one loaded model, and the sections that its file ranges are read into."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from swapper.device.device import Device
from swapper.device.model_device import page_access
from swapper.formats.sources import Source
from swapper.formats.stored import FileRange, StoredTensor
from swapper.infer.mapping.adoption import view_of
from swapper.infer.mapping.matching import Recipe
from swapper.infer.planning.infer_placement import Placement
from swapper.infer.planning.streaming_plan import StreamingPlan
from swapper.infer.runtime.model_files import WeightFiles
from swapper.io.engines import Transfer, wait_for_all
from swapper.modules.resources import Resources
from swapper.paging.planning.layout import SectionPlan
from swapper.paging.planning.schedule import Access, Schedule
from swapper.paging.section import Section
from swapper.runtime.counters import Counters

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
        super().__init__(counters)
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
        self.pager.back_cold_pages()  # for accesses past the guard
        self.pager.read_ahead()
        wait_for_all(tickets)
        parts = iter(tensors)
        return [recipe.from_parts([next(parts) for _ in recipe.parts]) for recipe in buffers]

    def read_part(self, stored: StoredTensor, offset: int, memory: torch.Tensor) -> Transfer:
        """Submit a read of a stored tensor's bytes from `offset` on that fill `memory`, contiguous; return its ticket."""
        return self.store.read_into(stored.path, stored.offset + offset, memory)

    def close(self, stay: Collection[int] = ()) -> None:
        super().close(stay)
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
