"""Copies host memory to new memory on a device, without a wait, on a stream of its own: experts, and parts of matrices.

The copy waits for what was queued when its memory was allocated, and kernels wait for the copy's event. So a copy that is sent
before the kernels of an earlier one runs concurrently with them. Who drops the memory first lets the stream that it was
allocated on wait for the event ([Note: stream order of a storage], device_storage.py).
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from swapper.device.copies import CopyTimes
from swapper.device.device import Device
from swapper.device.device_storage import place_in_storage
from swapper.errors import DeviceError
from swapper.runtime.counters import Counters


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
