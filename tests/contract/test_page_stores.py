"""Holds for every store of pages: swap files, a scratch file, both as one, a checkpoint's files, the dry run's."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from swapper import _C
from swapper.errors import ChecksumError, InvariantError, IoError
from swapper.formats.sources import FileStamp, Source
from swapper.infer.streaming import WeightFiles
from swapper.io.drives import Drives
from swapper.io.engines import open_engine
from swapper.paging.dry_run import DryStore
from swapper.paging.layout import SectionPlan
from swapper.paging.section import Page, Section, pieces_of
from swapper.paging.store.page_files import PageStore
from swapper.paging.store.scratch import ScratchFile, Stores
from swapper.paging.store.swap_files import Store
from swapper.paging.virtual_drive import VirtualDrive

PAGE = 64 << 10
PAGES = 5


def section(family: str, first_page: int = 0, offset: int = 0) -> Section:
    return Section(SectionPlan(0, family, torch.uint8, (), PAGES * PAGE - 4096), offset, PAGE, first_page)


class Bench:
    """A store, its pages, and memory of two frames."""

    def __init__(self, directories: list[Path]) -> None:
        self.arena = _C.Arena(2 * PAGE, huge_pages=False)
        self.memory = torch.frombuffer(self.arena.view(0, 2 * PAGE), dtype=torch.uint8)
        self.drives = Drives(tuple(directories))
        self.engine = open_engine(directories, arena=self.arena)
        self.sections: list[Section] = []
        self.store: PageStore
        self.names_changes = True

    @property
    def pages(self) -> list[Page]:
        return [page for section in self.sections for page in section.pages]

    def content(self, page: Page) -> torch.Tensor:
        return torch.full((page.nbytes,), 17 * page.index + 3, dtype=torch.uint8)

    def write(self, page: Page, content: torch.Tensor) -> None:
        self.memory[: page.nbytes] = content
        ticket = self.store.write(page, self.arena.address)
        file = self.store.written_to(page)
        ticket.wait()
        self.store.written(page, ticket)
        assert self.store.file_of(page) is file

    def read(self, page: Page) -> torch.Tensor:
        self.memory[PAGE : PAGE + page.nbytes] = 255
        self.store.read(page, self.arena.address + PAGE).wait()
        return self.memory[PAGE : PAGE + page.nbytes].clone()

    def path_of(self, page: Page) -> Path:
        file = self.store.file_of(page)
        assert file is not None
        return Path(file.path)


def swap_files(bench: Bench, directory: Path) -> None:
    bench.sections = [section("state")]
    nbytes = PAGES * PAGE
    bench.store = Store(bench.engine, bench.drives, [], nbytes, {}, 2, pieces_of(bench.sections[0]))


def scratch_file(bench: Bench, directory: Path) -> None:
    bench.sections = [section("grad")]
    bench.store = ScratchFile(bench.engine, bench.drives, bench.sections[0].pages)


def both(bench: Bench, directory: Path) -> None:
    bench.sections = [section("state"), section("grad", PAGES)]
    swap = Store(bench.engine, bench.drives, [], PAGES * PAGE, {}, 2, pieces_of(bench.sections[0]))
    bench.store = Stores(swap, ScratchFile(bench.engine, bench.drives, bench.sections[1].pages))


def checkpoint_files(bench: Bench, directory: Path) -> None:
    bench.sections = [section("param", offset=12)]
    path = directory / "weights"
    pages = [bench.content(page) for page in bench.pages]
    path.write_bytes(bytes(12) + torch.cat(pages).numpy().tobytes())
    source = Source(path, "test", {}, {path: FileStamp.of(path)}, {}, {})
    bench.store = WeightFiles(bench.engine, source, {bench.sections[0]: path})
    bench.names_changes = False


WRITABLE = {"swap files": swap_files, "a scratch file": scratch_file, "both as one": both}
STORES = {**WRITABLE, "a checkpoint's files": checkpoint_files}


@pytest.fixture
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    make: Callable[[Bench, Path], None] = request.param
    made = Bench([tmp_path])
    make(made, tmp_path)
    yield made
    made.engine.close()
    made.store.close()  # type: ignore[attr-defined]
    made.arena.close()


every_store = pytest.mark.parametrize("bench", STORES.values(), ids=STORES, indirect=True)
every_writable = pytest.mark.parametrize("bench", WRITABLE.values(), ids=WRITABLE, indirect=True)


@every_store
def test_a_page_has_what_was_written_of_it_last(bench: Bench) -> None:
    for page in bench.pages:
        if page.location is None:
            for content in (torch.zeros(page.nbytes, dtype=torch.uint8), bench.content(page)):
                bench.write(page, content)
    for page in bench.pages:
        assert torch.equal(bench.read(page), bench.content(page))
        file = bench.store.file_of(page)
        assert file is not None
        view = bench.arena.view(0, page.nbytes)
        bench.engine.read(file, page.stored_offset, view.address, page.nbytes).wait()
        assert torch.equal(torch.frombuffer(view, dtype=torch.uint8), bench.content(page))


@every_writable
def test_a_page_that_was_never_written_is_not_read(bench: Bench) -> None:
    for page in bench.pages:
        assert bench.store.file_of(page) is None
        with pytest.raises(InvariantError, match="never written"):
            bench.store.read(page, bench.arena.address)


@every_store
def test_a_read_behind_a_transfer_that_failed_fails_and_leaves_the_memory_alone(bench: Bench, tmp_path: Path) -> None:
    page = bench.pages[1]
    if page.location is None:
        bench.write(page, bench.content(page))
    broken, file = _C.Engine(chaos={"seed": 1, "eio": 1}), _C.File(tmp_path / "other", create=True)
    first = broken.write(file, 0, bench.arena.address, 4096)
    bench.memory[PAGE:] = 99
    second = bench.store.read(page, bench.arena.address + PAGE, first)
    assert isinstance(second.exception(), IoError) and second.done
    assert first.error is not None and torch.equal(bench.memory[PAGE:], torch.full((PAGE,), 99, dtype=torch.uint8))
    broken.close()
    file.close()


@every_store
def test_a_read_that_failed_is_explained(bench: Bench) -> None:
    """Bytes that are not those that were written are an error that names the tensors' page; a checkpoint has no checksums."""
    page = bench.pages[1]
    if page.location is None:
        bench.write(page, bench.content(page))
    refused = IoError("read", "somewhere", page.file_offset, page.nbytes, 5, "Input/output error")
    assert bench.store.explain(page, refused) is refused
    if not bench.names_changes:
        return
    file = bench.store.file_of(page)
    assert file is not None
    other = bench.arena.view(0, page.nbytes)
    torch.frombuffer(other, dtype=torch.uint8).fill_(200)
    bench.engine.write(file, page.stored_offset, other.address, page.nbytes).wait()
    error = bench.store.read(page, bench.arena.address + PAGE).exception()
    assert isinstance(error, IoError)
    assert isinstance(bench.store.explain(page, error), ChecksumError)


@pytest.mark.parametrize("bench", [swap_files], indirect=True)
def test_a_torn_page_is_read_as_it_is_and_returns_to_what_was_committed(bench: Bench) -> None:
    page = bench.pages[1]
    bench.write(page, bench.content(page))
    bench.store.commit()  # type: ignore[attr-defined]
    bench.write(page, torch.zeros(page.nbytes, dtype=torch.uint8))
    mixed = torch.arange(page.nbytes).to(torch.uint8)
    with bench.path_of(page).open("r+b") as file:
        os.pwrite(file.fileno(), mixed.numpy().tobytes(), page.stored_offset)
    assert isinstance(bench.store.read(page, bench.arena.address + PAGE).exception(), IoError)
    page.torn = True
    assert torch.equal(bench.read(page), mixed)
    bench.store.roll_back([page])  # type: ignore[attr-defined]
    assert not page.torn and torch.equal(bench.read(page), bench.content(page))


@pytest.mark.parametrize("bench", [checkpoint_files], indirect=True)
def test_a_checkpoint_is_never_written(bench: Bench) -> None:
    before = bench.path_of(bench.pages[0]).read_bytes()
    with pytest.raises(InvariantError, match="would be written"):
        bench.store.write(bench.pages[0], bench.arena.address)
    assert bench.path_of(bench.pages[0]).read_bytes() == before


def test_the_store_of_a_dry_run_answers_as_the_others_do() -> None:
    drive, page = VirtualDrive(), section("state").pages[0]
    store = DryStore(drive)
    ticket = store.write(page, 0)
    assert ticket.done and ticket.error is None and store.written_to(page) is None
    store.written(page, ticket)
    assert page.location is not None and store.file_of(page) is None
    store.read(page, 0, ticket).wait()
    assert drive.finished == 2
