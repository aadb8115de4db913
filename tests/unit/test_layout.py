"""Planning which bytes of which tensor lie where: no overlap, aligned, every byte on exactly one page."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swapper.durability.commit import describe_plans, plans_of
from swapper.io.tensor_bytes import LARGE_TENSOR_BYTES, SECTOR_BYTES, TENSOR_ALIGNMENT_BYTES, round_up
from swapper.paging.layout import (
    HUGE_PAGE_BYTES,
    HUGE_PAGES_SHARE,
    TensorSpec,
    choose_page_bytes,
    plan_group,
    plan_section,
)
from swapper.paging.section import Section

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.complex128]

shapes = st.one_of(
    st.lists(st.integers(0, 9), max_size=3).map(tuple),
    st.integers(0, 40_000).map(lambda n: (n,)),
)
specs = st.lists(
    st.builds(TensorSpec, st.text("ab.", min_size=1, max_size=3), st.just("param"), st.sampled_from(DTYPES), shapes),
    min_size=1,
    max_size=12,
)


def of_dtype(given_specs: list[TensorSpec], dtype: torch.dtype) -> list[TensorSpec]:
    return [TensorSpec(spec.owner, spec.kind, dtype, spec.shape) for spec in given_specs]


@given(specs, st.sampled_from(DTYPES))
def test_tensors_of_a_section_lie_in_the_order_given_aligned_and_without_overlap(given_specs, dtype):
    given_specs = of_dtype(given_specs, dtype)
    plan = plan_section(0, "param", given_specs)
    assert [slot.spec for slot in plan.slots] == given_specs
    end = 0
    for slot in plan.slots:
        assert slot.offset >= end
        assert slot.offset % TENSOR_ALIGNMENT_BYTES == 0
        assert slot.offset % slot.spec.dtype.itemsize == 0
        if slot.spec.nbytes >= LARGE_TENSOR_BYTES:
            assert slot.offset % SECTOR_BYTES == 0
        assert slot.end - slot.offset == math.prod(slot.spec.shape) * dtype.itemsize
        end = slot.end
    assert plan.nbytes >= max(end, 1)


@given(specs, st.sampled_from(DTYPES))
def test_a_section_is_whole_sectors_and_wastes_less_than_one_for_each_tensor_and_one_at_its_end(given_specs, dtype):
    given_specs = of_dtype(given_specs, dtype)
    plan = plan_section(0, "param", given_specs)
    assert plan.nbytes % SECTOR_BYTES == 0
    needed = sum(spec.nbytes for spec in given_specs)
    large = sum(spec.nbytes >= LARGE_TENSOR_BYTES for spec in given_specs)
    small = len(given_specs) - large
    assert plan.nbytes <= needed + large * SECTOR_BYTES + small * TENSOR_ALIGNMENT_BYTES + SECTOR_BYTES


@given(specs)
def test_a_group_has_one_section_for_each_dtype_and_each_tensor_in_one_of_them(given_specs):
    plans = plan_group(4, "param", given_specs)
    assert [plan.dtype for plan in plans] == list(dict.fromkeys(spec.dtype for spec in given_specs))
    for plan in plans:
        assert (plan.group, plan.family) == (4, "param")
        assert [slot.spec for slot in plan.slots] == [spec for spec in given_specs if spec.dtype == plan.dtype]


@given(specs)
def test_the_state_of_a_group_is_one_section_dtype_by_dtype_each_tensor_aligned(given_specs):
    (plan,) = plan_group(4, "state", given_specs)
    dtypes = list(dict.fromkeys(spec.dtype for spec in given_specs))
    assert plan.dtype == (dtypes[0] if len(dtypes) == 1 else None)
    by_dtype = [spec for dtype in dtypes for spec in given_specs if spec.dtype == dtype]
    assert [slot.spec for slot in plan.slots] == by_dtype
    assert all(slot.offset % slot.spec.dtype.itemsize == 0 for slot in plan.slots)
    assert plans_of(describe_plans([plan])) == [plan]
    assert plan_group(4, "state", []) == []


@given(specs, st.sampled_from(DTYPES), st.integers(1, 40), st.integers(0, 1000), st.integers(0, 1 << 40))
def test_pages_are_the_whole_section_piece_by_piece(given_specs, dtype, page_sectors, first_page, file_offset):
    plan = plan_section(0, "param", of_dtype(given_specs, dtype))
    page_bytes = page_sectors * SECTOR_BYTES
    end = 0
    for offset, nbytes in plan.pages(page_bytes):
        assert offset == end
        assert 0 < nbytes <= page_bytes and nbytes % SECTOR_BYTES == 0
        end = offset + nbytes
    assert end == plan.nbytes
    assert all(nbytes == page_bytes for _, nbytes in plan.pages(page_bytes)[:-1])

    section = Section(plan, file_offset, page_bytes, first_page)
    assert [(page.offset, page.nbytes) for page in section.pages] == plan.pages(page_bytes)
    assert [page.index for page in section.pages] == list(range(first_page, first_page + len(section.pages)))
    assert all(page.file_offset == file_offset + page.offset for page in section.pages)


@given(specs, st.sampled_from(DTYPES), st.integers(1, 9), st.data())
def test_the_pages_of_a_range_are_exactly_those_that_it_touches(given_specs, dtype, page_sectors, data):
    plan = plan_section(0, "param", of_dtype(given_specs, dtype))
    section = Section(plan, 0, page_sectors * SECTOR_BYTES)
    begin = data.draw(st.integers(0, plan.nbytes))
    end = data.draw(st.integers(0, plan.nbytes))
    touched = [page for page in section.pages if max(begin, page.offset) < min(end, page.offset + page.nbytes)]
    assert section.pages_of(begin, end) == touched


@given(specs, st.sampled_from(DTYPES))
def test_tensors_are_views_of_the_section_s_memory_at_their_places(given_specs, dtype):
    plan = plan_section(0, "param", of_dtype(given_specs, dtype))
    section = Section(plan, 0, None)
    memory = torch.zeros(plan.nbytes, dtype=torch.uint8)
    section.attach(memory, None)
    assert not section.pages and section.resident
    for number, slot in enumerate(plan.slots, start=1):
        tensor = section.tensor(slot)
        assert (tensor.dtype, tuple(tensor.shape)) == (dtype, slot.spec.shape)
        if tensor.numel():
            assert tensor.data_ptr() == memory.data_ptr() + slot.offset
        tensor.view(-1).view(torch.uint8).fill_(number)
    for number, slot in enumerate(plan.slots, start=1):
        assert (memory[slot.offset : slot.end] == number).all()


@given(st.integers(0, 1 << 50), st.integers(1, 1 << 30))
def test_round_up_gives_the_next_multiple(value, multiple):
    result = round_up(value, multiple)
    assert result % multiple == 0 and value <= result < value + multiple


# --- page size --------------------------------------------------------------------------------------------------------

sectors = st.integers(1, 4 * GIB // SECTOR_BYTES)
section_sizes = st.lists(st.one_of(sectors, st.integers(1, 4096)), min_size=1, max_size=30).map(
    lambda sizes: [size * SECTOR_BYTES for size in sizes]
)
pools = st.one_of(st.integers(SECTOR_BYTES, 64 * MIB), st.integers(SECTOR_BYTES, 1 << 41))


def largest_share(pool_bytes: int) -> int:
    """Return how much of a pool a page may take: a 40th, or the whole huge pages next to that."""
    share = max(pool_bytes // 40, 256 * KIB)
    return share if share < HUGE_PAGE_BYTES else round(share / HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES


def largest_page(section_bytes: list[int], pool_bytes: int) -> tuple[int, int]:
    """Return how large a page may be at most, and the steps in which its size is chosen."""
    allowed = min(largest_share(pool_bytes), 32 * MIB, max(section_bytes))
    return allowed, 64 * KIB if allowed < 8 * MIB else 2 * MIB


def framed(section_bytes: list[int], page_bytes: int) -> int:
    return sum(round_up(nbytes, page_bytes) for nbytes in section_bytes)


@given(section_sizes, pools)
def test_a_page_is_whole_sectors_within_its_limits(section_bytes, pool_bytes):
    page_bytes = choose_page_bytes(section_bytes, pool_bytes)
    assert page_bytes % SECTOR_BYTES == 0
    assert SECTOR_BYTES <= page_bytes <= 32 * MIB
    assert page_bytes <= max(pool_bytes // 30, 256 * KIB), "so that many are in flight"
    assert page_bytes <= max(section_bytes), "no larger than anything that there is to page"


@given(section_sizes, pools)
def test_a_page_is_not_smaller_than_a_16th_of_what_would_be_allowed(section_bytes, pool_bytes):
    """Large pages are for the drive and for Python's share of the work."""
    allowed, step = largest_page(section_bytes, pool_bytes)
    assert choose_page_bytes(section_bytes, pool_bytes) >= (allowed - step) // 16 // SECTOR_BYTES * SECTOR_BYTES


@given(section_sizes, pools)
def test_no_larger_page_would_need_less_memory(section_bytes, pool_bytes):
    """One of whole huge pages, though, may waste a tenth more than one that takes an entry of the page table every 4 KiB."""
    allowed, step = largest_page(section_bytes, pool_bytes)
    page_bytes = choose_page_bytes(section_bytes, pool_bytes)
    for larger in range(page_bytes + step, allowed - step + 1, step):
        is_worth_it = page_bytes % HUGE_PAGE_BYTES == 0 and larger % HUGE_PAGE_BYTES != 0
        worth = 1 - HUGE_PAGES_SHARE if is_worth_it else 1
        assert framed(section_bytes, larger) > worth * framed(section_bytes, page_bytes)


@pytest.mark.parametrize(
    "section_bytes, page_bytes",
    [
        ([96 * MIB] * 12 + [24 * MIB] * 12, 4 * MIB),
        ([96 * MIB + SECTOR_BYTES] * 12 + [24 * MIB + SECTOR_BYTES] * 12, 4 * MIB),
        ([5 * MIB // 2] * 40, 5 * MIB // 2),
    ],
    ids=["whole ones", "hardly any waste", "two fifths would be wasted"],
)
def test_a_page_is_whole_huge_pages_where_that_wastes_little(section_bytes: list[int], page_bytes: int) -> None:
    assert choose_page_bytes(section_bytes, 152 * MIB) == page_bytes


@pytest.mark.whole
@pytest.mark.parametrize("name", ["llama-7b", "gpt2", "one odd size", "two sizes", "one large, many small"])
@pytest.mark.parametrize("pool_bytes", [64 * MIB, 256 * MIB, GIB, 8 * GIB, 64 * GIB])
def test_frames_are_hardly_larger_than_what_is_in_them(name, pool_bytes):
    layer = 202_383_360 * 2  # parameters of a Llama 7B layer in bf16
    section_bytes = {
        "llama-7b": [262_144_000, 262_144_000] + 32 * [layer] + 32 * [layer * 6],
        "gpt2": [154_389_504, 3_145_728] + 12 * [28_352_512] + 12 * [56_705_024],
        "one odd size": [round_up(37_123_456, SECTOR_BYTES)] * 3,
        "one large, many small": [500 * MIB] + 100 * [MIB],
        "two sizes": [9 * MIB + SECTOR_BYTES, 70 * MIB - SECTOR_BYTES] * 4,
    }[name]
    section_bytes = [round_up(nbytes, SECTOR_BYTES) for nbytes in section_bytes]
    page_bytes = choose_page_bytes(section_bytes, pool_bytes)
    assert framed(section_bytes, page_bytes) <= 1.2 * sum(section_bytes)
