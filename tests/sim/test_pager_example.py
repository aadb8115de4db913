"""The pager moves six pages through three frames as docs/changing.md shows it: a forward, a backward and a sweep."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from swapper.paging.dry_run import DryStore
from swapper.paging.host_memory import Pool
from swapper.paging.layout import SectionPlan
from swapper.paging.pager import Pager
from swapper.paging.schedule import Access, Schedule
from swapper.paging.section import NoWindow, Page, Section
from swapper.paging.virtual_drive import DriveRates, VirtualDrive

DOCS = Path(__file__).parents[2] / "docs" / "changing.md"
PAGE = 4096
LETTERS = {"COLD": ".", "READING": "r", "CLEAN": "c", "DIRTY": "d", "WRITING": "w"}


class TellingStore(DryStore):
    """Notes what it is asked for in `sent`."""

    def __init__(self, drive: VirtualDrive) -> None:
        super().__init__(drive)
        self.sent: list[str] = []

    def read(self, page: Page, address: int, after: Any = None) -> Any:
        self.sent.append(f"read {page.index}{' after a write' if after else ''}")
        return super().read(page, address, after)

    def write(self, page: Page, address: int) -> Any:
        self.sent.append(f"write {page.index}")
        return super().write(page, address)


def pages_of(family: str, first_page: int) -> list[Page]:
    """Return three pages whose content the store has."""
    plan = SectionPlan(0, family, torch.float32, (), 3 * PAGE)
    section = Section(plan, first_page * PAGE, PAGE, first_page)
    section.attach(torch.empty(0, dtype=torch.uint8), NoWindow())
    for page in section.pages:
        page.location = 0
    return list(section.pages)


class Example:
    """Pages 0 to 2 are parameters of three groups, pages 3 to 5 their state. Moving a page takes a second, and so does a use."""

    def __init__(self) -> None:
        self.drive = VirtualDrive(DriveRates(read=PAGE, write=PAGE))
        self.store = TellingStore(self.drive)
        self.pages = pages_of("param", 0) + pages_of("state", 3)
        pool = Pool(base_address=0, arena_offset=0, frame_bytes=PAGE, frame_count=3)
        self.forward = [Access(("param", group), (group,)) for group in range(3)]
        slices = [(3 + group, group) for group in range(3)]
        self.sweep = [Access(("slice", n), each, writes=frozenset(each)) for n, each in enumerate(slices)]
        schedule = Schedule([*self.forward, *reversed(self.forward), *self.sweep])
        self.pager = Pager(self.pages, pool, self.store, schedule, self.drive.counters)
        self.shown: list[str] = []

    def show(self, call: str) -> None:
        states = [LETTERS[page.residency.name] for page in self.pages]
        states = [state.upper() if page.leases else state for page, state in zip(self.pages, states, strict=True)]
        self.shown.append(f"{call:19} {' '.join(states)}   {', '.join(self.store.sent)}".rstrip())
        self.store.sent.clear()

    def use(self, name: str, accesses: Iterable[tuple[int, Access]]) -> None:
        for number, access in accesses:
            title = f"{name} {number}"
            self.pager.lease(access)
            self.show(f"{title} lease")
            self.pager.wait(access)
            self.show(f"{'':{len(title)}} wait")
            self.drive.compute(1)
            self.pager.release(access, changed=access.writes)
            self.show(f"{'':{len(title)}} release")


def test_the_pager_moves_pages_as_the_documentation_shows() -> None:
    example = Example()
    example.use("forward", enumerate(example.forward))
    example.use("backward", reversed(list(enumerate(example.forward))))
    example.use("step", enumerate(example.sweep))
    example.pager.end_step()
    example.show("end_step")
    text = re.findall(r"^```text\n(.*?)^```", DOCS.read_text(), re.MULTILINE | re.DOTALL)[0]
    assert "\n".join(example.shown) + "\n" == text
