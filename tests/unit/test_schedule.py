"""The schedule knows when each page is used next, finds its place again, and learns the order that was really seen."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from sampling import examples

import swapper.paging.schedule as schedule_module
from swapper.paging.schedule import FIRST_SHARE, NEVER, Access, Schedule, choose_resident_set

PAGES = range(6)

accesses = st.builds(
    Access,
    st.sampled_from("abcd"),
    st.lists(st.sampled_from(PAGES), max_size=3, unique=True).map(tuple),
    st.just(frozenset()),
    st.sets(st.sampled_from(PAGES), max_size=1).map(frozenset),
)
cycles = st.lists(accesses, max_size=7)


def use(key: object, *pages: int) -> Access:
    return Access(key, pages)


def with_left_out(step, cycle, before):
    """What `step` has, with what only `cycle` has behind what it comes behind there: by pairing equal keys from the front.

    Of the keys in `before`, which were left out then, so many are not kept; returns those that are, too.
    """
    pairs, left, kept, before = {}, list(enumerate(step)), [], list(before)
    for number, access in enumerate(cycle):
        pair = next((pair for pair in left if pair[1].key == access.key), None)
        if pair is not None:
            left.remove(pair)
            pairs[number] = pair[0]
        elif access.key in before:
            before.remove(access.key)
        else:
            kept.append(number)
    merged = []
    for place in range(-1, len(step)):
        merged += [step[place]] if place >= 0 else []
        behind = {number: [-1, *(pairs[other] for other in range(number) if other in pairs)][-1] for number in kept}
        merged += [cycle[number] for number in kept if behind[number] == place]
    return merged, [cycle[number].key for number in kept]


class ScheduleAgainstSearch(RuleBasedStateMachine):
    """The schedule answers from indices; this model searches the cycle, position by position."""

    @initialize(cycle=cycles)
    def begin(self, cycle):
        self.schedule = Schedule(cycle)
        self.left_out = []
        self.install(cycle, position=0)

    def install(self, cycle, position):
        self.cycle = list(cycle)
        self.origin = self.position = position
        self.recorded = []

    def at(self, position):
        return self.cycle[(position - self.origin) % len(self.cycle)]

    def first(self, wanted):
        """The first position from now on, at most one cycle ahead, whose access is `wanted`."""
        ahead = range(self.position, self.position + len(self.cycle))
        return next((position for position in ahead if wanted(self.at(position))), None)

    def note(self, access):
        self.recorded.append(access)
        expected = bool(self.cycle) and self.at(self.position) == access
        place = self.first(lambda other: other.key == access.key)
        if place is not None:
            self.position = place + 1
        assert self.schedule.advance(access) is expected

    @rule()
    def what_is_expected_happens(self):
        if self.cycle:
            self.note(self.at(self.position))

    @rule(access=accesses)
    def anything_happens(self, access):
        self.note(access)

    @rule(number=st.integers(0, 6))
    def something_of_the_cycle_happens(self, number):
        if self.cycle:
            self.note(self.cycle[number % len(self.cycle)])

    @rule()
    def the_step_ends(self):
        cycle = self.cycle
        if self.recorded:
            cycle, self.left_out = with_left_out(self.recorded, self.cycle, self.left_out)
        is_at_its_end = not self.cycle or self.position in range(self.origin, self.position + 1, len(self.cycle))
        changes = cycle != self.cycle or not is_at_its_end
        assert self.schedule.end_step() is changes
        if changes:
            self.install(cycle, self.position)
        self.recorded = []

    @invariant()
    def position_and_cycle_are_the_model_s(self):
        assert self.schedule.position == self.position
        assert list(self.schedule.cycle) == self.cycle
        for ahead in range(2 * len(self.cycle)):
            assert self.schedule.at(self.position + ahead) == self.at(self.position + ahead)

    @invariant()
    def next_uses_are_what_a_search_finds(self):
        found = [self.first(lambda access, page=page: page in access.pages) for page in PAGES]
        expected = [NEVER if place is None else place for place in found]
        assert [self.schedule.next_use(page) for page in PAGES] == self.schedule.next_uses(PAGES) == expected


TestScheduleAgainstSearch = ScheduleAgainstSearch.TestCase
TestScheduleAgainstSearch.settings = settings(max_examples=examples(60), stateful_step_count=25)


@given(cycles, st.lists(accesses, max_size=30), st.sets(st.integers(0, 29)))
def test_positions_never_decrease_whatever_happens(cycle, happening, step_ends):
    schedule = Schedule(cycle)
    for number, access in enumerate(happening):
        before = schedule.position
        schedule.advance(access)
        assert before <= schedule.position <= before + len(schedule.cycle)
        before = schedule.position
        if number in step_ends:
            schedule.end_step()
        assert schedule.position == before
        assert all(schedule.next_use(page) >= schedule.position for page in PAGES)


@given(cycles.filter(bool), st.integers(1, 5))
def test_a_run_that_follows_the_cycle_is_expected_at_every_access_and_changes_nothing(cycle, steps):
    schedule = Schedule(cycle)
    for step in range(steps):
        for access in cycle:
            assert schedule.advance(access)
        assert not schedule.end_step()
        assert schedule.position == (step + 1) * len(cycle)
    assert list(schedule.cycle) == cycle


@given(cycles, cycles.filter(bool))
def test_an_order_that_repeats_is_expected_from_its_third_step_on(cycle, seen):
    schedule = Schedule(cycle)
    for _ in range(2):
        for access in seen:
            schedule.advance(access)
        schedule.end_step()
    assert all(schedule.advance(access) for access in seen)


def run(schedule, seen):
    for access in seen:
        schedule.advance(access)
    schedule.end_step()


@given(st.lists(st.booleans(), min_size=8, max_size=8), st.lists(st.booleans(), min_size=8, max_size=8))
def test_what_a_step_leaves_out_is_expected_still_where_it_was_unless_two_do(first, second):
    """[Note: what a step leaves out]"""
    cycle = [use(key, number) for number, key in enumerate("abcdefgh")]
    schedule = Schedule(cycle)
    for is_there in (first, second):
        assert list(schedule.cycle) == cycle
        run(schedule, [access for access, there in zip(cycle, is_there, strict=True) if there])
    if any(first) and any(second):
        either = [access for access, *is_there in zip(cycle, first, second, strict=True) if any(is_there)]
        assert list(schedule.cycle) == either
        assert schedule.at(schedule.position) == either[0]


def test_steps_that_take_one_of_two_ways_have_both_expected():
    shared, one, other = use("s", 0), use("a", 1), use("b", 2)
    schedule = Schedule([])
    for _ in range(3):
        run(schedule, [shared, one])
        run(schedule, [shared, other])
    assert set(schedule.cycle) == {shared, one, other} and len(schedule.cycle) == 3


@given(cycles.filter(bool), cycles, st.sampled_from("abcd"))
def test_what_is_expected_before_a_key_is_what_comes_before_it_in_this_cycle(cycle, happened, key):
    schedule = Schedule(cycle)
    for access in happened:
        schedule.advance(access)
    begin = schedule.position
    left = [schedule.at(begin + ahead).key for ahead in range(len(cycle) - begin % len(cycle))]
    assert schedule.expected_before(key) == (left[: left.index(key)] if key in left else [])


def test_an_access_left_out_costs_one_departure():
    cycle = [use(key, number) for number, key in enumerate("abcde")]
    schedule = Schedule(cycle)
    assert [schedule.advance(cycle[number]) for number in (0, 1, 3, 4, 0)] == [True, True, False, True, True]


def test_an_access_that_nobody_knows_leaves_the_place_as_it_is():
    cycle = [use("a", 0), use("b", 1)]
    schedule = Schedule(cycle)
    assert [schedule.advance(access) for access in (cycle[0], use("new", 5), cycle[1])] == [True, False, True]


def test_a_known_access_with_other_pages_keeps_the_place_but_is_not_what_was_expected():
    schedule = Schedule([use("a", 0), use("b", 1)])
    assert not schedule.advance(use("a", 0, 2))
    assert schedule.advance(use("b", 1))


def test_a_key_used_twice_is_found_at_its_next_place():
    cycle = [use("a", 0), use("b", 1), use("a", 0), use("c", 2)]
    schedule = Schedule(cycle)
    assert [schedule.advance(access) for access in (cycle[0], cycle[2], cycle[3])] == [True, False, True]
    assert schedule.position == 4


def test_evaluations_without_end_are_not_remembered_without_end(monkeypatch):
    monkeypatch.setattr(schedule_module, "LONGEST_STEP", 5)
    cycle = [use("a", 0), use("b", 1)]
    schedule = Schedule(cycle)
    for _ in range(100):
        schedule.advance(cycle[0])
    schedule.advance(cycle[1])
    assert schedule.end_step()
    assert list(schedule.cycle) == [cycle[0]] * 4 + [cycle[1]]


def test_a_schedule_that_knows_nothing_expects_nothing():
    schedule = Schedule([])
    assert schedule.next_use(0) == NEVER
    assert not schedule.end_step()
    assert not schedule.advance(use("a", 0))
    assert schedule.end_step()
    assert schedule.next_use(0) == schedule.position


@pytest.mark.whole
@pytest.mark.parametrize("page, expected", [(0, 4), (1, 5), (2, 2), (3, NEVER)])
def test_a_page_used_in_this_cycle_already_is_next_used_in_the_next_one(page, expected):
    cycle = [use("a", 0), use("b", 1), use("c", 2), use("d", 2)]
    schedule = Schedule(cycle)
    schedule.advance(cycle[0])
    schedule.advance(cycle[1])
    assert schedule.next_use(page) == expected


def one_use_each(pages: int) -> list[Access]:
    return [Access(("slice", 0, page), (page,)) for page in range(pages)]


@pytest.mark.whole
@pytest.mark.parametrize("pages, frames, window", [(100, 20, 6), (97, 22, 6), (40, 39, 2), (30, 40, 4)])
def test_an_even_share_of_pages_that_are_used_once_stays_and_more_of_the_first(
    pages: int, frames: int, window: int
) -> None:
    kept = sorted(choose_resident_set(one_use_each(pages), lambda page: 8, frames, window))
    assert len(kept) == min(frames - window - 2, pages)
    lead = min(int(FIRST_SHARE * len(kept)), window)
    assert kept[:lead] == list(range(lead))
    gaps = [after - before for before, after in itertools.pairwise(kept[lead:])]
    assert max(gaps) - min(gaps) <= 1


def test_frames_are_kept_for_pages_that_fill_them() -> None:
    kept = choose_resident_set(one_use_each(40), lambda page: 3 if page % 4 == 3 else 8, 30, 2)
    assert len(kept) == 26 and all(page % 4 != 3 for page in kept)


def test_what_is_used_again_in_a_step_is_no_free_choice() -> None:
    forward = [Access(("param", page), (page,)) for page in range(20)]
    assert choose_resident_set([*forward, *reversed(forward)], lambda page: 8, 10, 2) == frozenset()
    neighbours = [Access(("slice", 0, n), (n, n + 1)) for n in range(40)]  # two slices meet on each page
    assert choose_resident_set(neighbours, lambda page: 8, 20, 2)


def test_of_accesses_one_at_a_time_only_what_does_not_stay_needs_further_frames() -> None:
    layers = [Access(("kv", n), tuple(range(10 * n, 10 * n + 10))) for n in range(8)]
    kept = choose_resident_set(layers, lambda page: 8, 40, 4, leased=(9, 79), one_at_a_time=True)
    assert kept.isdisjoint({9, 79})
    streamed = max(len(kept.symmetric_difference(layer.pages) & set(layer.pages)) for layer in layers)
    assert len(kept) + 2 + 4 + streamed <= 40 + 2  # the share of one layer is not the same as that of all
    assert len(kept) > len(choose_resident_set(layers, lambda page: 8, 40, 4, leased=(9, 79)))


def test_without_room_or_a_schedule_nothing_stays() -> None:
    assert choose_resident_set(one_use_each(10), lambda page: 8, 6, 4) == frozenset()
    assert choose_resident_set([], lambda page: 8, 6, 1) == frozenset()


# --- [Note: before its turn] ------------------------------------------------------------------------------------------


def tolerant(tolerance=2):
    """A schedule of eight accesses, of a page each."""
    cycle = [use(key, number) for number, key in enumerate("abcdefgh")]
    return Schedule(cycle, tolerance), cycle


def test_an_access_before_its_turn_is_expected_and_its_turn_is_left_out():
    schedule, cycle = tolerant()
    assert schedule.advance(cycle[2]) and schedule.position == 0
    assert schedule.pending(2) is None and schedule.next_use(2) == 2 + len(cycle) and schedule.next_use(1) == 1
    assert schedule.advance(cycle[0]) and schedule.position == 1
    assert schedule.advance(cycle[1]) and schedule.position == 3
    assert schedule.next_use(2) == 2 + len(cycle)
    assert all(schedule.pending(position) is schedule.at(position) for position in range(3, 3 + len(cycle)))


def test_a_few_groups_far_before_their_turn_are_no_departure_and_are_used_in_their_turn_too():
    schedule, cycle = tolerant()
    assert schedule.advance(cycle[5]) and schedule.advance(cycle[7]) and schedule.position == 0
    assert schedule.next_use(5) == 5 and schedule.pending(5) is cycle[5]
    assert all(schedule.advance(access) for access in cycle)
    assert schedule.position == len(cycle)


def test_parts_of_one_group_are_one():
    cycle = [use(("param", page // 4, page), page) for page in range(16)]
    schedule = Schedule(cycle, 4)
    assert all(map(schedule.advance, cycle[8:16])) and schedule.position == 0
    assert not schedule.advance(cycle[4]) and schedule.position == 5


def test_more_groups_far_before_their_turn_are_a_departure_to_where_they_follow_each_other():
    forward = [use(key, number) for number, key in enumerate("abcdefgh")]
    schedule = Schedule([*forward, *reversed(forward)], 8)
    for access in forward:
        assert schedule.advance(access)
    assert schedule.advance(forward[2]) and schedule.advance(forward[3]) and schedule.position == 8
    assert not schedule.advance(forward[4])  # another forward, and not the backward's place
    assert schedule.position == 16 + 5
    strict, cycle = tolerant(None)
    assert not strict.advance(cycle[1])


def test_steps_whose_order_is_another_each_time_teach_nothing_and_depart_nowhere():
    schedule, cycle = tolerant()
    for order in ([1, 0, 2, 4, 3, 5, 6, 7], [0, 2, 3, 1, 4, 7, 6, 5], [2, 1, 0, 3, 4, 5, 6, 7]):
        assert all(schedule.advance(cycle[number]) for number in order)
        assert not schedule.end_step() and schedule.cycle == tuple(cycle)
    assert schedule.position == 3 * len(cycle)


def test_what_a_step_left_out_is_learned_where_an_order_is_tolerated_too():
    schedule, cycle = tolerant()
    for _ in range(2):
        for access in (*cycle[:2], *cycle[4:]):
            schedule.advance(access)
        schedule.end_step()
    assert schedule.cycle == (*cycle[:2], *cycle[4:])


@given(cycles.filter(bool), st.integers(1, 4), st.lists(st.integers(0, 30), max_size=60))
def test_places_that_are_over_are_ahead_and_nobody_s_next_use(cycle, tolerance, happening):
    schedule = Schedule(cycle, tolerance)
    for number in happening:
        before = schedule.position
        schedule.advance(cycle[number % len(cycle)])
        assert before <= schedule.position <= before + 2 * len(cycle)
        assert schedule.pending(schedule.position) is not None
        for page in PAGES:
            place = schedule.next_use(page)
            assert place >= schedule.position and schedule.pending(place) is not None
            assert place == NEVER or page in schedule.at(place).pages
