"""Every move that a page's life consists of is allowed, and no other."""

from __future__ import annotations

import itertools

import pytest
import torch

from swapper.errors import InvariantError
from swapper.io.tensor_bytes import SECTOR_BYTES
from swapper.paging.layout import SectionPlan
from swapper.paging.residency import Residency
from swapper.paging.section import NO_FRAME, Section

STORIES = {
    "read, used, evicted": "COLD READING CLEAN COLD",
    "a read that fails": "COLD READING COLD",
    "changed and written back": "CLEAN DIRTY WRITING CLEAN",
    "made anew, without a read": "COLD READING DIRTY WRITING CLEAN",
    "a write that fails and is tried again": "DIRTY WRITING DIRTY WRITING CLEAN",
    "thrown away before it was written": "DIRTY COLD",
    "brought over for a snapshot": "CLEAN WRITING CLEAN",
}
ALLOWED = {pair for story in STORIES.values() for pair in itertools.pairwise(Residency[name] for name in story.split())}
PAIRS = list(itertools.product(Residency, repeat=2))


def make_page():
    return Section(SectionPlan(3, "state", torch.float32, (), SECTOR_BYTES), 0, SECTOR_BYTES, first_page=7).pages[0]


@pytest.mark.parametrize("old, new", [p for p in PAIRS if p in ALLOWED], ids=lambda state: state.name)
def test_a_move_of_a_page_s_life_is_allowed(old, new):
    page = make_page()
    page.residency = old
    page.move(new)
    assert page.residency is new


@pytest.mark.parametrize("old, new", [p for p in PAIRS if p not in ALLOWED], ids=lambda state: state.name)
def test_any_other_move_raises_names_the_page_and_changes_nothing(old, new):
    page = make_page()
    page.residency = old
    with pytest.raises(InvariantError, match=rf"page 7 \(group 3 state float32 .*{old.name} -> {new.name}"):
        page.move(new)
    assert page.residency is old


def test_a_page_begins_cold_without_frame_and_lease():
    page = make_page()
    assert (page.residency, page.frame, page.leases, page.location, page.committed) == (
        Residency.COLD,
        NO_FRAME,
        0,
        None,
        None,
    )
