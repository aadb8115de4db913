"""Copies optimizer state to a device before its gradients are there.

[Note: state ahead] The link idles until a step's first gradients are there, and a forward that follows waits for the groups
that it needs first. So in what may be a step's last backward their state goes up already, into memory that nothing else has:
`ahead_bytes` of the plan. It is that of the step before, and stays so until the update: whatever reads or changes state in
between waits for updates first (`Sweep.settle`), which invalidates it. An update that finds its state there only queues kernels.

A slice has the same memory in each step, so the copies of the next step wait on their stream, and the host for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from swapper.device.device_storage import DeviceStorage
from swapper.train.groups.train_device import TrainingDevice
from swapper.train.layout.slices import Slice
from swapper.train.layout.trainable import Trainable
from swapper.train.updates.slice_parts import SlicePart, state_parts, state_slice_bytes


@dataclass(slots=True)
class UpdateSlot:
    """Memory on the device for a slice that is updated there.

    Attributes:
        storage: its memory, allocated at the first use.
        in_flight: slices whose copies to or from it are in flight.
        last_use: the event of the copies down; None before the first.
        has_state: it has the state of the slice: see StateAhead.
    """

    storage: DeviceStorage | None = None
    in_flight: int = 0
    last_use: torch.Event | None = None
    has_state: bool = False


Pieces = Callable[[Iterable[SlicePart]], Iterable[tuple[int, torch.Tensor]]]
"""Returns the offset in a slot and the host memory of each page's piece of some parts."""


class StateAhead:
    """Owns the slots of slices whose state goes up early. All methods are called on the stream of updates.

    Args:
        pieces: see Pieces.
        may_fetch: returns True if the update of a group needs nothing but its state copied, from memory that stays where it is.
    """

    def __init__(self, on_device: TrainingDevice, pieces: Pieces, may_fetch: Callable[[Trainable], bool]) -> None:
        self._on_device = on_device
        self._pieces = pieces
        self._may_fetch = may_fetch
        self._left_bytes = on_device.ahead_bytes
        self._slots: dict[tuple[int, int], UpdateSlot] = {}  # by group and number of the slice
        self._is_over = False  # nothing more is fetched before the next step

    def fetch(self, slices: Iterable[tuple[Trainable, Sequence[Slice]]], arrived: Mapping[int, torch.Event]) -> None:
        """Queue the copies of as many groups as there is memory for, in order. Once a step; later calls do nothing.

        Args:
            slices: of each group, with all of its parameters.
            arrived: by group: the event after which the last step's results are in host memory.
        """
        if self._is_over:
            return
        self._is_over = True
        for trainable, parts in slices:
            if not self._may_fetch(trainable) or not self._allocate(trainable, parts):
                return
            for number, part in enumerate(parts):
                slot = self._slots[trainable.group, number]
                if slot.storage is not None:
                    up = list(self._pieces(state_parts(trainable, part)))
                    self._on_device.bring_up(slot.storage, up, slot.last_use, arrived.get(trainable.group))
                    slot.has_state = True

    def _allocate(self, trainable: Trainable, parts: Sequence[Slice]) -> bool:
        """Allocate the slots of a group. Return False if there is no memory for them."""
        if (trainable.group, 0) in self._slots:
            return True
        needed = [state_slice_bytes(trainable, part) for part in parts]
        if sum(needed) > self._left_bytes:
            return False
        slots = {}
        for number, nbytes in enumerate(needed):
            storage = self._on_device.spare_storage(nbytes)
            if storage is None:  # something else has taken the memory
                self._left_bytes = 0
                return False
            slots[trainable.group, number] = UpdateSlot(storage)
        self._left_bytes -= sum(needed)
        self._slots |= slots
        return True

    def take(self, group: int, number: int) -> UpdateSlot | None:
        """Return the slot with the state of a slice, if it is there; the update changes it."""
        slot = self._slots.get((group, number))
        if slot is None or not slot.has_state:
            return None
        slot.has_state = False
        return slot

    def invalidate(self) -> None:
        """Note that state in host memory may change, or that the rest is not needed."""
        for slot in self._slots.values():
            slot.has_state = False

    def begin_step(self) -> None:
        """The next step may fetch again."""
        self.invalidate()
        self._is_over = False

    def free(self) -> None:
        """Give the memory back; no copies are in flight."""
        self.begin_step()
        while self._slots:
            storage = self._slots.popitem()[1].storage
            if storage is not None:
                self._left_bytes += storage.nbytes
                storage.free()
