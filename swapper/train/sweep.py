"""The optimizer's sweep over the state: read slice k+1, update slice k, write slice k-1, all at one time.

Slices are taken hand over hand: the next one is leased before the last one is released, so that a page which two slices
share never leaves in between and is written once. The reads and writes themselves go on in the engine meanwhile.

[Note: small updates] A slice is updated in runs of UPDATE_ELEMENTS: what a run touches then stays in the processor's cache
between the optimizer's passes over it, which is several times faster than one pass after the other over a whole slice.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from swapper.core.pager import Pager
from swapper.core.schedule import Access
from swapper.stats import Stats
from swapper.train.shadow import Shadow, Work
from swapper.train.slices import ParameterPlaces, Place, Slice, plan_slices

UPDATE_ELEMENTS = 1 << 19
"""[Note: small updates]"""


@dataclass
class Trainable:
    """One group's trainable parameters that the optimizer has, with where their state lies.

    `settings` has for each the index of its group in `optimizer.param_groups`.
    """

    group: int
    parameters: list[nn.Parameter]
    places: list[ParameterPlaces]
    settings: list[int]
    _slices: dict[tuple[bool, ...], list[Slice]] = field(default_factory=dict)

    def slices(self, active: tuple[bool, ...], page_bytes: int) -> list[Slice]:
        if active not in self._slices:
            self._slices[active] = plan_slices(self.group, self.places, active, page_bytes, may_cut=True)
        return self._slices[active]

    def all_slices(self, page_bytes: int) -> list[Slice]:
        return self.slices((True,) * len(self.places), page_bytes)


class Sweep:
    """Applies the optimizer to all groups, slice by slice."""

    def __init__(
        self, trainables: Sequence[Trainable], shadow: Shadow, pager: Pager, page_bytes: int, stats: Stats
    ) -> None:
        self._trainables = trainables
        self._shadow = shadow
        self._pager = pager
        self._page_bytes = page_bytes
        self._stats = stats
        self._old_scalars: dict[str, dict[str, torch.Tensor]] = {}  # of a parameter that is being updated in pieces
        self._flat: dict[Place, torch.Tensor] = {}

    def run(self) -> None:
        """Update every parameter that has a gradient. Its writes may still be in flight on return."""
        last: Slice | None = None
        for trainable in self._trainables:
            active = tuple(parameter.grad is not None for parameter in trainable.parameters)
            for part in trainable.slices(active, self._page_bytes):
                self._hand_over(last, part.access)
                last = part
                started = time.monotonic()
                self._update(trainable, part)
                self._stats.update_s += time.monotonic() - started
            updated = [p for p, is_active in zip(trainable.parameters, active, strict=True) if is_active]
            torch.autograd.graph.increment_version(updated)
        if last is not None:
            self._pager.release(last.access, last.access.writes)

    def refresh_masters(self, trainable: Trainable) -> None:
        """The parameters were changed from outside: masters follow, except where they still round to the parameter."""
        for part in trainable.all_slices(self._page_bytes):
            access = Access(None, part.access.pages, writes=part.access.writes)
            self._pager.acquire(access)
            for piece in part.pieces:
                places = trainable.places[piece.parameter]
                if places.has_master:
                    param = self._view(places.param)[piece.begin : piece.end]
                    master = self._view(places.state["master"])[piece.begin : piece.end]
                    master.copy_(torch.where(master.to(param.dtype) == param, master, param.to(master.dtype)))
            self._pager.release(access, access.writes)

    # --------------------------------------------------------------------------------------------------------------

    def _hand_over(self, last: Slice | None, access: Access) -> None:
        self._pager.lease(access)
        if last is not None:
            self._pager.release(last.access, last.access.writes)
        self._pager.wait(access)

    def _update(self, trainable: Trainable, part: Slice) -> None:
        run: list[tuple[Work, torch.Tensor | None]] = []
        run_elements = 0
        for piece in part.pieces:
            # An empty parameter has nothing to update but its step counter.
            for begin in range(piece.begin, max(piece.end, piece.begin + 1), UPDATE_ELEMENTS):
                end = min(begin + UPDATE_ELEMENTS, piece.end)
                if run and run_elements + end - begin > UPDATE_ELEMENTS:
                    self._apply(run)
                    run, run_elements = [], 0
                run.append(self._work(trainable, piece.parameter, begin, end))
                run_elements += end - begin
        self._apply(run)

    def _apply(self, run: list[tuple[Work, torch.Tensor | None]]) -> None:
        self._shadow.update([work for work, _ in run])
        for work, rounded in run:
            if rounded is not None:
                rounded.copy_(work.tensor)

    def _work(self, trainable: Trainable, number: int, begin: int, end: int) -> tuple[Work, torch.Tensor | None]:
        """Return the work on elements [begin, end), and where its result is to be rounded to if it is a master."""
        places = trainable.places[number]
        gradient = trainable.parameters[number].grad
        if gradient is None:
            raise RuntimeError(f"the gradient of {places.name} vanished during the optimizer's step")
        tensors = {key: self._view(place)[begin:end] for key, place in places.state.items()}
        param = self._view(places.param)[begin:end]
        master = tensors.pop("master", None)
        state = {**self._scalars(places, begin, end), **tensors}
        target = param if master is None else master
        gradient = gradient.detach().reshape(-1)[begin:end].to(target.dtype)
        work = Work(trainable.settings[number], target, gradient, state)
        return work, None if master is None else param

    def _scalars(self, places: ParameterPlaces, begin: int, end: int) -> dict[str, torch.Tensor]:
        """0-dim state. All pieces of a parameter start from the same old values; the first piece leaves the new ones."""
        if begin > 0:
            old = self._old_scalars[places.name]
            if end == places.numel:
                del self._old_scalars[places.name]
            return {key: value.clone() for key, value in old.items()}
        stored = {key: self._view(place)[0] for key, place in places.scalars.items()}
        if end < places.numel:
            self._old_scalars[places.name] = {key: value.clone() for key, value in stored.items()}
        return stored

    def _view(self, place: Place) -> torch.Tensor:
        """Return the tensor at `place`, flat."""
        flat = self._flat.get(place)
        if flat is None:
            flat = self._flat[place] = place.section.tensor(place.slot).view(-1)
        return flat
