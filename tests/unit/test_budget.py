"""Dividing the host budget: never more than was given, always enough for a step, and the smallest that works is named."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from swapper.errors import BudgetError
from swapper.io.tensor_bytes import SECTOR_BYTES
from swapper.paging.layout import (
    ARENA_ALIGNMENT_BYTES,
    SMALL_SECTION_BYTES,
    Budget,
    divide,
    resident_bytes,
)

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def sizes(smallest: int, largest: int) -> st.SearchStrategy[int]:
    """Bytes, whole sectors, of all magnitudes alike."""
    return st.floats(math.log(smallest), math.log(largest)).map(
        lambda value: -(-int(math.exp(value)) // SECTOR_BYTES) * SECTOR_BYTES
    )


models = st.lists(st.lists(sizes(SMALL_SECTION_BYTES + 1, 8 * GIB), min_size=1, max_size=4), min_size=1, max_size=8)
"""Groups of sections that are in use at one time."""


class Model:
    """Sections in groups, and the frames that they need: a group's at one time, and two more."""

    def __init__(self, groups: list[list[int]]) -> None:
        self.groups = groups
        self.sections = [nbytes for group in groups for nbytes in group]

    def frames_needed(self, page_bytes: int) -> int:
        return max(sum(-(-nbytes // page_bytes) for nbytes in group) for group in self.groups) + 2

    def divide(self, host_bytes: int, kept_bytes: int = 0) -> Budget:
        return divide(host_bytes, kept_bytes, self.sections, self.frames_needed, "gradients 1 MiB")

    def smallest(self, host_bytes: int, kept_bytes: int = 0) -> int:
        """Return what the error names for a budget that is too small."""
        with pytest.raises(BudgetError) as refused:
            self.divide(host_bytes, kept_bytes)
        smallest = refused.value.smallest_bytes
        assert smallest is not None and f"({smallest} bytes)" in str(refused.value)
        return smallest


@given(models, sizes(SECTOR_BYTES, 64 * GIB), sizes(SECTOR_BYTES, 16 * GIB))
def test_a_budget_is_never_exceeded_and_always_enough_for_a_step(groups, host_bytes, kept_bytes):
    model = Model(groups)
    try:
        budget = model.divide(host_bytes, kept_bytes)
    except BudgetError:
        assert model.smallest(host_bytes, kept_bytes) > host_bytes
        return
    assert budget.resident_bytes == kept_bytes
    assert budget.pool_bytes == budget.page_bytes * budget.frame_count
    assert budget.resident_bytes + budget.pool_bytes <= host_bytes
    assert budget.frame_count >= model.frames_needed(budget.page_bytes)
    assert budget.page_bytes % SECTOR_BYTES == 0


@given(models, sizes(SECTOR_BYTES, 64 * GIB))
def test_no_more_frames_are_taken_than_there_are_pages_for(groups, host_bytes):
    model = Model(groups)
    try:
        budget = model.divide(host_bytes)
    except BudgetError:
        return
    pages = sum(-(-nbytes // budget.page_bytes) for nbytes in model.sections)
    assert budget.frame_count <= max(pages, model.frames_needed(budget.page_bytes))


@example([[202248192], [163840, 163840, 3272704]], 215293952)
@given(models, sizes(SECTOR_BYTES, 64 * GIB))
def test_what_is_left_of_the_budget_is_less_than_a_page_or_there_are_frames_for_everything(groups, host_bytes):
    model = Model(groups)
    try:
        budget = model.divide(host_bytes)
    except BudgetError:
        return
    pages = sum(-(-nbytes // budget.page_bytes) for nbytes in model.sections)
    whole_bytes = host_bytes // ARENA_ALIGNMENT_BYTES * ARENA_ALIGNMENT_BYTES  # an arena takes no others
    assert whole_bytes - budget.pool_bytes < budget.page_bytes or budget.frame_count >= pages


@given(models, sizes(SECTOR_BYTES, 4 * GIB))
def test_the_smallest_budget_that_the_error_names_works_and_2_mib_less_does_not(groups, kept_bytes):
    model = Model(groups)
    smallest = model.smallest(SECTOR_BYTES, kept_bytes)
    budget = model.divide(smallest, kept_bytes)
    assert budget.frame_count >= model.frames_needed(budget.page_bytes)
    with pytest.raises(BudgetError):
        model.divide(smallest - 2 * MIB, kept_bytes)


@given(models, sizes(SECTOR_BYTES, 64 * GIB), sizes(SECTOR_BYTES, 64 * GIB))
def test_the_error_names_the_same_smallest_budget_whatever_was_asked_for(groups, one, other):
    model = Model(groups)
    smallest = model.smallest(SECTOR_BYTES)
    assert all(model.smallest(asked) == smallest for asked in (one, other) if asked < smallest - 2 * MIB)


@given(models, sizes(MIB, 64 * GIB))
def test_a_budget_above_the_smallest_works(groups, more_bytes):
    model = Model(groups)
    model.divide(model.smallest(SECTOR_BYTES) + more_bytes)


@given(sizes(SECTOR_BYTES, GIB), st.integers(-4096, 4096))
def test_where_nothing_is_paged_the_budget_must_hold_all_and_there_is_no_pool(kept_bytes, more_bytes):
    host_bytes = kept_bytes + more_bytes
    if more_bytes < 0:
        with pytest.raises(BudgetError, match=rf"\({kept_bytes} bytes\)"):
            divide(host_bytes, kept_bytes, [], lambda page_bytes: 2, "parameters")
    else:
        budget = divide(host_bytes, kept_bytes, [], lambda page_bytes: 2, "parameters")
        assert (budget.resident_bytes, budget.pool_bytes) == (kept_bytes, 0)


def test_the_error_says_what_takes_the_room_and_what_to_do():
    with pytest.raises(
        BudgetError, match=r"host_memory=1\.0 MiB .*\(gradients 1 MiB\).*raise host_memory, or place more"
    ):
        Model([[GIB]]).divide(MIB)


@given(st.lists(st.integers(0, GIB), max_size=20))
def test_what_stays_in_memory_is_whole_sectors_each_and_frames_begin_at_a_huge_page(sections):
    total = resident_bytes(sections)
    assert total % ARENA_ALIGNMENT_BYTES == 0
    packed = sum(-(-nbytes // SECTOR_BYTES) for nbytes in sections) * SECTOR_BYTES
    assert packed <= total < packed + ARENA_ALIGNMENT_BYTES
