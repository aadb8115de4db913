"""Turns: one thread's pass through a model excludes those of others.

They are reentrant (a module within a module). Ctrl-C, or a backward that fails, can end a pass without ending its turn, and a
thread can die in one: a waiting thread checks by the owner's frame whether the owner is still inside.

[Note: in one step] Another thread can raise an exception between any two instructions here. So there is no mutex that is taken
first and gets its owner then, which would be held for ever: the owner is the entry of a dictionary, which comes and goes at once.
"""

from __future__ import annotations

import inspect
import logging
import selectors
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import NoReturn

import torch
from torch import nn

from swapper.errors import StateError, UnsupportedError
from swapper.runtime.interrupts import defer_signals
from swapper.tensors.torch_private import backward_task

PATIENCE_S = 0.5
"""How long a thread waits for another's pass before it checks whether that thread is still inside."""

_WARN_AFTER_S = 60.0

_CHECKS = 3
"""How often in a row the owner is found waiting, at the same instruction, before that counts as a deadlock."""

_WAITING = frozenset({threading.__file__, selectors.__file__})
"""Files of Python whose innermost frame waits: for futures, threads, queues and events; for asyncio's tasks."""

_SUSPENDABLE = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR

log = logging.getLogger("swapper")


@dataclass(eq=False)
class _Owner:
    """A turn. See `Turns.take`."""

    thread: threading.Thread | None
    frame: FrameType | None


class BatchThread(threading.Thread):
    """Runs one of several batches, of which one runs at a time.

    Args:
        batches: an object that all of them have.
        run: called in the thread.
    """

    def __init__(self, batches: object, run: Callable[[], object]) -> None:
        super().__init__(target=run, daemon=True)
        self.batches = batches


class Turns:
    """The turns of one model."""

    def __init__(self) -> None:
        self._owners: dict[None, _Owner] = {}  # one, or none: [Note: in one step]
        self._takeover = threading.Lock()  # an abandoned turn is taken over by one thread only
        self._bell = threading.Lock()  # released when a turn ends; acquired by who waits for that
        self._bell.acquire()

    @property
    def owner(self) -> threading.Thread | None:
        """The thread that is inside; None: none, or one that is about to be."""
        inside = self._owners.get(None)
        return None if inside is None else inside.thread

    def hand_over(self, thread: threading.Thread | None) -> None:
        """Give the turn to `thread`; None: to one that is about to take it so."""
        self._owners.setdefault(None, _Owner(thread, None)).thread = thread

    @property
    def is_mine(self) -> bool:
        """Whether this thread is inside."""
        inside = self._owners.get(None)
        return inside is not None and inside.thread is threading.current_thread()

    def goes_on(self) -> bool:
        """Return whether this thread is inside, with a pass that goes on: one that Ctrl-C has ended may leave its turn behind."""
        inside = self._owners.get(None)
        if inside is None or inside.thread is not threading.current_thread():
            return False
        return inside.frame is None or is_running(inside.frame)

    def take(self, frame: FrameType | None = None, part: Callable[[], str | None] = lambda: None) -> bool:
        """Wait until no other thread is inside. Returns whether the turn is new: False if this thread had it already.

        Args:
            frame: of the pass; once it has returned the turn counts as abandoned. None: once the thread has ended.
            part: see `wait`.

        Raises:
            StateError: see `wait`.
        """
        if self.goes_on():
            return False
        self.wait(partial(self._try_to_take, frame), part)
        return True

    def wait(self, attempt: Callable[[], bool], part: Callable[[], str | None]) -> None:
        """Call `attempt`, which waits for PATIENCE_S, until it returns True. A thread that waits for long is warned.

        Args:
            part: returns the name of what this thread runs if it is a part of what the owner runs; else None.

        Raises:
            StateError: the owner's forward waits for this thread, which runs a part of it.
            UnsupportedError: the owner is another batch, which waits until this one does.
        """
        began, has_warned = time.monotonic(), False
        waits: list[object] = []
        while not attempt():
            self._check_batches()
            at = self._where_owner_waits()
            waits = [*waits, at] if at is not None and (not waits or waits[-1] == at) else []
            if len(waits) >= _CHECKS and (name := part()) is not None:
                self._refuse_part(name)
            if not has_warned and time.monotonic() - began > _WARN_AFTER_S:
                has_warned = True
                self._warn()

    def _try_to_take(self, frame: FrameType | None) -> bool:
        """Take the turn if it is free, or soon, or abandoned by its owner. Ctrl-C takes effect before or afterwards."""
        mine = _Owner(threading.current_thread(), frame)
        while True:
            with defer_signals, self._takeover:
                inside = self._owners.setdefault(None, mine)
                if inside is mine:
                    return True
                if not _is_inside(inside) and self._owners.get(None) is inside:
                    self._owners[None] = mine
                    return True
            with defer_signals:
                if not self._bell.acquire(timeout=PATIENCE_S):
                    return False

    def give(self) -> None:
        """End the turn: this thread's pass is over."""
        with defer_signals:
            self._owners.pop(None, None)
            with suppress(RuntimeError):  # it has been released, and nobody waited
                self._bell.release()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Return a context in which no other thread is inside."""
        is_new = self.take(_outside_of_generators(sys._getframe(2)))
        try:
            yield
        finally:
            if is_new and self.is_mine:
                self.give()

    def _check_batches(self) -> None:
        mine, owner = threading.current_thread(), self.owner
        if isinstance(mine, BatchThread) and isinstance(owner, BatchThread) and owner.batches is mine.batches:
            raise UnsupportedError(
                "a loss of accumulate_batches has gradients for models of two managers, and its micro-batches would wait for each "
                "other: give both models to one manager, offload({'one': a, 'other': b}, optimizers), or call backward for each "
                "micro-batch"
            )

    def _where_owner_waits(self) -> object:
        """Return the instruction at which the owner waits for other threads or for tasks; None if it does not."""
        owner = self.owner
        frame = None if owner is None else sys._current_frames().get(owner.ident or 0)
        if frame is None or frame.f_code.co_filename not in _WAITING:
            return None
        return owner, id(frame), frame.f_lasti

    def _refuse_part(self, name: str) -> NoReturn:
        raise StateError(
            f"{name} is run by thread {threading.current_thread().name}, while the forward that contains it waits in thread "
            f"{getattr(self.owner, 'name', '?')}: a pass uses its weights in one thread. Run {name} in the thread of the forward, "
            "without a pool or asyncio.to_thread"
        )

    def _warn(self) -> None:
        log.warning(
            "thread %s has waited %d s for thread %s, which is inside the model: threads take turns, a pass at a time. A forward "
            "that itself waits for threads that run parts of the model never ends: run those parts in the thread of the forward",
            threading.current_thread().name, int(_WARN_AFTER_S), getattr(self.owner, "name", "?"),
        )  # fmt: skip


def _is_inside(owner: _Owner) -> bool:
    thread = owner.thread
    return thread is None or (thread.is_alive() and (owner.frame is None or is_running(owner.frame)))


def _outside_of_generators(frame: FrameType | None) -> FrameType | None:
    """Return `frame`, or the innermost one around it that is no generator's: `is_running` would end a suspended one."""
    while frame is not None and frame.f_code.co_flags & _SUSPENDABLE:
        frame = frame.f_back
    return frame


def is_running(frame: FrameType) -> bool:
    """Return whether a frame, of any thread and not of a generator, has not returned yet.

    Following another thread's `f_back` is not safe: the thread runs on between two lookups. Python refuses to clear a running
    frame. One that has returned loses its local variables, which are torch's or swapper's own.
    """
    try:
        frame.clear()
    except RuntimeError:
        return True
    return False


def frame_of_call() -> FrameType | None:
    """Return torch's frame that runs the innermost call of a module in this thread; None if there is none."""
    return _outermost_of(nn.modules.module.__file__)


def frame_of_backward() -> FrameType | None:
    """Return torch's frame that runs the innermost backward; None in a thread of autograd's own."""
    return _outermost_of(torch.autograd.graph.__file__)


def is_in_backward() -> bool:
    """Return whether this thread runs a part of a backward, or a forward within one."""
    return backward_task() != -1


def _outermost_of(file: str) -> FrameType | None:
    """Return the innermost frame that runs code of `file`, or the outermost one of several in a row."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename != file:
        frame = frame.f_back
    while frame is not None and frame.f_back is not None and frame.f_back.f_code.co_filename == file:
        frame = frame.f_back
    return frame
