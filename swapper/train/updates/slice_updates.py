"""Updates the elements of a slice whose pages are in memory: runs the optimizer, or one pass, over pieces of parameters.

[Note: small updates] A slice is updated in runs of UPDATE_ELEMENTS: a run's data then stays in the processor's cache
between the optimizer's passes over it, which is several times faster than one pass after the other over a whole slice.
An optimizer that makes one pass (torch's fused ones, without a master to upcast for and round) has the slice as one
run: each run costs some 0.2 ms of Python, with caches filled by the previous one, while the other processors wait.
torch's Adam and AdamW are updated in one pass of swapper's own, with the same bits (one_pass.py).

[Note: rare writes] Optimizers with factors, matrices of their own shape (SOAP, Shampoo), read some in each step and write
them in every tenth. They get copies of these, which are compared with what is stored: pages on which nothing has changed are
not written. (torch's counters of versions miss writes to `.data`.)
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import Any, Protocol

import torch
from torch import nn

from swapper.codecs import CODECS, CodedState
from swapper.errors import InvariantError, UnsupportedError
from swapper.runtime.free_memory import note_freed, note_temporaries
from swapper.train.layout.slices import (
    UPDATE_ELEMENTS,
    GroupUpdate,
    ParameterLocations,
    Slice,
    SlicePiece,
    TensorLocation,
    Trainable,
)
from swapper.train.optimizer.entries import PAGED, StateEntries, in_order
from swapper.train.optimizer.optimizer_proxy import OptimizerProxies, Work, is_same
from swapper.train.state.coded_state import CodedRun
from swapper.train.updates.one_pass import (
    AllowedPasses,
    OnePass,
    UpcastBuffer,
    Update,
    find_passes,
    fits,
    is_rounded,
    not_held,
)


class GradientSource(Protocol):
    """The gradients that a sweep reads. See Gradients."""

    def make_ready(self, update: GroupUpdate) -> None:
        """Prepare the update of a group: move its gradients into place, and wait for readers of its parameters."""

    def part(self, parameter: nn.Parameter, gradient: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        """Return elements [begin, end) of `gradient`, which `parameter` has or had, flat, clipped, not to be changed.

        Requires leases of its pages, if any.
        """


PieceTensors = tuple[torch.Tensor, Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]]
"""Elements of a parameter, of state of its shape, and the state that belongs to all of it, each by key. Not to be changed."""


class SliceUpdates:
    """Updates slices of parameters in host memory.

    Args:
        proxies: run the updates.
        entries: the optimizer's state of each parameter.
        gradients: of all parameters.
        decoded_bytes: most that the decoded state of a run takes.
    """

    def __init__(
        self, proxies: OptimizerProxies, entries: StateEntries, gradients: GradientSource, decoded_bytes: int
    ) -> None:
        self._gradients = gradients
        self._proxies = proxies
        self._entries = entries
        # Of a parameter that is being updated in pieces: state that all pieces begin with, and its entries afterwards.
        self._old: dict[str, dict[str, torch.Tensor]] = {}
        self._new: dict[str, dict[str, Any]] = {}
        self._passes: dict[int, AllowedPasses] = {}  # of this step, by the number of the group of the optimizers
        # By parameter: whether its state `fits`, found for these entries.
        self._fitting: dict[str, tuple[Mapping[str, object], bool]] = {}
        # Cached tensors and parts: a new view takes a few microseconds, and ten if torch's code is not in the cache.
        self._whole: dict[TensorLocation, torch.Tensor] = {}
        self._parts: dict[tuple[TensorLocation, int, int], torch.Tensor] = {}
        self._tensors: dict[tuple[ParameterLocations, int, int], PieceTensors] = {}
        self._stored: dict[tuple[ParameterLocations, int, int], dict[str, CodedState]] = {}
        self._unchanged: set[TensorLocation] = set()  # in the slice that is being updated: [Note: rare writes]
        self._upcast = UpcastBuffer(UPDATE_ELEMENTS)
        self._coded = self._coded_here = CodedRun(decoded_bytes, self._flat_part)

    def _forget_pieces(self) -> None:
        """Forget the last step, and parameters that it has updated in part."""
        self._old.clear()
        self._new.clear()
        self._passes.clear()
        self._unchanged.clear()
        self._coded_here.begin_run()

    def _refresh_slice(self, trainable: Trainable, part: Slice, before: Mapping[str, torch.Tensor]) -> None:
        """Set the masters of a slice to its parameters, except where they still round to them. See `Sweep.refresh_masters`."""
        for piece in part.pieces:
            places = trainable.places[piece.parameter]
            if places.has_coded_master:
                self._coded_here.refresh_master(places, piece.begin, piece.end, before[places.name], UPDATE_ELEMENTS)
            elif places.has_master:
                param = self._flat_part(places.param, piece.begin, piece.end)
                master = self._flat_part(places.state["master"], piece.begin, piece.end)
                master.copy_(torch.where(master.to(param.dtype) == param, master, param.to(master.dtype)))

    def _runs(self, update: GroupUpdate, part: Slice) -> Iterator[list[Update]]:
        """Yield the runs of a slice, each to be updated and stored before the next. Update what needs no optimizer."""
        run: list[Update] = []
        run_elements = 0
        max_elements = 0
        trainable = update.trainable
        for number in {trainable.settings[piece.parameter] for piece in part.pieces} - self._passes.keys():
            self._passes[number] = find_passes(self._proxies.kind(number), self._proxies.settings(number))
        for piece in part.pieces:
            places = trainable.places[piece.parameter]
            passes = self._passes[trainable.settings[piece.parameter]]
            if (in_one_pass := self._find_pass(places, passes)) is not None:
                self._update_in_one_pass(in_one_pass, update, piece)
                continue
            max_elements = max_elements or self._run_elements(trainable, part)
            # An empty parameter has nothing to update but its step counter.
            step = max_elements if places.may_cut else piece.end
            for begin in range(piece.begin, max(piece.end, piece.begin + 1), max(step, 1)):
                end = min(begin + step, piece.end)
                if run and run_elements + end - begin > max_elements:
                    yield run
                    run, run_elements = [], 0
                run.append(self._prepare(update, piece.parameter, begin, end))
                run_elements += end - begin
        if run:
            yield run

    def _changed_pages(self, trainable: Trainable, part: Slice) -> frozenset[int]:
        """Return the pages of a slice that have changed. See [Note: rare writes]."""
        pages: set[int] = set()
        for piece in part.pieces:
            places = trainable.places[piece.parameter]
            pages.update(places.param.pages(piece.begin, piece.end))
            for of, first, last in places.stored(piece.begin, piece.end):
                pages.update(of.pages(first, last))
            for place in places.others.values():
                pages.update(() if place in self._unchanged else place.pages(0, place.slot.spec.numel))
        return part.access.writes & pages

    def _find_pass(self, places: ParameterLocations, passes: AllowedPasses) -> OnePass | None:
        """Return what of `passes` updates a parameter in this step; None: the optimizer itself."""
        if passes.fused is not None and places.coded and is_rounded(places):
            return passes.fused
        if passes.torchs is None:
            return None
        entries, found = self._entries[places.name], self._fitting.get(places.name)
        if found is None or found[0] is not entries:  # which are replaced, and not changed
            found = self._fitting[places.name] = entries, fits(places, entries)
        return passes.torchs if found[1] else None

    def _update_in_one_pass(self, in_one_pass: OnePass, update: GroupUpdate, piece: SlicePiece) -> None:
        """Update a piece and its state in one pass; its step counter as `_state` and `_store` do."""
        trainable, number, begin, end = update.trainable, piece.parameter, piece.begin, piece.end
        places = trainable.places[number]
        stored = self._old[places.name]["step"] if begin > 0 else self._at(places.others["step"])
        entries = self._entries[places.name]
        is_new = "step" not in entries
        before = torch.zeros_like(stored) if is_new else stored.clone()
        states = self._stored.get((places, begin, end))
        if states is None:
            states = self._stored[places, begin, end] = self._encoded(places, begin, end)
        for state in (states["exp_avg"], states["exp_avg_sq"]) if is_new else ():
            for part in state.parts:
                part.zero_()
        lost = in_one_pass(
            self._flat_part(places.param, begin, end),
            self._gradient_part(update, number, begin, end).contiguous(),
            states,
            float(before + 1),
        )
        if lost:
            raise not_held(lost, places)
        if begin == 0:
            stored.copy_(before + 1)
            self._old[places.name] = {"step": before}
            self._new[places.name] = {**entries, **dict.fromkeys(("step", "exp_avg", "exp_avg_sq"), PAGED)}
        if end == places.numel:
            self._old.pop(places.name)
            self._entries.replace(places.name, self._new.pop(places.name))

    def _encoded(self, places: ParameterLocations, begin: int, end: int) -> dict[str, CodedState]:
        """Return the state of elements [begin, end) as it is stored."""
        fp32 = CODECS["fp32"]
        found = {key: CodedState(fp32, (self._flat_part(place, begin, end),)) for key, place in places.state.items()}
        for key, coded in places.coded.items():
            found[key] = CodedState(coded.codec, tuple(self._coded.parts(coded, begin, end)))
        return found

    def _run_elements(self, trainable: Trainable, part: Slice) -> int:
        """Return the maximum of a run, all if the update of the slice reads memory once. See [Note: small updates]."""
        for piece in part.pieces:
            places, passes = trainable.places[piece.parameter], self._passes[trainable.settings[piece.parameter]]
            if places.has_master or places.coded or not passes.reads_once:
                return UPDATE_ELEMENTS
        return sys.maxsize

    def _apply(self, run: list[Update]) -> None:
        """Do the updates of a run, store their results, and empty it, so that nothing refers to its tensors any more."""
        works: list[Work] = []
        is_cut = True
        for update in run:
            works.append(update.work)
            is_cut = is_cut and update.places.may_cut
        with nullcontext() if is_cut else note_temporaries():
            for proxy, own in self._proxies.each_with(works):
                proxy.update(own)
        for update in run:
            self._store(update)
            note_freed(update.work.tensor.nbytes)  # the optimizer's temporaries are as large
        run.clear()
        self._upcast.begin_run()
        self._coded.begin_run()

    def _prepare(self, group: GroupUpdate, number: int, begin: int, end: int, by_kernel: bool = False) -> Update:
        """Return the optimizer's input for elements [begin, end) of a parameter, by its number in the group.

        Args:
            by_kernel: swapper's AdamW updates it as a part of a run, on a device.
        """
        trainable, settings = group.trainable, group.trainable.settings[number]
        places = trainable.places[number]
        param, stored, others = self._tensors_of(places, begin, end)
        decoded = self._decoded(places, begin, end, param, by_kernel) if places.coded else {}
        state_tensors = {**stored, **decoded}
        master = state_tensors.pop("master", None)
        target = param if master is None else master
        gradient = self._gradient_part(group, number, begin, end)
        if not places.may_cut:
            gradient = gradient.view(target.shape)
        if not by_kernel and gradient.dtype != target.dtype:
            gradient = self._widen(gradient, target.dtype)
        if self._entries.changes_gradient(places.name):
            gradient = gradient.clone()  # the user may read it, and the step may be undone and taken again
        state = self._state(places, begin, end, state_tensors, others)
        marks, passes = vars(trainable.parameters[number]), self._entries.passes(places.name)
        work = Work(settings, target.detach(), gradient, state, marks, passes)
        rounded = None if master is None else param
        return Update(work, places, begin, end, state_tensors, target, rounded, decoded, by_kernel)

    def _gradient_part(self, update: GroupUpdate, number: int, begin: int, end: int) -> torch.Tensor:
        """Return elements [begin, end) of a parameter's gradient, flat, clipped, not to be changed."""
        fixed = update.gradients[number]
        if fixed is None:
            raise InvariantError(f"{update.trainable.places[number].name} has no gradient and was to be updated")
        return self._gradients.part(update.trainable.parameters[number], fixed, begin, end)

    def _widen(self, gradient: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the gradient in `dtype`, for as long as the run."""
        return self._upcast.widen(gradient, dtype)

    def _decoded(
        self, places: ParameterLocations, begin: int, end: int, param: torch.Tensor, by_kernel: bool
    ) -> dict[str, torch.Tensor]:
        """Return the state that is stored encoded, decoded, in the shape of `param`. New state is zeros for the kernel."""
        known = places.coded if by_kernel else {"master", *self._entries[places.name]}
        values = self._coded.decode(places, begin, end, param, known)
        return {key: value.view(param.shape) for key, value in values.items()}

    def _tensors_of(self, places: ParameterLocations, begin: int, end: int) -> PieceTensors:
        """Return elements [begin, end) of a parameter and its state."""
        found = self._tensors.get((places, begin, end))
        if found is None:
            state = {key: self._part(place, places, begin, end) for key, place in places.state.items()}
            found = self._part(places.param, places, begin, end), state, self._others(places)
            self._tensors[places, begin, end] = found
        return found

    def _part(self, place: TensorLocation, places: ParameterLocations, begin: int, end: int) -> torch.Tensor:
        """Return elements [begin, end) at `place`, flat; or all of it in its own shape, if it may not be cut."""
        return self._flat_part(place, begin, end) if places.may_cut else self._at(place)

    def _flat_part(self, place: TensorLocation, begin: int, end: int) -> torch.Tensor:
        """Return elements [begin, end) at `place`, flat."""
        part = self._parts.get((place, begin, end))
        if part is None:
            part = self._parts[place, begin, end] = self._at(place).view(-1)[begin:end]
        return part

    def _at(self, place: TensorLocation) -> torch.Tensor:
        whole = self._whole.get(place)
        if whole is None:
            whole = self._whole[place] = place.section.tensor(place.slot)
        return whole

    def _state(
        self,
        places: ParameterLocations,
        begin: int,
        end: int,
        state_tensors: dict[str, torch.Tensor],
        stored: Mapping[str, torch.Tensor],
    ) -> dict[str, Any]:
        """Return the optimizer's state in its order.

        State of the parameter as a whole is the same for all of its pieces: the old values; the first piece stores the
        new.
        """
        entries = self._entries[places.name]
        others = stored
        if begin > 0:
            others = {k: v.clone() for k, v in self._old[places.name].items()}
        else:
            if end < places.numel:
                self._old[places.name] = {key: value.clone() for key, value in stored.items()}
            state_tensors.update(stored)
        state: dict[str, Any] = {}
        for key, entry in entries.items():
            if entry is not PAGED:
                state[key] = entry
                continue
            value = (others[key] if key in places.others else state_tensors[key]).detach()
            is_copied = key in places.factors or key in places.orders
            state[key] = in_order(value, places.orders.get(key, range(value.dim()))) if is_copied else value
        return state

    def _others(self, places: ParameterLocations) -> dict[str, torch.Tensor]:
        """Return the state that belongs to a parameter as a whole."""
        return {key: self._at(place) for key, place in places.others.items()}

    def _store(self, update: Update) -> None:
        """Store new state tensors of the optimizer in their sections, and record its entries."""
        work, places = update.work, update.places
        if work.tensor.data_ptr() != update.target.data_ptr():
            update.target.copy_(work.tensor)
        if update.rounded is not None and not update.by_kernel:
            update.rounded.copy_(update.target)
        entries: dict[str, Any] = {}
        for key, value in work.state.items():
            if not isinstance(value, torch.Tensor):
                entries[key] = value
                continue
            entries[key] = PAGED
            stored = update.state_tensors.get(key)
            if stored is None:
                if key not in places.others:
                    raise UnsupportedError(
                        f"{self._proxies.kind(work.settings)} keeps {key!r} for {places.name}, which it did not keep at "
                        "manager.offload"
                    )
                continue  # the first piece has stored it
            if value.shape != stored.shape or value.dtype != stored.dtype:
                raise UnsupportedError(
                    f"{self._proxies.kind(work.settings)} keeps {key!r} for {places.name} as {value.dtype} {list(value.shape)}; "
                    f"when it was offloaded it was {stored.dtype} {list(stored.shape)}"
                )
            if key in places.factors and self._is_unchanged(stored, value):
                self._unchanged.add(places.others[key])
            elif value.data_ptr() != stored.data_ptr() or not value.is_contiguous():
                self._keep(update, key, value)
        if update.decoded:
            param = update.target if update.rounded is None else update.rounded
            kept = {key: value for key, value in update.decoded.items() if key == "master" or key in entries}
            self._coded.encode(places, update.begin, update.end, param, kept)
        if update.begin == 0:
            self._new[places.name] = entries
        if update.end == places.numel:
            self._old.pop(places.name, None)
            self._entries.replace(places.name, self._new.pop(places.name))

    def _is_unchanged(self, stored: torch.Tensor, value: torch.Tensor) -> bool:
        """Return True if the optimizer has left a factor as it is stored, bit for bit."""
        return is_same(stored, value)

    def _keep(self, update: Update, key: str, value: torch.Tensor) -> None:
        """Copy state that the optimizer has put elsewhere to its location."""
        update.state_tensors[key].copy_(value)
