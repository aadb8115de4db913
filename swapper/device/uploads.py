"""Copies from frames to a device: the copy stream, and the frames that wait for their event.

A page is leased until its copy is over; then its frame is free for the next read. Pages that stay in host memory are leased for
good, and need not be waited for.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from swapper.device.device import Device
from swapper.device.device_storage import DeviceStorage
from swapper.device.image_layout import Span
from swapper.errors import DeviceError
from swapper.paging.pager import Pager
from swapper.paging.planning.schedule import Access
from swapper.paging.residency import Residency
from swapper.paging.section import Page
from swapper.runtime.counters import Counters

COPIES_IN_FLIGHT = 6
"""Frames that may at least be leased for copies at one time. A drive is no faster than a link: few are enough."""


@dataclass(slots=True)
class PageCopy:
    """How one page goes to a device.

    Attributes:
        page: of the pager.
        access: that page alone.
        spans: which bytes of it go where.
        stays: its lease is kept, once it was read: it stays in host memory.
        is_held: by such a lease.
    """

    page: Page
    access: Access
    spans: tuple[Span, ...]
    stays: bool = False
    is_held: bool = False

    def is_read(self) -> bool:
        """Whether a lease would be given without waiting."""
        page = self.page
        if page.residency is Residency.READING:
            return (
                page.ticket is not None
                and page.previous_owner is None
                and page.ticket.done
                and page.ticket.error is None
            )
        return page.residency in (Residency.CLEAN, Residency.DIRTY, Residency.WRITING)


class Uploads:
    """Owns the copy stream, and the leases of frames that are being copied.

    Args:
        device: where to.
        pager: of the frames.
        source: gives the memory of a page's frame, uint8 of shape (page.nbytes,); the page is leased.
        counters: to keep.

    Attributes:
        most_in_flight: frames that may be leased for copies at one time.
    """

    def __init__(
        self, device: Device, pager: Pager, source: Callable[[Page], torch.Tensor], counters: Counters
    ) -> None:
        self._device = device
        self._pager = pager
        self._source = source
        self._counters = counters
        self._stream = device.new_stream()
        self.most_in_flight = COPIES_IN_FLIGHT
        self._in_flight: deque[tuple[Any, Access]] = deque()  # oldest first: they end in this order

    def send(self, copy: PageCopy, storage: DeviceStorage) -> None:
        """Queue the copy of a page, once it is in memory.

        Raises:
            IoError: it could not be read.
            DeviceError: the device failed.
        """
        self.give_back()
        if not copy.is_held:
            while len(self._in_flight) >= self.most_in_flight:
                self._wait_for_oldest()
            self._pager.acquire(copy.access)
            copy.is_held = copy.stays
        try:
            frame = self._source(copy.page)
            pieces = [(span.target, frame[span.begin : span.begin + span.nbytes]) for span in copy.spans]
            storage.fill(pieces, self._stream)
            event = None if copy.is_held else self._device.record(self._stream)
        except BaseException:
            if not copy.is_held:
                self.finish()  # a part of it may be queued
                self._pager.release(copy.access)
            raise
        self._counters.uploaded_bytes += sum(span.nbytes for span in copy.spans)
        if not copy.is_held:
            self._in_flight.append((event, copy.access))

    def fill(self, storage: DeviceStorage, pieces: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Queue copies of memory that nobody changes before they are over, which the caller sees to; they are all for `storage`."""
        storage.fill(pieces, self._stream)
        storage.all_is_queued()
        self._counters.uploaded_bytes += sum(source.numel() for _, source in pieces)

    @property
    def is_full(self) -> bool:
        """Whether `send` would wait for an earlier copy."""
        self.give_back()
        return len(self._in_flight) >= self.most_in_flight

    def give_back(self) -> None:
        """Give frames back whose copies are over."""
        while self._in_flight and self._device.has_passed(self._in_flight[0][0]):
            self._pager.release(self._in_flight.popleft()[1])

    def finish(self) -> None:
        """Wait for all copies and give their frames back. A device that failed uses no memory any more."""
        while self._in_flight:
            with contextlib.suppress(DeviceError):
                self._device.wait_for(self._in_flight[0][0])
            self._pager.release(self._in_flight.popleft()[1])
        with contextlib.suppress(DeviceError):
            self._device.wait_for(self._device.record(self._stream))

    def _wait_for_oldest(self) -> None:
        event, access = self._in_flight[0]
        with self._counters.waiting("frame", f"a copy to {self._device}"):
            self._device.wait_for(event)
        self._in_flight.popleft()
        self._pager.release(access)
