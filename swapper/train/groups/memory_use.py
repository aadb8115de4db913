"""Decides how much of a device's memory a session uses while it runs: more than planned, or less.

[Note: memory that steps leave] What a model's own operations need of the device's memory is not known before they ran. So a
device_memory that the user leaves to swapper is half of what is free. In the second step, which begins with the optimizer's state,
the peak is known, and what it leaves is used: by more images, gradients that are added up, and state that goes up early. If the
model's operations find no memory all the same, the next pass begins with less of these. Gradients and state that stay keep theirs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from swapper.device.model_device import DeviceBudget, DevicePlacement
from swapper.device.tier import MIN_FREE_BYTES, DeviceTier
from swapper.runtime.counters import Counters
from swapper.runtime.sizes import format_bytes

log = logging.getLogger("swapper")

MAX_WHOLE_BYTES, WHOLE_SHARE = 256 << 20, 64
"""Of a slice that stays, and the divisor of a device's budget: the temporaries of its update take a twentieth at most: choices."""
FREE_SHARE = 20
"""The divisor of a device's memory that is left free at the peak, for fragments: a choice."""
FAILURE_SHARE = 4
"""The divisor of a budget that is given up when the model's own operations found no memory: a choice."""


class MemoryUse:
    """Owns the limits of what a session has on its device besides gradients and state that stay.

    Args:
        budget, placement: as planned.
        tier: has the images.

    Attributes:
        sum_bytes: for gradients that are added up on the device.
        ahead_bytes: for optimizer state which is copied up before its gradients are there.
        whole_bytes: of its largest state tensor that a slice has at most if nothing is copied for it.
        free_ahead: frees the memory of state that goes up early, and returns how much it was.
    """

    def __init__(self, budget: DeviceBudget, placement: DevicePlacement, tier: DeviceTier, counters: Counters) -> None:
        self.sum_bytes = placement.sum_bytes
        self.ahead_bytes = placement.ahead_bytes
        self.whole_bytes = min(MAX_WHOLE_BYTES, budget.nbytes // WHOLE_SHARE)
        self.free_ahead: Callable[[], int] = lambda: 0
        self._device = budget.device
        self._budget = budget
        self._placement = placement
        self._tier = tier
        self._counters = counters
        self._first_step: int | None = counters.step
        self._failures = self._device.failures()
        self._peak_before = self._device.max_allocated_bytes()

    def pass_begins(self) -> None:
        """Use less if the model's own operations found no memory since the last call; evict images if others need theirs."""
        if (failures := self._device.failures()) > self._failures:
            self._failures = failures
            freed_bytes = self._lower(self._budget.nbytes // FAILURE_SHARE)
            log.warning(
                "%s ran out of memory in the model's own operations: device_memory is lowered, and %s of it are free now. The pass "
                "that failed can be taken again, after optimizer.zero_grad()",
                self._device, format_bytes(freed_bytes),
            )  # fmt: skip
        self._tier.keep_free_memory()

    def step_taken(self) -> None:
        """Follow the peak of the first whole step. [Note: memory that steps leave]"""
        if not self._budget.is_auto or self._first_step in (None, self._counters.step):
            return
        self._first_step = None
        spare_bytes = self._device.free_at_peak() - max(MIN_FREE_BYTES, self._device.total_bytes() // FREE_SHARE)
        if spare_bytes > 0:
            log.info(
                "%s: device_memory is %s more: steps leave it", self._device, format_bytes(self._grow(spare_bytes))
            )
        elif self._device.max_allocated_bytes() > self._peak_before:
            freed_bytes = self._lower(-spare_bytes)
            log.info("%s: device_memory is %s less: steps need it", self._device, format_bytes(freed_bytes))

    def _grow(self, nbytes: int) -> int:
        """Use more memory from now on. Return how much."""
        images = self._tier.grow(nbytes)
        sums = min(nbytes - images, max(self._placement.max_sum_bytes - self.sum_bytes, 0))
        ahead = min(nbytes - images - sums, max(self._placement.max_ahead_bytes - self.ahead_bytes, 0))
        self.sum_bytes += sums
        self.ahead_bytes += ahead
        return images + sums + ahead

    def _lower(self, nbytes: int) -> int:
        """Use less memory from now on. Return what was freed: of state that goes up early, then of images."""
        self.ahead_bytes = self.sum_bytes = 0
        freed_bytes = self.free_ahead()
        return freed_bytes + self._tier.lower(max(nbytes - freed_bytes, 0))

    def close(self) -> None:
        self.free_ahead = lambda: 0
