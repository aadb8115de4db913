"""Keeps the last used experts on a device, and copies others there without a wait.

Their host memory is registered with the device, and a copy has a stream of its own: those of weights that are used next
overlap with the kernels before them. What an expert's value is computed from stays there as it is stored.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch

from swapper.device.device import OUT_OF_MEMORY, Device
from swapper.device.device_storage import place_in_storage
from swapper.device.registered_memory import LockedMemory
from swapper.errors import DeviceError
from swapper.infer.mapping.adoption import view_of
from swapper.infer.mapping.matching import Recipe
from swapper.runtime.counters import Counters

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class _Entry:
    """An expert on the device.

    Attributes:
        memory: uint8, with a version counter that only writes of users change; `version` is that of the copy.
        parts: of the expert as they are stored, views of `memory`.
        filled_at: the event of the copy.
        stream: that the memory was allocated on.
        users: streams that have waited for the copy.
    """

    memory: torch.Tensor
    parts: list[torch.Tensor]
    version: int
    filled_at: torch.Event
    stream: torch.Stream
    users: set[torch.Stream] = field(default_factory=set)


class DeviceExperts(Generic[Key]):
    """Owns the copies, last used ones up to a limit, and host memory for what they are copied from.

    Args:
        host_bytes: of that memory.
        limit: returns the bytes of the device that they may have, given those that images are to get now.
    """

    def __init__(self, device: Device, host_bytes: int, limit: Callable[[int], int], counters: Counters) -> None:
        self._device = device
        self._limit = limit
        self._counters = counters
        self._memory = LockedMemory(device, host_bytes)
        self._stream = device.new_stream()
        self._entries: OrderedDict[Key, _Entry] = OrderedDict()  # last used last
        self._used_bytes = 0
        self._in_flight: deque[tuple[torch.Event, Sequence[torch.Tensor]]] = deque()  # oldest first; keeps the sources

    def take(self, nbytes: int) -> torch.Tensor:
        """Return host memory, uint8 of shape (nbytes,). If the registered one is in too small pieces it is other memory."""
        self._collect()
        found = self._memory.take(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8) if found is None else found

    def __contains__(self, key: Key) -> bool:
        return key in self._entries

    def was_changed(self, key: Key) -> bool:
        """Return True if somebody has written to an expert there."""
        entry = self._entries.get(key)
        return entry is not None and entry.memory._version != entry.version

    def value(self, key: Key, recipe: Recipe) -> torch.Tensor:
        """Return an expert that is there, for kernels on the current stream."""
        self._entries.move_to_end(key)
        entry, current = self._entries[key], self._device.current_stream()
        if current not in entry.users:
            self._device.let_wait(current, entry.filled_at)
            entry.users.add(current)
        with torch.inference_mode(False), torch.no_grad():
            return recipe.from_parts(entry.parts)

    def send(self, key: Key, recipe: Recipe, sources: Sequence[torch.Tensor]) -> None:
        """Queue the copy of an expert, whose parts `sources` have: uint8, read, in host memory.

        Raises:
            torch.OutOfMemoryError: the device has no memory left, after all others were dropped.
        """
        self._collect()
        offsets, nbytes = place_in_storage(source.numel() for source in sources)
        self._shrink_to(self._limit(0) - nbytes)
        with torch.inference_mode(False), torch.no_grad():
            memory, stream = self._allocate(nbytes), self._device.current_stream()
            filling = torch.empty(0, dtype=torch.uint8, device=memory.device).set_(
                memory.untyped_storage(), 0, (nbytes,), (1,)
            )
            self._device.let_wait(self._stream, self._device.record(stream))
            for at, source in zip(offsets, sources, strict=True):
                self._device.copy(filling[at : at + source.numel()], source, self._stream)
            event = self._device.record(self._stream)
            parts = [view_of(memory, at, part) for at, part in zip(offsets, recipe.parts, strict=True)]
        self._in_flight.append((event, sources))
        self._entries[key] = _Entry(memory, parts, memory._version, event, stream)
        self._used_bytes += nbytes
        self._counters.uploaded_bytes += sum(source.numel() for source in sources)

    def drop(self, key: Key) -> None:
        """Drop an expert. Its memory is released when nobody has it any more, behind what uses it now."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._used_bytes -= entry.memory.nbytes
            self._device.let_wait(entry.stream, entry.filled_at)
            for user in entry.users - {entry.stream}:
                self._device.let_wait(entry.stream, self._device.record(user))

    def shrink(self, image_bytes: int) -> None:
        """Drop what is beyond the limit, when images are to get this many bytes."""
        self._shrink_to(self._limit(image_bytes))

    def close(self) -> None:
        """Drop all, and wait for copies in flight."""
        self._entries.clear()
        while self._in_flight:
            with contextlib.suppress(DeviceError):
                self._device.wait_for(self._in_flight[0][0])
            self._in_flight.popleft()

    def _allocate(self, nbytes: int) -> torch.Tensor:
        try:
            return self._device.empty(nbytes)
        except OUT_OF_MEMORY:
            self._shrink_to(0)
            self._device.release_cached()
            return self._device.empty(nbytes)

    def _shrink_to(self, nbytes: int) -> None:
        while self._entries and self._used_bytes > max(nbytes, 0):
            self.drop(next(iter(self._entries)))

    def _collect(self) -> None:
        while self._in_flight and self._device.has_passed(self._in_flight[0][0]):
            self._in_flight.popleft()
