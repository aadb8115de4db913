"""Brings the results of updates on an accelerator to host memory, and knows what is in flight and what became of it.

[Note: a step goes on] A step is queued when `optimizer.step()` returns, and its copies go on during the next forward, as far as
streams order everything: state in host memory, of parameters that are updated in their images. What reads that state, or a
commit, waits for it (`settle`); so does the next update of a group for its own. Results are waited for in the step if they
lease frames, or if a forward is to copy them to the device again. Of those that a codec may refuse, the step waits for the
kernels that count such values, and not for the results. Kernels of updates may still read
gradients then: an operation on one that is still a parameter's `grad` waits for them first (gradient_guards.py), and one that was
dropped is kept until its slice has arrived.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial

import torch

from swapper.device.copies import Downloads
from swapper.errors import StateError
from swapper.paging.pager import Pager
from swapper.paging.schedule import Access
from swapper.runtime.counters import Counters
from swapper.train.groups.train_device import TrainingDevice
from swapper.train.layout.slices import GroupUpdate
from swapper.train.state.coded_state import CodecCounts
from swapper.train.updates.device_slots import UpdateSlot

Piece = tuple[torch.Tensor, torch.Tensor]
"""Host memory, and what on the device is copied there."""


class Results:
    """Owns the copies down of slices that were updated, and the leases of their pages until they have arrived.

    Attributes:
        down_at: by group: the event after which the results of its last update have come down.
        awaited: groups of the step whose results something waits for.
    """

    def __init__(self, on_device: TrainingDevice, pager: Pager, counters: Counters) -> None:
        self._on_device = on_device
        self._pager = pager
        self._over: deque[Access] = deque()  # arrived, and leased until the next slice is
        self._in_flight: Counter[int] = Counter()  # by group: slices
        self.down_at: dict[int, torch.Event] = {}
        self._unsent: dict[int, list[Callable[[], None]]] = {}  # by group: sends those of slices whose state was there
        self.awaited: set[int] = set()
        self._failure: BaseException | None = None  # with which results of a step were lost
        self._refusals = Downloads(on_device.device, counters)  # counts of what codecs cannot hold
        self._unchecked: set[int] = set()  # groups whose counts are in flight
        self._unheld: dict[int, StateError] = {}  # by group: a codec's refusal of a slice of the step

    @property
    def in_flight(self) -> int:
        """The number of slices whose results are in flight."""
        return self._in_flight.total()

    @property
    def are_lost(self) -> bool:
        """True if some of a step could not be copied."""
        return self._failure is not None

    # --- sending ------------------------------------------------------------------------------------------------------

    def send(
        self, update: GroupUpdate, access: Access, slot: UpdateSlot, pieces: Sequence[Piece], is_awaited: bool
    ) -> None:
        """Queue the copies of a slice, on the stream of updates. Its gradients are kept until they have arrived.

        Args:
            access: of the slice, leased until then.
            slot: that has it.
            is_awaited: the step waits for them.
        """
        group = update.trainable.group
        slot.in_flight += 1
        self._in_flight[group] += 1
        if is_awaited:
            self.awaited.add(group)
        arrived = partial(self._arrived, group, access, slot, update.gradients)
        lost = partial(self._lost, group, access, slot)
        slot.last_use = self.down_at[group] = self._on_device.downloads.send(pieces, arrived, lost, is_held=False)

    def keep(self, group: int, send: Callable[[], None]) -> None:
        """Call `send` with the rest: nothing waits for these, and those in the ring, whose slots are needed again, come first."""
        self._unsent.setdefault(group, []).append(send)

    def send_rest(self, group: int | None = None) -> None:
        """Send the kept results of a group, or all."""
        with self._on_device.apart():
            for index in list(self._unsent) if group is None else (group,):
                for send in self._unsent.pop(index, ()):
                    send()

    def send_unheld(self, group: int, found: CodecCounts | None) -> None:
        """Have the counts of what codecs cannot hold of a slice come down, before its results."""
        if found is not None:
            counts, error_in = found
            here = self._on_device.device.empty_on_host(counts.numel())
            self._unchecked.add(group)
            self._refusals.send([(here, counts)], lambda: self._refused(group, error_in(here)))

    def _refused(self, group: int, error: StateError | None) -> None:
        if error is not None:
            self._unheld.setdefault(group, error)

    def _arrived(self, group: int, access: Access, slot: UpdateSlot, gradients: Sequence[torch.Tensor | None]) -> None:
        self._in_flight[group] -= 1
        slot.in_flight -= 1
        self._over.append(access)

    def _lost(self, group: int, access: Access, slot: UpdateSlot, error: BaseException) -> None:
        self._failure = error
        self._in_flight[group] -= 1
        slot.in_flight -= 1
        self._pager.release(access)

    # --- waiting ------------------------------------------------------------------------------------------------------

    def release_arrived(self) -> None:
        """Release the pages of slices that have arrived."""
        while self._over:
            access = self._over.popleft()
            self._pager.release(access, access.writes)

    def wait_for_all(self) -> None:
        """Wait until no copy is in flight. Raises DeviceError: the device failed."""
        self.send_rest()
        self._wait(self._in_flight.total)

    def wait_for(self, group: int) -> None:
        """Wait until the results of a group are in host memory. Raises as `check`, for this group."""
        self.send_rest(group)
        self._wait(lambda: self._in_flight[group])
        self.check(group)

    def _wait(self, in_flight: Callable[[], int]) -> None:
        try:
            while in_flight():
                self._on_device.downloads.wait_for_oldest()
        finally:
            self.release_arrived()

    def show(self, group: int) -> None:
        """Wait for what the next use of a group needs."""
        if group in self.awaited:
            self.wait_for(group)
        elif group in self._unchecked:
            self.check(group)

    def check(self, group: int | None = None) -> None:
        """Wait for the counts of what codecs cannot hold, of a group or of all.

        Raises:
            DeviceError: results of the step were lost.
            StateError: a codec cannot hold some of them.
        """
        if group in self._unchecked or (group is None and self._unchecked):
            self._refusals.finish()
            self._unchecked.clear()
        if self._failure is not None:
            raise self._failure
        for error in [error for index, error in self._unheld.items() if group in (None, index)]:
            raise error

    # --- the end of a step --------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Wait for what is in flight of an abandoned step. Raises DeviceError: the device failed."""
        self._unsent.clear()
        if self.in_flight:
            self._on_device.downloads.finish()
        self._refusals.finish()
        self._over.clear()

    def forget(self) -> None:
        """Forget what became of an abandoned step."""
        self._unsent.clear()
        self.awaited.clear()
        self._unchecked.clear()
        self._unheld.clear()
        self._failure = None
