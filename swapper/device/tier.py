"""What lies on a device and what comes next: groups that stay, and those that are brought for each use, within one budget.

A group's *image* is its storage on the device and the pages that fill it. [Note: before its kernels] While a group is about to
run, the next ones are allocated and their copies queued, as far as the budget goes and as far as they have been read; only then
are its own kernels queued: memory that is asked for behind them would wait for them, and the copies with it.

When the device runs short (another tensor of the user's, a budget that was too generous) the images that stay are given up, and
the allocation is tried once more; they are brought for each use from then on.

A pass of inference is like the one before it, so its order of use goes round. A step of training ends with an update, which puts
all that was brought out of date: its order has an end, beyond which nothing is brought until it begins again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from swapper.device.device import OUT_OF_MEMORY, Device
from swapper.device.device_storage import DeviceStorage
from swapper.device.uploads import PageCopy, Uploads
from swapper.errors import BudgetError, DeviceError, InvariantError
from swapper.runtime.counters import Counters
from swapper.runtime.sizes import format_bytes

LEAST_FREE_BYTES = 256 << 20
"""Less than this on the device, when a pass begins, and images that stay are given up, as many as are missing."""


class DeviceCopy:
    """One group on the device.

    Args:
        name: of what it holds, for people.
        storage: its memory.
        copies: the pages that fill it, in the order of the file.
        stays: once it was filled, it stays.

    Attributes:
        sent: how many of `copies` are queued.
        leases: who uses it now.
        waits: what it is to be filled with is not there yet: it is not brought ahead, and its memory is left for it.
        let_go: called before the content of an image that had stayed is given up.
    """

    __slots__ = ("copies", "leases", "let_go", "name", "sent", "stays", "storage", "waits")

    def __init__(self, name: str, storage: DeviceStorage, copies: Sequence[PageCopy], stays: bool) -> None:
        self.name = name
        self.storage = storage
        self.copies = copies
        self.stays = stays
        self.sent = 0
        self.leases = 0
        self.waits = False
        self.let_go: Callable[[], None] = lambda: None

    @property
    def is_filled(self) -> bool:
        return self.storage.is_allocated and self.sent == len(self.copies)


class DeviceTier:
    """Decides which images have memory.

    Args:
        device: where.
        uploads: what fills them.
        budget_bytes: for all images together.
        counters: to keep.
        goes_round: after the last image of what is expected comes the first.
    """

    def __init__(
        self, device: Device, uploads: Uploads, budget_bytes: int, counters: Counters, is_cyclic: bool = True
    ) -> None:
        self._device = device
        self._uploads = uploads
        self._budget_bytes = budget_bytes
        self._limit_bytes = budget_bytes  # less while the device is short
        self._counters = counters
        self._goes_round = is_cyclic
        self._used_bytes = 0
        self._images: list[DeviceCopy] = []
        self._cycle: list[DeviceCopy] = []
        self._position = 0  # in the cycle: what is expected next

    def add(self, image: DeviceCopy) -> None:
        self._images.append(image)

    def expect(self, order: Sequence[DeviceCopy]) -> None:
        """From here on images are expected to be used in this order, over and over."""
        self._cycle = list(order)
        self._position = 0

    def prepare(self) -> None:
        """Bring what is expected first, before anybody asks for it."""
        self._prepare_next()

    def invalidate(self, image: DeviceCopy) -> None:
        """What it is filled from is about to be changed: nothing reads that when this returns. Nobody may use the image now.

        Raises:
            DeviceError: the device failed.
        """
        if image.leases:
            raise InvariantError(f"{image.name} is changed while kernels may use it")
        image.storage.wait_for_copies()
        self._uploads.give_back()
        if image.storage.is_allocated and image.stays:
            image.storage.invalidate()
            image.sent = 0
        else:
            self._free(image)

    # --- use ------------------------------------------------------------------------------------------------------

    def lease(self, image: DeviceCopy) -> bool:
        """Have `image` on the device for kernels that are queued from now on. Returns whether it had to be brought.

        Raises:
            IoError: a page could not be read.
            BudgetError: the images in use at one time are more than the device's budget, or its memory, holds.
            DeviceError: the device failed.
        """
        is_brought = not (image.stays and image.is_filled)
        self._find_place(image)
        image.leases += 1
        try:
            self._fill(image)
            self._prepare_next()
            image.storage.let_compute_use()
        except BaseException:
            self._end_lease(image, is_whole=image.is_filled)
            raise
        return is_brought

    def release(self, image: DeviceCopy) -> None:
        """The last kernel that uses `image` is queued."""
        self._end_lease(image, is_whole=True)
        self._prepare_next()

    def forget(self, image: DeviceCopy, kept: int = 0) -> None:
        """What held it is gone, but for `kept` leases."""
        if image.leases > kept:
            image.leases = kept + 1
            self._end_lease(image, is_whole=image.is_filled)

    def drop(self, image: DeviceCopy) -> None:
        """Nobody will use it any more. A device that failed keeps the memory until the process ends."""
        image.leases = 0
        with contextlib.suppress(DeviceError):
            self._free(image)

    def _end_lease(self, image: DeviceCopy, is_whole: bool) -> None:
        image.leases -= 1
        if image.leases == 0 and not (is_whole and (image.stays or self._is_next(image))):
            self._free(image)

    def _is_next(self, image: DeviceCopy) -> bool:
        """Whether it is used twice running, as what a forward ends with and its backward begins with."""
        return not self._goes_round and self._cycle[self._position : self._position + 1] == [image]

    def _find_place(self, image: DeviceCopy) -> None:
        ahead = [*self._cycle[self._position :], *self._cycle[: self._position]]
        for number, expected in enumerate(ahead):
            if expected is image:
                after = self._position + number + 1
                self._position = after if after <= len(self._cycle) else after - len(self._cycle)
                if self._goes_round:
                    self._position %= len(self._cycle)
                return

    # --- bringing -------------------------------------------------------------------------------------------------

    def _fill(self, image: DeviceCopy) -> None:
        if image.is_filled:
            return
        if not image.storage.is_allocated:
            self._take(image)
        while image.sent < len(image.copies):
            self._uploads.send(image.copies[image.sent], image.storage)
            image.sent += 1
        image.storage.all_is_queued()

    def _prepare_next(self) -> None:
        """[Note: before its kernels] What cannot be had now is brought when it is needed, and its error is told then."""
        self._uploads.give_back()
        count = len(self._cycle) if self._goes_round else len(self._cycle) - self._position
        waiting: dict[int, int] = {}  # bytes that what waits will need before what comes after it
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
                copy = image.copies[image.sent]
                if not copy.is_held and (self._uploads.is_full or not copy.is_read()):
                    return
                self._uploads.send(copy, image.storage)
                image.sent += 1
            image.storage.all_is_queued()

    # --- memory ---------------------------------------------------------------------------------------------------

    def _can_take(self, image: DeviceCopy, waiting_bytes: int) -> bool:
        """Allocate ahead, if nothing must make room for it, nor it for what is used before and cannot be brought yet."""
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
                self._give_up(victim)
                if self._used_bytes + nbytes <= self._limit_bytes:
                    break
        if self._used_bytes + nbytes > self._budget_bytes:
            in_use = ", ".join(
                f"{other.name} {format_bytes(other.storage.nbytes)}" for other in self._images if other.leases
            )
            raise BudgetError(
                f"device_memory is too small for what is used at one time: {in_use}, and {format_bytes(self._budget_bytes)} are "
                f"for weights on {self._device}; raise device_memory, or gather fewer modules at once"
            )
        try:
            self._allocate(image)
        except OUT_OF_MEMORY:
            self.give_up_what_is_idle()
            try:
                self._allocate(image)
            except OUT_OF_MEMORY as error:
                raise BudgetError(
                    f"{self._device} has no {format_bytes(nbytes)} left for {image.name}, after everything that is not in use "
                    f"was given up: lower device_memory, or what else is on the device ({error})"
                ) from error

    def give_up_what_is_idle(self) -> None:
        """The device is out of memory: keep what is in use."""
        self._limit_bytes = self._used_bytes
        for victim in self._victims():
            self._give_up(victim)
        self._device.release_cached()

    def _allocate(self, image: DeviceCopy) -> None:
        image.storage.allocate()
        image.sent = 0
        self._used_bytes += image.storage.nbytes
        self._counters.device_peak_bytes = max(self._counters.device_peak_bytes, self._used_bytes)

    def _victims(self) -> list[DeviceCopy]:
        """Images that nobody uses: those that were brought ahead, latest first, then those that stay."""
        ahead = [*self._cycle[self._position :], *self._cycle[: self._position]]
        order = {id(image): number for number, image in reversed(list(enumerate(ahead)))}
        idle = [image for image in self._images if image.storage.is_allocated and not image.leases]
        return sorted(idle, key=lambda image: (image.stays, -order.get(id(image), len(ahead))))

    def _give_up(self, image: DeviceCopy) -> None:
        if image.stays:
            image.stays = False
            image.let_go()
        self._free(image)

    def _free(self, image: DeviceCopy) -> None:
        if image.storage.is_allocated:
            self._used_bytes -= image.storage.nbytes
            image.sent = 0
            image.storage.free()

    def keep_some_free(self) -> None:
        """Give up images that stay where the device is about to run short; called between passes."""
        spare_bytes = self._device.free_bytes() - LEAST_FREE_BYTES
        for victim in self._victims():
            if spare_bytes >= 0:
                break
            if victim.stays:
                spare_bytes += victim.storage.nbytes
                self._give_up(victim)
        self._limit_bytes = min(self._budget_bytes, self._used_bytes + max(spare_bytes, 0))

    def finish(self) -> None:
        """Wait for all copies."""
        self._uploads.finish()

    def close(self) -> None:
        """Images that still have memory keep it for as long as a tensor of theirs lives."""
        self.finish()
        self._images, self._cycle = [], []
