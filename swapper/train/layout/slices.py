"""Defines what an optimizer updates: parameters with the locations of their state, and the slices that it updates together. Pure.

A *slice* is a run of elements of a group's parameters whose state is read, updated and written back as one. Small
parameters share a slice; a parameter whose state is larger than a few pages is cut, if the optimizer allows it, at page
boundaries of its first state tensor, so that neighboring slices share few pages.

[Note: where a parameter may be cut] Element-wise optimizers give the same bits for a parameter cut at multiples of 64
elements as for the whole one: the vectorized kernels work in runs that divide 64, so no element changes between a
kernel's vector body and its scalar tail. A trial finds out which optimizers are element-wise
(train/optimizer/optimizer_trial.py).
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import nn

from swapper.codecs import StateCodec
from swapper.paging.layout import Slot
from swapper.paging.schedule import Access
from swapper.paging.section import Section

CUT_ELEMENTS = 64
"""Elements. See [Note: where a parameter may be cut]."""

SAME_AGAIN = 128
"""Pieces: see `largest_slice_pages`. 32 would do: a part of encoded state has 4 bytes for 32 elements at least."""


MIN_SLICE_BYTES = 16 << 10
"""Of a slice on a device with some MiB of memory: a choice."""


def slice_bytes_of(page_bytes: int, max_bytes: int) -> int:
    """Return how many bytes of its largest state tensor a slice has: a page, or an even part of one, of `max_bytes` if it can be.

    So a slice's pieces of a large parameter are within those of a whole page.
    """
    size = page_bytes
    while size > max(max_bytes, MIN_SLICE_BYTES) and size % 2 == 0:
        size //= 2
    return size


@dataclass(frozen=True, slots=True, eq=False)
class TensorLocation:
    """A tensor's section and slot in it. Compared by identity, for fast lookups."""

    section: Section
    slot: Slot

    def pages(self, begin: int, end: int) -> range:
        """Return the indices of the pages of elements [begin, end)."""
        itemsize = self.slot.spec.dtype.itemsize
        at = self.slot.offset
        return self.section.indices_of(at + begin * itemsize, at + end * itemsize)


@dataclass(frozen=True, slots=True, eq=False)
class CodedTensor:
    """A tensor of state that is stored encoded, in parts. [Note: what is encoded], train/layout/state_codecs.py

    Attributes:
        parts: locations of codes, scales and the like. Each has a part for every run of 32 elements of the parameter.
        numel: elements of the tensor.
    """

    codec: StateCodec
    parts: tuple[TensorLocation, ...]
    numel: int

    def part_of(self, place: TensorLocation, begin: int, end: int) -> tuple[int, int]:
        """Return the elements of a part that elements [begin, end), multiples of 32, are stored in."""
        count = place.slot.spec.numel
        return begin * count // self.numel, end * count // self.numel

    def pages(self, begin: int, end: int) -> list[int]:
        """Return the indices of the pages of elements [begin, end)."""
        return [page for place in self.parts for page in place.pages(*self.part_of(place, begin, end))]


@dataclass(frozen=True, eq=False)
class ParameterLocations:
    """The locations of one trainable parameter's tensors.

    Attributes:
        state: state tensors of the parameter's shape by key, the fp32 master (key "master") first if there is one.
        others: state tensors of other shapes by key ("step", factors): they belong to the parameter as a whole.
        may_cut: its elements may be updated in pieces.
        grad: its gradient, if that is on NVMe.
        state_stays: all of the state is on a device, and an update does not need its locations.
        coded: state tensors of the parameter's shape that are stored encoded, by key, the master first.
        orders: of memory, by key, of state that the optimizer keeps in another than its own, the stored one: StateKey.

    What follows from these is found once.
    """

    name: str
    param: TensorLocation
    state: dict[str, TensorLocation]
    others: dict[str, TensorLocation]
    may_cut: bool = True
    grad: TensorLocation | None = None
    state_stays: bool = False
    coded: dict[str, CodedTensor] = field(default_factory=dict)
    orders: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @cached_property
    def numel(self) -> int:
        return self.param.slot.spec.numel

    @cached_property
    def has_master(self) -> bool:
        return "master" in self.state or self.has_coded_master

    @cached_property
    def has_coded_master(self) -> bool:
        """True if the master is stored as its difference from the parameter, which is read with it."""
        return "master" in self.coded

    @cached_property
    def factors(self) -> frozenset[str]:
        """Keys of state that is a matrix of another shape than the parameter's. [Note: rare writes], updates/slice_updates.py"""
        return frozenset(key for key, place in self.others.items() if len(place.slot.spec.shape) > 1)

    def stored(self, begin: int, end: int) -> Iterator[tuple[TensorLocation, int, int]]:
        """Yield the tensors of the parameter's shape, and the parts of encoded ones, that have the state of elements
        [begin, end), each with the range of its own elements."""
        for place in self.state.values():
            yield place, begin, end
        for coded in self.coded.values():
            for place in coded.parts:
                yield place, *coded.part_of(place, begin, end)


@dataclass(frozen=True, slots=True)
class SlicePiece:
    """Elements [begin, end) of the group's trainable parameter number `parameter`."""

    parameter: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Slice:
    """A part that is updated together, and the pages that it needs."""

    pieces: tuple[SlicePiece, ...]
    access: Access

    @property
    def numel(self) -> int:
        return sum(piece.end - piece.begin for piece in self.pieces)


def plan_slices(
    group: int, parameters: Sequence[ParameterLocations], active: Sequence[bool], slice_bytes: int
) -> list[Slice]:
    """Return the slices of one group, in the order of its layout.

    No slice needs more pages than the largest one of a step in which all parameters have gradients: the divided budget
    suffices for every step.

    Args:
        parameters: its trainable parameters, in the order of their slots.
        active: for each, True if it has a gradient in this step; the others are skipped.
        slice_bytes: of the largest state tensor, at most. See `slice_bytes_of`.
    """
    max_pages = sys.maxsize
    if not all(active):
        everything = plan_slices(group, parameters, [True] * len(parameters), slice_bytes)
        max_pages = max(len(part.access.pages) for part in everything)
    unfilled = _pages_made_anew(parameters, active)
    slices = []
    for number, pieces in enumerate(_runs(parameters, active, slice_bytes, max_pages)):
        access = _access(group, number, parameters, pieces, unfilled)
        unfilled -= access.fresh
        slices.append(Slice(pieces, access))
    return slices


def largest_slice_pages(parameters: Sequence[ParameterLocations], slice_bytes: int) -> int:
    """Return the most pages that a slice of a step in which all parameters have gradients needs. See `plan_slices`.

    A large parameter's pieces have one page of a tensor each. So, within their pages, the other tensors begin at the same places
    again after SAME_AGAIN pieces at the latest, and only as many at both ends need to be looked at. (Pieces of an even part of a
    page have no more pages than those of a page, but at the ends, where they are joined with others.)
    """
    most = 0
    for pieces in _runs(parameters, [True] * len(parameters), slice_bytes, sys.maxsize, SAME_AGAIN):
        pages: set[int] = set()
        for piece in pieces:
            pages |= _pages_of(parameters[piece.parameter], piece.begin, piece.end)
        most = max(most, len(pages))
    return most


def _pages_of(places: ParameterLocations, begin: int, end: int) -> set[int]:
    return {*_state_pages(places, begin, end), *places.param.pages(begin, end), *_grad_pages(places, begin, end)}


def _runs(
    parameters: Sequence[ParameterLocations],
    active: Sequence[bool],
    slice_bytes: int,
    max_pages: int,
    at_each_end: int = sys.maxsize,
) -> Iterator[tuple[SlicePiece, ...]]:
    """Yield the pieces of each slice: whole small parameters together, large ones cut `slice_bytes` of a state tensor
    at a time. Of such a one only the first and last `at_each_end` pieces are there."""
    run: list[SlicePiece] = []
    run_bytes = 0
    run_pages: set[int] = set()
    for number, places in enumerate(parameters):
        if not active[number]:
            continue
        cuts = _cuts(places, slice_bytes) if places.may_cut else [places.numel]
        spans = list(itertools.pairwise([0, *cuts]))
        if len(spans) > 2 * at_each_end:
            spans = [*spans[:at_each_end], *spans[-at_each_end:]]
        for begin, end in spans:
            nbytes = (end - begin) * _lead(places).slot.spec.dtype.itemsize
            pages = _pages_of(places, begin, end)
            if run and (run_bytes + nbytes > slice_bytes or len(run_pages | pages) > max_pages):
                yield tuple(run)
                run, run_bytes, run_pages = [], 0, set()
            run.append(SlicePiece(number, begin, end))
            run_bytes += nbytes
            run_pages |= pages
    if run:
        yield tuple(run)


def _lead(places: ParameterLocations) -> TensorLocation:
    """Return the tensor at whose pages the parameter is cut: of encoded state the one with the largest elements."""
    if not places.coded:
        return next(iter(places.state.values()), places.param)
    codes = [place for coded in places.coded.values() for place in coded.parts]
    whole = [place for place in (*places.state.values(), *codes) if place.slot.spec.numel == places.numel]
    return max(whole, key=lambda place: place.slot.spec.dtype.itemsize)


def _cuts(places: ParameterLocations, slice_bytes: int) -> list[int]:
    """Return the ends of the pieces of one parameter: at multiples of `slice_bytes` of its first state tensor, in elements."""
    slot = _lead(places).slot
    itemsize = slot.spec.dtype.itemsize
    ends = []
    boundary = (slot.offset // slice_bytes + 1) * slice_bytes
    while boundary < slot.end:
        elements = (boundary - slot.offset) // itemsize // CUT_ELEMENTS * CUT_ELEMENTS
        if elements > 0:
            ends.append(elements)
        boundary += slice_bytes
    return [*ends, places.numel]


def _pages_made_anew(parameters: Sequence[ParameterLocations], active: Sequence[bool]) -> set[int]:
    """Return parameter pages that need not be read: every parameter on them is written from its master."""
    pages: set[int] = set()
    keep: set[int] = set()
    sections = {places.param.section: None for places in parameters}
    rewritten = {
        places.param.slot.spec.owner
        for places, is_active in zip(parameters, active, strict=True)
        if is_active and places.has_master and not places.has_coded_master
    }
    for section in sections:
        for slot in section.plan.slots:
            of_slot = section.indices_of(slot.offset, slot.end)
            (pages if slot.spec.owner in rewritten else keep).update(of_slot)
    return pages - keep


def _state_pages(places: ParameterLocations, begin: int, end: int) -> list[int]:
    """Return the pages of the state of elements [begin, end). The first piece includes state of other shapes."""
    if places.state_stays:
        return []
    others = (
        [p for place in places.others.values() for p in place.pages(0, place.slot.spec.numel)] if begin == 0 else []
    )
    return others + [page for place, first, last in places.stored(begin, end) for page in place.pages(first, last)]


def _grad_pages(places: ParameterLocations, begin: int, end: int) -> range:
    return places.grad.pages(begin, end) if places.grad is not None else range(0)


def _access(
    group: int, number: int, parameters: Sequence[ParameterLocations], pieces: Sequence[SlicePiece], unfilled: set[int]
) -> Access:
    read: dict[int, None] = {}
    gradients: dict[int, None] = {}
    filled: dict[int, None] = {}
    for piece in pieces:
        places = parameters[piece.parameter]
        read.update(dict.fromkeys(_state_pages(places, piece.begin, piece.end)))
        gradients.update(dict.fromkeys(_grad_pages(places, piece.begin, piece.end)))
        for page in places.param.pages(piece.begin, piece.end):
            (filled if page in unfilled else read)[page] = None
    changed = (*read, *filled)
    return Access(("slice", group, number), (*gradients, *changed), fresh=frozenset(filled), writes=frozenset(changed))


UPDATE_ELEMENTS = (1 << 18) * min(max(len(os.sched_getaffinity(0)), 2), 32)
"""Elements, 256 Ki for a core: their fp32 state fits its cache, and on two cores 256 Ki to 4 Mi in all were no faster; with
more cores, Python's own time for a run is for more elements. See [Note: small updates], updates/slice_updates.py."""
NO_GROUP = -1
"""The settings of a parameter in no group."""
ALL_GROUPS = range(sys.maxsize)
"""Those of all optimizers, however many there are."""


@dataclass
class Trainable:
    """One group's trainable parameters that the optimizer has, with the locations of their state.

    `settings` has for each the number of its group in the OptimizerSet, NO_GROUP if it is in none any more: then it is
    not updated. See train/state/conditions.py.
    """

    group: int
    parameters: list[nn.Parameter]
    places: list[ParameterLocations]
    settings: list[int]
    _slices: dict[tuple[tuple[bool, ...], int], list[Slice]] = field(default_factory=dict)

    @property
    def members(self) -> Iterable[tuple[nn.Parameter, ParameterLocations, int]]:
        """Each parameter with the locations of its state and the number of its group."""
        return zip(self.parameters, self.places, self.settings, strict=True)

    def slices(self, active: tuple[bool, ...], slice_bytes: int) -> list[Slice]:
        key = active, slice_bytes
        if key not in self._slices:
            self._slices[key] = plan_slices(self.group, self.places, active, slice_bytes)
        return self._slices[key]

    def all_slices(self, slice_bytes: int) -> list[Slice]:
        return self.slices((True,) * len(self.places), slice_bytes)


@dataclass(frozen=True, eq=False)
class GroupUpdate:
    """One group's part of a step: the gradients of its trainable parameters, None for one without."""

    trainable: Trainable
    gradients: tuple[torch.Tensor | None, ...]

    @cached_property
    def active(self) -> tuple[bool, ...]:
        """For each parameter, True if it has a gradient."""
        return tuple([gradient is not None for gradient in self.gradients])

    @cached_property
    def present(self) -> list[torch.Tensor]:
        """The gradients that there are."""
        return [gradient for gradient in self.gradients if gradient is not None]

    @property
    def names(self) -> list[str]:
        """Names of the parameters that it updates."""
        places = zip(self.trainable.places, self.gradients, strict=True)
        return [of.name for of, gradient in places if gradient is not None]

    def joined(self, other: GroupUpdate) -> GroupUpdate:
        """Return this update together with another optimizer's of the same group, of other parameters."""
        pairs = zip(self.gradients, other.gradients, strict=True)
        return GroupUpdate(self.trainable, tuple(theirs if ours is None else ours for ours, theirs in pairs))


def decoded_bytes(trainables: Iterable[Trainable]) -> int:
    """Return the bytes of the scratch for encoded state. [Note: decoded runs], coded_state.py"""
    members = ([(p.numel, len(p.coded), p.may_cut) for p in of.places if p.coded] for of in trainables)
    return scratch_bytes(members, UPDATE_ELEMENTS)


def scratch_bytes(groups: Iterable[Sequence[tuple[int, int, bool]]], run_elements: int) -> int:
    """Return the maximum bytes of decoded values of a run.

    Args:
        groups: for each group, (elements, number of encoded tensors, may be cut) of its parameters with encoded state.
        run_elements: elements of a run; only a parameter that may not be cut makes a larger one.
    """
    most = 0
    for members in groups:
        together = min(run_elements, sum(numel for numel, _, _ in members))
        most = max([most, *(together * count for _, count, _ in members)])
        most = max([most, *(numel * count for numel, count, may_cut in members if not may_cut)])
    return most * torch.float32.itemsize
