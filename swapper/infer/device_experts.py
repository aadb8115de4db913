"""Keeps the last used experts on a device, and copies others there without a wait.

Their host memory is registered with the device, and a copy has a stream of its own: those of weights that are used next
overlap with the kernels before them. What an expert's value is computed from stays there as it is stored.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch

from swapper.device.copies import NewCopies, NewCopy
from swapper.device.device import OUT_OF_MEMORY
from swapper.device.registered_memory import LockedMemory
from swapper.infer.adoption import view_of
from swapper.infer.matching import Recipe

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class _Entry:
    """An expert on the device.

    Attributes:
        copy: of it; `version` is that of its memory then.
        parts: of the expert as they are stored, views of that memory.
        users: streams that have waited for the copy.
    """

    copy: NewCopy
    parts: list[torch.Tensor]
    version: int
    users: set[torch.Stream] = field(default_factory=set)


class DeviceExperts(Generic[Key]):
    """Owns the copies, last used ones up to a limit, and host memory for what they are copied from.

    Args:
        copies: queues them.
        host_bytes: of that memory.
        limit: returns the bytes of the device that they may have, given those that images are to get now.
    """

    def __init__(self, copies: NewCopies, host_bytes: int, limit: Callable[[int], int]) -> None:
        self._copies = copies
        self._device = copies.device
        self._limit = limit
        self._memory = LockedMemory(copies.device, host_bytes)
        self._entries: OrderedDict[Key, _Entry] = OrderedDict()  # last used last
        self._used_bytes = 0

    def take(self, nbytes: int) -> torch.Tensor:
        """Return host memory, uint8 of shape (nbytes,). If the registered one is in too small pieces it is other memory."""
        self._copies.collect()
        found = self._memory.take(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu") if found is None else found

    def __contains__(self, key: Key) -> bool:
        return key in self._entries

    def was_changed(self, key: Key) -> bool:
        """Return True if somebody has written to an expert there."""
        entry = self._entries.get(key)
        return entry is not None and entry.copy.memory._version != entry.version

    def value(self, key: Key, recipe: Recipe) -> torch.Tensor:
        """Return an expert that is there, for kernels on the current stream."""
        self._entries.move_to_end(key)
        entry, current = self._entries[key], self._device.current_stream()
        if current not in entry.users:
            self._device.let_wait(current, entry.copy.filled_at)
            entry.users.add(current)
        with torch.inference_mode(False), torch.no_grad():
            return recipe.from_parts(entry.parts)

    def send(self, key: Key, recipe: Recipe, sources: Sequence[torch.Tensor]) -> None:
        """Queue the copy of an expert, whose parts `sources` have: uint8, read, in host memory.

        Raises:
            torch.OutOfMemoryError: the device has no memory left, after all others were dropped.
        """
        copy = self._copies.send(sources, self._allocate)
        with torch.inference_mode(False), torch.no_grad():
            parts = [view_of(copy.memory, at, part) for at, part in zip(copy.offsets, recipe.parts, strict=True)]
        self._entries[key] = _Entry(copy, parts, copy.memory._version)
        self._used_bytes += copy.memory.nbytes

    def drop(self, key: Key) -> None:
        """Drop an expert. Its memory is released when nobody has it any more, behind what uses it now."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._used_bytes -= entry.copy.memory.nbytes
            stream = entry.copy.stream
            self._device.let_wait(stream, entry.copy.filled_at)
            for user in entry.users - {stream}:
                self._device.let_wait(stream, self._device.record(user))

    def shrink(self, image_bytes: int) -> None:
        """Drop what is beyond the limit, when images are to get this many bytes."""
        self._shrink_to(self._limit(image_bytes))

    def close(self) -> None:
        """Drop all, and wait for copies in flight."""
        self._entries.clear()
        self._copies.finish()

    def _allocate(self, nbytes: int) -> torch.Tensor:
        self._shrink_to(self._limit(0) - nbytes)
        try:
            return self._device.empty(nbytes)
        except OUT_OF_MEMORY:
            self._shrink_to(0)
            self._device.release_cached()
            return self._device.empty(nbytes)

    def _shrink_to(self, nbytes: int) -> None:
        while self._entries and self._used_bytes > max(nbytes, 0):
            self.drop(next(iter(self._entries)))
