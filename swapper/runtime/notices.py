"""Notices to a person: a line of what was chosen, and a bar for work that takes long.

A program that configures logging gets the line in its log, and nothing else. Of several processes the first one speaks.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
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
    """Yield `items`; on a terminal and in a notebook show a bar if that takes more than PATIENCE_S seconds.

    Args:
        items: to work on, one after the other.
        what: the work, beside the bar.
        nbytes: returns the bytes of an item.
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    console = Console(stderr=True)
    if not console.is_interactive or not is_first_rank():
        yield from items
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    bar, began_s, shown = Progress(*columns, console=console, transient=True), time.monotonic(), False
    task = bar.add_task(what, total=sum(nbytes(item) for item in items))
    try:
        for item in items:
            yield item
            bar.advance(task, nbytes(item))
            if not shown and time.monotonic() - began_s > PATIENCE_S:
                bar.start()
                shown = True
    finally:
        if shown:
            bar.stop()
