"""Brings a group's parameters to where kernels see them: its range of host memory, or its image on a device.

A third kind is read on demand (infer/experts.py). What a group is (trained, or weights that nobody changes)
is another matter: leased_group.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from swapper.device.model_device import ModelDevice
from swapper.device.tier import DeviceCopy
from swapper.errors import SwapperError
from swapper.paging.pager import Pager
from swapper.paging.schedule import Access
from swapper.paging.section import Page
from swapper.paging.store.page_files import checksum_of

log = logging.getLogger("swapper")

Update = Callable[[Access | None], None]
"""Updates a group whose update is deferred, and leases the given access."""


class GroupHome:
    """Brings the bytes of one group's parameters to where kernels see them, and changes back. Here: of a group that has none.

    Attributes:
        is_paged: its memory is given up between uses.
        answers_reads: reads of memory that was given up are answered (csrc/memory/fault.h).
        pages: indices of the pages that are in frames while it is in use.
        pins: of the uses outside of the order of passes, whether each may write. The group notes them here.
        values: tensors that parameters are given for this use. Empty: they are views of the home's memory.
    """

    is_paged = True
    answers_reads = False
    pages: tuple[int, ...] = ()
    values: Sequence[torch.Tensor] = ()

    def __init__(self) -> None:
        self.pins: list[bool] = []

    def fetch(self, update: Update | None) -> bool:
        """Have the bytes there for kernels that are queued from now on. Returns whether that is in the order of a pass.

        Args:
            update: called first, if the group's update is deferred.
        """
        return False

    def give_back(self, changed: bool = False) -> None:
        """End that use. `changed`: kernels have changed parameters, which is to be kept."""

    def forget(self) -> None:
        """End it, if it goes on, but no pins: what held it is gone. The pager forgets its leases by itself."""

    def leave(self, stays: bool) -> None:
        """Give the memory up for good, unless parameters stay there, or something of the user's that shows them."""

    def wait_on_current_stream(self) -> None:
        """Have the current stream, which may not be that of `fetch`, wait for the bytes."""

    def note_use(self) -> None:
        """Note that kernels on the current stream may use the memory."""

    # --- the order of passes ------------------------------------------------------------------------------------------

    @property
    def accesses(self) -> list[Access]:
        """The pager's accesses of a use from now on, in order."""
        return []

    @property
    def kept_accesses(self) -> list[Access]:
        """The pager's leases that it has even while nobody uses it."""
        return []

    @property
    def streamed_pages(self) -> Sequence[int]:
        """The pages that each pass reads, after the first."""
        return ()

    def expected_before(self) -> list[int]:
        """Return the groups that the rest of this step is expected to lease before this one."""
        return []

    def wait_for_update(self, waits: bool) -> None:
        """Note whether the content exists only after an update: it is not brought ahead meanwhile."""

    @property
    def taken_bytes(self) -> int:
        """Bytes that a use takes of host_memory, in frames, or of device_memory."""
        return 0

    def sized(self) -> AbstractContextManager[object]:
        """Return a context in which the memory has its size, with any content: torch makes views of what is there."""
        return nullcontext()

    # --- what stays ---------------------------------------------------------------------------------------------------

    @property
    def stays(self) -> bool:
        """Whether bytes that were fetched stay there."""
        return False

    def call_before_eviction(self, act: Callable[[], None]) -> None:
        """Have `act` called before bytes that were to stay are given up; until `leave`."""

    def stream_all(self) -> int:
        """Have no page stay from now on. Return how many that frees: none if one was written to. Requires that nobody uses it."""
        return 0

    # --- changes ------------------------------------------------------------------------------------------------------

    def written(self) -> list[tuple[Page, int]]:
        """Return the pages that were written to past torch's version counters, with the offset of a write in the section."""
        return []

    def discard_changes(self) -> None:
        """Fetch the bytes again at the next use."""

    def sync_to_host(self) -> None:
        """Copy updates that were made here to the parameters' locations in host memory.

        Raises:
            IoError: a page could not be read.
            DeviceError: the device failed.
        """

    def pin(self, write: bool) -> None:
        """Have the bytes there until `unpin`. Raises as `fetch`."""
        self.fetch(None)

    def unpin(self, write: bool, changed: bool) -> None:
        """End a pin. `changed`: what it has written is to be kept."""
        self.give_back(changed)

    def unmanage(self, number: int) -> None:
        """Bring the parameter with this number no more; later ones count one less."""


class HostHome(GroupHome):
    """A group's range of host memory. Its pages have frames while they are leased; some may stay once they were read.

    Args:
        pager: reads and writes the pages.
        group: index of the group.
        pages: in the order of the file; none if its memory is never given up.
        kept: how many of them stay, the first ones.
    """

    answers_reads = True

    def __init__(self, pager: Pager, group: int, pages: Sequence[Page], kept: int = 0) -> None:
        super().__init__()
        self._pager = pager
        self.pages = tuple(page.index for page in pages)
        self.is_paged = bool(pages)
        key = ("param", group)
        self._all = self._next = Access(key, self.pages)
        self._streamed = Access(key, self.pages[kept:]) if kept else self._all
        self._kept = Access(None, self.pages[:kept])
        self._is_kept = False  # after the first use, which leases all
        self._read = Access(None, self.pages)
        self._write = Access(None, self.pages, writes=frozenset(self.pages))
        self._external = [page for page in pages if page.section.plan.external is not None]
        self._checksums: list[dict[int, int]] = []  # of external pages, as each pin to write found them
        self._before_eviction: Callable[[], None] = lambda: None

    def fetch(self, update: Update | None) -> bool:
        if update is not None:
            update(self._next if self.pages else None)
        elif self._next.pages:  # else all stay, and the schedule knows nothing of it
            self._pager.acquire(self._next)
        self._next, self._is_kept = self._streamed, True
        return True

    def give_back(self, changed: bool = False) -> None:
        may_write = False
        try:
            if changed:
                self._pager.acquire(self._write)  # waits for a write in flight
                may_write = True
        finally:  # also if that was interrupted or failed: the pages are changed
            if self._next.pages:
                self._pager.release(self._next, self._write.writes if changed and not may_write else ())
            if may_write:
                self._pager.release(self._write, self._write.writes)

    def leave(self, stays: bool) -> None:
        self._before_eviction = lambda: None  # else the group and this would keep each other, and the memory

    @property
    def accesses(self) -> list[Access]:
        return [self._next] if self._next.pages else []

    @property
    def kept_accesses(self) -> list[Access]:
        pins = [self._write if write else self._read for write in self.pins]
        return [*pins, self._kept] if self._is_kept and self._kept.pages else pins

    @property
    def streamed_pages(self) -> Sequence[int]:
        return self._streamed.pages

    def expected_before(self) -> list[int]:
        expected = self._pager.expected_before(self._all.key)
        return [group for kind, group, *_ in expected if kind == "param"] if expected else []

    @property
    def taken_bytes(self) -> int:
        return len(self.pages) * self._pager.frame_bytes

    @property
    def stays(self) -> bool:
        return not self._streamed.pages

    def call_before_eviction(self, act: Callable[[], None]) -> None:
        self._before_eviction = act

    def stream_all(self) -> int:
        if not self._is_kept or not self._kept.pages or self._pager.written_at(self._kept):
            return 0
        self._before_eviction()
        kept, self._kept = self._kept, Access(None, ())
        self._next = self._streamed = self._all
        self._pager.release(kept)
        return len(kept.pages)

    def written(self) -> list[tuple[Page, int]]:
        return self._pager.written_at(self._read)

    def discard_changes(self) -> None:
        if self._is_kept and self._kept.pages:
            self._pager.release(self._kept)
        self._next, self._is_kept = self._all, False
        self._pager.forget_written(self.pages)

    def pin(self, write: bool) -> None:
        access = self._write if write else self._read
        if self.pages:
            self._pager.take_in_written()  # earlier writes are not this pin's
            self._pager.acquire(access)
        try:
            if write:
                self._checksums.append(self._checksums_now())
        except BaseException:
            self._pager.release(access)
            raise

    def unpin(self, write: bool, changed: bool) -> None:
        access = self._write if write else self._read
        before = self._checksums.pop() if write else {}
        now = self._checksums_now() if changed else {}
        same = {page for page, checksum in before.items() if now.get(page) == checksum}
        if self.pages:
            self._pager.release(access, access.writes - same if changed else ())

    def _checksums_now(self) -> dict[int, int]:
        """Return the checksums of the external pages: unchanged ones need no space in the swap files."""
        memory = ((page, page.section.memory.data_ptr() + page.offset) for page in self._external)
        found = ((page.index, checksum_of(page, address)) for page, address in memory)
        return {index: checksum for index, checksum in found if checksum is not None}


class DeviceHome(GroupHome):
    """A group's image on a device; its pages are leased only while they are copied.

    Attributes:
        image: of the group.
    """

    def __init__(self, on_device: ModelDevice, image: DeviceCopy) -> None:
        super().__init__()
        self._on_device = on_device
        self.image = image

    def fetch(self, update: Update | None) -> bool:
        if update is not None:
            update(None)
        self._on_device.lease(self.image)
        return True

    def give_back(self, changed: bool = False) -> None:
        try:
            if changed:
                self._on_device.copy_back(self.image)
        except BaseException:
            self.image.sent = 0  # it has what the host does not: it is copied again for its next use
            raise
        finally:
            self._on_device.tier.release(self.image)

    def forget(self) -> None:
        self._on_device.tier.forget(self.image, len(self.pins))

    def leave(self, stays: bool) -> None:
        self.image.before_eviction = lambda: None  # else the group and this would keep each other, and the memory
        if not (stays and self._is_there_for_good()):
            self._on_device.tier.drop(self.image)

    def _is_there_for_good(self) -> bool:
        """Fill the image, if its memory was given up: what shows it would read nothing. Return False if that fails."""
        if self.image.is_filled:
            return True
        try:
            self._on_device.tier.lease(self.image)
        except SwapperError as error:
            log.error(
                "close: do not use tensors or graphs of yours that refer to memory of %s on the device, which would end the "
                "process: it cannot be filled (%s)",
                self.image.name,
                str(error),
            )
            return False
        return True

    def wait_on_current_stream(self) -> None:
        self.image.storage.wait_on_current_stream()

    def note_use(self) -> None:
        self.image.storage.note_use()

    @property
    def accesses(self) -> list[Access]:
        if self.image.stays and self.image.is_filled:
            return []
        return [copy.access for copy in self.image.copies if not copy.stays]

    @property
    def kept_accesses(self) -> list[Access]:
        return [copy.access for copy in self.image.copies if copy.is_held]

    @property
    def streamed_pages(self) -> list[int]:
        return [] if self.image.stays else [copy.page.index for copy in self.image.copies if not copy.stays]

    def wait_for_update(self, waits: bool) -> None:
        self.image.waits = waits

    @property
    def taken_bytes(self) -> int:
        return self.image.storage.nbytes

    @contextmanager
    def sized(self) -> Iterator[None]:
        if self.image.storage.is_allocated:
            yield
            return
        self.image.storage.allocate()
        try:
            yield
        finally:
            self.image.storage.free()

    @property
    def stays(self) -> bool:
        return self.image.stays

    def call_before_eviction(self, act: Callable[[], None]) -> None:
        self.image.before_eviction = act

    def discard_changes(self) -> None:
        self._on_device.tier.invalidate(self.image)

    def sync_to_host(self) -> None:
        if self.image.is_dirty:
            self._on_device.copy_back(self.image)

    def pin(self, write: bool) -> None:
        self._on_device.tier.lease(self.image)
