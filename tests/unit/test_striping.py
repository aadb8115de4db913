"""Stripes: every byte of a file has one place on one drive, and drives get what their weights say."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swapper.io.files import StripeLayout, StripeRecord
from swapper.runtime.records import seal

UNIT = 4096
layouts = st.lists(st.floats(0.3, 3.0), min_size=1, max_size=5).map(
    lambda weights: StripeLayout.by_weight(UNIT, weights)
)


@given(layouts, st.integers(0, 40 * UNIT), st.integers(0, 40 * UNIT))
def test_runs_cover_a_range_once_and_in_order(layout: StripeLayout, offset: int, nbytes: int) -> None:
    runs = list(layout.runs(offset, nbytes))
    assert sum(count for _, _, count in runs) == nbytes
    assert all(0 < count <= UNIT for _, _, count in runs)
    places = {(drive, byte // UNIT) for drive, at, count in runs for byte in (at, at + count - 1)}
    assert len(places) == len(runs), "no two stripes share a place"


@given(layouts, st.integers(0, 40 * UNIT))
def test_parts_are_as_large_as_what_is_dealt_to_them(layout: StripeLayout, nbytes: int) -> None:
    dealt = dict.fromkeys(layout.pattern, 0)
    for drive, at, count in layout.runs(0, nbytes):
        assert at == dealt[drive], "a part has no gaps"
        dealt[drive] += count
    assert dealt == {drive: layout.part_bytes(drive, nbytes) for drive in dealt}
    assert max(layout.end_of(drive, part_bytes) for drive, part_bytes in dealt.items()) == nbytes


@given(layouts, st.integers(0, 40 * UNIT), st.integers(1, 20 * UNIT))
def test_where_a_part_ends_is_where_the_file_does(layout: StripeLayout, offset: int, nbytes: int) -> None:
    """Also of a file with a hole, whose last stripe lies beyond the ends of other parts."""
    ends = [layout.end_of(drive, at + count) for drive, at, count in layout.runs(offset, nbytes)]
    assert max(ends) == offset + nbytes


@pytest.mark.whole
@pytest.mark.parametrize(
    ("weights", "pattern"),
    [
        ([1], [0]),
        ([1, 1], [0, 1]),
        ([2, 1], [0, 1, 0]),
        ([1, 3], [1, 0, 1, 1]),
        ([3, 2], [0, 1, 0, 1, 0]),
        ([1, 1, 1], [0, 1, 2]),
    ],
)
def test_drives_get_stripes_by_weight(weights: list[float], pattern: list[int]) -> None:
    assert list(StripeLayout.by_weight(UNIT, weights).pattern) == pattern


@given(st.lists(st.floats(0.3, 3.0), min_size=1, max_size=5))
def test_shares_are_near_the_weights_and_nobody_is_left_out(weights: list[float]) -> None:
    pattern = StripeLayout.by_weight(UNIT, weights).pattern
    for drive, weight in enumerate(weights):
        assert pattern.count(drive) >= 1
        assert abs(pattern.count(drive) - weight / sum(weights) * len(pattern)) <= 1


def test_a_record_is_what_it_was() -> None:
    record = StripeRecord("abc", 1, StripeLayout.by_weight(UNIT, [1, 2]))
    assert StripeRecord.parse(record.data()) == record


@given(st.integers(0, 200), st.integers(1, 255))
def test_a_record_with_a_changed_byte_is_none(at: int, change: int) -> None:
    data = bytearray(StripeRecord("abc", 1, StripeLayout.by_weight(UNIT, [1, 2])).data())
    data[at % len(data)] ^= change
    try:
        record = StripeRecord.parse(bytes(data))
    except ValueError:
        return
    assert record.data() == StripeRecord("abc", 1, StripeLayout.by_weight(UNIT, [1, 2])).data()  # white space


@given(
    st.dictionaries(
        st.sampled_from(["format", "id", "index", "stripe_bytes", "pattern"]),
        st.none() | st.integers() | st.text() | st.lists(st.integers() | st.text()),
    )
    | st.integers()
    | st.text()
)
def test_anything_else_is_no_record(content: object) -> None:
    try:
        record = StripeRecord.parse(seal(content) if isinstance(content, dict) else json.dumps(content).encode())
    except ValueError:
        return
    assert record.layout.stripe_bytes % 4096 == 0 and record.layout.pattern
