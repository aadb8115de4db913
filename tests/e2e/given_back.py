"""Memory that swapper has, and at the addresses that it had: what `close` and `unload` give back at once."""

from __future__ import annotations

import contextlib
import gc
import re
from collections.abc import Iterator
from pathlib import Path

_NAME = "swapper-arena"


_of_others: set[int] = set()
"""Inodes of arenas that there were before: the process's engines for checkpoints keep theirs."""


def _arenas() -> dict[int, int]:
    found = {}
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if _NAME in str(link.readlink()):
                status = link.stat()
                found[status.st_ino] = status.st_blocks * 512
    return found


def arena_bytes() -> int:
    """Return how much memory swapper's arenas have, mapped or not: those that were made since `no_collector` began."""
    return sum(nbytes for inode, nbytes in _arenas().items() if inode not in _of_others)


def arena_addresses() -> list[tuple[int, int]]:
    """Return the addresses at which those arenas are mapped now: by themselves, and by windows."""
    found = []
    with Path("/proc/self/maps").open() as lines:
        for line in lines:
            if _NAME in line and int(line.split()[4]) not in _of_others:
                begin, end = line.split(" ", 1)[0].split("-")
                found.append((int(begin, 16), int(end, 16)))
    return found


def bytes_at(addresses: list[tuple[int, int]]) -> int:
    """Return how much memory is at these addresses, whosever it is.

    It is read line by line: memory for the whole text may come just where other memory was given back.
    """
    total, is_inside = 0, False
    with Path("/proc/self/smaps").open() as lines:
        for line in lines:
            heading = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
            if heading:
                begin, end = int(heading[1], 16), int(heading[2], 16)
                is_inside = any(begin < last and end > first for first, last in addresses)
            elif is_inside and line.startswith("Rss:"):
                total += int(line.split()[1]) * 1024
    return total


@contextlib.contextmanager
def no_collector() -> Iterator[None]:
    """Within, what is in a cycle stays."""
    gc.collect()
    _of_others.clear()
    _of_others.update(_arenas())
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
