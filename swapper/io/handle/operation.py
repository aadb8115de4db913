"""A requested transfer, as a future.

An operation consists of parts (engine tickets, staged transfers): done when all are, failed by the first that failed.
While any part is in flight `_under_way` has the operation, which keeps its tensors and files if the user drops all.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Generator, Sequence

from swapper import _C
from swapper.errors import IoError
from swapper.io.files import Opened
from swapper.io.staging import StagedTransfer

logger = logging.getLogger("swapper.io")

_under_way: set[Operation] = set()
"""Every operation that is not retired. Changed only by single set operations."""


TransferPart = _C.Ticket | StagedTransfer


class Operation:
    """A read or write in the background. Made by `AioHandle.submit_read` and its siblings.

    `await operation` waits too, in asyncio, and returns the number of bytes. An operation that failed without anybody
    asking for its outcome is logged as an error.
    """

    def __init__(
        self,
        kind: str,
        opened: Opened,
        nbytes: int,
        parts: Sequence[TransferPart],
        keep: object = None,
        release: Callable[[], None] | None = None,
    ) -> None:
        """Watch the transfers of one operation.

        Args:
            kind: "read" or "write".
            opened: the file, closed at the end.
            nbytes: of all parts.
            parts: the transfers, under way.
            keep: lives until the operation is over.
            release: the thread that notices the end first calls it, once.
        """
        self.kind = kind
        self.opened = opened
        self.path = opened.path
        self.nbytes = nbytes
        self._parts = parts
        self._keep = keep
        self._release = release
        self._last_check: Callable[[], None] | None = None
        self._error: Exception | None = None
        self._is_observed = False
        self._is_retired = False
        self._lock = threading.Lock()
        _under_way.add(self)

    def __repr__(self) -> str:
        state = "pending" if not self.done else "failed" if self._first_error() else "done"
        return f"<Operation: {self.kind} of {self.nbytes} bytes, {self.path!r}, {state}>"

    @property
    def done(self) -> bool:
        """True if the operation is over, successful or not."""
        if not all(part.done for part in self._parts):
            return False
        self._retire()
        return True

    @property
    def cancelled(self) -> bool:
        """`cancel` was in time."""
        return any(part.cancelled for part in self._parts)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the operation is over, without the GIL. Returns False if `timeout_s` seconds pass first.

        Raises:
            IoError, DeviceError: it failed or was called off. All of it is over then: you may use the tensor.
        """
        if not self._wait_for_parts(timeout_s):
            return False
        error = self._outcome()
        if error is not None:
            raise error
        return True

    def exception(self, timeout_s: float | None = None) -> Exception | None:
        """Wait as `wait` does, and return the error of a failed operation, or None, instead of raising it.

        Raises:
            TimeoutError: not over after `timeout_s` seconds.
        """
        if not self._wait_for_parts(timeout_s):
            raise TimeoutError(f"{self!r} is not over after {timeout_s} s")
        return self._outcome()

    def cancel(self) -> bool:
        """Call the operation off if none of it has begun; return True if so. `wait` then raises an IoError."""
        for part in self._parts:  # the first begins first: if it is too late for that one, the rest runs too
            if not part.cancel():
                return False
        self._is_observed = True
        return bool(self._parts)

    def settle(self) -> None:
        """Wait until it is over, successful or not, without raising its error."""
        self._wait_for_parts(None)

    def check_last(self, check: Callable[[], None]) -> None:
        """Let the first successful `wait` call `check`; an IoError from it becomes the operation's error."""
        self._last_check = check

    def __await__(self) -> Generator[object, None, int]:
        if not self.done:
            yield from until_done(self, asyncio.get_running_loop()).__await__()
        self.wait()
        return self.nbytes

    def notify(self, fd: int) -> None:
        """Add 1 to the eventfd `fd` whenever a part is over; then check `done`."""
        for part in self._parts:
            part.notify(fd)

    def __del__(self) -> None:
        if not getattr(self, "_is_observed", True) and self._first_error() is not None:
            logger.error("%r failed, and nobody waited for it: %s", self, self._first_error())

    def _wait_for_parts(self, timeout_s: float | None) -> bool:
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        for part in self._parts:
            left_s = None if deadline_s is None else max(deadline_s - time.monotonic(), 0)
            try:
                if not part.wait(left_s):
                    return False
            except Exception:  # the drive's or a device's; raised when all parts are over
                if part.error is None:
                    raise
        self._retire()
        return True

    def _outcome(self) -> Exception | None:
        self._is_observed = True
        error = self._first_error()
        if error is not None:
            return error
        with self._lock:
            check, self._last_check = self._last_check, None
            if check is not None:
                try:
                    check()
                except IoError as failure:
                    self._error = failure
            return self._error

    def _first_error(self) -> Exception | None:
        return self._error or next((part.error for part in self._parts if part.error is not None), None)

    def _retire(self) -> None:
        """Release tensors and files."""
        with self._lock:
            if self._is_retired:
                return
            self._is_retired = True
        _under_way.discard(self)
        self._keep = None
        release, self._release = self._release, None
        if release is not None:
            release()


class _Watch:
    """The operations that one asyncio event loop waits for, by one eventfd and no thread. Open while there are any."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: dict[asyncio.Future[None], Operation] = {}
        self._fd = -1

    async def wait(self, operation: Operation) -> None:
        if self._fd < 0:
            self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._loop.add_reader(self._fd, self._wake)
        future = self._loop.create_future()
        self._waiting[future] = operation
        try:
            operation.notify(self._fd)
            if not operation.done:
                await future
        finally:
            del self._waiting[future]
            if not self._waiting:
                self._loop.remove_reader(self._fd)
                os.close(self._fd)
                self._fd = -1
                _watches.pop(self._loop, None)  # otherwise it would keep a closed loop forever

    def _wake(self) -> None:
        os.eventfd_read(self._fd)
        for future, operation in self._waiting.items():
            if operation.done and not future.done():
                future.set_result(None)


_watches: dict[asyncio.AbstractEventLoop, _Watch] = {}


async def until_done(operation: Operation, loop: asyncio.AbstractEventLoop) -> None:
    """Return when `operation` is over, successful or not."""
    watch = _watches.get(loop)
    if watch is None:
        watch = _watches[loop] = _Watch(loop)
    await watch.wait(operation)
