"""A run on a simulated drive that does exactly what a test says, and the words to say it in.

IDLE drives do nothing until somebody waits for them, SLOW ones little; EAGER ones are done as soon as they are asked.
"""

from __future__ import annotations

import errno
from typing import Any

from simulated_run import Run

from swapper.errors import IoError
from swapper.paging.residency import Residency
from swapper.paging.schedule import Access

IDLE, SLOW, EAGER = 0.0, 0.02, 1.0


def use(key: object, *pages: int) -> Access:
    return Access(key, pages)


def change(key: object, *pages: int, fresh: tuple[int, ...] = ()) -> Access:
    return Access(key, pages, frozenset(fresh), frozenset(pages))


def make(
    pages: int, frames: int, cycle: tuple[Access, ...] = (), hurry: float = IDLE, seed: int = 1, **options: Any
) -> Run:
    """A run whose pages all have content, committed, and of which none is in memory."""
    options = {"lazy": False, "window_pages": frames, **options}
    run = Run(seed, [pages], frames, list(cycle), hurry=hurry, **options)
    for index in range(pages):
        write(run, index)
    assert run.commit()
    run.discard()
    run.engine.seen.clear()
    return run


def write(run: Run, *pages: int) -> None:
    lease = run.acquire(change(None, *pages, fresh=pages))
    assert lease is not None
    run.change(lease)
    run.release(lease)


def fail(run: Run, op: str, *pages: int) -> None:
    """From now on `op` fails for these pages, until run.faults.repair()."""
    for index in pages:
        for file in run.store._files.values():
            run.faults._broken[op, file.first.path, run.pages[index].file_offset] = errno.EIO


def error_of(run: Run, request: str, *arguments: Any) -> IoError:
    """Return the IoError with which a request to the pager must fail."""
    assert not run.attempt(getattr(run.pager, request), *arguments)
    assert run.last_error is not None
    run.check()
    return run.last_error


def in_memory(run: Run) -> set[int]:
    return {page.index for page in run.pages if page.residency is not Residency.COLD}


def pass_over(run: Run, accesses: list[Access]) -> None:
    for access in accesses:
        lease = run.acquire(access)
        assert lease is not None
        if access.writes:
            run.change(lease)
        run.release(lease)
        run.check()
