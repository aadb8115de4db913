"""A group's storage on a device: one stretch of memory that comes and goes, under tensors that stay.

The storage is resized to zero and back, and not replaced: parameters, their aliases and what autograd keeps stay views of it.

[Note: whose turn a storage's memory is] torch's allocator hands memory out in the order of the stream on which it was asked for:
what is freed may be given out again at once, for kernels queued later on that stream. So a storage is allocated and freed on the
compute stream, and nothing of it needs `record_stream`, if three rules are kept: the copy stream fills it only after an event that
the compute stream recorded when it was allocated; the compute stream waits for the last of those copies before it uses *or frees*
it; and if other streams used it (a user who has several), each of them waits for the copies, and the one that allocated it waits
for all of them before it is freed or filled anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from swapper.device.device import Device


class DeviceStorage:
    """Owns the storage of one group. Made with memory, so that views of it can be made; then `free` it.

    Args:
        device: where.
        nbytes: of all tensors, as `place_in_storage` gives it.

    Attributes:
        room_since: after this event of the compute stream the memory may be filled.
        filled_at: after this event of the copy stream it is; None while copies are still to be queued.
        read_until: after this event of the copy stream what it was filled from last is not read for it any more.
    """

    def __init__(self, device: Device, nbytes: int) -> None:
        self._device = device
        self.nbytes = nbytes
        self._memory = device.empty(nbytes)
        self._storage = self._memory.untyped_storage()
        # With a version counter of its own: filling it changes no parameter.
        self._filling = torch.empty(0, dtype=torch.uint8, device=device.device).set_(self._storage, 0, (nbytes,), (1,))
        self._stream: Any = device.current_stream()
        self.room_since: Any = None
        self.filled_at: Any = None
        self.read_until: Any = None
        self._filler: Any = None  # the stream that has queued copies since `allocate`
        self._ready: set[Any] = set()  # streams that have waited for the content
        self._users: set[Any] = set()  # streams behind kernels that may have used it

    @property
    def memory(self) -> torch.Tensor:
        """uint8 of shape (nbytes,): tensors are to be views of it. It has data while `is_allocated`."""
        return self._memory

    @property
    def is_allocated(self) -> bool:
        return self._storage.nbytes() > 0

    @property
    def identity(self) -> int:
        """What all tensors on this storage have in common, with memory or without: see `storage_of`."""
        return int(self._storage._cdata)

    def read(self, begin: int, nbytes: int) -> torch.Tensor:
        """Return bytes of it as they are in the order of the current stream: uint8 of shape (nbytes,)."""
        return self._filling[begin : begin + nbytes]

    def allocate(self) -> None:
        """Take memory on the current stream, of any content.

        Raises:
            torch.OutOfMemoryError: there is none.
        """
        self._stream = self._device.current_stream()
        self._device.resize(self._storage, self.nbytes)
        self.room_since = self._device.record(self._stream)
        self._ready.clear()
        self._users.clear()

    def fill(self, pieces: Sequence[tuple[int, torch.Tensor]], stream: Any) -> None:
        """Queue copies on `stream`, which waits for the memory itself. Of one `allocate` all copies are on one stream.

        Args:
            pieces: where in the storage, in bytes, and what: uint8, on the host.
        """
        if self._filler is None:
            self._device.let_wait(stream, self.room_since)
            self._filler = stream
        with torch.inference_mode(False), torch.no_grad():
            for target, source in pieces:
                self._device.copy(self._filling[target : target + source.numel()], source, stream)

    def all_is_queued(self) -> None:
        """No copy is missing any more."""
        self.filled_at = self.room_since if self._filler is None else self._device.record(self._filler)
        self.read_until = self.filled_at

    def wait_for_copies(self) -> None:
        """Wait, in this thread, until nothing is read any more that it was filled from.

        Raises:
            DeviceError: the device failed.
        """
        if self.filled_at is None and self._filler is not None:
            self.read_until = self._device.record(self._filler)
        if self.read_until is not None:
            self._device.wait_for(self.read_until)
            self.read_until = None

    def let_compute_use(self) -> None:
        """Have the current stream wait until the content is there. It must be filled, as far as this thread knows.

        Other streams may be using it: to be called for each stream whose kernels do.
        """
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
        """Kernels that use it may be on the current stream, or before what that has waited for."""
        if self.is_allocated:
            self._users.add(self._device.current_stream())

    def let_compute_read(self) -> None:
        """Have the current stream wait for whatever may have changed the content."""
        current = self._device.current_stream()
        for user in {*self._users, self._stream} - {current}:
            self._device.let_wait(current, self._device.record(user))

    def invalidate(self) -> None:
        """What is there is not what is to be there any more: it can be filled anew, where it is. No copy may be in flight."""
        self._follow_users()
        self.room_since = self._device.record(self._stream)
        self.filled_at = self._filler = None

    def free(self) -> None:
        """Give the memory back, in the order of the stream that took it. [Note: whose turn a storage's memory is]"""
        if not self.is_allocated:
            return
        self._follow_users()
        if self._filler is not None:
            self.read_until = self.filled_at or self._device.record(self._filler)
            self._device.let_wait(self._stream, self.read_until)
        self.room_since = self.filled_at = self._filler = None
        self._device.resize(self._storage, 0)

    def _follow_users(self) -> None:
        """Have the stream whose turn it is wait for the kernels that have used the memory, on whatever stream."""
        self.note_use()
        for user in self._users - {self._stream}:
            self._device.let_wait(self._stream, self._device.record(user))
        self._users.clear()
        self._ready.clear()
