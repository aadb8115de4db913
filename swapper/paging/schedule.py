"""The schedule: the order in which a step uses its pages; and what follows from it: the resident set, and how far to prefetch.

Pure. The schedule is a cycle of accesses, one step long, recorded once and then followed. Positions count accesses from the start
of the run and never wrap, so that a later use has a larger number. Before anything was recorded the cycle is a guess from module
order. If the run departs from the cycle, the schedule finds its place again, and the recorded order replaces the cycle at the end
of the step.

[Note: before its turn] If several things go on at once, as copies to an accelerator during updates, their order differs from step
to step. With a `tolerance` an access that comes before its turn is no departure: the place stays, and the turn is skipped when it
comes. A step whose accesses are all within the tolerance is not learned: the next one would have another order again. A group may
be copied once in a step and twice in the next, if a layer is left out and another one stays on the device for it. Then the use
that is expected of it is far ahead, and the place stays too: if it went there, what is used before then would make room for what
is not, and the next access would be far from the place again, nearly a cycle. Several groups far ahead are a departure, to where
they follow each other.

[Note: what a step leaves out] Layers may be left out by chance (layerdrop), and others in the next step; or steps alternate between
two orders. So what the step before had is still expected, at its place: only what two steps in a row left out is forgotten.

[Note: a resident set] Of pages that are used once in a cycle which does not fit, any fixed set may be resident: as many must be
read whichever it is. But computing hides only transfers that go on at the same time: if all of one layer is resident and nothing
of the next, the drive first idles and is then waited for. So the resident set is spread evenly over the cycle, with more of what
comes first: it follows a time without transfers (a step's other half, where nothing is paged), and then much is needed at once.
If some pages are used several times in a step, the resident set is no free choice: the page that is needed latest is evicted.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field

NEVER = 1 << 62
"""The next use of a page that the schedule does not know."""

ONE_USE_SHARE = 1 / 8
"""Uses of a page within this part of a cycle count as one: slices of one layer that meet on a page."""
FIRST_SHARE = 2 / 5
"""At most this part of the resident set is what comes first in the cycle."""
MAX_FAR_GROUPS = 2
"""Maximum of groups that come far ahead of their turn one after another and are no departure: a choice."""
LONGEST_STEP = 1 << 18
"""Accesses that are recorded of one step, the last ones: a long evaluation between two steps is not a step."""


@dataclass(frozen=True, slots=True)
class Access:
    """One use of some pages.

    Attributes:
        key: ("param", group) or ("slice", group, number). None: outside the order of a step, never recorded.
        pages: indices of all pages, in the order in which they are needed.
        fresh: those that are overwritten: they need a frame but no read.
        writes: those that are changed.
        in_frames: those that are used in their frames only, as by copies to a device, and not at their windows' addresses.
    """

    key: Hashable
    pages: tuple[int, ...]
    fresh: frozenset[int] = frozenset()
    writes: frozenset[int] = frozenset()
    in_frames: frozenset[int] = field(default=frozenset(), compare=False)


class Schedule:
    """A cycle of accesses and the place in it. An access may come 1/tolerance of a cycle early. [Note: before its turn]

    Attributes:
        position: of the access that is expected next.
        cycle: the accesses.
        fresh: the pages that some access of the cycle overwrites.
    """

    def __init__(self, cycle: Sequence[Access], tolerance: int | None = None) -> None:
        self.position = 0
        self._tolerance = tolerance
        self._recording: deque[Access] = deque(maxlen=LONGEST_STEP)
        self._left_out: Counter[Hashable] = Counter()  # keys that the last step left out of the cycle
        self._install(cycle)

    def at(self, position: int) -> Access:
        return self.cycle[(position - self._origin) % len(self.cycle)]

    def advance(self, access: Access) -> bool:
        """Note that `access` happens now. Returns False if it was not expected, so that read-ahead must start again."""
        self._recording.append(access)
        if not self.cycle:
            return False
        expected = self.at(self.position)
        if expected is access or expected == access:
            self.position += 1
            self._far.clear()
            if self._early:
                self._skip_over()
            return True
        expected_key = expected.key == access.key
        places = self._places.get(access.key)
        place = self._next_of(places) if places and not expected_key else self.position
        reach = 0 if self._tolerance is None else len(self.cycle) // self._tolerance
        if place < self.position + reach and self.at(place) == access:
            self._early.add(place)
            self._far.clear()
            return True
        self._has_departed = True
        if self._tolerance is not None and places and not expected_key:
            found = self._departure(access, places)
            if found is None:
                return True
            place = found
        if expected_key or places:
            self.position = place + 1
            self._skip_over()
        return False

    def pending(self, position: int) -> Access | None:
        """Return the access at `position`, now or later; None if it has come before its turn."""
        return None if position in self._early else self.cycle[(position - self._origin) % len(self.cycle)]

    def next_use(self, page: int) -> int:
        """Return the position of the next use of `page` from now on, or NEVER."""
        return self.next_uses((page,))[0]

    def next_uses(self, pages: Iterable[int]) -> list[int]:
        """Return the next use of each of `pages`. Those of an access mostly have all of their uses together."""
        found: list[int] = []
        last, use = None, NEVER
        for page in pages:
            places = self._page_places.get(page)
            if places != last:
                last, use = places, NEVER if places is None else self._next_of(places)
            found.append(use)
        return found

    def expected_before(self, key: Hashable) -> list[Hashable]:
        """Return the keys expected in the rest of this cycle before `key`; none if `key` is not expected."""
        if not self.cycle:
            return []
        now = (self.position - self._origin) % len(self.cycle)
        places = self._places.get(key, [])
        found = bisect_left(places, now)
        if found == len(places) or places[found] == now:
            return []
        return [access.key for access in self.cycle[now : places[found]]]

    def end_step(self, learn: bool = True) -> bool:
        """End the step: its record, with what it left out, becomes the cycle. Returns whether that changed anything.

        Args:
            learn: False if the next step will differ: the present cycle begins again.
        """
        recorded, in_order = list(self._recording), self._tolerance is not None and not self._has_departed
        self._recording.clear()
        self._has_departed = False
        expected = list(self.cycle)
        if learn and recorded and not in_order:
            expected = self._with_left_out(recorded)
        is_at_its_end = not self.cycle or (self.position - self._origin) % len(self.cycle) == 0
        if expected == list(self.cycle) and is_at_its_end:
            return False
        self._install(expected)
        return True

    def _with_left_out(self, step: Sequence[Access]) -> list[Access]:
        """Return the accesses of `step`, and those that it is the first to leave out, each after the one before it in the cycle."""
        places: dict[Hashable, deque[int]] = {}
        for place, access in enumerate(step):
            places.setdefault(access.key, deque()).append(place)
        before, self._left_out = self._left_out, Counter()
        kept: dict[int, list[Access]] = {}  # by the place of the one before
        last = -1
        for access in self.cycle:
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
        self.cycle = tuple(cycle)
        self.fresh = frozenset[int]().union(*{access.fresh for access in self.cycle})
        self._early: set[int] = set()  # positions from the present one on. [Note: before its turn]
        self._has_departed = False
        self._far: dict[Hashable, Access] = {}  # by group: what came far ahead of its turn, since one came that is near
        self._origin = self.position  # the access at this position is the first of the cycle
        self._places: dict[Hashable, list[int]] = {}
        self._page_places: dict[int, list[int]] = {}
        for index, access in enumerate(self.cycle):
            self._places.setdefault(access.key, []).append(index)
            for page in access.pages:
                places = self._page_places.setdefault(page, [])
                if not places or places[-1] != index:
                    places.append(index)

    def _next_of(self, places: list[int]) -> int:
        """Return the first position from now on that is on one of `places` (ascending indices into the cycle) and not over."""
        length, count = len(self.cycle), len(places)
        cycles, index = divmod(self.position - 1 - self._origin, length)
        found = bisect_right(places, index)
        while True:
            if found == count:
                cycles, found = cycles + 1, 0
            position = self._origin + cycles * length + places[found]
            if position not in self._early:
                return position
            found += 1

    def _departure(self, access: Access, places: list[int]) -> int | None:
        """Return where a step goes on that comes to `access`, far ahead; None if it stays. [Note: before its turn]"""
        group = access.key[:2] if isinstance(access.key, tuple) else access.key
        before = next(reversed(self._far.values()), None)
        self._far.pop(group, None)
        self._far[group] = access
        if len(self._far) <= MAX_FAR_GROUPS:
            return None
        self._far.clear()
        now = (self.position - self._origin) % len(self.cycle)
        begin = self.position - now
        ahead = [begin + place + (len(self.cycle) if place < now else 0) for place in places]
        follows = [place for place in ahead if place not in self._early and self.at(place - 1) == before]
        return min(follows, default=self._next_of(places))

    def _skip_over(self) -> None:
        """Expect the first access from the present position on that is not over."""
        while self.position in self._early:
            self.position += 1
        self._early = {early for early in self._early if early > self.position}


# --- the resident set ---------------------------------------------------------------------------------------------------


def choose_resident_set(
    cycle: Sequence[Access],
    page_bytes: Callable[[int], int],
    frame_count: int,
    window_pages: int,
    leased: Collection[int] = (),
    one_at_a_time: bool = False,
) -> frozenset[int]:
    """Return the pages that stay in memory; none if that is no free choice, or without room. [Note: a resident set]

    Args:
        page_bytes: returns the size of a page; only pages of the largest size stay.
        window_pages: how many pages may be read early.
        leased: pages that stay anyway, leased outside of the order.
        one_at_a_time: an access is over when the next one begins.
    """
    first: dict[int, int] = {}
    for position, access in enumerate(cycle):
        for page in access.pages:
            if position - first.setdefault(page, position) > ONE_USE_SHARE * len(cycle):
                return frozenset()
    largest = max((page_bytes(page) for page in first), default=0)
    order = [page for page in first if page_bytes(page) == largest and page not in leased]
    free = frame_count - len(leased)
    if one_at_a_time:  # of an access that is spread like the rest, only the part that does not stay needs other frames
        working = max((len(access.pages) for access in cycle), default=0)
        count = int((free - window_pages - working) / (1 - min(working / max(len(order), 1), 1 / 2)))
    else:
        neighbors = zip(cycle, [*cycle[1:], *cycle[:1]], strict=True)
        working = max((len({*one.pages, *other.pages}) for one, other in neighbors), default=0)
        count = free - max(window_pages + 2, working + 1)
    count = min(count, len(order))
    if count <= 0:
        return frozenset()
    lead = min(int(FIRST_SHARE * count), window_pages)
    rest, count = order[lead:], count - lead
    return frozenset(order[:lead]) | {rest[(2 * n + 1) * len(rest) // (2 * count)] for n in range(count)}


class PrefetchDistance:
    """Counts how long a step goes as expected, from miss to miss, and says from that how far to read ahead.

    That is the whole cycle while a step goes as expected, or leaves out a little of what was already prefetched. A miss elsewhere
    in the schedule means that what was prefetched in vain took the drive's time and others' frames. Then another miss is expected
    after as many hits as before the last ones, and no further is read; once there are more hits, the distance grows again.
    """

    def __init__(self) -> None:
        self._run = 0  # hits since the last miss
        self._before = (NEVER, NEVER)  # hits between the misses before

    def hit(self) -> None:
        """An access came as expected."""
        self._run += 1

    def miss(self) -> None:
        """An access came that is elsewhere in the schedule."""
        self._before = (self._before[1], self._run)
        self._run = 0

    def accesses(self, cycle: int) -> int:
        """Return how many accesses to read ahead, the present one included; a whole step has `cycle`."""
        expected = min(self._before)
        return cycle if expected >= cycle else min(abs(expected - self._run), cycle)
