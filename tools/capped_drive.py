"""A virtual drive under the cap of a control group: `docker run --device-read-bps`, IOReadBandwidthMax, tools/capped."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from swapper.paging.virtual_drive import DriveRates, Lane

SLICE_S = 0.1
"""Linux: DFL_THROTL_SLICE, HZ / 10."""


@dataclass(frozen=True)
class CappedRates(DriveRates):
    """Rates of a drive without its cap, and what the cap allows in each direction, in bytes a second."""

    cap: float = math.inf

    def lanes(self) -> tuple[Lane, Lane]:
        return CappedLane(self.read, self.cap), CappedLane(self.write, self.cap)

    def share(self, reading: bool, writing: bool, computing: bool) -> float:
        wanted = min(self.read, self.cap) * reading + min(self.write, self.cap) * writing
        reached = super().share(reading, writing, computing) * (self.read * reading + self.write * writing)
        return min(reached / wanted, 1.0) if wanted else 1.0

    def faster(self, times: float) -> CappedRates:
        rates = super().faster(times)
        assert isinstance(rates, CappedRates)
        return replace(rates, cap=self.cap * times)

    def seconds_for(self, read_bytes: int, written_bytes: int) -> float:
        return max(super().seconds_for(read_bytes, written_bytes), read_bytes / self.cap, written_bytes / self.cap)


class CappedLane(Lane):
    """Linux lets bytes pass in slices of time (block/blk-throttle.c). A slice's bytes pass at the drive's own speed, then nothing
    does until the next slice. So a drive that rested first does SLICE_S of the cap at once, which short steps feel.
    """

    def __init__(self, rate: float, cap: float) -> None:
        super().__init__(min(rate, cap))
        self._uncapped = rate

    def add(self, begin_s: float, nbytes: int) -> tuple[float, float]:
        first_s, end_s = super().add(begin_s, nbytes)
        over = max(math.ceil((end_s - first_s) / SLICE_S - 1e-6) - 1, 0)  # slices before the last one
        slice_s = first_s + over * SLICE_S
        passed_s = (end_s - slice_s) * self.rate / self._uncapped
        return first_s, max(slice_s + passed_s, begin_s + nbytes / self._uncapped)
