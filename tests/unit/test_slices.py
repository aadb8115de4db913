"""Slices, updated together: every element once, cut where bits do not change, with exactly the pages it needs."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from swapper.io.tensor_bytes import SECTOR_BYTES
from swapper.paging.layout import TensorSpec, plan_group
from swapper.paging.section import Section
from swapper.train.layout.inventory import find_places, find_trainables, make_sections, take_inventory
from swapper.train.layout.slices import (
    CUT_ELEMENTS,
    SAME_AGAIN,
    ParameterLocations,
    Slice,
    SlicePiece,
    TensorLocation,
    plan_slices,
)
from swapper.train.layout.state_codecs import StateCodecs
from swapper.train.layout.train_placement import StepKind, frames_needed
from swapper.train.optimizer.optimizer_set import OptimizerSet
from swapper.train.passes.given_model import GivenModel

GROUP = 5


@dataclass(frozen=True)
class Planned:
    """A made-up group: its trainable parameters, which of them have a gradient, and all of its sections."""

    parameters: list[ParameterLocations]
    active: list[bool]
    sections: list[Section]
    page_bytes: int

    def slices(self, may_cut: bool = True) -> list[Slice]:
        parameters = [replace(places, may_cut=may_cut) for places in self.parameters]
        return plan_slices(GROUP, parameters, self.active, self.page_bytes)


@st.composite
def groups(draw: st.DrawFn, masters: bool | None = None) -> Planned:
    page_bytes = draw(st.integers(1, 6)) * SECTOR_BYTES
    has_masters = draw(st.booleans()) if masters is None else masters
    numels = st.one_of(st.integers(0, 200), st.integers(0, 9000), st.sampled_from([64, 1024, 2048, 4096]))
    parameters = draw(
        st.lists(st.tuples(numels, st.booleans(), st.sampled_from(["none", "active", "idle"])), max_size=7)
    )
    param_specs, state_specs = [], []
    for number, (numel, is_narrow, role) in enumerate(parameters):
        name = f"p{number}"
        dtype = torch.bfloat16 if is_narrow else torch.float32
        param_specs.append(TensorSpec(name, "param", dtype, (numel,)))
        if role == "none":  # frozen: it has no state
            continue
        updated = torch.float32 if has_masters else dtype
        state_specs.append(TensorSpec(name, "step", torch.float32, ()))
        kinds = (["master"] if updated != dtype else []) + ["exp_avg", "exp_avg_sq"]
        state_specs += [TensorSpec(name, kind, updated, (numel,)) for kind in kinds]
    sections, places = _place(
        plan_group(GROUP, "param", param_specs) + plan_group(GROUP, "state", state_specs), page_bytes
    )
    found = []
    for spec in param_specs:
        of_parameter = {kind: place for (owner, kind), place in places.items() if owner == spec.owner}
        param, step = of_parameter.pop("param"), of_parameter.pop("step", None)
        if step is not None:
            found.append(ParameterLocations(spec.owner, param, of_parameter, {"step": step}))
    active = [role == "active" for _, _, role in parameters if role != "none"]
    return Planned(found, active, sections, page_bytes)


def _place(plans, page_bytes: int) -> tuple[list[Section], dict[tuple[str, str], TensorLocation]]:
    sections = []
    places = {}
    first_page = 0
    for plan in plans:
        section = Section(plan, 0, page_bytes, first_page)
        sections.append(section)
        first_page += len(section.pages)
        places |= {(slot.spec.owner, slot.spec.kind): TensorLocation(section, slot) for slot in plan.slots}
    return sections, places


def pages_with(place: TensorLocation, begin: int, end: int) -> set[int]:
    """The pages on which an element of [begin, end) lies, looked for byte by byte."""
    slot = place.slot
    first = slot.offset + begin * slot.spec.dtype.itemsize
    last = slot.offset + end * slot.spec.dtype.itemsize
    return {p.index for p in place.section.pages if max(first, p.offset) < min(last, p.offset + p.nbytes)}


def touched(planned: Planned, piece: SlicePiece) -> set[int]:
    """The pages that the update of one piece needs."""
    places = planned.parameters[piece.parameter]
    pages = pages_with(places.param, piece.begin, piece.end)
    for place in places.state.values():
        pages |= pages_with(place, piece.begin, piece.end)
    if piece.begin == 0:
        for place in places.others.values():
            pages |= pages_with(place, 0, 1)
    return pages


@given(groups(), st.booleans())
def test_every_element_with_a_gradient_is_updated_exactly_once_in_the_order_of_the_layout(planned, may_cut):
    done = [(piece.parameter, piece.begin, piece.end) for part in planned.slices(may_cut) for piece in part.pieces]
    expected = [number for number, is_active in enumerate(planned.active) if is_active]
    assert list(dict.fromkeys(number for number, _, _ in done)) == expected
    for number in expected:
        ranges = [(begin, end) for parameter, begin, end in done if parameter == number]
        assert ranges[0][0] == 0 and ranges[-1][1] == planned.parameters[number].numel
        assert all(before[1] == after[0] for before, after in itertools.pairwise(ranges))
        assert all(begin < end for begin, end in ranges) or ranges == [(0, 0)]


@given(groups())
def test_parameters_are_cut_only_where_an_update_gives_the_same_bits(planned):
    for part in planned.slices():
        assert all(piece.begin % CUT_ELEMENTS == 0 for piece in part.pieces)


@given(groups())
def test_nothing_is_cut_if_the_optimizer_is_not_elementwise(planned):
    for part in planned.slices(may_cut=False):
        assert all((p.begin, p.end) == (0, planned.parameters[p.parameter].numel) for p in part.pieces)


@given(groups())
def test_a_slice_is_no_larger_than_a_page_of_a_state_tensor(planned):
    for part in planned.slices():
        nbytes = 0
        for piece in part.pieces:
            lead = next(iter(planned.parameters[piece.parameter].state.values()))
            nbytes += (piece.end - piece.begin) * lead.slot.spec.dtype.itemsize
        # A cut falls on the multiple of 64 elements below a page boundary, so that the next piece may begin a little before.
        assert nbytes < planned.page_bytes + CUT_ELEMENTS * 4


@given(groups(), st.booleans())
def test_a_slice_needs_exactly_the_pages_that_its_pieces_touch_and_changes_them_all(planned, may_cut):
    for number, part in enumerate(planned.slices(may_cut)):
        assert part.access.key == ("slice", GROUP, number)
        assert len(set(part.access.pages)) == len(part.access.pages)
        assert set(part.access.pages) == set().union(*(touched(planned, piece) for piece in part.pieces))
        assert part.access.writes == set(part.access.pages)


@given(groups(masters=True), st.booleans())
def test_a_page_is_fresh_at_its_first_slice_if_and_only_if_everything_on_it_is_rewritten(planned, may_cut):
    """Rewritten: a parameter with a gradient, rounded anew from its master. All else is read before it is changed."""
    rewritten = {
        places.name
        for places, is_active in zip(planned.parameters, planned.active, strict=True)
        if is_active and "master" in places.state
    }
    owners: dict[int, set[str]] = {}
    for section in planned.sections:
        for slot in section.plan.slots:
            for index in pages_with(TensorLocation(section, slot), 0, slot.spec.numel):
                is_param = section.plan.family == "param"
                owners.setdefault(index, set()).add(slot.spec.owner if is_param else "state is never rewritten")
    seen: set[int] = set()
    for part in planned.slices(may_cut):
        expected = {index for index in part.access.pages if index not in seen and owners[index] <= rewritten}
        assert part.access.fresh == expected
        seen |= set(part.access.pages)


@given(groups(masters=False))
def test_without_masters_every_page_is_read(planned):
    assert not any(part.access.fresh for part in planned.slices())


def test_sections_that_stay_in_memory_need_no_pages():
    spec = TensorSpec("p", "param", torch.float32, (5000,))
    state = [TensorSpec("p", kind, torch.float32, (5000,)) for kind in ("exp_avg", "exp_avg_sq")]
    plans = plan_group(GROUP, "param", [spec]) + plan_group(GROUP, "state", state)
    param, states = Section(plans[0], 0, None), Section(plans[1], 0, SECTOR_BYTES)
    places = {slot.spec.kind: TensorLocation(states, slot) for slot in plans[1].slots}
    parameters = [ParameterLocations("p", TensorLocation(param, plans[0].slots[0]), places, {})]
    pages = {index for part in plan_slices(GROUP, parameters, [True], SECTOR_BYTES) for index in part.access.pages}
    assert pages == {page.index for page in states.pages}


# --- frames for the sweep -----------------------------------------------------------------------------------------------


class Stack(nn.Module):
    """Layers of the given widths, each a group."""

    def __init__(self, widths: list[tuple[int, ...]]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ParameterList(torch.zeros(n) for n in layer) for layer in widths)


widths = st.lists(
    st.lists(st.one_of(st.integers(1, 300), st.integers(1, 60_000)), min_size=1, max_size=6).map(tuple),
    min_size=1,
    max_size=5,
)


@given(widths, st.integers(1, 8), st.randoms(use_true_random=False))
def test_a_step_in_which_parameters_have_no_gradient_fits_into_the_frames_too(layers, page_sectors, random):
    """The sweep has two neighbouring slices leased at one time, whichever parameters are left out."""
    page_bytes = page_sectors * 16 * SECTOR_BYTES
    model = Stack(layers)
    inventory = take_inventory(GivenModel(model), OptimizerSet([torch.optim.AdamW(model.parameters())]), None)
    sections = make_sections(inventory.plans, [0] * len(inventory.plans), lambda plan: False, page_bytes)
    frames = frames_needed(inventory, lambda plan: False, page_bytes, StepKind())
    before: set[int] = set()
    for trainable in find_trainables(inventory, find_places(sections)):
        active = [random.random() < 0.6 for _ in trainable.places]
        for part in plan_slices(trainable.group, trainable.places, active, page_bytes):
            pages = set(part.access.pages)
            assert len(before | pages) <= frames
            before = pages


@pytest.mark.parametrize("codec", ["exact", "split", "8bit"])
def test_the_frames_of_large_equal_layers_are_those_of_all_slices(codec):
    """Few pieces of few groups are looked at: pages of 24 KiB cut these tensors into hundreds of pieces."""
    with torch.device("meta"):
        layers = [nn.Linear(1024, 9001), nn.Linear(1024, 9001), nn.Linear(992, 5003, bias=False), nn.Linear(1024, 9001)]
        model = nn.Sequential(*layers).to(torch.bfloat16)
    optimizers = OptimizerSet([torch.optim.AdamW(model.parameters(), fused=True)])
    codecs = StateCodecs.parse(codec, torch.float32)
    inventory = take_inventory(GivenModel(model), optimizers, torch.float32, may_be_meta=True, state_codecs=codecs)
    page_bytes = 6 * SECTOR_BYTES
    sections = make_sections(inventory.plans, [0] * len(inventory.plans), lambda plan: False, page_bytes)
    most = longest = 0
    for trainable in find_trainables(inventory, find_places(sections)):
        slices = plan_slices(trainable.group, trainable.places, [True] * len(trainable.places), page_bytes)
        longest = max(longest, len(slices))
        most = max(most, *(len(part.access.pages) for part in slices))
    assert longest > 2 * SAME_AGAIN
    update_alone = replace(inventory, units=[])
    assert frames_needed(update_alone, lambda plan: plan.family == "grad", page_bytes, StepKind()) == 2 * most + 2
