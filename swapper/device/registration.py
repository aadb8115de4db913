"""Page-locked memory: the pool's frames, registered once with the device, so that copies need no detour and hold nobody up.

In slabs, by threads, behind those that take the memory: the first pass does not wait for it, and a frame that is not registered
yet is copied all the same, more slowly. No frame lies in two slabs, because a copy must not go across their border. The threads
are this object's own and do nothing else with the device: CUDA keeps the error of a refused registration for the next call of the
same thread.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterable
from typing import Protocol

from swapper.device.device import Device
from swapper.errors import DeviceError, IoError

SLAB_BYTES = 256 << 20
THREADS = 2


class Memory(Protocol):
    """What is needed of an arena (`swapper._C.Arena`)."""

    @property
    def address(self) -> int: ...
    def wait_taken(self, nbytes: int, /) -> None: ...


class Registration:
    """Owns what is registered of one pool, until `close`.

    Args:
        device: with which.
        memory: the arena.
        offset: where in it the frames begin.
        frame_bytes, frame_count: the frames.
    """

    def __init__(self, device: Device, memory: Memory, offset: int, frame_bytes: int, frame_count: int) -> None:
        self._device = device
        self._memory = memory
        self._slabs: list[int] = []  # addresses of what is registered
        finalizer = weakref.finalize(self, _forget, device, self._slabs, memory)  # of a model that nobody unloads
        finalizer.atexit = False
        self._lock = threading.Lock()
        self._reason = "" if device.can_register else f"torch cannot register memory with {device}"
        self._is_closing = False
        per_slab = max(SLAB_BYTES // max(frame_bytes, 1), 1)
        slabs = [
            (offset + at * frame_bytes, min(per_slab, frame_count - at) * frame_bytes)
            for at in range(0, frame_count, per_slab)
        ]
        self._left = iter(slabs)
        self._threads = []
        if device.can_register:
            self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(min(THREADS, len(slabs)))]
        for thread in self._threads:
            thread.start()

    def describe(self) -> str:
        with self._lock:
            return self._reason or "registered"

    def wait(self) -> None:
        """Wait until all of it is registered, or was refused."""
        for thread in self._threads:
            thread.join()

    def close(self) -> None:
        """Nothing is copied any more: let the device forget the memory."""
        self._is_closing = True
        self.wait()
        for address in self._slabs:
            self._device.unregister(address)
        self._slabs.clear()

    def _work(self) -> None:
        for offset, nbytes in self._next():
            try:
                self._memory.wait_taken(offset + nbytes)
                reason = self._device.register(self._memory.address + offset, nbytes)
            except (IoError, RuntimeError) as error:
                reason = str(error)
            with self._lock:
                if reason:
                    self._reason = self._reason or reason
                else:
                    self._slabs.append(self._memory.address + offset)

    def _next(self) -> Iterable[tuple[int, int]]:
        while not self._is_closing:
            with self._lock:
                slab = next(self._left, None)
            if slab is None:
                return
            yield slab


def _forget(device: Device, slabs: list[int], memory: Memory) -> None:
    """`memory` is here so that it lives until now."""
    with contextlib.suppress(DeviceError):
        if slabs:
            device.synchronize()
    for address in slabs:
        device.unregister(address)
