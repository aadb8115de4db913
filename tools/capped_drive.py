"""A virtual drive under the cap of a control group: `docker run --device-read-bps`, IOReadBandwidthMax, tools/capped."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from swapper.paging.virtual_drive import DriveRates, DryTransfer, PagingCosts, VirtualDrive

SLICE_S = 0.1
"""Linux: DFL_THROTL_SLICE, HZ / 10."""


@dataclass(frozen=True)
class CappedRates(DriveRates):
    """Rates of a drive without its cap, and what the cap allows in each direction, in bytes a second."""

    cap: float = math.inf

    def open(self, costs: PagingCosts) -> VirtualDrive:
        return CappedDrive(self, costs)

    def faster(self, times: float) -> CappedRates:
        rates = super().faster(times)
        assert isinstance(rates, CappedRates)
        return replace(rates, cap=self.cap * times)

    def seconds_for(self, read_bytes: int, written_bytes: int) -> float:
        return max(super().seconds_for(read_bytes, written_bytes), read_bytes / self.cap, written_bytes / self.cap)


@dataclass
class _Lane:
    """One direction.

    Attributes:
        begin_s: of the slices that `passed` counts.
        passed: bytes since then.
        last_s: when it was last in use.
    """

    begin_s: float = -math.inf
    passed: float = 0.0
    last_s: float = -math.inf


class CappedDrive(VirtualDrive):
    """Linux lets bytes pass in slices of time (block/blk-throttle.c). A slice's bytes pass at the drive's own speed, then nothing
    does until the next slice. So a drive that rested first does SLICE_S of the cap at once, which short steps feel. What a slice
    has left over can be used in the one after it; a rest of more than a slice begins a new one.
    """

    def __init__(self, rates: CappedRates, costs: PagingCosts | None = None) -> None:
        super().__init__(rates, costs)
        self._cap = rates.cap
        self._lanes = _Lane(), _Lane()

    def _allowed(self, writes: bool) -> tuple[float, float]:
        """Return the bytes that may pass in the present slice, and its end in seconds from now."""
        lane, cap = self._lanes[writes], self._cap
        has_rested = not lane.passed or self.now_s > math.ceil(lane.last_s / SLICE_S + 1) * SLICE_S
        if has_rested:
            lane.begin_s, lane.passed = self.now_s, 0.0
        over = int((self.now_s - lane.begin_s) / SLICE_S + 1e-9)
        if over >= 2:  # one stays, for what it has left over
            lane.begin_s += (over - 1) * SLICE_S
            lane.passed = max(lane.passed - (over - 1) * SLICE_S * cap, 0.0)
            over = 1
        return cap * SLICE_S * (over + 1) - lane.passed, lane.begin_s + SLICE_S * (over + 1) - self.now_s

    def _moving(self) -> list[tuple[list[DryTransfer], DryTransfer, float]]:
        return [(queue, one, rate * self._is_open(queue is self._writes)) for queue, one, rate in super()._moving()]

    def _is_open(self, writes: bool) -> bool:
        return self._allowed(writes)[0] > 1e-3

    def _until_change(self, transfer: DryTransfer, rate: float, writes: bool) -> float:
        allowed, end_s = self._allowed(writes)
        return min(transfer.left, allowed) / rate if rate else end_s

    def _passed(self, nbytes: float, writes: bool) -> None:
        lane = self._lanes[writes]
        lane.passed += nbytes
        lane.last_s = self.now_s
