"""Holds for the resources of every model: opened and closed in one order, whoever opens them and wherever that ends."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from infer.host_device import HostDevice
from model_users import USERS, User

from swapper.errors import IoError
from swapper.io.drives import Drives
from swapper.modules.resources import Resources
from swapper.paging.layout import PoolSize, SectionPlan
from swapper.paging.schedule import Access, Schedule
from swapper.paging.section import Section
from swapper.paging.store.scratch import ScratchFile, Stores
from swapper.paging.store.swap_files import Store
from swapper.runtime.counters import Counters

PAGE = 64 << 10


@pytest.fixture(params=[name for name in USERS if name != "an expert"])
def user(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[User]:
    made = USERS[request.param](tmp_path)
    yield made
    made.close()


def open_files(directory: Path) -> list[str]:
    targets = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            targets.append(str(entry.readlink()))
        except OSError:
            continue
    return [target for target in targets if target.startswith(str(directory)) and not target.endswith("lock")]


def test_what_was_opened_is_closed_also_twice_and_with_reads_under_way(user: User, tmp_path: Path) -> None:
    resources = user.resources
    user.run()
    pages = [page for page in resources.pager._pages if page.ticket is not None]
    tickets = [page.ticket for page in pages]
    assert open_files(tmp_path)
    for _ in range(2):
        user.close()
        assert all(ticket is None or ticket.done for ticket in tickets)
        assert resources.engine is None and resources.host_side is None
        assert not any(hasattr(resources, name) for name in ("pager", "pool", "store"))
        assert open_files(tmp_path) == []
    resources.close()


def test_counters_have_the_bytes_of_everything_that_was_moved(user: User) -> None:
    counters = user.resources.counters
    user.run()
    engine = user.resources.engine
    assert engine is not None
    engine.drain()
    user.resources.count_bytes()
    moved = counters.bytes_read, counters.bytes_written
    assert moved == (engine.bytes_read, engine.bytes_written) and sum(moved) > 0
    user.close()
    assert (counters.bytes_read, counters.bytes_written) >= moved


class Opened:
    """Resources of two sections, one of which stays in memory, in swap files and a scratch file."""

    def __init__(self, directory: Path) -> None:
        self.sections = [
            Section(SectionPlan(0, "state", torch.uint8, (), PAGE), 0, None, 0),
            Section(SectionPlan(1, "state", torch.uint8, (), 3 * PAGE), PAGE, PAGE, 0),
            Section(SectionPlan(1, "grad", torch.uint8, (), 2 * PAGE), 0, PAGE, 3),
        ]
        self.resources: Resources[Stores] = Resources(Counters())
        self.drives = Drives((directory,))

    def open(self, **options: object) -> None:
        pages = [page for section in self.sections for page in section.pages]
        cycle = [Access(("all", page.index), (page.index,)) for page in pages]
        self.resources.open(
            self.sections, PoolSize(PAGE, 3), self.drives.directories, "auto", self.open_store, Schedule(cycle),
            HostDevice("late"), **options,  # type: ignore[arg-type]
        )  # fmt: skip

    def open_store(self, engine: object) -> Stores:
        resident, paged, transient = self.sections
        pieces = [resident.piece, *paged.pages]
        return Stores(
            Store(engine, self.drives, [], 4 * PAGE, {}, 2, pieces),  # type: ignore[arg-type]
            ScratchFile(engine, self.drives, transient.pages),  # type: ignore[arg-type]
        )


def no_store(engine: object) -> Stores:
    raise IoError("open", "nowhere", 0, 0, 2, "no such file")


@pytest.mark.parametrize("stage", ["engine", "store", "pager", "nothing"])
def test_an_opening_that_fails_leaves_nothing_open(tmp_path: Path, stage: str) -> None:
    opened = Opened(tmp_path)
    options: dict[str, object] = {}
    if stage == "engine":
        opened.drives = Drives((tmp_path / "absent",))
    elif stage == "store":
        opened.open_store = no_store  # type: ignore[method-assign]
    elif stage == "pager":
        options = {"no_such_option": True}
    try:
        opened.open(**options)
        assert stage == "nothing"
    except (IoError, TypeError, OSError):
        assert stage != "nothing"
    windows = [weakref.ref(section.window) for section in opened.sections if not section.resident]
    opened.resources.close()
    opened.resources.close()
    gc.collect()
    assert open_files(tmp_path) == [] and not any(window() is not None for window in windows)
    assert opened.resources.engine is None


def test_pages_to_which_somebody_refers_and_what_is_resident_become_ordinary_memory(tmp_path: Path) -> None:
    opened = Opened(tmp_path)
    opened.open()
    resident, paged, _ = opened.sections
    pager = opened.resources.pager
    resident.memory.fill_(7)
    seen, kept = resident.memory[:PAGE], paged.own_bytes(0, 2 * PAGE)
    for number in range(2):  # the last one stays in its frame
        access = Access(None, (number,), writes=frozenset({number}), fresh=frozenset({number}))
        with pager.leased(access):
            kept[number * PAGE : (number + 1) * PAGE].fill_(8 + number)
        pager.flush()
        if number == 0:
            pager.discard_pages([0])
    others = paged.own_bytes(2 * PAGE, 3 * PAGE)
    assert [page.index for page in paged.referenced_pages()] == [0, 1, 2]
    del others
    assert [page.index for page in paged.referenced_pages()] == [0, 1]
    assert [page.shown for page in paged.pages] == [False, True, False]
    opened.resources.close()
    assert torch.equal(seen, torch.full((PAGE,), 7, dtype=torch.uint8))
    assert torch.equal(kept.view(2, PAGE), torch.tensor([[8], [9]], dtype=torch.uint8).expand(2, PAGE))
