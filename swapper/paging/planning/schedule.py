"""The order in which a step uses its pages: recorded once, then followed, so that the pager can read ahead and evict well.

The schedule is a cycle of accesses, one step long. Positions count accesses from the start of the run and never wrap, so
that "farther in the future" is "the larger number". Before anything was recorded the cycle is a guess from module order;
where the run departs from the cycle, the schedule finds its place again, and the order that was really seen replaces the
cycle at the end of the step.

[Note: before its turn] Where several things go on at one time, as copies to an accelerator beside updates, who of them comes first
is another in each step. With a `tolerance` an access that comes before its turn is no departure: the place stays what it is, and
the turn is left out when it comes. A step with nothing else in it teaches nothing: the next one would have another order again.

[Note: what a step leaves out] Layers may be left out by chance (layerdrop), and others in the next step; or each step takes one of
two ways. So what the step before had is expected still, at the place where it came: only what two steps in a row left out is
forgotten.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

NEVER = 1 << 62
"""The next use of a page that the schedule does not know."""

LONGEST_STEP = 1 << 18
"""Of more accesses than this in one step the last ones are recorded: a long evaluation between two steps is not a step."""


@dataclass(frozen=True, slots=True)
class Access:
    """One use of some pages at one time.

    Attributes:
        key: what is used: ("param", group) or ("slice", group, number). None: outside the order of a step, never recorded.
        pages: indices of all pages used, in the order in which they are wanted.
        fresh: those whose whole content is made anew: they need a frame but no read.
        writes: those that are changed.
    """

    key: Hashable
    pages: tuple[int, ...]
    fresh: frozenset[int] = frozenset()
    writes: frozenset[int] = frozenset()


class Schedule:
    """A cycle of accesses and the place in it. Knows nothing of frames or I/O.

    Args:
        cycle: what is expected.
        tolerance: how much of the cycle an access may come before its turn, as one part in so many; None: not at all.
            [Note: before its turn]
    """

    def __init__(self, cycle: Sequence[Access], tolerance: int | None = None) -> None:
        self._position = 0
        self._tolerance = tolerance
        self._recording: deque[Access] = deque(maxlen=LONGEST_STEP)
        self._left_out: Counter[Hashable] = Counter()  # keys that the last step left out of the cycle
        self._install(cycle)

    @property
    def position(self) -> int:
        """The position of the access that is expected next."""
        return self._position

    @property
    def cycle(self) -> tuple[Access, ...]:
        return self._cycle

    def at(self, position: int) -> Access:
        return self._cycle[(position - self._origin) % len(self._cycle)]

    def advance(self, access: Access) -> bool:
        """Note that `access` happens now. Returns False if it is not what was expected, so that read-ahead must start anew."""
        self._recording.append(access)
        if not self._cycle:
            return False
        if self.at(self._position) == access:
            self._go_on(self._position + 1)
            return True
        expected_key = self.at(self._position).key == access.key
        places = self._places.get(access.key)
        place = self._next_of(places, self._position - 1) if places and not expected_key else self._position
        reach = 0 if self._tolerance is None else len(self._cycle) // self._tolerance
        if place < self._position + reach and self.at(place) == access:
            self._early.add(place)
            return True
        self._has_departed = True
        if expected_key or places:
            self._go_on(place + 1)
        return False

    def is_over(self, position: int) -> bool:
        """Whether what is expected at `position`, now or later, has come before its turn."""
        return position in self._early

    def next_use(self, page: int) -> int:
        """Return the position of the next use of `page` from now on, or NEVER."""
        places = self._page_places.get(page)
        return NEVER if places is None else self._next_of(places, self._position - 1)

    def expected_before(self, key: Hashable) -> list[Hashable]:
        """Return the keys of what is expected in what is left of this cycle before `key`; of nothing if that is not."""
        if not self._cycle:
            return []
        now = (self._position - self._origin) % len(self._cycle)
        places = self._places.get(key, [])
        found = bisect_left(places, now)
        return [access.key for access in self._cycle[now : places[found]]] if found < len(places) else []

    def end_step(self, learn: bool = True) -> bool:
        """The step is over: what was recorded becomes the cycle, with what it left out. Returns True if that changed anything.

        Args:
            learn: False where what was recorded is no step like the next one: the cycle that there is begins anew.
        """
        recorded, in_order = list(self._recording), self._tolerance is not None and not self._has_departed
        self._recording.clear()
        self._has_departed = False
        expected = list(self._cycle)
        if learn and recorded and not in_order:
            expected = self._with_left_out(recorded)
        is_at_its_end = not self._cycle or (self._position - self._origin) % len(self._cycle) == 0
        if expected == list(self._cycle) and is_at_its_end:
            return False
        self._install(expected)
        return True

    def _with_left_out(self, step: Sequence[Access]) -> list[Access]:
        """Return the accesses of `step`, and behind what they come behind in the cycle those that it is the first to leave out."""
        places: dict[Hashable, deque[int]] = {}
        for place, access in enumerate(step):
            places.setdefault(access.key, deque()).append(place)
        before, self._left_out = self._left_out, Counter()
        kept: dict[int, list[Access]] = {}  # by the place that they come behind
        last = -1
        for access in self._cycle:
            if places.get(access.key):
                last = places[access.key].popleft()
            elif before[access.key] > 0:
                before[access.key] -= 1
            else:
                self._left_out[access.key] += 1
                kept.setdefault(last, []).append(access)
        return kept.get(-1, []) + [one for place, access in enumerate(step) for one in (access, *kept.get(place, ()))]

    def follow(self, cycle: Sequence[Access]) -> None:
        """Expect `cycle` from here on, whatever was recorded."""
        self._recording.clear()
        self._left_out.clear()
        self._install(cycle)

    def _install(self, cycle: Sequence[Access]) -> None:
        self._cycle = tuple(cycle)
        self._early: set[int] = set()  # positions from the present one on. [Note: before its turn]
        self._has_departed = False
        self._origin = self._position  # the access at this position is the first of the cycle
        self._places: dict[Hashable, list[int]] = {}
        self._page_places: dict[int, list[int]] = {}
        for index, access in enumerate(self._cycle):
            self._places.setdefault(access.key, []).append(index)
            for page in access.pages:
                places = self._page_places.setdefault(page, [])
                if not places or places[-1] != index:
                    places.append(index)

    def _next_of(self, places: list[int], after: int) -> int:
        """The first position > `after` that falls on one of `places` (ascending indices into the cycle) and is not over."""
        length, count = len(self._cycle), len(places)
        cycles, index = divmod(after - self._origin, length)
        found = bisect_right(places, index)
        while True:
            if found == count:
                cycles, found = cycles + 1, 0
            position = self._origin + cycles * length + places[found]
            if position not in self._early:
                return position
            found += 1

    def _go_on(self, position: int) -> None:
        """What is expected next is at `position`, or behind it."""
        while position in self._early:
            position += 1
        self._position = position
        if self._early:
            self._early = {early for early in self._early if early > position}
