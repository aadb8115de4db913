"""Moves saved activations of one accelerator to host memory during the forward, and prefetches them for backward.

A copy stream of its own copies storages to the host, the oldest first. Host memory belongs to the cache
(saved_tensor_cache.py), which writes the excess to the drive. Backward needs the newest first; others are prefetched.

[Note: in the order of the stream] Python queues work far ahead of the device, so counts here are not of what the device
has done, but of what it will have done at that place of the compute stream. Memory is released in that order too: the
compute stream waits for the copy from it (mostly long over), and then the reference is dropped; torch's allocator gives
it to later kernels of the same stream. So there is no `record_stream`, and no wait in Python. Memory for prefetched
storages is allocated on the compute stream, and filled after an event recorded there.

[Note: storages that are copied] The device may hold a number of bytes of saved storages. The previous forward predicts
their total. The oldest, as many as exceed the limit, are copied at once, long before their memory is needed; the newest
stay, since backward begins with them. The link has the whole forward for the copies, and moves no byte more.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from itertools import count
from typing import NamedTuple

import torch

from swapper.device.device import OUT_OF_MEMORY, Device
from swapper.device.device_memory import LockedMemory
from swapper.errors import BudgetError, DeviceError, IoError
from swapper.runtime.interrupts import make_lock
from swapper.runtime.sizes import format_bytes
from swapper.train.activations.saved_tensor_cache import Arrival, SavedTensorCache, Stored, check_whole, page_aligned


class DeviceStored:
    """One storage's content. Lives as long as anything saved refers to it.

    Attributes:
        memory: the bytes on the device, uint8; None while they are only in host memory or on the drive.
        stream: that uses the memory, and in whose order it is released.
        filled: after this event `memory` has the content; None for the memory that was saved.
        copied: after this event host memory has it.
        is_ordered: `stream` is behind every copy from `memory` and into it.
        below: the content in host memory or on the drive, once it was sent there.
    """

    def __init__(self, cache: DeviceTensorCache, number: int, memory: torch.Tensor, stream: torch.Stream) -> None:
        self._cache = cache
        self.number = number
        self.nbytes = memory.nbytes
        self.memory: torch.Tensor | None = memory
        self.stream = stream
        self.filled: torch.Event | None = None
        self.copied: torch.Event | None = None
        self.is_ordered = True
        self.below: Stored | None = None
        self.origin: object = None
        self.uses_left = 0

    def bytes(self) -> torch.Tensor:
        """Return all of its bytes, uint8, for use on the current stream. Raises IoError, BudgetError, DeviceError."""
        return self._cache.fetch(self)

    def __del__(self) -> None:
        unordered = None if self.is_ordered else self.memory  # ordered memory is freed now
        held_bytes = 0 if self.memory is None else self.nbytes
        event = self.copied if self.filled is None else self.filled
        self._cache.forgotten.append(
            _DeviceRemains(self.number, self.nbytes, held_bytes, unordered, self.stream, event)
        )


class _DeviceRemains(NamedTuple):
    """The remains of a dropped storage, to be released: from any thread, at any moment."""

    number: int
    nbytes: int
    held_bytes: int
    memory: torch.Tensor | None
    stream: torch.Stream
    event: torch.Event | None


class DeviceTensorCache:
    """Decides which storages have memory on the device.

    Args:
        device: the accelerator.
        below: the cache in host memory and on the drive.
        locked: host memory registered with the device.
        limit_bytes: maximum of storages on the device, in addition to the one being saved or used.
    """

    def __init__(self, device: Device, below: SavedTensorCache, locked: LockedMemory, limit_bytes: int) -> None:
        self._device = device
        self._below = below
        self._locked = locked
        self._limit_bytes = limit_bytes
        self._going_down: deque[tuple[torch.Event, torch.Tensor]] = deque()  # event, host memory
        self._going_up: deque[tuple[torch.Event, torch.Tensor]] = deque()
        self._down, self._up = device.new_stream(), device.new_stream()
        self._lock = make_lock()
        self._order = count()
        self._live: dict[int, weakref.ref[DeviceStored]] = {}  # by number, in order
        self._here: dict[int, weakref.ref[DeviceStored]] = {}  # those with memory, in order of allocation
        self.forgotten: deque[_DeviceRemains] = deque()
        self._held_bytes = 0
        self._live_bytes = 0
        self._max_bytes = 0  # maximum of live bytes since the forward began
        self._expected_bytes: int | None = None  # see [Note: storages that are copied]
        self._counters = below.counters

    # --- the forward --------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin a forward."""
        with self._lock:
            self._settle()
            self._expected_bytes = self._max_bytes or self._expected_bytes
            self._max_bytes = 0

    def end(self) -> None:
        """Release pending memory: nothing is saved any more for now."""
        with self._lock:
            if not self._lock.broken_by:  # else the next use raises
                self._settle()

    def keep(self, memory: torch.Tensor) -> DeviceStored:
        """Take over the content of a storage, uint8, which nobody changes any more.

        Raises:
            IoError: the drive is full, or an earlier storage of this forward could not be written.
            DeviceError: the device failed.
        """
        with self._lock:
            self._settle()
            stored = DeviceStored(self, next(self._order), memory, self._device.current_stream())
            is_too_much = self._expected_bytes is None or self._live_bytes < self._expected_bytes - self._limit_bytes
            self._live[stored.number] = weakref.ref(stored)
            self._live_bytes += stored.nbytes
            self._max_bytes = max(self._max_bytes, self._live_bytes)
            self._hold(stored)
            if is_too_much:
                self._send_down(stored)
            while self._held_bytes > self._limit_bytes:
                oldest = next((s for of in self._here.values() if (s := of()) is not None), None)
                if oldest is None or not self._drop(oldest):
                    break
        return stored

    def _send_down(self, stored: DeviceStored) -> bool:
        """Queue the copy to host memory. Return False if that is full and nothing of it may be written."""
        if not self._below.make_room(stored.nbytes) and not self._below.writes:
            return False
        assert stored.memory is not None
        host = self._host_memory(stored.nbytes)
        self._device.let_wait(self._down, self._device.record(stored.stream))
        try:
            stored.copied = self._device.copy([(host, stored.memory)], self._down).over
            stored.is_ordered = False
            self._going_down.append((stored.copied, host))
        except BaseException:
            with contextlib.suppress(DeviceError):  # a part of it may be queued, and `host` must not be freed before
                self._device.wait_for(self._device.record(self._down))
            raise
        self._counters.down_bytes += stored.nbytes
        stored.below = self._below.keep(host, Arrival(self._device, stored.copied), self._host_memory)
        stored.below.uses_left = 1  # until it is on the device again
        return True

    def _host_memory(self, nbytes: int) -> torch.Tensor:
        """Return memory for a copy, after waiting for earlier copies that use it."""
        while (memory := self._locked.take(nbytes)) is None:
            if not self._end_oldest(self._going_up) and not self._end_oldest(self._going_down):
                self._counters.unlocked_bytes += nbytes
                return page_aligned(nbytes)
        return memory

    def _end_oldest(self, going: deque[tuple[torch.Event, torch.Tensor]]) -> bool:
        if not going:
            return False
        event = going[0][0]
        self._device.wait_for(event)
        if going and going[0][0] is event:
            going.popleft()  # its memory may be freed, and not before: Ctrl-C leaves it here too
        return True

    # --- the backward -------------------------------------------------------------------------------------------------

    def fetch(self, stored: DeviceStored) -> torch.Tensor:
        """Return the bytes of `stored` for kernels of the current stream, and prefetch those that backward needs next.

        Raises:
            IoError: it could not be written, or cannot be read.
            BudgetError: the device has no memory left.
            DeviceError: the device failed.
        """
        with self._lock:
            self._settle()
            if stored.memory is None:
                self._bring_up(stored, self._make_memory(stored))
            self._bring_up_ahead(stored)
            assert stored.memory is not None
            current = self._device.current_stream()
            if current != stored.stream:
                return self._copy_for(stored, current)
            if stored.filled is not None and not stored.is_ordered:
                self._device.let_wait(current, stored.filled)
                stored.is_ordered = True
            return stored.memory

    def _bring_up(self, stored: DeviceStored, memory: torch.Tensor) -> None:
        assert stored.below is not None and stored.copied is not None
        host = stored.below.bytes()
        current = self._device.current_stream()
        self._device.let_wait(self._up, self._device.record(current))  # the memory's previous user
        self._device.let_wait(self._up, stored.copied)
        queued = self._device.copy([(memory, host)], self._up)
        stored.memory, stored.stream = memory, current
        stored.filled, stored.is_ordered = queued.over, False
        self._going_up.append((stored.filled, host))
        stored.below.uses_left = 0
        self._counters.up_bytes += stored.nbytes
        self._hold(stored)

    def _bring_up_ahead(self, wanted: DeviceStored) -> None:
        """Prefetch; a storage that fails now is copied when it is needed, and raises its error then."""
        for number in reversed(self._live):
            stored = self._live[number]()
            if stored is None or number >= wanted.number or stored.memory is not None or stored.below is None:
                continue
            while self._lacks_room(stored):
                if not self._drop_one(wanted, only_used=True):
                    return
            try:
                if not self._below.is_near(stored.below):
                    return
                self._bring_up(stored, self._device.empty(stored.nbytes))
            except (OUT_OF_MEMORY, IoError):
                return

    def _make_memory(self, stored: DeviceStored) -> torch.Tensor:
        while self._lacks_room(stored) and self._drop_one(stored, only_used=False):
            pass
        try:
            return self._device.empty(stored.nbytes)
        except OUT_OF_MEMORY:
            while self._drop_one(stored, only_used=False):
                pass
            self._device.release_cached()
        try:
            return self._device.empty(stored.nbytes)
        except OUT_OF_MEMORY as error:
            raise BudgetError(
                f"{self._device} has no {format_bytes(stored.nbytes)} left for a saved tensor that backward needs, after "
                f"releasing those that it does not need yet: lower device_memory of offload_activations ({error})",
                option="device_memory",
            ) from error

    def _copy_for(self, stored: DeviceStored, stream: torch.Stream) -> torch.Tensor:
        """Return the content in separate memory for another stream."""
        assert stored.memory is not None
        content_at = stored.filled if stored.filled is not None else self._device.record(stored.stream)
        self._device.let_wait(stream, content_at)
        memory = self._device.empty(stored.nbytes)
        queued = self._device.copy([(memory, stored.memory)], stream)
        self._device.let_wait(stored.stream, queued.over)
        return memory

    # --- memory -------------------------------------------------------------------------------------------------------

    def _lacks_room(self, stored: DeviceStored) -> bool:
        return self._held_bytes + stored.nbytes > self._limit_bytes

    def _drop_one(self, wanted: DeviceStored, only_used: bool) -> bool:
        """Release one with a copy below, a used one first, else the one needed last. Return False without one."""
        alive = [s for of in self._here.values() if (s := of()) is not None]
        here = [s for s in alive if s is not wanted and s.below is not None]
        victims = sorted(
            (s for s in here if not only_used or not s.uses_left), key=lambda s: (s.uses_left > 0, s.number)
        )
        return bool(victims) and self._drop(victims[0])

    def _drop(self, stored: DeviceStored) -> bool:
        """Release its memory. Return False if nothing below can have it. See [Note: in the order of the stream]."""
        if stored.below is None and not self._send_down(stored):
            return False
        event = stored.copied if stored.filled is None else stored.filled
        if not stored.is_ordered and event is not None:
            self._device.let_wait(stored.stream, event)
        stored.memory, stored.filled, stored.is_ordered = None, None, True
        del self._here[stored.number]
        self._count(-stored.nbytes)
        return True

    def _hold(self, stored: DeviceStored) -> None:
        self._here[stored.number] = weakref.ref(stored)
        self._count(stored.nbytes)

    def _count(self, more_bytes: int) -> None:
        self._held_bytes += more_bytes
        counters = self._counters
        counters.device_held_bytes += more_bytes
        counters.device_peak_bytes = max(counters.device_peak_bytes, counters.device_held_bytes)

    def _settle(self) -> None:
        """Handle every finished copy and every dropped storage. Raises StateError, see `check_whole`."""
        check_whole(self._lock)
        for going in (self._going_down, self._going_up):
            while going and self._device.has_passed(going[0][0]):
                going.popleft()
        while self.forgotten:
            remains = self.forgotten.popleft()
            self._live.pop(remains.number, None)
            self._here.pop(remains.number, None)
            self._live_bytes -= remains.nbytes
            self._count(-remains.held_bytes)
            if remains.memory is not None and remains.event is not None:
                self._device.let_wait(remains.stream, remains.event)

    def __del__(self) -> None:
        with contextlib.suppress(DeviceError):  # a failed device copies nothing any more
            for going in (self._going_down, self._going_up):
                while self._end_oldest(going):
                    pass
