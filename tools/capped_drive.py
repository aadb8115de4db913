"""A virtual drive under the cap of a control group: `docker run --device-read-bps`, IOReadBandwidthMax, tools/capped."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from swapper.paging.virtual_drive import DriveRates, Lane

SLICE_S = 0.1
"""Linux: DFL_THROTL_SLICE, HZ / 10."""
REST_S = 1.5 * SLICE_S
"""The end of the slice after the one that was used last, on average."""


@dataclass(frozen=True)
class CappedRates(DriveRates):
    """Rates of a drive without its cap, and what the cap allows in each direction, in bytes a second."""

    cap: float = math.inf

    def lanes(self) -> tuple[Lane, Lane]:
        return CappedLane(self.read, self.cap), CappedLane(self.write, self.cap)

    def share(self, reading: bool, writing: bool, computing: bool) -> float:
        return 1.0  # slices are of the clock's time

    def faster(self, times: float) -> CappedRates:
        rates = super().faster(times)
        assert isinstance(rates, CappedRates)
        return replace(rates, cap=self.cap * times)

    def seconds_for(self, read_bytes: int, written_bytes: int) -> float:
        return max(super().seconds_for(read_bytes, written_bytes), read_bytes / self.cap, written_bytes / self.cap)


class CappedLane(Lane):
    """Linux lets bytes pass in slices of time (block/blk-throttle.c). A slice's bytes pass at the drive's own speed, then nothing
    does until the next slice. So a drive that rested first does SLICE_S of the cap at once, which short steps feel. What a slice
    has left over can be used in the one after it; a rest of more than a slice begins a new one.
    """

    def __init__(self, rate: float, cap: float) -> None:
        super().__init__(rate)
        self._allowed = Lane(cap)
        self._began_s = self._last_s = -math.inf  # of slices without a rest: the begin, the last use

    def add(self, begin_s: float, nbytes: float) -> tuple[float, float]:
        if begin_s > self._last_s + REST_S:
            self._began_s = begin_s
        first_s, end_s = self._allowed.add(max(begin_s - SLICE_S, self._began_s), nbytes)
        slice_s = first_s + SLICE_S * max(math.ceil((end_s - first_s) / SLICE_S - 1e-6) - 1, 0)
        found = super().add(max(begin_s, slice_s), min(nbytes, (end_s - slice_s) * self._allowed.rate))
        self._last_s = max(self._last_s, found[1])
        return found

    def look(self, now_s: float) -> tuple[bool, float]:
        self._allowed.look(now_s - 2 * SLICE_S)  # forgets what was before
        return super().look(now_s)
