"""Defines SnapshotTicket, the handle of a snapshot in progress."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Generator
from pathlib import Path

from swapper.errors import StateError


class SnapshotTicket:
    """A snapshot in progress. Made by `SwapManager.snapshot`. Awaitable: `path = await manager.snapshot(...)`.

    The next `snapshot`, or `close`, raises a failure that nobody has asked for.

    Attributes:
        path: the file appears there, whole, when the ticket succeeds.
        step: number of optimizer steps in it.
    """

    def __init__(self, path: Path, step: int, hurry: Callable[[], None]) -> None:
        self.path = path
        self.step = step
        self._hurry = hurry
        self._owner = threading.get_ident()
        self._pid = os.getpid()
        self._over = threading.Event()
        self._error: BaseException | None = None
        self._is_reported = False

    @property
    def done(self) -> bool:
        """True if it is over, successful or not."""
        return self._over.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the file has its name, synced. Returns False if `timeout_s` seconds pass first.

        In the training thread this first waits for the last step's writes; in another, for that thread to continue.

        Raises:
            IoError: a transfer failed, or a drive is full.
            CheckpointError: the path was created, or its directory removed, meanwhile.
            StateError: in a forked child.
        """
        error = self.exception(timeout_s)
        if error is not None:
            raise error
        return self.done

    def exception(self, timeout_s: float | None = None) -> BaseException | None:
        """Wait as `wait` does, and return its error for this snapshot, or None."""
        if os.getpid() != self._pid:
            raise StateError("wait for a snapshot in the process that took it, not in a forked child")
        if not self.done and threading.get_ident() == self._owner:
            self._hurry()
        if not self._over.wait(timeout_s):
            return None
        self._is_reported = True
        return self._error

    def result(self, timeout_s: float | None = None) -> Path:
        """Wait as `wait` does, and return the path.

        Raises:
            TimeoutError: not there after `timeout_s` seconds.
        """
        if not self.wait(timeout_s):
            raise TimeoutError(f"the snapshot {self.path} is not published after {timeout_s} s; it is in progress")
        return self.path

    def __await__(self) -> Generator[object, None, Path]:
        if not self.done and threading.get_ident() == self._owner:
            self._hurry()
        yield from asyncio.get_running_loop().run_in_executor(None, self._over.wait).__await__()
        return self.result()

    def __repr__(self) -> str:
        state = "in progress" if not self.done else "failed" if self._error is not None else "published"
        return f"SnapshotTicket({str(self.path)!r}, step {self.step}, {state})"

    # --- for the publisher

    def finish(self, error: BaseException | None) -> None:
        """Finish the ticket: published, or failed with `error`."""
        if not self.done:
            if error is not None:  # its frames would keep a running forward alive, with all activations
                error.__traceback__ = error.__context__ = None
            self._error = error
            self._over.set()

    def unreported_error(self) -> BaseException | None:
        """Return the error that nobody has seen yet, and mark it as reported."""
        if self._error is None or self._is_reported:
            return None
        self._is_reported = True
        return self._error
