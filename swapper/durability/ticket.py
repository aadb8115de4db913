"""SnapshotTicket: a snapshot that is on its way."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

from swapper.errors import StateError


class SnapshotTicket:
    """A snapshot under way. Made by `SwapManager.snapshot`. Also awaitable: `path = await manager.snapshot(...)`.

    A failure that nobody has asked for is raised by the next `snapshot`, or by `close`.

    Attributes:
        path: where the file appears, whole, when the ticket is done well.
        step: how many optimizer steps it has.
    """

    def __init__(self, path: Path, step: int, hurry: Callable[[], None]) -> None:
        self.path = path
        self.step = step
        self._hurry = hurry
        self._owner = threading.get_ident()
        self._pid = os.getpid()
        self._over = threading.Event()
        self._error: BaseException | None = None
        self._told = False

    @property
    def done(self) -> bool:
        """Over, well or not."""
        return self._over.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the file is under its name, synced. False if `timeout_s` seconds of that pass first.

        In the thread that trains this first waits for the last step's writes; in another, for that thread to go on.

        Raises:
            IoError: a transfer failed, or a drive is full.
            CheckpointError: the path was taken, or its directory removed, meanwhile.
            StateError: in a forked child.
        """
        error = self.exception(timeout_s)
        if error is not None:
            raise error
        return self.done

    def exception(self, timeout_s: float | None = None) -> BaseException | None:
        """Wait as `wait` does, and return what it would raise of this snapshot's, or None."""
        if os.getpid() != self._pid:
            raise StateError("a snapshot is waited for in the process that took it, not in a forked child")
        if not self.done and threading.get_ident() == self._owner:
            self._hurry()
        if not self._over.wait(timeout_s):
            return None
        self._told = True
        return self._error

    def result(self, timeout_s: float | None = None) -> Path:
        """Wait as `wait` does, and return the path.

        Raises:
            TimeoutError: not there after `timeout_s` seconds.
        """
        if not self.wait(timeout_s):
            raise TimeoutError(f"the snapshot {self.path} is not published after {timeout_s} s; it is still on its way")
        return self.path

    def __await__(self) -> Generator[Any, None, Path]:
        if not self.done and threading.get_ident() == self._owner:
            self._hurry()
        yield from asyncio.get_running_loop().run_in_executor(None, self._over.wait).__await__()
        return self.result()

    def __repr__(self) -> str:
        state = "on its way" if not self.done else "failed" if self._error is not None else "published"
        return f"SnapshotTicket({str(self.path)!r}, step {self.step}, {state})"

    # --- for the publisher ----------------------------------------------------------------------------------------

    def finish(self, error: BaseException | None) -> None:
        """It is over: published, or failed by `error`."""
        if not self.done:
            if (
                error is not None
            ):  # its frames would keep alive whatever ran when it came up: a forward with all activations
                error.__traceback__ = error.__context__ = None
            self._error = error
            self._over.set()

    def unreported_error(self) -> BaseException | None:
        """Return the error that nobody was told of yet; that is now done."""
        if self._error is None or self._told:
            return None
        self._told = True
        return self._error
