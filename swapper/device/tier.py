"""The device tier: decides which groups have memory on a device within one budget, resident ones or ones copied for each use.

A group's *image* is its storage on the device and the pages that fill it. [Note: before its kernels] Before the kernels of a group
are queued, the next groups are allocated and their copies queued, as far as the budget goes and as far as they have been read:
memory that is asked for behind the kernels would wait for them, and the copies with it.

When the device runs short (another tensor of the user's, a budget that was too generous) the resident images are evicted, and the
allocation is tried once more; they are copied for each use from then on.

Passes of inference repeat: their order of use is cyclic. A training step ends with an update, which makes all images outdated: its
order has an end, beyond which nothing is copied until it begins again.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from swapper.device.copies import PageCopy, Uploads
from swapper.device.device import OUT_OF_MEMORY, Device, refuse_compiled_graphs
from swapper.device.device_memory import DeviceStorage
from swapper.errors import BudgetError, DeviceError, InvariantError
from swapper.runtime.counters import Counters
from swapper.runtime.sizes import format_bytes

MIN_FREE_BYTES = 256 << 20
"""If less is free on the device when a pass begins, resident images are evicted."""
CHECK_SHARE = 50
"""Looking takes at most a 50th of the time: the driver takes up to a millisecond to say, and a pass may be that short."""


T = TypeVar("T")


class DeviceCopy:
    """The image of one group.

    Args:
        name: for messages.
        storage: its memory.
        copies: the pages that fill it, in the order of the file.
        stays: it is resident once it was filled.

    Attributes:
        sent: how many of `copies` are queued.
        leases: how many uses it has now.
        waits: its content does not exist yet: it is not copied ahead, and memory is reserved for it.
        is_dirty: it was changed on the device, and host memory has an earlier content.
        before_eviction: called before the content of a resident image is given up.
    """

    __slots__ = ("before_eviction", "copies", "is_dirty", "leases", "name", "sent", "stays", "storage", "waits")

    def __init__(self, name: str, storage: DeviceStorage, copies: Sequence[PageCopy], stays: bool) -> None:
        self.name = name
        self.storage = storage
        self.copies = copies
        self.stays = stays
        self.sent = 0
        self.leases = 0
        self.waits = False
        self.is_dirty = False
        self.before_eviction: Callable[[], None] = lambda: None

    @property
    def is_filled(self) -> bool:
        return self.storage.is_allocated and self.sent == len(self.copies)


class DeviceTier:
    """Decides which images have memory, of `budget_bytes` in all. `is_cyclic`: the expected order repeats.

    Attributes:
        shrink_others: called before an image is allocated, with its bytes; others give back what they had of the budget.
    """

    def __init__(
        self, device: Device, uploads: Uploads, budget_bytes: int, counters: Counters, is_cyclic: bool = True
    ) -> None:
        self._device = device
        self._uploads = uploads
        self._budget_bytes = budget_bytes
        self._target_bytes = budget_bytes  # less if kernels of others need it: see `lower`
        self._limit_bytes = budget_bytes  # less while the device is short
        self._counters = counters
        self._is_cyclic = is_cyclic
        self._used_bytes = 0
        self._images: list[DeviceCopy] = []
        self._cycle: list[DeviceCopy] = []
        self._position = 0  # in the cycle: what is expected next
        self._next_check_s = 0.0
        self.shrink_others: Callable[[int], None] = lambda nbytes: None

    def spare_bytes(self, nbytes: int = 0) -> int:
        """Return what the expected images leave of the budget, and those that are there with `nbytes` more."""
        expected_bytes = sum(image.storage.nbytes for image in dict.fromkeys(self._cycle))
        return max(self._limit_bytes - max(self._used_bytes + nbytes, expected_bytes), 0)

    def add(self, image: DeviceCopy) -> None:
        self._images.append(image)

    def expect(self, order: Sequence[DeviceCopy]) -> None:
        """Expect images in this order from here on."""
        self._cycle = list(order)
        self._position = 0

    def invalidate(self, image: DeviceCopy) -> None:
        """Declare an unused image outdated. When this returns nothing reads the memory that it is filled from, which may change.

        Raises:
            DeviceError: the device failed.
        """
        if image.leases:
            raise InvariantError(f"{image.name} is changed while kernels may use it")
        image.is_dirty = False
        image.storage.wait_for_copies()
        self._uploads.give_back()
        if image.storage.is_allocated and image.stays:
            image.storage.invalidate()
            image.sent = 0
        else:
            self._free(image)

    # --- use ------------------------------------------------------------------------------------------------------

    def lease(self, image: DeviceCopy) -> bool:
        """Have `image` on the device for kernels that are queued from now on. Returns whether it had to be copied.

        Raises:
            IoError: a page could not be read.
            BudgetError: the images in use at once are more than the device's budget, or its memory, holds.
            DeviceError: the device failed.
            UnsupportedError: a CUDA graph is recorded that cannot work.
        """
        self._device.refuse_capture(image.name)
        if not image.stays:
            refuse_compiled_graphs(image.name)
        is_copied = not (image.stays and image.is_filled)
        self._find_place(image)
        image.leases += 1
        try:
            with self._device.range("lease", image.name):
                self._fill(image)
                self.prepare_next()
                image.storage.wait_on_current_stream()
        except BaseException:
            self._end_lease(image, is_whole=image.is_filled)
            raise
        return is_copied

    def release(self, image: DeviceCopy) -> None:
        """End a lease: the last kernel that uses `image` is queued."""
        self._end_lease(image, is_whole=image.is_filled)
        self.prepare_next()

    @contextmanager
    def changing(self, image: DeviceCopy) -> Iterator[DeviceStorage]:
        """Return a context that queues kernels, on the current stream, which change the content of a filled image."""
        image.leases += 1
        try:
            image.storage.wait_on_current_stream()
            image.storage.wait_for_users()
            yield image.storage
        finally:
            image.leases -= 1
            image.storage.note_update()

    def forget(self, image: DeviceCopy, kept: int = 0) -> None:
        """End all leases but `kept`: what held them is gone."""
        if image.leases > kept:
            image.leases = kept + 1
            self._end_lease(image, is_whole=image.is_filled)

    def drop(self, image: DeviceCopy) -> None:
        """Free `image` for good. A device that failed keeps the memory until the process ends."""
        image.leases = 0
        with contextlib.suppress(DeviceError):
            self._free(image)

    def remove(self, image: DeviceCopy) -> None:
        """Free `image`, and forget it."""
        self.drop(image)
        self._images.remove(image)
        self._cycle = [one for one in self._cycle if one is not image]
        self._position = 0

    def has_room(self, image: DeviceCopy) -> bool:
        """Return whether `image` has memory, or would get some without an eviction."""
        return image.storage.is_allocated or self._used_bytes + image.storage.nbytes <= self._limit_bytes

    def _end_lease(self, image: DeviceCopy, is_whole: bool) -> None:
        image.leases -= 1
        if image.leases == 0 and not (is_whole and (image.stays or self._is_next(image))):
            self._free(image)

    def _is_next(self, image: DeviceCopy) -> bool:
        """Whether it is used twice in a row, as at the end of a forward and the beginning of its backward."""
        return not self._is_cyclic and self._cycle[self._position : self._position + 1] == [image]

    def _find_place(self, image: DeviceCopy) -> None:
        ahead = [*self._cycle[self._position :], *self._cycle[: self._position]]
        for number, expected in enumerate(ahead):
            if expected is image:
                after = self._position + number + 1
                self._position = after if after <= len(self._cycle) else after - len(self._cycle)
                if self._is_cyclic:
                    self._position %= len(self._cycle)
                return

    # --- copying -------------------------------------------------------------------------------------------------

    def _fill(self, image: DeviceCopy) -> None:
        if image.is_filled:
            return
        if not image.storage.is_allocated:
            self._take(image)
        while image.sent < len(image.copies):
            self._uploads.send(image.copies[image.sent], image.storage)
            image.sent += 1
        image.storage.all_is_queued()

    def prepare_next(self) -> None:
        """Copy what is expected next, as far as possible now; errors are raised when it is needed. [Note: before its kernels]"""
        self._uploads.give_back()
        count = len(self._cycle) if self._is_cyclic else len(self._cycle) - self._position
        waiting: dict[int, int] = {}  # bytes that waiting images will need earlier
        for number in range(count):
            image = self._cycle[(self._position + number) % len(self._cycle)]
            if image.is_filled:
                continue
            if image.waits:
                waiting[id(image)] = 0 if image.storage.is_allocated else image.storage.nbytes
                continue
            if not image.storage.is_allocated and not self._can_take(image, sum(waiting.values())):
                return
            while image.sent < len(image.copies):
                if not self._uploads.send_ahead(image.copies[image.sent], image.storage):
                    return
                image.sent += 1
            image.storage.all_is_queued()

    # --- memory ---------------------------------------------------------------------------------------------------

    def _can_take(self, image: DeviceCopy, waiting_bytes: int) -> bool:
        """Allocate ahead, if that needs no eviction and leaves `waiting_bytes` for waiting images."""
        if self._used_bytes + waiting_bytes + image.storage.nbytes > self._limit_bytes:
            return False
        try:
            self._allocate(image)
        except OUT_OF_MEMORY:
            self._limit_bytes = self._used_bytes
            return False
        return True

    def _take(self, image: DeviceCopy) -> None:
        nbytes = image.storage.nbytes
        if self._used_bytes + nbytes > self._limit_bytes:
            for victim in self._victims():
                self.evict(victim)
                if self._used_bytes + nbytes <= self._limit_bytes:
                    break
        if self._used_bytes + nbytes > self._budget_bytes:
            in_use = ", ".join(f"{one.name} {format_bytes(one.storage.nbytes)}" for one in self._images if one.leases)
            raise BudgetError(
                f"device_memory is too small for what is used at once: {in_use}, and {format_bytes(self._budget_bytes)} are "
                f"for weights on {self._device}; raise device_memory, or gather fewer modules at once",
                option="device_memory",
            )
        self.evicting(lambda: self._allocate(image), nbytes, image.name)

    def evicting(
        self, allocate: Callable[[], T], nbytes: int, purpose: str, remedy: str = "what else is on the device"
    ) -> T:
        """Call `allocate`, once more after evicting idle images. Raises BudgetError if memory is short then too."""
        try:
            return allocate()
        except OUT_OF_MEMORY:
            self.evict_idle()
        try:
            return allocate()
        except OUT_OF_MEMORY as error:
            raise BudgetError(
                f"{self._device} has no {format_bytes(nbytes)} left for {purpose}, after everything that is not in use was given "
                f"up: lower device_memory, or {remedy} ({error})",
                option="device_memory",
            ) from error

    def evict_idle(self) -> None:
        """Evict all images that are not in use: the device is out of memory."""
        self._limit_bytes = self._used_bytes
        self.shrink_others(0)
        for victim in self._victims():
            self.evict(victim)
        self._device.release_cached()

    def _allocate(self, image: DeviceCopy) -> None:
        self.shrink_others(image.storage.nbytes)
        image.storage.allocate()
        image.sent = 0
        self._used_bytes += image.storage.nbytes
        self._counters.device_peak_bytes = max(self._counters.device_peak_bytes, self._used_bytes)

    def _victims(self) -> list[DeviceCopy]:
        """Return the images that may be evicted: those copied ahead, latest use first, then resident ones."""
        ahead = [*self._cycle[self._position :], *self._cycle[: self._position]]
        order = {id(image): number for number, image in reversed(list(enumerate(ahead)))}
        idle = [image for image in self._images if image.storage.is_allocated and not image.leases]
        return sorted(idle, key=lambda image: (image.stays, -order.get(id(image), len(ahead))))

    def evict(self, image: DeviceCopy) -> None:
        """Free an image that is not in use; it is copied for each use from now on."""
        if image.stays:
            image.stays = False
            image.before_eviction()
        self._free(image)

    def _free(self, image: DeviceCopy) -> None:
        if image.storage.is_allocated:
            self._used_bytes -= image.storage.nbytes
            image.sent = 0
            image.storage.free()

    def keep_free_memory(self) -> None:
        """Evict resident images if the device is about to run short. Call it between passes; see CHECK_SHARE."""
        if time.monotonic() < self._next_check_s:
            return
        began_s = time.thread_time()
        spare_bytes = self._device.free_bytes() - MIN_FREE_BYTES
        self._next_check_s = time.monotonic() + CHECK_SHARE * (time.thread_time() - began_s)
        for victim in self._victims():
            if spare_bytes >= 0:
                break
            if victim.stays:
                spare_bytes += victim.storage.nbytes
                self.evict(victim)
        self._limit_bytes = min(self._target_bytes, self._used_bytes + max(spare_bytes, 0))

    def grow(self, nbytes: int) -> int:
        """Have more images stay, in this much more memory. Return how much of it they take."""
        taken_bytes = 0
        for image in self._images:
            if not image.stays and taken_bytes + image.storage.nbytes <= nbytes:
                image.stays = True
                taken_bytes += image.storage.nbytes
        self._budget_bytes += taken_bytes
        self._target_bytes += taken_bytes
        self._limit_bytes += taken_bytes
        return taken_bytes

    def lower(self, nbytes: int) -> int:
        """Use this much less memory from now on, but for images in use at once. Return what was freed of it."""
        before_bytes = self._used_bytes
        self._target_bytes = max(min(self._target_bytes, self._used_bytes) - nbytes, 0)
        self._limit_bytes = min(self._limit_bytes, self._target_bytes)
        for victim in self._victims():
            if self._used_bytes <= self._limit_bytes:
                break
            self.evict(victim)
        return before_bytes - self._used_bytes

    def finish(self) -> None:
        """Wait for all copies."""
        self._uploads.finish()

    def close(self) -> None:
        """Close it. Images that still have memory keep it for as long as a tensor of theirs lives."""
        self.finish()
        self._images, self._cycle, self.shrink_others = [], [], lambda nbytes: None
