"""Changing the bytes of a run's live files behind its back, as a decaying drive or another program would."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import swapper
from swapper.paging.residency import DIRTY, WRITING
from swapper.paging.section import Page

SECTOR = 4096
STEP_BYTES = 64 << 10
"""One bit is turned in each of these."""

Harm = Callable[[bytes, bytes], bytes]
"""What becomes of a page's bytes, given also those of another page."""


def flip_bits(content: bytes, other: bytes) -> bytes:
    changed = bytearray(content)
    for at in range(0, len(changed), STEP_BYTES):
        changed[at] ^= 1
    return bytes(changed)


def zero_a_block(content: bytes, other: bytes) -> bytes:
    """The first block that has something."""
    at = next((n for n in range(0, len(content), SECTOR) if any(content[n : n + SECTOR])), 0)
    return content[:at] + bytes(SECTOR) + content[at + SECTOR :]


def exchange(content: bytes, other: bytes) -> bytes:
    """The other page's bytes, as where a write went to the wrong place."""
    return (other + content[len(other) :])[: len(content)]


def cut(content: bytes, other: bytes) -> bytes:
    """Nothing is there; see `change`."""
    return b""


HARMS: list[Harm] = [flip_bits, zero_a_block, exchange, cut]


def paths_of(manager: swapper.SwapManager, page: Page) -> Path:
    """Return the file that has the newest content of a page; a nameless one by its descriptor."""
    run = manager.current.run
    if not page.section.transient:
        return run._resources.store.swap_files.paths[page.location][page.drive]
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            if "/scratch-" in str(descriptor.readlink()):
                return descriptor
        except FileNotFoundError:  # of the listing itself
            continue
    raise AssertionError("the run has no scratch file")


def stored_pages(manager: swapper.SwapManager, family: str) -> list[Page]:
    """Return the pages of a family whose newest content is on the drive."""
    pages = [page for page in manager.current.run.pager._pages if page.section.plan.family == family]
    return [page for page in pages if page.location is not None and page.residency not in (DIRTY, WRITING)]


def change(manager: swapper.SwapManager, family: str, harm: Harm) -> None:
    """Change every page of `family` on the drive."""
    pages = stored_pages(manager, family)
    assert pages, f"nothing of {family} is on the drive"
    changed = 0
    contents = [_read(paths_of(manager, page), page) for page in pages]
    for number, page in enumerate(pages):
        path = paths_of(manager, page)
        harmed = harm(contents[number], contents[number - 1])
        changed += harmed != contents[number]
        descriptor = os.open(path, os.O_RDWR)
        if harmed:
            os.pwrite(descriptor, harmed, page.file_offset)
        else:
            os.ftruncate(descriptor, min(os.fstat(descriptor).st_size, page.file_offset + page.nbytes // 2))
        os.fsync(descriptor)
        os.close(descriptor)
    assert changed, "nothing was changed"


def _read(path: Path, page: Page) -> bytes:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.pread(descriptor, page.nbytes, page.file_offset)
    finally:
        os.close(descriptor)
