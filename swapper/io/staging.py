"""Stages tensors that the engine cannot use directly (strided, conjugated, on a CUDA device), chunk by chunk.

It has a fixed ring of slots in page-locked memory, and one thread that copies: while a chunk is copied, earlier ones
are transferred. Memory does not grow with the tensor. The ring is allocated at its first use.
"""

from __future__ import annotations

import functools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch

from swapper import _C
from swapper.errors import IoError
from swapper.io.registered import CudaRegistrar, Registrar, Registration, slabs
from swapper.io.tensor_bytes import byte_count, copy_in, copy_out, device_errors

SLOTS = 16
SLOT_BYTES = 4 << 20
"""A fast drive needs 32 MiB or more in flight, in addition to slots being copied. Four slots reached 0.73 to 0.88 of
its speed, 16 reach 0.88 to 0.99."""

Move = Callable[[int, int, int], Iterator[_C.Ticket]]
"""Begins a transfer of (file offset, address, bytes); yields engine tickets, several if the file is striped."""


class StagingChunk:
    """A transfer from or into a slot. The slot is free when all of it is over, even if a part could not begin."""

    def __init__(self, tickets: Iterator[_C.Ticket]) -> None:
        self._tickets: list[_C.Ticket] = []
        self._error: Exception | None = None
        try:
            for ticket in tickets:
                self._tickets.append(ticket)
        except Exception as error:  # raised by `wait`, when all begun parts are over
            self._error = error

    @property
    def done(self) -> bool:
        return all(ticket.done for ticket in self._tickets)

    def wait(self) -> None:
        """Wait for all of it, then raise the first IoError."""
        for ticket in self._tickets:
            try:
                ticket.wait()
            except IoError as error:
                self._error = self._error or error
        if self._error is not None:
            raise self._error


@dataclass(frozen=True)
class StagingSlot:
    address: int
    memory: torch.Tensor


class StagedTransfer:
    """One tensor's transfer through the ring; a part of an operation."""

    def __init__(self, future: Future[None], description: tuple[str, str, int, int]) -> None:
        self._future = future
        self._description = description

    @property
    def done(self) -> bool:
        return self._future.done()

    @property
    def error(self) -> Exception | None:
        if not self._future.done():
            return None
        if self._future.cancelled():
            return IoError(*self._description, 0, "cancelled")
        error = self._future.exception()
        return error if error is None or isinstance(error, Exception) else RuntimeError(repr(error))

    def on_done(self, act: Callable[[], None]) -> None:
        """Call `act` when it is over, from the thread that ends it, or at once."""
        self._future.add_done_callback(lambda _: act())

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it is over, and raise its error. Returns False if `timeout_s` seconds pass first."""
        over = threading.Event()
        self._future.add_done_callback(lambda _: over.set())
        if not over.wait(timeout_s):
            return False
        if self.error is not None:
            raise self.error
        return True

    @property
    def cancelled(self) -> bool:
        return self._future.cancelled()

    def cancel(self) -> bool:
        return self._future.cancel()

    def notify(self, fd: int) -> None:
        own = os.dup(fd)  # the caller may close its own at any time

        def tell(_: Future[None]) -> None:
            os.eventfd_write(own, 1)
            os.close(own)

        self._future.add_done_callback(tell)


class Staging:
    """The ring and its thread. `close` waits for all transfers. The first CUDA tensor registers the slots with CUDA."""

    def __init__(
        self, registrar_of: Callable[[torch.device], Registrar] = CudaRegistrar, device_type: str = "cuda"
    ) -> None:
        self._worker = ThreadPoolExecutor(1, "swapper-staging")
        self._slots: list[StagingSlot] = []
        self._registrar_of = registrar_of
        self._device_type = device_type
        self._registration: Registration | None = None

    def begin(self, kind: str, tensor: torch.Tensor, offset: int, path: str, move: Move) -> StagedTransfer:
        """Begin to "read" or "write" the elements in row-major order, from file offset `offset` on.

        Args:
            kind: "read" or "write".
            tensor: on any device, of any strides.
            offset: in the file, in bytes.
            path: for messages.
            move: transfers one run.
        """
        act = self._read if kind == "read" else self._write
        future = self._worker.submit(act, tensor.detach(), offset, move, event_of(tensor))
        return StagedTransfer(future, (kind, path, offset, byte_count(tensor)))

    def close(self) -> None:
        self._worker.shutdown(wait=True)
        if self._registration is not None:
            self._registration.close()
            self._registration = None
        self._slots = []

    def _write(self, tensor: torch.Tensor, offset: int, move: Move, ready: torch.cuda.Event | None) -> None:
        in_flight: deque[tuple[StagingSlot, StagingChunk]] = deque()
        free = deque(self._ring(tensor.device))
        with _on_own_stream(tensor, ready):
            try:
                for start, stop in _chunks(tensor):
                    if not free:
                        slot, ticket = in_flight.popleft()
                        free.append(slot)
                        ticket.wait()
                    slot = free.popleft()
                    flat = _typed(slot, tensor.dtype, stop - start)
                    copy_out(tensor, start, stop, flat)
                    at = offset + start * tensor.element_size()
                    in_flight.append((slot, StagingChunk(move(at, slot.address, flat.numel() * flat.element_size()))))
            finally:
                _drain(chunk for _, chunk, *_ in in_flight)
        for _, ticket in in_flight:
            ticket.wait()

    def _read(self, tensor: torch.Tensor, offset: int, move: Move, ready: torch.cuda.Event | None) -> None:
        in_flight: deque[tuple[StagingSlot, StagingChunk, int, int]] = deque()
        chunks = _chunks(tensor)

        def begin(slot: StagingSlot) -> None:
            for start, stop in chunks:
                nbytes = (stop - start) * tensor.element_size()
                ticket = StagingChunk(move(offset + start * tensor.element_size(), slot.address, nbytes))
                in_flight.append((slot, ticket, start, stop))
                return

        with _on_own_stream(tensor, ready):
            try:
                for slot in self._ring(tensor.device):
                    begin(slot)
                while in_flight:
                    slot, ticket, start, stop = in_flight.popleft()
                    ticket.wait()
                    copy_in(tensor, start, stop, _typed(slot, tensor.dtype, stop - start))
                    begin(slot)
            finally:
                _drain(chunk for _, chunk, *_ in in_flight)

    def _ring(self, device: torch.device) -> list[StagingSlot]:
        if not self._slots:
            self._arena = _C.Arena(SLOTS * SLOT_BYTES)
            memory = torch.frombuffer(self._arena.view(0, SLOTS * SLOT_BYTES), dtype=torch.uint8)
            starts = range(0, SLOTS * SLOT_BYTES, SLOT_BYTES)
            self._slots = [StagingSlot(self._arena.address + at, memory.narrow(0, at, SLOT_BYTES)) for at in starts]
        if device.type == self._device_type and self._registration is None:
            parts = slabs(0, SLOTS * SLOT_BYTES, SLOT_BYTES)
            self._registration = Registration(self._registrar_of(device), self._arena, parts)
            self._registration.wait()
        return self._slots


def _chunks(tensor: torch.Tensor) -> Iterator[tuple[int, int]]:
    """Yield ranges of elements that fill a slot: SLOT_BYTES is a multiple of every element's size."""
    per_slot = SLOT_BYTES // tensor.element_size()
    for start in range(0, tensor.numel(), per_slot):
        yield start, min(start + per_slot, tensor.numel())


def _typed(slot: StagingSlot, dtype: torch.dtype, elements: int) -> torch.Tensor:
    return slot.memory.narrow(0, 0, elements * dtype.itemsize).view(dtype)


def _drain(chunks: Iterable[StagingChunk]) -> None:
    """Wait for all transfers, whatever their outcome: a slot must not be reused while the engine uses it."""
    for chunk in chunks:
        with suppress(Exception):
            chunk.wait()


# --- CUDA: a stream of the copying thread, ordered after the work queued at submission --------------------------------


def event_of(tensor: torch.Tensor) -> torch.cuda.Event | None:
    """Return an event behind the work queued in this thread; None for a CPU tensor. Raises DeviceError."""
    if tensor.device.type != "cuda":
        return None
    with device_errors(tensor.device, "what was queued before"):
        event: torch.cuda.Event = torch.cuda.current_stream(tensor.device).record_event()
        return event


@functools.cache
def _stream_of(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of all copies here: torch deals out 32 in turn, so more would soon be the program's own."""
    return torch.cuda.Stream(device)


@contextmanager
def _on_own_stream(tensor: torch.Tensor, ready: torch.cuda.Event | None) -> Iterator[None]:
    """Copy a CUDA tensor on a stream other than the user's, and wait for it; do nothing for other tensors."""
    if ready is None:
        yield
        return
    with device_errors(tensor.device, "copying a tensor through host memory"):
        stream = _stream_of(tensor.device)
        stream.wait_event(ready)
        with torch.cuda.stream(stream):
            yield
            stream.synchronize()
