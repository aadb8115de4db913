"""Ctrl-C, deferred where it would leave something half-changed; and closing several things of which each may raise.

Python runs the handler of SIGINT between any two instructions of the main thread, so that KeyboardInterrupt may arise in the
middle of a list being changed. Within `defer_sigint` the first Ctrl-C is only noted, and takes effect at the end; a second one
takes effect at once, for a user who cannot wait.

[Note: signals without names] `signal.signal` and `getsignal` make enumerations of numbers and handlers, which would be most of the
cost here, and the pager defers several times for each page. The functions that they wrap are used instead.
"""

from __future__ import annotations

import _signal as unnamed  # [Note: signals without names]
import logging
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from types import FrameType
from typing import Any

from swapper.runtime.process import is_off

SIGINT: int = unnamed.SIGINT

log = logging.getLogger("swapper")


class DeferredSigint:
    """A context manager that may be nested. In threads other than the main one, which get no signals, it does nothing."""

    def __init__(self) -> None:
        self._depth = 0
        self._pending: tuple[int, FrameType | None] | None = None
        self._handler: Callable[[int, FrameType | None], Any] | None = None

    def __enter__(self) -> None:
        if threading.get_ident() != threading.main_thread().ident:
            return
        if self._depth == 0:
            handler = unnamed.getsignal(SIGINT)
            self._handler = handler if callable(handler) else None  # ignored, or not Python's
            if self._handler is not None:
                unnamed.signal(SIGINT, self._note)
        self._depth += 1

    def __exit__(self, *exception: object) -> None:
        if threading.get_ident() != threading.main_thread().ident:
            return
        self._depth -= 1
        if self._depth or self._handler is None:
            return
        handler, pending, self._pending = self._handler, self._pending, None
        unnamed.signal(SIGINT, handler)
        if pending is not None:
            handler(*pending)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._pending is not None and self._handler is not None:
            self._handler(number, frame)
        self._pending = (number, frame)


defer_sigint: AbstractContextManager[None] = nullcontext() if is_off("sigint") else DeferredSigint()


def run_uninterrupted(action: Callable[[], None]) -> None:
    """Do `action` within `defer_sigint`, even if Ctrl-C comes just before: for actions that give something back."""
    begun = False
    try:
        with defer_sigint:
            begun = True
            action()
    except BaseException:
        if not begun:
            with defer_sigint:
                action()
        raise


class SteadyLock:
    """A mutex within which Ctrl-C is deferred: what it guards is never left half-changed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        defer_sigint.__enter__()
        self._lock.acquire()

    def __exit__(self, *exception: object) -> None:
        self._lock.release()
        defer_sigint.__exit__(None, None, None)

    def locked(self) -> bool:
        return self._lock.locked()


def close_all(endings: Iterable[Callable[[], object]]) -> None:
    """Call all, in order, even if some raise; then raise the first error. Later errors are logged.

    Not `contextlib.ExitStack`: an error that went through one is in a cycle with its own traceback. What the traceback's frames
    hold, as tensors that the autograd graph has too, is then found by no garbage collector, and stays.
    """
    failures: list[BaseException] = []
    for end in endings:
        try:
            end()
        except BaseException as error:  # also Ctrl-C: half-closed is worse than a moment's wait
            if failures:
                log.error("%s: %s (after another error)", type(error).__name__, error)
            else:
                failures.append(error)
    if failures:
        try:
            raise failures[0]
        finally:
            failures.clear()  # its traceback has this frame
