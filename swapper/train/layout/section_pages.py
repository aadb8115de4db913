"""Going through a section's tensors page by page, outside of the order of a step: to fill, copy out or replace them.

Each page is in memory once and, if it is changed, written once, however many tensors meet on it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from swapper.paging.pager import Pager
from swapper.paging.planning.layout import Slot
from swapper.paging.planning.schedule import Access
from swapper.paging.section import Section
from swapper.train.layout.content import SectionSource


def iter_section_pages(
    section: Section, pager: Pager, *, write: bool = False, fresh: bool = False, only: Sequence[Slot] | None = None
) -> Iterator[tuple[Slot, int, int, torch.Tensor]]:
    """Yield (slot, begin, end, flat view of its elements [begin, end)) for all that the section holds.

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
