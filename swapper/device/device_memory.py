"""Owns the memory of a device and for it: storages of groups there, and page-locked host memory that it knows.

A group's memory is allocated and freed under tensors that stay. The storage is resized to zero and back, not
replaced: parameters, their aliases and autograd's saved tensors stay views of it.

[Note: stream order of a storage] torch's allocator orders memory by the stream that asked for it: what is freed may
be given out again at once, for kernels queued later on that stream. So a storage is allocated and freed on the
compute stream, and needs no `record_stream`, if three rules hold: the copy stream fills it only after an event that
the compute stream recorded at allocation; the compute stream waits for the last of those copies before it uses *or
frees* it; and if the user has more streams, each that uses it waits for the copies, and the allocating one waits for
all of them before the storage is freed or filled again.

Host memory is a run's frames, and pieces of any size for saved activations. A device knows the addresses of an arena
(io/registered.py), not those of the windows that its frames are mapped into.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from swapper import _C
from swapper.device.device import Device, QueuedCopy
from swapper.io.extents import Extents
from swapper.io.registered import Registration, slabs
from swapper.io.tensor_bytes import SECTOR_BYTES, round_up
from swapper.paging.host_memory import Pool
from swapper.paging.section import Page
from swapper.runtime.interrupts import make_lock

DEVICE_ALIGNMENT_BYTES = 512
"""As torch's own allocators: kernels choose by alignment, and other kernels give other bits."""


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes [begin, begin + nbytes) of a section; on the device they begin at `target` of the group's storage."""

    begin: int
    nbytes: int
    target: int


def place_in_storage(sizes: Iterable[int]) -> tuple[list[int], int]:
    """Return where each of tensors of these sizes begins, and the size of all, at least one alignment; in bytes."""
    offsets, cursor = [], 0
    for nbytes in sizes:
        offsets.append(cursor)
        cursor = round_up(cursor + nbytes, DEVICE_ALIGNMENT_BYTES)
    return offsets, max(cursor, DEVICE_ALIGNMENT_BYTES)


def merge_spans(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Return the same bytes in fewer spans: neighbors on both sides are one copy."""
    found: list[Span] = []
    for span in spans:
        last = found[-1] if found else None
        if last and span.begin - last.begin == last.nbytes == span.target - last.target:
            found[-1] = Span(last.begin, last.nbytes + span.nbytes, last.target)
        else:
            found.append(span)
    return tuple(found)


def spans_of_page(spans: Sequence[Span], offset: int, nbytes: int) -> tuple[Span, ...]:
    """Return what of `spans` is in bytes [offset, offset + nbytes) of the section, with begins counted from `offset`.

    Args:
        spans: of a section.
        offset, nbytes: of the page in it, in bytes.
    """
    found = []
    for span in spans:
        begin, end = max(span.begin, offset), min(span.begin + span.nbytes, offset + nbytes)
        if begin < end:
            found.append(Span(begin - offset, end - begin, span.target + begin - span.begin))
    return merge_spans(found)


class DeviceStorage:
    """Owns the storage of one group, `nbytes` bytes. It is made with memory, so that views can be made; then `free` it.

    Attributes:
        room_since: event of the compute stream after which the memory may be filled.
        filled_at: event of the copy stream after which it is filled; None while copies are still to be queued.
        read_until: event of the copy stream after which the host memory that it was filled from is not read any more.
    """

    def __init__(self, device: Device, nbytes: int) -> None:
        self._device = device
        self.nbytes = nbytes
        self._memory = device.empty(nbytes)
        self._storage = self._memory.untyped_storage()
        # With a version counter of its own: filling it changes no parameter.
        self._filling = torch.empty(0, dtype=torch.uint8, device=device.device).set_(self._storage, 0, (nbytes,), (1,))
        self._stream = device.current_stream()
        self.room_since = device.record(self._stream)
        self.filled_at: torch.Event | None = None
        self.read_until: torch.Event | None = None
        self._filler: torch.Stream | None = None  # the stream that has queued copies since `allocate`
        self._ready: set[torch.Stream] = set()  # streams that have waited for the content
        self._users: set[torch.Stream] = set()  # streams behind kernels that may have used it

    @property
    def memory(self) -> torch.Tensor:
        """uint8 of shape (nbytes,): tensors are to be views of it. It has data while `is_allocated`."""
        return self._memory

    @property
    def is_allocated(self) -> bool:
        return self._storage.nbytes() > 0

    @property
    def identity(self) -> int:
        """The same for all tensors on this storage, with memory or without: see `storage_of`."""
        return int(self._storage._cdata)

    def read(self, begin: int, nbytes: int) -> torch.Tensor:
        """Return a view of bytes for kernels on the current stream: uint8 of shape (nbytes,)."""
        return self._filling[begin : begin + nbytes]

    def set_size(self, nbytes: int) -> None:
        """Have `allocate` take `nbytes` bytes from now on. It has no memory now; tensors of its `memory` are of the size before."""
        self.nbytes = nbytes

    def allocate(self) -> None:
        """Take memory on the current stream, of any content.

        Raises:
            torch.OutOfMemoryError: there is none.
        """
        self._stream = self._device.current_stream()
        self._device.resize(self._storage, self.nbytes)
        if self._filling.numel() != self.nbytes:
            self._filling.set_(self._storage, 0, (self.nbytes,), (1,))
        self.room_since = self._device.record(self._stream)
        self._ready.clear()
        self._users.clear()

    def fill(self, pieces: Sequence[tuple[int, torch.Tensor]], stream: torch.Stream) -> QueuedCopy:
        """Queue copies on `stream`, which waits for the memory by itself. After an `allocate` all copies use one stream.

        Args:
            pieces: (offset in the storage in bytes, source): uint8 on the host.
        """
        if self._filler is None:
            self._device.let_wait(stream, self.room_since)
            self._filler = stream
        with torch.inference_mode(False):
            copies = [(self._filling[target : target + source.numel()], source) for target, source in pieces]
        return self._device.copy(copies, stream)

    def all_is_queued(self) -> None:
        """Note that all copies are queued."""
        self.filled_at = self.room_since if self._filler is None else self._device.record(self._filler)
        self.read_until = self.filled_at

    def wait_for_copies(self) -> None:
        """Block until the host memory that it was filled from is not read any more.

        Raises:
            DeviceError: the device failed.
        """
        if self.filled_at is None and self._filler is not None:
            self.read_until = self._device.record(self._filler)
        if self.read_until is not None:
            self._device.wait_for(self.read_until)
            self.read_until = None

    def wait_on_current_stream(self) -> None:
        """Have the current stream wait for the content, whose copies are queued. Call it on each stream whose kernels use it."""
        current = self._device.current_stream()
        self._users.add(current)
        if current in self._ready:
            return
        if self.filled_at is not None:
            self._device.let_wait(current, self.filled_at)
        if current != self._stream:
            self._device.let_wait(current, self.room_since)
        self._ready.add(current)

    def note_use(self) -> None:
        """Note that kernels on the current stream, or that it has waited for, may use it."""
        if self.is_allocated:
            self._users.add(self._device.current_stream())

    def wait_for_users(self) -> None:
        """Have the current stream wait for all kernels that may have changed the content."""
        current = self._device.current_stream()
        for user in {*self._users, self._stream} - {current}:
            self._device.let_wait(current, self._device.record(user))

    def note_update(self) -> None:
        """Note that kernels on the current stream, which has waited for all users, have changed the content."""
        current = self._device.current_stream()
        self.filled_at = self._device.record(current)
        self._users = {current}
        self._ready = {current}

    def invalidate(self, last_use: torch.Event | None = None) -> None:
        """Declare the content outdated: it can be filled again where it is. No copy may be in flight.

        Args:
            last_use: after it nothing uses the content. Default: after all that is queued by now on streams that have used it.
        """
        if last_use is None:
            self._follow_users()
            last_use = self._device.record(self._stream)
        self._users.clear()
        self._ready.clear()
        self.room_since = last_use
        self.filled_at = self._filler = None

    def free(self) -> None:
        """Give the memory back, in the order of the stream that took it. [Note: stream order of a storage]"""
        if not self.is_allocated:
            return
        self._follow_users()
        if self._filler is not None:
            self.read_until = self.filled_at or self._device.record(self._filler)
            self._device.let_wait(self._stream, self.read_until)
        self.filled_at = self._filler = None
        self._device.resize(self._storage, 0)

    def _follow_users(self) -> None:
        """Have the allocating stream wait for the kernels that used the memory, on any stream."""
        self.note_use()
        for user in self._users - {self._stream}:
            self._device.let_wait(self._stream, self._device.record(user))
        self._users.clear()
        self._ready.clear()


# --- host memory that the device knows --------------------------------------------------------------------------------

HEAD_BYTES = 32 << 20
"""Populated before the first piece is given; threads populate the rest."""


class HostSide:
    """Owns the registration of a run's memory with a device.

    Args:
        arena: resident sections first, then the frames.
        frames_offset: where the frames begin, in bytes.
    """

    def __init__(self, device: Device, arena: _C.Arena, frames_offset: int, pool: Pool) -> None:
        self._device = device
        self._memory = torch.frombuffer(arena.view(0, arena.nbytes), dtype=torch.uint8)
        self._registrations: list[Registration] = []
        self.add(arena, frames_offset)
        frames = slabs(frames_offset, pool.frame_bytes * pool.frame_count, pool.frame_bytes)
        self._registrations.append(Registration(device, arena, frames))

    def add(self, arena: _C.Arena, nbytes: int) -> None:
        """Register the first `nbytes` bytes of an arena."""
        if nbytes:
            self._registrations.append(Registration(self._device, arena, slabs(0, nbytes, SECTOR_BYTES)))

    def of(self, page: Page) -> torch.Tensor:
        """Return the memory of a leased page, or of a resident section as a whole: uint8 of shape (page.nbytes,)."""
        if page.section.resident:
            return page.section.memory
        begin = page.frame.offset
        return self._memory[begin : begin + page.nbytes]

    def describe(self) -> str:
        """Return "registered", or why some of it is not."""
        said = [registration.describe() for registration in self._registrations]
        return next((reason for reason in said if reason != "registered"), "registered")

    @property
    def registered_bytes(self) -> int:
        """How much the device knows by now."""
        return sum(registration.registered_bytes for registration in self._registrations)

    def wait(self) -> None:
        """Wait until all of it is registered, or was refused."""
        for registration in self._registrations:
            registration.wait()

    def close(self) -> None:
        """Unregister everything. No copy may be in flight."""
        for registration in self._registrations:
            registration.close()
        self._registrations.clear()
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")


class LockedMemory:
    """Owns an arena of `nbytes` bytes, taken and registered once, and gives pieces of it.

    A piece is a tensor. Its place is free again when the last tensor that shares its memory is gone, wherever that is held: in a
    copy or a transfer in flight, too.
    """

    def __init__(self, device: Device, nbytes: int) -> None:
        self.nbytes = round_up(nbytes, SECTOR_BYTES)
        self._arena = _C.Arena(self.nbytes, head_bytes=min(self.nbytes, HEAD_BYTES), node=device.node)
        self._arena.prefault_rest()
        self._registration = Registration(device, self._arena, slabs(0, self.nbytes, SECTOR_BYTES))
        self._lock = make_lock()
        self._extents = Extents()
        self._given_back: deque[tuple[int, int]] = deque()  # by finalizers, at any moment

    def take(self, nbytes: int) -> torch.Tensor | None:
        """Return memory of any content, uint8 of shape (nbytes,) that begins at a sector.

        Returns:
            None if no range is free, or none is known to be: an exception of another thread has struck in here.

        Raises:
            IoError: the system has no memory.
        """
        with self._lock:
            if self._lock.broken_by:
                return None
            self._collect()
            offset = self._extents.take(nbytes)
            if self._extents.end > self.nbytes:
                self._extents.give(offset, nbytes)
                return None
        try:
            self._arena.wait_populated(offset + nbytes)
        except BaseException:
            self._given_back.append((offset, nbytes))
            raise
        piece = (ctypes.c_uint8 * nbytes).from_address(self._arena.address + offset)
        finalizer = weakref.finalize(piece, _give_back, self._given_back, offset, nbytes, self._arena)
        finalizer.atexit = False
        return torch.frombuffer(piece, dtype=torch.uint8)

    @property
    def used_bytes(self) -> int:
        with self._lock:
            self._collect()
            return self._extents.used_bytes

    def wait(self) -> None:
        """Wait until the device knows all of it, or has refused."""
        self._registration.wait()

    def describe(self) -> str:
        """Return "registered", or why some of it is not."""
        return self._registration.describe()

    def _collect(self) -> None:
        while self._given_back:
            self._extents.give(*self._given_back.popleft())


def _give_back(given_back: deque[tuple[int, int]], offset: int, nbytes: int, arena: object) -> None:
    """Note a free place. The finalizer keeps `arena` alive until then."""
    given_back.append((offset, nbytes))
