"""Notices to a person: a line of what was chosen, and a bar for work that takes long.

A program that configures logging gets the line in its log, and nothing else. Of several processes the first one speaks.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TypeVar

T = TypeVar("T")

PATIENCE_S = 2.0
"""Work that is shorter gets no bar."""

log = logging.getLogger("swapper")


def is_first_rank() -> bool:
    """Return True in the first process of those that torchrun has started, and in a process alone."""
    return os.environ.get("RANK", "0") == "0"


def is_interactive() -> bool:
    """Return True in a notebook or at Python's prompt: both define a prompt."""
    return hasattr(sys, "ps1")


def notify(text: str) -> None:
    """Log `text` as info; print it to stderr where nobody has configured logging, as in a first script or a notebook.

    `logging.getLogger("swapper").setLevel(logging.WARNING)` silences it.
    """
    if log.hasHandlers():
        log.info("%s", text)
    elif log.level <= logging.INFO and is_first_rank():
        print(f"swapper: {text}", file=sys.stderr)


def tracked(items: Sequence[T], what: str, nbytes: Callable[[T], int]) -> Iterator[T]:
    """Yield `items`; on a terminal and in a notebook show a bar once that has taken PATIENCE_S seconds.

    Args:
        items: to work on, one after the other.
        what: the work, for the bar.
        nbytes: returns the bytes of an item.
    """
    began_s, done_bytes, advance = time.monotonic(), 0, None
    with ExitStack() as stack:
        for item in items:
            yield item
            done_bytes += nbytes(item)
            if advance is None and time.monotonic() - began_s > PATIENCE_S and is_first_rank():
                advance = stack.enter_context(_bar(what, sum(nbytes(one) for one in items)))
            if advance is not None:
                advance(done_bytes)


@contextmanager
def _bar(what: str, total_bytes: int) -> Iterator[Callable[[int], object]]:
    """Show a bar on stderr, if that is a terminal or a notebook's. Yields what sets the bytes that are done."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_interactive) as bar:
        task = bar.add_task(what, total=total_bytes)
        yield lambda done_bytes: bar.update(task, completed=done_bytes)
