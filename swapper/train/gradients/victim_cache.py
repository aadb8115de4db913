"""Caches evicted parameters in the memory of their gradients, until backward.

Gradients in memory have permanent slots, but content only from backward to the optimizer's update. In a forward that
memory is idle, if they were zeroed (to None). Pages that are evicted there and needed again in backward are parameters,
whose sections have the layout of their gradients'. Such a page is copied to the gradients' slots and, for backward,
back, instead of being read from the drive again. An arriving gradient drops the page in its slot. See
docs/decisions/victim-cache.md.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from swapper.paging.section import Page, Section


@dataclass(frozen=True, slots=True)
class VictimRegion:
    """The cache location of a page: bytes [offset, offset + page.nbytes) of its parameters' gradients."""

    section: Section
    offset: int
    owners: tuple[str, ...]


def find_regions(sections: Iterable[Section], grad_sections: Iterable[Section]) -> dict[int, VictimRegion]:
    """Return, by index of each page of parameters whose gradients are in memory, its cache location."""
    gradients = {_layout(section): section for section in grad_sections if section.resident}
    regions = {}
    for section in sections:
        gradient = gradients.get(_layout(section))
        if gradient is None or section.plan.family != "param":
            continue
        for page in section.pages:
            end = page.offset + page.nbytes
            owners = [slot.spec.owner for slot in section.plan.slots if slot.offset < end and slot.end > page.offset]
            regions[page.index] = VictimRegion(gradient, page.offset, tuple(owners))
    return regions


def _layout(section: Section) -> tuple[int, tuple[tuple[str, int, int], ...], int]:
    slots = tuple((slot.spec.owner, slot.offset, slot.end) for slot in section.plan.slots)
    return section.plan.group, slots, section.plan.nbytes


class GradientVictimCache:
    """The pager's victim cache (paging/frames.py): slots of gradients that nobody holds.

    Args:
        regions: by index of page; the sections have memory.
        is_idle: by parameter's name, True if its gradient's slot is unused.
    """

    def __init__(self, regions: Mapping[int, VictimRegion], is_idle: Mapping[str, Callable[[], bool]]) -> None:
        self._regions = regions
        self._is_idle = is_idle

    def keep(self, page: Page, address: int) -> bool:
        region = self._regions.get(page.index)
        if region is None or not all(self._is_idle[owner]() for owner in region.owners):
            return False
        ctypes.memmove(region.section.memory.data_ptr() + region.offset, address, page.nbytes)
        return True

    def load(self, page: Page, address: int) -> None:
        region = self._regions[page.index]
        ctypes.memmove(address, region.section.memory.data_ptr() + region.offset, page.nbytes)

    def place_of(self, page: Page) -> tuple[Any, int]:
        region = self._regions[page.index]
        return region.section.view, region.offset
