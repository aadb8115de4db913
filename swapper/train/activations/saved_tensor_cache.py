"""Where the storages of saved activations are: in memory, in a scratch file, or on their way; the moves are those of pages.

A storage enters in the order of the forward, and backward wants the newest first. So the oldest leave, and what lies before the one
that is wanted is read ahead. A storage is written from where it lies, uncopied, and let go when the write is done; it comes back
into memory of its own. What its file has stays valid until the storage is forgotten, so that a restored one can be let go at once
where others need the room, and be read again (retain_graph). What comes from a device is here as of when its copy is asked for
(device_activations.py), and is not written before it has arrived.

[Note: what may be freed when] Storages are forgotten by Python's garbage collector, at any moment and in any thread, while a
transfer may be under way: `Stored.__del__` only hands memory, ticket and place over to a queue. They are freed when the ticket is
done, by whoever comes next.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import torch

from swapper.errors import IoError
from swapper.io import beneath
from swapper.io.alignment import SECTOR_BYTES
from swapper.io.extents import Extents
from swapper.paging.residency import Residency, Resident
from swapper.runtime.heap import note_freed
from swapper.runtime.interrupts import SteadyLock


class Arrival(Protocol):
    """When memory has the content that it is to have."""

    @property
    def done(self) -> bool: ...
    def wait(self) -> None: ...


class Stored(Resident):
    """One storage's content. Lives as long as anything saved refers to it. DIRTY is what was never written.

    Attributes:
        number: its place in the order of the forward.
        nbytes: its size.
        memory: the bytes, uint8; None while they are only on the drive.
        offset: of its place in the file, from when it is first written.
        ticket: of the transfer under way.
        error: why it could not be written.
        origin: keeps whatever tells that it is this storage, for whoever looks it up.
        uses_left: how many saved tensors refer to it and were not restored yet.
        arrival: of its content; None where it is there.
        allocate: gives memory into which it is read back.
    """

    def __init__(self, cache: SavedTensorCache, number: int, memory: torch.Tensor) -> None:
        super().__init__(Residency.DIRTY)
        self._cache = cache
        self.number = number
        self.nbytes = memory.nbytes
        self.memory: torch.Tensor | None = memory
        self.offset: int | None = None
        self.ticket: Any = None
        self.error: IoError | None = None
        self.origin: object = None
        self.uses_left = 0
        self.arrival: Arrival | None = None
        self.allocate: Callable[[int], torch.Tensor] = page_aligned

    def bytes(self) -> torch.Tensor:
        """Return all of its bytes, uint8, to be kept by whoever uses them. Raises IoError."""
        return self._cache.fetch(self)

    def __del__(self) -> None:
        self._cache.forgotten.append(_Remains(self.number, self.nbytes, self.memory, self.offset, self.ticket))


@dataclass(frozen=True)
class _Remains:
    """What is left to be freed of a storage that nobody wants any more."""

    number: int
    nbytes: int
    memory: torch.Tensor | None
    offset: int | None
    ticket: Any


class SavedTensorCache:
    """Owns what is saved, and decides which storages are in memory.

    Args:
        file: the scratch file.
        find_engine: gives the engine that does the transfers; asked each time. Raises where there is none any more.
        limit_bytes: the most that storages may have in memory, beside the one that is saved or used at the moment.
        keep_bytes: what stays in memory and is not written at all, of these; None: nothing is ever written.
    """

    def __init__(
        self, file: SpillFile, find_engine: Callable[[], Any], limit_bytes: int, keep_bytes: int | None
    ) -> None:
        self._find_engine = find_engine
        self._limit_bytes = limit_bytes
        self._keep_bytes = keep_bytes
        self._file = file
        self._lock = SteadyLock()
        self._order = count()
        self._live: dict[int, weakref.ref[Stored]] = {}  # by number, in order
        self._here: dict[int, int] = {}  # what was never written, oldest first: by number, its bytes
        self._here_bytes = 0
        self._moving: dict[int, weakref.ref[Stored]] = {}
        self._restored: dict[int, weakref.ref[Stored]] = {}  # CLEAN, READING, or looked at while WRITING
        self.forgotten: deque[_Remains] = deque()
        self._ending: list[_Remains] = []  # forgotten, their tickets not done
        self._failure: IoError | None = None  # of a write, not told to anyone
        self._first = 0  # number of the first storage of the forward under way
        self.counters = ActivationCounters()

    @property
    def writes(self) -> bool:
        """Whether what is too much goes to the drive."""
        return self._keep_bytes is not None

    # --- the forward ----------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """A forward begins."""
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
        """Have others leave until so many bytes more may be in memory. False if they cannot be had.

        Raises:
            IoError: the drive is full.
        """
        with self._lock:
            self._settle()
            self._wait_for_room(nbytes)
            return self.counters.held_bytes + nbytes <= self._limit_bytes

    def _send_away(self, more_bytes: int) -> None:
        """Have the oldest written that have arrived, until what stays in memory is no more than may."""
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
        stored.move(Residency.WRITING)
        self._moving[stored.number] = weakref.ref(stored)
        self.counters.written_bytes += stored.nbytes

    def _wait_for_room(self, more_bytes: int) -> None:
        """What is restored and not in use goes first; then the oldest transfer is waited for, or what is to be written."""
        self._send_away(more_bytes)
        while self.counters.held_bytes + more_bytes > self._limit_bytes:
            if self._drop_restored(None):
                continue
            tickets = [stored.ticket for stored in map(_call, self._moving.values()) if stored is not None]
            tickets += [remains.ticket for remains in self._ending]
            if tickets:
                tickets[0].exception()
                self._settle()
            elif not self._wait_for_arrival(more_bytes):
                return

    def _wait_for_arrival(self, more_bytes: int) -> bool:
        """Wait for the oldest that is not there yet, where it is to be written. False if there is none."""
        oldest = self._alive(next(iter(self._here), -1))
        if oldest is None or oldest.arrival is None:
            return False
        oldest.arrival.wait()
        before = len(self._here)
        self._send_away(more_bytes)
        return len(self._here) < before

    # --- the backward ---------------------------------------------------------------------------------------------

    def fetch(self, stored: Stored) -> torch.Tensor:
        """Return the bytes of `stored`, and have those that backward wants next read.

        Raises:
            IoError: it could not be written, or cannot be read.
        """
        with self._lock:
            self._settle()
            if stored.error is not None:
                self._failure = None if self._failure is stored.error else self._failure
                raise _again(stored.error)
            if stored.residency is Residency.COLD:
                while self._lacks_room(stored) and self._drop_restored(stored):
                    pass
                self._read(stored)
            self._restored.pop(stored.number, None)  # the newest use comes last
            if stored.offset is not None:
                self._restored[stored.number] = weakref.ref(stored)
            self._read_ahead(stored.number)
            if stored.residency is Residency.READING:
                self.counters.waits += not stored.ticket.done
                stored.ticket.exception()
                error = self._settle_one(stored)
                if error is not None:
                    raise error
            assert stored.memory is not None
            return stored.memory

    def is_near(self, stored: Stored) -> bool:
        """Whether `fetch` would not wait. What is on the drive is read ahead, if there is room for it."""
        with self._lock:
            self._settle()
            if stored.residency is Residency.COLD:
                self._read_ahead(stored.number + 1)
            return stored.error is None and stored.residency not in (Residency.COLD, Residency.READING)

    def _read(self, stored: Stored) -> None:
        assert stored.offset is not None
        memory = stored.allocate(stored.nbytes)
        stored.ticket = self._file.read(self._find_engine(), stored.offset, memory)
        stored.memory = memory
        stored.move(Residency.READING)
        self._moving[stored.number] = self._restored[stored.number] = weakref.ref(stored)
        self.counters.read_bytes += stored.nbytes
        self._add(stored.nbytes)

    def _read_ahead(self, current: int) -> None:
        """Read what was saved before number `current`, as far as there is room."""
        wanted = self._alive(current)
        for number in reversed(self._live):
            stored = self._alive(number)
            if stored is None or number >= current or stored.residency is not Residency.COLD:
                continue
            while self._lacks_room(stored):
                if not self._drop_restored(wanted, only_used=True):
                    return
            self._read(stored)

    def _lacks_room(self, stored: Stored) -> bool:
        return self.counters.held_bytes + stored.nbytes > self._limit_bytes

    def _drop_restored(self, wanted: Stored | None, only_used: bool = False) -> bool:
        """Let go of the memory of one that is on the drive too, the one that was used longest ago; not of `wanted`.

        `only_used`: not of one that something will ask for in this backward.
        """
        for reference in list(self._restored.values()):
            stored = reference()
            if (
                stored is None
                or stored is wanted
                or stored.residency is not Residency.CLEAN
                or (only_used and stored.uses_left)
            ):
                continue
            del self._restored[stored.number]
            self._let_go(stored)
            return True
        return False

    # --- what is over -----------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Take note of every transfer that is over and of everything that was forgotten."""
        for number, reference in list(self._moving.items()):
            stored = reference()
            if stored is None:
                del self._moving[number]
            elif stored.ticket.done:
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
        """The transfer of `stored` is over."""
        self._moving.pop(stored.number, None)
        ticket, stored.ticket = stored.ticket, None
        error: IoError | None = ticket.error
        if stored.residency is Residency.WRITING and error is not None:
            stored.move(Residency.DIRTY)
            stored.error = error
            if stored.number >= self._first:  # of an earlier forward its backward is told
                self._failure = self._failure or error
            return error
        is_read = stored.residency is Residency.READING
        if error is None:
            stored.move(Residency.CLEAN)
        if error is not None or not is_read:
            self._let_go(stored)
        return error

    def _let_go(self, stored: Stored) -> None:
        note_freed(stored.nbytes)
        stored.memory = None
        stored.move(Residency.COLD)
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

    # ----------------------------------------------------------------------------------------------------------------

    def _alive(self, number: int) -> Stored | None:
        reference = self._live.get(number)
        return None if reference is None else reference()

    def _is_not_here(self, number: int) -> None:
        """It is on its way to the drive, or forgotten."""
        self._here_bytes -= self._here.pop(number, 0)

    def _add(self, nbytes: int) -> None:
        self.counters.held_bytes += nbytes
        self.counters.peak_bytes = max(self.counters.peak_bytes, self.counters.held_bytes)


def _call(reference: weakref.ref[Stored]) -> Stored | None:
    return reference()


def _again(error: IoError) -> IoError:
    """Return the same error anew: its traceback, which has the graph, must not hang on something that the graph has."""
    return IoError(error.op, error.path, error.offset, error.nbytes, error.errno or 0, error.detail)


def page_aligned(nbytes: int) -> torch.Tensor:
    """Return uint8 memory that begins at a page, so that a drive writes straight into it."""
    raw = torch.empty(nbytes + SECTOR_BYTES, dtype=torch.uint8)
    shift = -raw.data_ptr() % SECTOR_BYTES
    return raw[shift : shift + nbytes]


@dataclass
class ActivationCounters:
    """What was done so far.

    Attributes:
        saved: tensors that autograd saved and that were taken over.
        storages: different ones among them; each is moved once.
        left_alone: tensors that were not: small ones, parameters and their views, those of special kinds.
        written_bytes, read_bytes: moved, as submitted.
        waits: how many times backward waited for a storage.
        held_bytes: what storages have in host memory now.
        peak_bytes: the most that they had at one time.
        down_bytes, up_bytes: copied from accelerators and to them.
        unlocked_bytes: of these, what was copied slowly, through memory that is not page-locked, because no stretch of the
            page-locked memory was long enough.
        device_held_bytes: what storages have on accelerators now, in the order of their streams.
        device_peak_bytes: the most that they had there at one time.
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


_numbers = count()


class SpillFile:
    """The scratch file, without a name and gone with the process: it is made when something is first written. Owns its places.

    Args:
        directory: on the drive that shall hold it.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._file: Any = None
        self._extents = Extents()
        self._pid = os.getpid()
        self.allocated_bytes = 0

    @property
    def used_bytes(self) -> int:
        """What is in use of it."""
        return self._extents.used_bytes

    def write(self, engine: Any, memory: torch.Tensor) -> tuple[int, Any]:
        """Begin to write `memory`, uint8, to a place of its own. Returns the place's offset, and the ticket.

        Raises:
            IoError: the drive is full.
        """
        file = self._open()
        offset = self._extents.take(memory.nbytes)
        try:
            if self._extents.end > self.allocated_bytes:
                file.allocate(self._extents.end)
                self.allocated_bytes = self._extents.end
            return offset, engine.write(file, offset, memory.data_ptr(), memory.nbytes, keep=memory)
        except BaseException:
            self._extents.give(offset, memory.nbytes)
            raise

    def read(self, engine: Any, offset: int, memory: torch.Tensor) -> Any:
        """Begin to read into `memory`, uint8, from a place that was written. Returns the ticket."""
        return engine.read(self._file, offset, memory.data_ptr(), memory.nbytes, keep=memory)

    def give(self, offset: int, nbytes: int) -> None:
        """A place is not in use any more, and no transfer from or to it is under way."""
        self._extents.give(offset, nbytes)

    def _open(self) -> Any:
        if self._file is None:
            path = self._directory / f"activations-{os.getpid()}-{next(_numbers)}.swap"
            self._file = beneath.open_for_transfers(path, create=True)
            beneath.unlink(path)
        return self._file

    def __del__(self) -> None:
        if os.getpid() == self._pid and self._file is not None:
            self._file.close()  # transfers under way keep it open, and their memory
