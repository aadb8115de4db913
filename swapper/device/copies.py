"""Copies between host memory and a device, each direction on a stream of its own; completed in order, by their events.

Uploads lease a page until its copy is over; then its frame is free for the next read. Pages that stay in host memory are leased
for good. Downloads keep the tensor on the device until its event: its memory would be given out again for kernels that know
nothing of the copy. Before it, nothing may read the host's side, nor use its frame for something else.

Copies host memory to new memory on a device, without a wait, on a stream of its own: experts, and parts of matrices.

The copy waits for what was queued when its memory was allocated, and kernels wait for the copy's event. So a copy that is sent
before the kernels of an earlier one runs concurrently with them. Who drops the memory first lets the stream that it was
allocated on wait for the event ([Note: stream order of a storage], device_memory.py).
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from swapper.device.device import Device, QueuedCopy
from swapper.device.device_memory import DeviceStorage, Span, place_in_storage
from swapper.errors import DeviceError, IoError
from swapper.paging.pager import Pager
from swapper.paging.residency import CLEAN, DIRTY, READING, WRITING
from swapper.paging.schedule import Access
from swapper.paging.section import Page
from swapper.runtime.counters import Counters

COPIES_IN_FLIGHT = 6
"""Frames that are leased for copies at once, by default. A drive is no faster than a link: few are enough."""

MAX_DOWNLOAD_BYTES = 256 << 20
"""Device memory kept for downloads in flight: more does not pay."""

Piece = tuple[torch.Tensor, torch.Tensor]
"""(host memory, source on the device): uint8, of the same size."""


class CopyTimes:
    """Adds up in a counter how long copies took, when their events show that they are over: nobody waits for that.

    Args:
        name: of the counter, in seconds.
    """

    def __init__(self, device: Device, counters: Counters, name: str) -> None:
        self._device = device
        self._counters = counters
        self._name = name
        self._copies: deque[QueuedCopy] = (
            deque()
        )  # that are not known to be over; of one stream, so they end in this order

    def add(self, copy: QueuedCopy) -> None:
        self._copies.append(copy)
        self.collect()

    def collect(self) -> None:
        """Count the copies that are over."""
        with contextlib.suppress(DeviceError):  # the next use of a failed device raises
            while self._copies and self._device.has_passed(self._copies[0].over):
                seconds = self._device.copy_seconds(self._copies.popleft())
                setattr(self._counters, self._name, getattr(self._counters, self._name) + seconds)


@dataclass(slots=True)
class PageCopy:
    """How one page is copied to a device.

    Attributes:
        access: to that page alone.
        spans: which bytes of it go where.
        stays: it stays in host memory once it was read: its lease is kept.
        is_held: by such a lease.
    """

    page: Page
    access: Access
    spans: tuple[Span, ...]
    stays: bool = False
    is_held: bool = False

    def is_read(self) -> bool:
        """Return whether a lease would be given without waiting."""
        page, ticket = self.page, self.page.ticket
        if page.residency is READING:
            return ticket is not None and page.previous_owner is None and ticket.done and ticket.error is None
        return page.residency in (CLEAN, DIRTY, WRITING)


class Uploads:
    """Owns the upload stream, and the leases of frames that are being copied.

    Args:
        source: returns the memory of a leased page's frame, uint8 of shape (page.nbytes,).

    Attributes:
        max_in_flight: frames that may be leased for copies at once.
    """

    def __init__(
        self, device: Device, pager: Pager, source: Callable[[Page], torch.Tensor], counters: Counters
    ) -> None:
        self._device = device
        self._pager = pager
        self._source = source
        self._counters = counters
        self._stream = device.new_stream()
        self._times = CopyTimes(device, counters, "upload_s")
        self.max_in_flight = COPIES_IN_FLIGHT
        self._in_flight: deque[tuple[torch.Event, Access]] = deque()  # oldest first: they end in this order
        pager.end_copies = self.finish

    def send(self, copy: PageCopy, storage: DeviceStorage) -> None:
        """Queue the copy of a page, once it is in memory.

        Raises:
            IoError: it could not be read.
            DeviceError: the device failed.
        """
        self.give_back()
        if not copy.is_held:
            while len(self._in_flight) >= self.max_in_flight:
                self._wait_for_oldest()
            self._pager.acquire(copy.access)
            copy.is_held = copy.stays
        try:
            frame = self._source(copy.page)
            pieces = [(span.target, frame[span.begin : span.begin + span.nbytes]) for span in copy.spans]
            with self._device.range("upload", copy.page):
                queued = storage.fill(pieces, self._stream)
        except BaseException:
            if not copy.is_held:
                self.finish()  # a part of it may be queued
                self._pager.release(copy.access)
            raise
        self._counters.uploaded_bytes += sum(span.nbytes for span in copy.spans)
        if not copy.is_held:
            self._in_flight.append((queued.over, copy.access))
        self._times.add(queued)

    def send_ahead(self, copy: PageCopy, storage: DeviceStorage) -> bool:
        """Queue the copy of a page, if nothing has to wait for that. Return whether it is queued.

        A write that has failed is raised by the next lease instead: at the end of another use nothing can be taken back.

        Raises:
            DeviceError: the device failed.
        """
        self.give_back()
        if not copy.is_held and (len(self._in_flight) >= self.max_in_flight or not copy.is_read()):
            return False
        try:
            self.send(copy, storage)
        except IoError as error:
            self._pager.raise_later(error)
            return False
        return True

    def follow(self, event: torch.Event) -> None:
        """Have copies that are sent from now on wait for `event`: what they read comes from a device."""
        self._device.let_wait(self._stream, event)

    def give_back(self) -> None:
        """Release the frames whose copies are over."""
        while self._in_flight and self._device.has_passed(self._in_flight[0][0]):
            self._pager.release(self._in_flight.popleft()[1])

    def finish(self) -> None:
        """Wait for all copies and release their frames. A device that failed uses no memory any more."""
        while self._in_flight:
            with contextlib.suppress(DeviceError):
                self._device.wait_for(self._in_flight[0][0])
            self._pager.release(self._in_flight.popleft()[1])
        with contextlib.suppress(DeviceError):
            self._device.wait_for(self._device.record(self._stream))
        self._times.collect()

    def close(self) -> None:
        """Wait for all copies, and have the pager forget this."""
        self.finish()
        self._pager.end_copies = lambda: None

    def _wait_for_oldest(self) -> None:
        event, access = self._in_flight[0]
        with self._counters.waiting("frame", f"a copy to {self._device}"):
            self._device.wait_for(event)
        self._in_flight.popleft()
        self._pager.release(access)


@dataclass(frozen=True, slots=True)
class _Copy:
    """A download in flight, over after `event`. `nbytes` counts `sources` if only this keeps them."""

    event: torch.Event
    sources: tuple[torch.Tensor, ...]
    nbytes: int
    arrived: Callable[[], None]
    lost: Callable[[BaseException], None]


class Downloads:
    """Owns the download stream and its copies in flight, which keep at most `max_bytes` of the device's memory."""

    def __init__(self, device: Device, counters: Counters, max_bytes: int = MAX_DOWNLOAD_BYTES) -> None:
        self.max_bytes = max_bytes
        self._device = device
        self._counters = counters
        self._stream = device.new_stream()
        self._times = CopyTimes(device, counters, "download_s")
        self._in_flight: deque[_Copy] = deque()  # oldest first: they end in this order
        self._bytes = 0

    def send(
        self,
        pieces: Sequence[Piece],
        arrived: Callable[[], None] = lambda: None,
        lost: Callable[[BaseException], None] = lambda error: None,
        is_held: bool = True,
    ) -> torch.Event:
        """Queue copies, behind everything that is queued on the current stream by now. It waits for older ones first if need be.

        Returns the event after which they are over.

        Args:
            arrived: called once they are over, by the next call here that notices.
            lost: called instead, with the error, if the device fails.
            is_held: only this keeps the sources.

        Raises:
            DeviceError: the device failed. `lost` was called.
        """
        nbytes = sum(source.numel() for _, source in pieces)
        held_bytes = nbytes if is_held else 0
        try:
            self.collect()
            while self._in_flight and self._bytes + held_bytes > self.max_bytes:
                self.wait_for_oldest()
            self._device.let_wait(self._stream, self._device.record(self._device.current_stream()))
            with self._device.range("download", nbytes):
                queued = self._device.copy(pieces, self._stream)
        except BaseException as error:
            with contextlib.suppress(DeviceError):  # a part of it may be queued
                self._device.wait_for(self._device.record(self._stream))
            lost(error)
            raise
        self._in_flight.append(_Copy(queued.over, tuple(source for _, source in pieces), held_bytes, arrived, lost))
        self._bytes += held_bytes
        self._counters.downloaded_bytes += nbytes
        self._times.add(queued)
        return queued.over

    def collect(self) -> None:
        """Call `arrived` of the copies that are over."""
        while self._in_flight and self._device.has_passed(self._in_flight[0].event):
            self._take_oldest().arrived()

    def wait_for_oldest(self) -> None:
        """Wait until the oldest copy is over. Raises DeviceError: the device failed: all are lost."""
        try:
            with self._counters.waiting("frame", f"a copy from {self._device}"):
                self._device.wait_for(self._in_flight[0].event)
        except Exception as error:  # not Ctrl-C: that ends no copy, and the next call waits for it
            while self._in_flight:
                self._take_oldest().lost(error)
            raise
        self._take_oldest().arrived()

    def finish(self) -> None:
        """Wait until all copies are over. Raises DeviceError: the device failed: all are lost."""
        while self._in_flight:
            self.wait_for_oldest()
        self._times.collect()

    def _take_oldest(self) -> _Copy:
        copy = self._in_flight.popleft()
        self._bytes -= copy.nbytes
        return copy


@dataclass(frozen=True, slots=True)
class NewCopy:
    """A copy that is queued.

    Attributes:
        memory: uint8 on the device, with a version counter that only writes of users change.
        offsets: of each source in it, in bytes.
        filled_at: the event of the copy.
        stream: that the memory was allocated on.
    """

    memory: torch.Tensor
    offsets: Sequence[int]
    filled_at: torch.Event
    stream: torch.Stream


class NewCopies:
    """Owns the stream, and the sources until their copies are over.

    Args:
        allocate: given a number of bytes, returns such memory. Default: `Device.empty`.
    """

    def __init__(
        self, device: Device, counters: Counters, allocate: Callable[[int], torch.Tensor] | None = None
    ) -> None:
        self.device = device
        self._allocate = allocate or device.empty
        self._counters = counters
        self._stream = device.new_stream()
        self._times = CopyTimes(device, counters, "upload_s")
        self._in_flight: deque[tuple[torch.Event, Sequence[torch.Tensor]]] = deque()  # oldest first

    def send(self, sources: Sequence[torch.Tensor], allocate: Callable[[int], torch.Tensor] | None = None) -> NewCopy:
        """Queue the copy of `sources`: uint8, contiguous, read, in host memory.

        Args:
            allocate: instead of that of all copies.

        Raises:
            torch.OutOfMemoryError, BudgetError: the device has none.
            DeviceError: the device failed.
        """
        self.collect()
        offsets, nbytes = place_in_storage(source.numel() for source in sources)
        with torch.inference_mode(False), torch.no_grad():
            memory, stream = (allocate or self._allocate)(nbytes), self.device.current_stream()
            filling = torch.empty(0, dtype=torch.uint8, device=memory.device).set_(
                memory.untyped_storage(), 0, (nbytes,), (1,)
            )
            pieces = [(filling[at : at + source.numel()], source) for at, source in zip(offsets, sources, strict=True)]
        self.device.let_wait(self._stream, self.device.record(stream))
        queued = self.device.copy(pieces, self._stream)
        self._in_flight.append((queued.over, sources))
        self._counters.uploaded_bytes += sum(source.numel() for source in sources)
        self._times.add(queued)
        return NewCopy(memory, offsets, queued.over, stream)

    def collect(self) -> None:
        """Drop the sources of copies that are over."""
        while self._in_flight and self.device.has_passed(self._in_flight[0][0]):
            self._in_flight.popleft()

    def finish(self) -> None:
        """Wait for all copies. A device that failed copies nothing any more."""
        while self._in_flight:
            with contextlib.suppress(DeviceError):
                self.device.wait_for(self._in_flight[0][0])
            self._in_flight.popleft()
        self._times.collect()
