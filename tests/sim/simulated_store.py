"""The real store, its files in memory; sections of sizes that a seed decides; and a victim cache with room by chance."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import torch
from simulated_engine import Arena, Engine, File

from swapper.io.drives import Drives
from swapper.paging.layout import SectionPlan
from swapper.paging.section import Page, Section
from swapper.paging.store.page_files import SwapFile
from swapper.paging.store.swap_files import TURNS, Store

PAGE_BYTES = 16


class SimulatedStore(Store):
    """The real store, its files in memory."""

    def __init__(self, engine: Engine, nbytes: int, pages: list[Page]) -> None:
        drives = Drives((Path("/nonexistent"),))
        super().__init__(engine, drives, [], nbytes, existing={}, turns=TURNS, pieces=pages)

    def file(self, number: int) -> File:
        return self._files[number].first

    def create_file(self, number: int) -> SwapFile:
        return SwapFile([self._engine.create_file(f"turn-{number}.swap", self.nbytes)])

    def freeze(self, number: int) -> None:
        self.file(number).is_frozen = True

    def content(self, page: Page) -> bytes | None:
        """Return what the drive has of a page; None if it was never written."""
        return None if page.location is None else part_of(self.file(page.location), page)


def part_of(file: File, page: Page) -> bytes:
    """Return what a file has where the page's place is."""
    return bytes(file.bytes[page.file_offset : page.file_offset + page.nbytes])


def make_sections(section_pages: list[int], random: Random, transient: frozenset[int]) -> tuple[list[Section], int]:
    """Return sections of so many pages each, the last page of each perhaps short, and the size of a file that holds them."""
    sections = []
    offset = 0
    first_page = 0
    for number, pages in enumerate(section_pages):
        nbytes = pages * PAGE_BYTES - random.choice([0, 0, 4, PAGE_BYTES - 1])
        plan = SectionPlan(number, "grad" if number in transient else "state", torch.uint8, (), nbytes)
        sections.append(Section(plan, offset, PAGE_BYTES, first_page))
        offset += nbytes + random.randrange(8)
        first_page += pages
    return sections, offset


class VictimCache:
    """A victim cache that has room by chance, and is needed for something else by chance."""

    def __init__(self, arena: Arena, random: Random, note_load: Callable[[], None]) -> None:
        self._arena = arena
        self._note_load = note_load
        self._random = random
        self._kept: dict[int, bytes] = {}
        self.generosity = random.choice([0.0, 0.5, 1.0])
        self.loads = 0

    def keep(self, page: Page, address: int) -> bool:
        if page.section.transient or self._random.random() >= self.generosity:
            return False
        self._kept[page.index] = bytes(self._arena.at(address, page.nbytes))
        return True

    def load(self, page: Page, address: int) -> None:
        self._note_load()
        self._arena.at(address, page.nbytes)[:] = self._kept.pop(page.index, b"\xaa" * page.nbytes)
        self.loads += 1

    def place_of(self, page: Page) -> tuple[object, int]:
        return self, page.index

    def at(self, index: int, nbytes: int) -> bytes:
        return self._kept.get(index, b"\xaa" * nbytes)  # what the memory is used for otherwise

    def content(self, page: Page) -> bytes | None:
        return self._kept.get(page.index)

    def choose(self) -> list[int]:
        """Returns pages whose memory is wanted back."""
        return [index for index in self._kept if self._random.random() < 0.3]

    def take_back(self, dropped: list[int]) -> None:
        """What was kept of these pages is gone."""
        for index in dropped:
            self._kept.pop(index, None)
