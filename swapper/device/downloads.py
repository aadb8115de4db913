"""Copies from a device to host memory: the stream they go by, and who is told when one is over.

Nothing may read the host's side, nor use the frame that it is in for something else, before the event behind the copy has passed;
and the tensor on the device is kept until then, because its memory would be given out again for kernels that know nothing of the
copy. Copies are over in the order in which they were queued.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from swapper.device.device import Device
from swapper.errors import DeviceError
from swapper.runtime.counters import Counters

MOST_BYTES = 256 << 20
"""Of the device's memory it does not pay to keep more for copies that are on their way."""

Piece = tuple[torch.Tensor, torch.Tensor]
"""Host memory and where it is filled from on the device: uint8, of the same size."""


@dataclass(frozen=True, slots=True)
class _Copy:
    """One that is on its way.

    Attributes:
        event: after it the copy is over.
        sources: on the device; kept here for as long as they are copied.
        nbytes: of them, where only this keeps them.
        arrived: to be called then.
        lost: to be called, with the error, where the device fails instead.
    """

    event: Any
    sources: tuple[torch.Tensor, ...]
    nbytes: int
    arrived: Callable[[], None]
    lost: Callable[[BaseException], None]


class Downloads:
    """Owns the stream, and what is on its way.

    Args:
        device: where from.
        counters: to keep.
        most_bytes: of tensors that are kept until they have arrived: the next one waits for the oldest.
    """

    def __init__(self, device: Device, counters: Counters, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._device = device
        self._counters = counters
        self._stream = device.new_stream()
        self._in_flight: deque[_Copy] = deque()  # oldest first: they end in this order
        self._bytes = 0

    def send(
        self,
        pieces: Sequence[Piece],
        arrived: Callable[[], None] = lambda: None,
        lost: Callable[[BaseException], None] = lambda error: None,
        is_held: bool = True,
    ) -> None:
        """Queue copies, behind everything that is queued on the current stream by now.

        Args:
            pieces: what, and where to.
            arrived: called once they are over, by whoever finds that out.
            lost: called instead where the device fails.
            is_held: nobody else keeps what is copied.

        Raises:
            DeviceError: the device failed. `lost` was called.
        """
        nbytes = sum(source.numel() for _, source in pieces)
        held_bytes = nbytes if is_held else 0
        try:
            self.collect()
            while self._in_flight and self._bytes + held_bytes > self._most_bytes:
                self.wait_for_oldest()
            self._device.let_wait(self._stream, self._device.record(self._device.current_stream()))
            with torch.inference_mode(False), torch.no_grad():
                for target, source in pieces:
                    self._device.copy(target, source, self._stream)
            event = self._device.record(self._stream)
        except BaseException as error:
            with contextlib.suppress(DeviceError):  # a part of it may be queued
                self._device.wait_for(self._device.record(self._stream))
            lost(error)
            raise
        self._in_flight.append(_Copy(event, tuple(source for _, source in pieces), held_bytes, arrived, lost))
        self._bytes += held_bytes
        self._counters.downloaded_bytes += nbytes

    def collect(self) -> None:
        """Take note of copies that are over."""
        while self._in_flight and self._device.has_passed(self._in_flight[0].event):
            self._take_oldest().arrived()

    def wait_for_oldest(self) -> None:
        """Wait until one more is over.

        Raises:
            DeviceError: the device failed: all are lost.
        """
        try:
            with self._counters.waiting("frame", f"a copy from {self._device}"):
                self._device.wait_for(self._in_flight[0].event)
        except Exception as error:  # not Ctrl-C: that ends no copy, and who waits next finds it out
            while self._in_flight:
                self._take_oldest().lost(error)
            raise
        self._take_oldest().arrived()

    def finish(self) -> None:
        """Wait until all are over.

        Raises:
            DeviceError: the device failed: all are lost.
        """
        while self._in_flight:
            self.wait_for_oldest()

    def _take_oldest(self) -> _Copy:
        copy = self._in_flight.popleft()
        self._bytes -= copy.nbytes
        return copy
