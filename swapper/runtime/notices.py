"""Tells a person what goes on: a line of what was chosen, a bar for work that takes long, and dumps when a wait is too long.

A program that configures logging gets the line in its log, and nothing else. Of several processes the first one
speaks.

The watchdog logs a dump of the run's state when a wait is too long, and at each SIGUSR1. Each manager has one thread.
It checks the waits (runtime/counters.py) now and then, and logs a dump (logger "swapper", a warning, which Python
prints to stderr by default) once for each wait that is too long. It reads without locks, changes nothing.

[Note: whose SIGUSR1] By default the signal ends a process. So if it has no handler, and the manager is made in the
main thread, swapper installs one, and removes it with the last manager; if that is closed in another thread, which
Python does not let change a handler, it stays and does what the system does. A handler of the user's, made before or
after, stays, and can call `manager.dump()`. Swapper's only notifies the threads: it may run in the middle of
anything.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import TypeVar

from swapper.runtime.counters import Counters, Wait
from swapper.runtime.interrupts import PROMPT
from swapper.runtime.process import is_off, naming_limits

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


class _Unconfigured(logging.Handler):
    """Prints swapper's lines, with its name, where nobody has configured logging; Python would leave out the name."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("swapper: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        if not _is_configured():
            try:
                print(self.format(record), file=sys.stderr)
            except Exception:
                self.handleError(record)


log.addHandler(_Unconfigured())


def _is_configured() -> bool:
    return logging.getLogger().hasHandlers() or len(log.handlers) > 1


def notify(text: str) -> None:
    """Log `text` as info; print it to stderr where nobody has configured logging, as in a first script or a notebook.

    `logging.getLogger("swapper").setLevel(logging.WARNING)` silences it.
    """
    if _is_configured():
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


# --- waits that are too long ------------------------------------------------------------------------------------------


_watching: weakref.WeakSet[Watchdog] = weakref.WeakSet()


class Watchdog:
    """Owns the watching thread.

    Args:
        counters: have the waits that go on now.
        describe: returns a dump; called without locks.
        stall_s: how long a wait may take, in seconds; None: no limit.
    """

    def __init__(self, counters: Counters, describe: Callable[[], str], stall_s: float | None) -> None:
        # Its put is reentrant, as a signal handler needs.
        self._queue: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._pid = os.getpid()
        self._thread = threading.Thread(
            target=_watch, args=(self._queue, counters, describe, stall_s), name="swapper-watchdog", daemon=True
        )
        with naming_limits("watch"):
            self._thread.start()
        weakref.finalize(self, self._queue.put, None).atexit = False  # a run that is dropped, not closed, ends it too
        _watching.add(self)
        _take_signal()

    def ask(self) -> None:
        """Have a dump logged soon: the signal came."""
        if os.getpid() == self._pid:
            self._queue.put("SIGUSR1")

    def stop(self) -> None:
        """End the thread. Idempotent."""
        _watching.discard(self)
        if not _watching:
            _give_signal_back()
        if os.getpid() == self._pid:
            self._queue.put(None)
            self._thread.join()


def _watch(
    inbox: queue.SimpleQueue[str | None], counters: Counters, describe: Callable[[], str], stall_s: float | None
) -> None:
    logged: Wait | None = None
    while True:
        try:
            why = inbox.get(timeout=None if stall_s is None else stall_s / 4)
            if why is None:
                return
        except queue.Empty:
            wait = min(list(counters.waits.values()), key=lambda wait: wait.since_s, default=None)
            if wait is None or stall_s is None or wait is logged or time.monotonic() - wait.since_s < stall_s:
                continue
            logged, why = wait, f"waiting for {stall_s:g} s and more"
        try:
            log.warning("%s\n%s", why, describe())
        except Exception:  # it reads what other threads change; the run must not suffer
            log.exception("the dump failed")


def describe_waits(counters: Counters) -> str:
    """Return the waits that go on now, a line for each thread."""
    now_s, waits = time.monotonic(), list(counters.waits.values())
    lines = [f"waiting {now_s - wait.since_s:.1f} s for a {wait.kind}: {wait.what}" for wait in waits]
    return "\n".join(lines or ["waiting for nothing"])


# --- [Note: whose SIGUSR1] ----------------------------------------------------------------------------------------------


def _on_signal(number: int, frame: FrameType | None) -> None:
    watchdogs = list(_watching)
    for watchdog in watchdogs:
        watchdog.ask()
    if not watchdogs:  # the last run was dropped and not closed: do what the system does by default
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


setattr(_on_signal, PROMPT, True)


def _take_signal() -> None:
    in_main = threading.current_thread() is threading.main_thread()
    if in_main and not is_off("sigusr1") and signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL:
        signal.signal(signal.SIGUSR1, _on_signal)


def _give_signal_back() -> None:
    in_main = threading.current_thread() is threading.main_thread()
    if in_main and signal.getsignal(signal.SIGUSR1) is _on_signal:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
