"""How far ahead of a step is read. Pure: counts accesses, knows no page.

As far as there is room, for as long as a step goes as expected, or leaves out a little of what was already asked for. Where it
jumps elsewhere, what was read for nothing has cost the drive's time and others their frames. So a step that jumps is expected to
jump again: it goes as expected for as long as it did before the last jumps, and no further is read; where it outlives that, it is
trusted the further, the longer it does.
"""

from __future__ import annotations

from swapper.paging.planning.schedule import NEVER


class PrefetchDistance:
    """Counts how long a step goes as expected, from jump to jump."""

    def __init__(self) -> None:
        self._run = 0  # accesses that came as expected since the last jump
        self._before = (NEVER, NEVER)  # the same between the jumps before

    def hit(self) -> None:
        """An access came as expected."""
        self._run += 1

    def miss(self) -> None:
        """An access came that is elsewhere in the schedule."""
        self._before = (self._before[1], self._run)
        self._run = 0

    def accesses(self, cycle: int) -> int:
        """Return how many accesses from the present one on may be read ahead, where a whole step has `cycle`."""
        expected = min(self._before)
        return cycle if expected >= cycle else min(abs(expected - self._run), cycle)
