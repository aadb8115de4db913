"""Reads and writes encoded tensors of the optimizer's state outside of the order of a step, as fp32.

A whole tensor is decoded or encoded in pieces that need no more pages than a slice of an update.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from swapper.checkpoint.encoded_state import in_nameless_file
from swapper.paging.layout import Slot
from swapper.paging.pager import Pager
from swapper.paging.schedule import Access
from swapper.train.layout.slices import CUT_ELEMENTS, CodedTensor, ParameterLocations, TensorLocation
from swapper.train.state.coded_run import encode

RESIDENT_ELEMENTS = 1 << 20
"""Elements of a piece of a tensor in memory: a choice."""


class CodedTensors:
    """Owns nothing; knows which tensors are encoded.

    Args:
        trained: the locations of all trained parameters.
        pager: makes the leases.
        directory: for files of decoded tensors.
    """

    def __init__(self, trained: Iterable[ParameterLocations], pager: Pager, directory: Path) -> None:
        self._of = {places.name: places for places in trained if places.coded}
        coded = [each for places in self._of.values() for each in places.coded.values()]
        self._parts = {(place.slot.spec.owner, place.slot.spec.kind) for each in coded for place in each.parts}
        self._pager = pager
        self._make = in_nameless_file(directory)

    def has(self, name: str, key: str) -> bool:
        """Return True if this tensor is stored encoded."""
        return name in self._of and key in self._of[name].coded

    @property
    def names(self) -> dict[str, str]:
        """The names of the codecs in use, by key of the state."""
        return {key: coded.codec.name for places in self._of.values() for key, coded in places.coded.items()}

    def keys(self, name: str) -> list[str]:
        """Return the keys of a parameter's encoded state, without its master."""
        return [key for key in self._of[name].coded if key != "master"] if name in self._of else []

    def is_part(self, slot: Slot) -> bool:
        """Return True if a slot has a part of an encoded tensor."""
        return (slot.spec.owner, slot.spec.kind) in self._parts

    def stored(self, name: str, key: str) -> dict[str, Any]:
        """Return the name of the codec, and the parts by suffix: tensors in their sections, whose data may be cold."""
        coded = self._of[name].coded[key]
        suffixes = [suffix for suffix, _, _ in coded.codec.parts(coded.numel)]
        parts = [place.section.tensor(place.slot) for place in coded.parts]
        return {"codec": coded.codec.name, **dict(zip(suffixes, parts, strict=True))}

    def read(self, name: str, key: str, on_drive: bool = False) -> torch.Tensor:
        """Return a decoded copy; `on_drive`, in a file without a name, so that it takes no memory for long."""
        places = self._of[name]
        shape = places.param.slot.spec.shape
        found = self._make(places.numel) if on_drive else torch.empty(places.numel, dtype=torch.float32, device="cpu")
        for begin, end, parts, param in self._pieces(places, places.coded[key], write=False):
            places.coded[key].codec.decode(parts, found[begin:end], param)
        return found.view(shape)

    def check(self, name: str, key: str, value: torch.Tensor) -> None:
        """Raise ValueError if the codec cannot hold `value`."""
        places = self._of[name]
        coded, flat = places.coded[key], value.detach().reshape(-1)
        for begin in range(0, places.numel, RESIDENT_ELEMENTS):
            piece = flat[begin : begin + RESIDENT_ELEMENTS].float().contiguous()
            made = [
                torch.empty(count, dtype=dtype, device="cpu") for _, dtype, count in coded.codec.parts(piece.numel())
            ]
            lost = coded.codec.encode(piece, made)
            if lost:
                raise ValueError(
                    f"the state {key!r} of {name} has {lost} values that the codec {coded.codec.name!r} cannot hold: they are not "
                    f"finite, or negative in a second moment. Mend them, or offload with a state_codec that keeps {key!r} exact"
                )

    def write(self, name: str, key: str, value: torch.Tensor | None) -> None:
        """Encode `value`, of the parameter's shape; None for zeros."""
        places = self._of[name]
        coded = places.coded[key]
        flat = None if value is None else value.detach().reshape(-1)
        for begin, end, parts, param in self._pieces(places, coded, write=True):
            if flat is None:
                for part in parts:
                    part.zero_()
            else:
                encode(coded, parts, flat[begin:end].float().contiguous(), param, name, key)

    def _pieces(
        self, places: ParameterLocations, coded: CodedTensor, write: bool
    ) -> Iterator[tuple[int, int, list[torch.Tensor], torch.Tensor]]:
        """Yield (begin, end, parts, parameter) of all pieces, each leased meanwhile; the parameter only if needed."""
        step = _piece_elements(coded)
        for begin in range(0, places.numel, step):
            end = min(begin + step, places.numel)
            changed = coded.pages(begin, end)
            read = places.param.pages(begin, end) if coded.codec.needs_parameter else []
            access = Access(None, (*changed, *read), writes=frozenset(changed if write else ()))
            with self._pager.leased(access):
                parts = [_part(place, *coded.part_of(place, begin, end)) for place in coded.parts]
                yield begin, end, parts, _part(places.param, begin, end)


def _piece_elements(coded: CodedTensor) -> int:
    """Return how many elements make a page of the largest part."""
    pages = [place.section.pages[0].nbytes for place in coded.parts if place.section.pages]
    itemsize = max(place.slot.spec.dtype.itemsize for place in coded.parts)
    return max(min(pages, default=RESIDENT_ELEMENTS) // itemsize // CUT_ELEMENTS, 1) * CUT_ELEMENTS


def _part(place: TensorLocation, begin: int, end: int) -> torch.Tensor:
    return place.section.tensor(place.slot).view(-1)[begin:end]
