"""The real store, its files in memory, and sections of sizes that a seed decides."""

from __future__ import annotations

from pathlib import Path
from random import Random

import torch
from simulated_engine import Engine, File

from swapper.io.drives import Drives
from swapper.paging.planning.layout import SectionPlan
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
