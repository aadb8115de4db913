"""Ending several things, each of which may raise: all are ended, and the first error is told.

Not `contextlib.ExitStack`: an error that went through one is part of a cycle with its own traceback. What the traceback's frames
hold, as tensors that the autograd graph has too, is then found by no garbage collector, and stays.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

log = logging.getLogger("swapper")


def close_all(endings: Iterable[Callable[[], object]]) -> None:
    """Call each, in order, whatever the ones before it raised; then raise what the first raised. Later errors are logged."""
    failures: list[BaseException] = []
    for end in endings:
        try:
            end()
        except BaseException as error:  # also Ctrl-C: what is left half-ended is worse than a moment
            if failures:
                log.error("%s: %s (after another error)", type(error).__name__, error)
            else:
                failures.append(error)
    if failures:
        try:
            raise failures[0]
        finally:
            failures.clear()  # its traceback has this frame
