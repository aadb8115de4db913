"""Waiting for operations in asyncio, without a thread: one eventfd for each event loop, however many operations."""

from __future__ import annotations

import asyncio
import os
from typing import Protocol


class Awaitable(Protocol):
    @property
    def done(self) -> bool: ...
    def notify(self, fd: int) -> None: ...


class _Watch:
    """The operations that one event loop waits for. Open while there are any."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: dict[asyncio.Future[None], Awaitable] = {}
        self._fd = -1

    async def wait(self, operation: Awaitable) -> None:
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
                _watches.pop(self._loop, None)  # or a loop that is over would be kept for ever

    def _wake(self) -> None:
        os.eventfd_read(self._fd)
        for future, operation in self._waiting.items():
            if operation.done and not future.done():
                future.set_result(None)


_watches: dict[asyncio.AbstractEventLoop, _Watch] = {}


async def until_done(operation: Awaitable, loop: asyncio.AbstractEventLoop) -> None:
    """Returns when `operation` is over, well or not."""
    watch = _watches.get(loop)
    if watch is None:
        watch = _watches[loop] = _Watch(loop)
    await watch.wait(operation)
