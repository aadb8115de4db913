"""Keeps the storages of saved activations in memory, in a scratch file, or in flight; their moves are those of pages.

Storages enter in the order of the forward, and backward needs the newest first. So the oldest are evicted, and those
before the current one are prefetched. A storage is written from where it lies, without a copy, and released when the
write is done; it returns in memory of its own. Its bytes in the file stay valid until the storage is dropped, so that a
restored one can be released at once when memory is needed, and be read again (retain_graph). A storage from a device is
here as soon as its copy is requested (device_activations.py), and is not written before it has arrived.

[Note: what may be freed when] Python's garbage collector drops storages at any moment and in any thread, even while a
transfer is in flight: `Stored.__del__` only moves memory, ticket and place to a queue. The next call frees them after
the ticket is done.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

import torch

from swapper._C import SteadyLock
from swapper.device.device import Device
from swapper.errors import IoError, StateError
from swapper.io.engines import Engine, Transfer
from swapper.io.extents import SpillFile
from swapper.io.tensor_bytes import SECTOR_BYTES
from swapper.paging.residency import CLEAN, COLD, DIRTY, READING, WRITING, Resident
from swapper.runtime.free_memory import note_freed
from swapper.runtime.interrupts import make_lock


class Arrival:
    """Tells when a copy from a device is over: memory has its final content."""

    def __init__(self, device: Device, event: torch.Event) -> None:
        self._device = device
        self.event = event

    @property
    def done(self) -> bool:
        return self._device.has_passed(self.event)

    def wait(self) -> None:
        self._device.wait_for(self.event)


class Stored(Resident):
    """One storage's content. Lives as long as anything saved refers to it. DIRTY means never written.

    Attributes:
        number: its place in the order of the forward.
        memory: the bytes, uint8; None while they are only on the drive.
        offset: of its place in the file, from its first write on.
        ticket: of the transfer in flight.
        error: of its write.
        origin: keeps alive the identity of the storage, for lookups.
        uses_left: how many saved tensors refer to it and were not restored yet.
        arrival: of its content; None if it is there.
        allocate: returns memory into which it is read back.
    """

    def __init__(self, cache: SavedTensorCache, number: int, memory: torch.Tensor) -> None:
        super().__init__(DIRTY)
        self._cache = cache
        self.number = number
        self.nbytes = memory.nbytes
        self.memory: torch.Tensor | None = memory
        self.offset: int | None = None
        self.ticket: Transfer | None = None
        self.error: IoError | None = None
        self.origin: object = None
        self.uses_left = 0
        self.arrival: Arrival | None = None
        self.allocate: Callable[[int], torch.Tensor] = page_aligned

    def bytes(self) -> torch.Tensor:
        """Return all of its bytes, uint8, which the caller keeps. Raises IoError."""
        return self._cache.fetch(self)

    def __del__(self) -> None:
        self._cache.forgotten.append(_Remains(self.number, self.nbytes, self.memory, self.offset, self.ticket))


@dataclass(frozen=True)
class _Remains:
    """The remains of a dropped storage, to be freed."""

    number: int
    nbytes: int
    memory: torch.Tensor | None
    offset: int | None
    ticket: Transfer | None


class SavedTensorCache:
    """Owns saved storages, and decides which of them are in memory.

    Args:
        file: the scratch file.
        find_engine: returns the engine for transfers; called each time. Raises if there is none any more.
        limit_bytes: maximum of storages in memory, in addition to the one being saved or used.
        keep_bytes: part of these that stays in memory and is never written; None: nothing is ever written.
    """

    def __init__(
        self, file: SpillFile, find_engine: Callable[[], Engine], limit_bytes: int, keep_bytes: int | None
    ) -> None:
        self._find_engine = find_engine
        self._limit_bytes = limit_bytes
        self._keep_bytes = keep_bytes
        self._file = file
        self._lock = make_lock()
        self._order = count()
        self._live: dict[int, weakref.ref[Stored]] = {}  # by number, in order
        self._here: dict[int, int] = {}  # never written ones, oldest first: by number, bytes
        self._here_bytes = 0
        self._moving: dict[int, weakref.ref[Stored]] = {}
        self._restored: dict[int, weakref.ref[Stored]] = {}  # CLEAN, READING, or accessed while WRITING
        self.forgotten: deque[_Remains] = deque()
        self._ending: list[_Remains] = []  # dropped, their tickets not done
        self._failure: IoError | None = None  # of a write, unreported
        self._first = 0  # number of the first storage of the current forward
        self.counters = ActivationCounters()

    @property
    def writes(self) -> bool:
        """True if the excess is written to the drive."""
        return self._keep_bytes is not None

    # --- the forward --------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin a forward."""
        with self._lock:
            self._settle()
            self._first, self._failure = next(self._order), None

    def keep(
        self,
        memory: torch.Tensor,
        arrival: Arrival | None = None,
        allocate: Callable[[int], torch.Tensor] | None = None,
    ) -> Stored:
        """Take over the content of a storage, uint8, which nobody changes any more.

        Args:
            arrival: before it, `memory` has another content.
            allocate: memory for it when it is read back, uint8 of shape (nbytes,); ordinary memory by default.

        Raises:
            IoError: the drive is full, or an earlier storage of this forward could not be written.
        """
        with self._lock:
            self._settle()
            if self._failure is not None:
                failure, self._failure = self._failure, None
                raise _again(failure)
            stored = Stored(self, next(self._order), memory)
            stored.arrival, stored.allocate = arrival, allocate or page_aligned
            self._live[stored.number] = weakref.ref(stored)
            self._here[stored.number] = stored.nbytes
            self._here_bytes += stored.nbytes
            self.counters.storages += 1
            self._add(stored.nbytes)
            self._wait_for_room(0)
        return stored

    def make_room(self, nbytes: int) -> bool:
        """Evict others until this many bytes more may be in memory. Return False if that is impossible.

        Raises:
            IoError: the drive is full.
        """
        with self._lock:
            self._settle()
            self._wait_for_room(nbytes)
            return self.counters.held_bytes + nbytes <= self._limit_bytes

    def _send_away(self, more_bytes: int) -> None:
        """Write the oldest that have arrived, until the rest is within its limit."""
        if self._keep_bytes is None:
            return
        while self._here and self._here_bytes + more_bytes > self._keep_bytes:
            number = next(iter(self._here))
            stored = self._alive(number)
            if stored is not None:
                if stored.arrival is not None and not stored.arrival.done:
                    return
                self._write(stored)
            self._is_not_here(number)

    def _write(self, stored: Stored) -> None:
        assert stored.memory is not None
        stored.offset, stored.ticket = self._file.write(self._find_engine(), stored.memory)
        stored.move(WRITING)
        self._moving[stored.number] = weakref.ref(stored)
        self.counters.written_bytes += stored.nbytes

    def _wait_for_room(self, more_bytes: int) -> None:
        """Release unused restored ones first; then wait for the oldest transfer, or for one that is to be written."""
        self._send_away(more_bytes)
        while self.counters.held_bytes + more_bytes > self._limit_bytes:
            if self._drop_restored(None):
                continue
            tickets = [stored.ticket for of in self._moving.values() if (stored := of()) is not None]
            tickets += [remains.ticket for remains in self._ending]
            oldest = next((ticket for ticket in tickets if ticket is not None), None)
            if oldest is not None:
                oldest.exception()
                self._settle()
            elif not self._wait_for_arrival(more_bytes):
                return

    def _wait_for_arrival(self, more_bytes: int) -> bool:
        """Wait for the oldest one to be written that has not arrived. Return False if there is none."""
        oldest = self._alive(next(iter(self._here), -1))
        if oldest is None or oldest.arrival is None:
            return False
        oldest.arrival.wait()
        before = len(self._here)
        self._send_away(more_bytes)
        return len(self._here) < before

    # --- the backward -------------------------------------------------------------------------------------------------

    def fetch(self, stored: Stored) -> torch.Tensor:
        """Return the bytes of `stored`, and prefetch storages that backward needs next.

        Raises:
            IoError: it could not be written, or cannot be read.
        """
        with self._lock:
            self._settle()
            if stored.error is not None:
                self._failure = None if self._failure is stored.error else self._failure
                raise _again(stored.error)
            if stored.residency is COLD:
                while self._lacks_room(stored) and self._drop_restored(stored):
                    pass
                self._read(stored)
            self._restored.pop(stored.number, None)  # the newest use comes last
            if stored.offset is not None:
                self._restored[stored.number] = weakref.ref(stored)
            self._read_ahead(stored.number)
            if stored.residency is READING:
                assert stored.ticket is not None
                self.counters.waits += not stored.ticket.done
                stored.ticket.exception()
                error = self._settle_one(stored)
                if error is not None:
                    raise error
            assert stored.memory is not None
            return stored.memory

    def is_near(self, stored: Stored) -> bool:
        """Return True if `fetch` would not wait. Otherwise prefetch it from the drive, if there is memory."""
        with self._lock:
            self._settle()
            if stored.residency is COLD:
                self._read_ahead(stored.number + 1)
            return stored.error is None and stored.residency not in (COLD, READING)

    def _read(self, stored: Stored) -> None:
        assert stored.offset is not None
        memory = stored.allocate(stored.nbytes)
        stored.ticket = self._file.read(self._find_engine(), stored.offset, memory)
        stored.memory = memory
        stored.move(READING)
        self._moving[stored.number] = self._restored[stored.number] = weakref.ref(stored)
        self.counters.read_bytes += stored.nbytes
        self._add(stored.nbytes)

    def _read_ahead(self, current: int) -> None:
        """Prefetch storages saved before number `current`, as far as there is memory."""
        wanted = self._alive(current)
        for number in reversed(self._live):
            stored = self._alive(number)
            if stored is None or number >= current or stored.residency is not COLD:
                continue
            while self._lacks_room(stored):
                if not self._drop_restored(wanted, only_used=True):
                    return
            self._read(stored)

    def _lacks_room(self, stored: Stored) -> bool:
        return self.counters.held_bytes + stored.nbytes > self._limit_bytes

    def _drop_restored(self, wanted: Stored | None, only_used: bool = False) -> bool:
        """Release the memory of the least recently used one with a copy on the drive; not of `wanted`.

        `only_used`: not of one that this backward still needs.
        """
        for reference in list(self._restored.values()):
            stored = reference()
            if stored is None or stored is wanted or stored.residency is not CLEAN:
                continue
            if not (only_used and stored.uses_left):
                del self._restored[stored.number]
                self._release(stored)
                return True
        return False

    # --- completions --------------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Handle every finished transfer and every dropped storage. Raises StateError, see `check_whole`."""
        check_whole(self._lock)
        for number, reference in list(self._moving.items()):
            stored = reference()
            if stored is None:
                del self._moving[number]
            elif stored.ticket is not None and stored.ticket.done:
                self._settle_one(stored)
        while self.forgotten:
            self._ending.append(self.forgotten.popleft())
        ending, self._ending = self._ending, []
        for remains in ending:
            if remains.ticket is not None and not remains.ticket.done:
                self._ending.append(remains)
            else:
                self._free(remains)

    def _settle_one(self, stored: Stored) -> IoError | None:
        """Handle the finished transfer of `stored`."""
        self._moving.pop(stored.number, None)
        ticket, stored.ticket = stored.ticket, None
        assert ticket is not None
        error = ticket.error
        if stored.residency is WRITING and error is not None:
            stored.move(DIRTY)
            stored.error = error
            if stored.number >= self._first:  # errors of an earlier forward are raised in its backward
                self._failure = self._failure or error
            return error
        is_read = stored.residency is READING
        if error is None:
            stored.move(CLEAN)
        if error is not None or not is_read:
            self._release(stored)
        return error

    def _release(self, stored: Stored) -> None:
        note_freed(stored.nbytes)
        stored.memory = None
        stored.move(COLD)
        self.counters.held_bytes -= stored.nbytes

    def _free(self, remains: _Remains) -> None:
        self._live.pop(remains.number, None)
        self._restored.pop(remains.number, None)
        self._is_not_here(remains.number)
        if remains.memory is not None:
            note_freed(remains.nbytes)
            self.counters.held_bytes -= remains.nbytes
        if remains.offset is not None:
            self._file.give(remains.offset, remains.nbytes)

    # ------------------------------------------------------------------------------------------------------------------

    def _alive(self, number: int) -> Stored | None:
        reference = self._live.get(number)
        return None if reference is None else reference()

    def _is_not_here(self, number: int) -> None:
        """Note that it is being written, or was dropped."""
        self._here_bytes -= self._here.pop(number, 0)

    def _add(self, nbytes: int) -> None:
        self.counters.held_bytes += nbytes
        self.counters.peak_bytes = max(self.counters.peak_bytes, self.counters.held_bytes)


def check_whole(lock: SteadyLock) -> None:
    """Raise StateError if something has struck while saved storages, which `lock` guards, were being moved."""
    if lock.broken_by:
        raise StateError(
            f"{lock.broken_by} was raised while saved activations were being moved (by another thread, or a second Ctrl-C): they "
            "are in no known state. Repeat the forward with a new swapper.offload_activations"
        )


def _again(error: IoError) -> IoError:
    """Return a new copy of the error: a traceback refers to the graph, and must not hang on something in the graph."""
    return IoError(error.op, error.path, error.offset, error.nbytes, error.errno or 0, error.detail)


def page_aligned(nbytes: int) -> torch.Tensor:
    """Return uint8 memory that begins at a page, so that a drive transfers straight into it."""
    raw = torch.empty(nbytes + SECTOR_BYTES, dtype=torch.uint8, device="cpu")
    shift = -raw.data_ptr() % SECTOR_BYTES
    return raw[shift : shift + nbytes]


@dataclass
class ActivationCounters:
    """Counts since the beginning.

    Attributes:
        saved: tensors that autograd saved and that were taken over.
        storages: distinct ones among them; each is moved once.
        left_alone: tensors that were not: small ones, parameters and their views, those of special kinds.
        written_bytes, read_bytes: moved, as submitted.
        waits: how many times backward waited for a storage.
        held_bytes: present bytes of storages in host memory.
        peak_bytes: their maximum.
        down_bytes, up_bytes: copied from accelerators and to them.
        unlocked_bytes: of these, bytes copied slowly, through memory that is not page-locked, because no free range of
            the page-locked memory was long enough.
        device_held_bytes: present bytes of storages on accelerators, in the order of their streams.
        device_peak_bytes: their maximum.
    """

    saved: int = 0
    storages: int = 0
    left_alone: int = 0
    written_bytes: int = 0
    read_bytes: int = 0
    waits: int = 0
    held_bytes: int = 0
    peak_bytes: int = 0
    down_bytes: int = 0
    up_bytes: int = 0
    unlocked_bytes: int = 0
    device_held_bytes: int = 0
    device_peak_bytes: int = 0
