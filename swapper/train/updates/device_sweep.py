"""Runs the optimizer's sweep on an accelerator: copies slice k+1 up, updates slice k, copies slice k-1 down, all at once.

A copy stream copies a slice's state, gradient and parameters to one of a ring of storages on the device. The optimizer
works on views of it on a stream of its own ([Note: stream of updates], train_device.py). Another stream copies the
results down. The slice's pages are leased until they have arrived, and then its storage is free. So the copies and the
update of three slices overlap with each other and with the drive, also across groups; the ring exists from a step's
first update until its last results have come. State that stays on the device is updated there.

The user's optimizer does the updates, or, if chosen, swapper's AdamW (one_pass.py). As in plain torch, an optimizer's
results on a device may differ from those on a CPU in the last bits. Encoded state is copied, and kept, encoded: it is
decoded for the update there, and encoded after it (coded_state.py).

[Note: whole groups] Where parameters, gradients and exact state of a group stay on the device nothing is copied, and a slice is all
of the group, up to `whole_bytes`: the optimizer's call and its kernels are few, as in plain torch. Its temporaries are as large as
the slice, some three times in fp32; plain torch has those of all parameters at once.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import islice
from types import NoneType
from typing import Any

import torch
from torch import nn

from swapper.errors import DeviceError, InvariantError
from swapper.paging.schedule import Access
from swapper.tensors.torch_private import without_torch_functions
from swapper.train.gradients.cold_grad import ColdGradient
from swapper.train.gradients.gradient_guards import fix, unfix
from swapper.train.groups.train_device import TrainingDevice
from swapper.train.layout.slices import GroupUpdate, ParameterLocations, Slice, TensorLocation, Trainable
from swapper.train.optimizer.optimizer_proxy import Work
from swapper.train.state.coded_state import CodedSlices
from swapper.train.state.resident_state import DeviceResidentState
from swapper.train.updates.device_results import Results
from swapper.train.updates.device_slots import (
    Gradient,
    SlicePart,
    StateAhead,
    UpdateRing,
    UpdateSlot,
    ahead_slice_bytes,
    coded_in,
    device_scratch_bytes,
    device_slice_bytes,
    parts_of,
    pieces_on_host,
    slot_bytes,
)
from swapper.train.updates.one_pass import AdamWKernel, Update, is_fused, is_rounded, update_by_kernel
from swapper.train.updates.slice_updates import PieceTensors
from swapper.train.updates.sweep import Sweep


class DeviceSweep(Sweep):
    """A sweep that updates on the device.

    Args:
        kept: state that stays on the device.
        kernel: updates instead of the optimizer, or None.
    """

    ahead = 1
    prepares = True

    def __init__(
        self,
        on_device: TrainingDevice,
        gradient_of: Gradient,
        kept: DeviceResidentState,
        kernel: AdamWKernel | None,
        *others: Any,
    ) -> None:
        super().__init__(*others)
        self.on_device = on_device
        self.gradient_of = gradient_of
        self.kept = kept
        self._kernel = kernel
        self._ring = UpdateRing(on_device)
        self._results = Results(on_device, self._pager, self._counters)
        self._ahead = StateAhead(on_device, self._has_state_in_place, self._ahead_bytes)
        on_device.memory.free_ahead = self._free_ahead
        self._counts: list[tuple[torch.Tensor, torch.Tensor]] = []  # of a slice: counters in host memory, and new ones
        # Of a slice: what is in the slot, by its begin.
        self._views: dict[tuple[TensorLocation, int], torch.Tensor] = {}
        scratch_bytes = device_scratch_bytes(self.trainables, self._page_bytes)
        self._coded = self._coded_there = CodedSlices(scratch_bytes, self._there, on_device.new_storage)
        # Gradients that updates of the step may still read.
        self._read: list[tuple[nn.Parameter, torch.Tensor | None]] = []
        self._accesses: dict[Access, Access] = {}  # of slices
        self._is_in_place = False  # of the group that is updated: see TrainingDevice.updates_in_place
        self._has_updated = False  # in this step

    def begin(self, member: int) -> None:
        self.on_device.device.refuse_capture("the optimizer's state")
        super().begin(member)

    def prepare(self) -> None:
        """Give the ring its memory, so that the first copies to it wait neither for updates nor for the caller's kernels."""
        if self._has_updated:
            return
        self.on_device.order.note()
        with self.on_device.apart():
            self._ring.begin(lambda: slot_bytes(self.trainables, self._page_bytes))

    def update(self, update: GroupUpdate) -> None:
        """Update a group. Copies of its results may still be in flight, their pages leased: see `settle`."""
        group = update.trainable.group
        self._results.wait_for(group)  # of the step before
        self._gradients.make_ready(update)
        if not self.kept.is_ready(group):
            self.settle()  # its pages go through the frames that earlier slices still lease
        self.prepare()
        self._read += zip(update.trainable.parameters, update.gradients, strict=True)
        with self.on_device.apart(), torch.autocast(self.on_device.device.device.type, enabled=False):
            if not self._has_updated or any(type(g) not in (ColdGradient, NoneType) for g in update.gradients):
                self.on_device.order.follow()
            self._has_updated = True
            self.kept.ready([group])
            self._is_in_place = self.on_device.updates_in_place(group)
            with self.on_device.changing(group) if self._is_in_place else nullcontext():
                is_whole = self._is_all_there(update)
                for number, part in enumerate(self._slices(update, is_whole)):
                    access = self._access(update.trainable, part)
                    if not is_whole and (slot := self._slot_ahead(update, number, part)) is not None:
                        send = self._update_on_device(update, part, access, slot, is_there=True)
                        if self._is_in_place:
                            self._results.keep(group, send)
                        else:
                            send()  # the next gather waits for its parameters
                        continue
                    nbytes = 0 if is_whole else device_slice_bytes(update.trainable, part)
                    slot = self._ring.next(nbytes, bool(access.pages))
                    self._update_on_device(update, part, access, slot, is_there=False)()

    def _is_all_there(self, update: GroupUpdate) -> bool:
        """Return True if nothing is copied for the update of a group. [Note: whole groups]"""
        trainable = update.trainable
        if not self._is_in_place or trainable.group not in self.kept:
            return False
        in_pages = any(part.access.pages for part in trainable.slices(update.active, self._page_bytes))
        is_coded = any(places.coded for places in trainable.places)
        return not in_pages and not is_coded and all(type(g) is not ColdGradient for g in update.gradients)

    def _slices(self, update: GroupUpdate, is_whole: bool) -> list[Slice]:
        nbytes = max(self.on_device.memory.whole_bytes, self._page_bytes) if is_whole else self._page_bytes
        return update.trainable.slices(update.active, nbytes)

    def fetch_ahead(self, groups: int | None = None) -> None:
        if not self._has_updated and self.on_device.memory.ahead_bytes and not self._results.are_lost:
            self.on_device.order.note()
            with self.on_device.apart():
                elsewhere = (of for of in self.trainables if of.group not in self.kept)
                slices = ((of, of.all_slices(self._page_bytes)) for of in islice(elsewhere, groups))
                self._ahead.fetch(slices, self._results.down_at)

    def _has_state_in_place(self, trainable: Trainable) -> bool:
        return not any(part.access.pages for part in trainable.all_slices(self._page_bytes))

    def _ahead_bytes(self, trainable: Trainable, part: Slice) -> int:
        """Return the bytes of a slot that gets the state of a slice early."""
        group = trainable.group
        only_state = self.on_device.updates_in_place(group) and group in self.on_device.staying_gradients
        return ahead_slice_bytes(trainable, part, only_state)

    def _slot_ahead(self, update: GroupUpdate, number: int, part: Slice) -> UpdateSlot | None:
        """Return a slot with the state of a slice of the update, and room for the rest, if that is on the device already."""
        if not all(update.active):
            return None
        only_state = self._is_in_place and not any(type(gradient) is ColdGradient for gradient in update.gradients)
        needed_bytes = ahead_slice_bytes(update.trainable, part, only_state)
        return self._ahead.take(update.trainable.group, number, needed_bytes)

    def give_back(self, then: Access | None = None) -> None:
        if then is not None:
            self._pager.lease(then)
        self.on_device.downloads.collect()
        self._results.release_arrived()
        if then is not None:
            self._pager.wait(then)

    def rejoin(self) -> None:
        unfix(gradient for _, gradient in self._read if gradient is not None)
        if self._read:
            self._wait_for_updates()
        self._read.clear()

    def _wait_for_updates(self, gradient: weakref.ref[torch.Tensor] | None = None) -> None:
        """Have the current stream wait for all updates, before a change of `gradient`."""
        device = self.on_device.device
        with contextlib.suppress(DeviceError):  # the next use of a failed device raises
            device.let_wait(device.current_stream(), device.record(self.on_device.updating))
        if gradient is not None and (alive := gradient()) is not None:
            unfix([alive])

    def pass_begins(self) -> None:
        with without_torch_functions():
            are_there = any(parameter.grad is gradient for parameter, gradient in self._read if gradient is not None)
        if are_there:  # this pass may add to them
            self.rejoin()
        self._read.clear()

    def show(self, group: int) -> None:
        self._results.show(group)

    def settle(self) -> None:
        """Wait until all results are in host memory.

        Raises:
            DeviceError: the device failed, now or since the last call.
            StateError: a codec cannot hold some of them.
        """
        self._ahead.invalidate()
        self.drain()
        self._results.check()

    def drain(self) -> None:
        self._results.wait_for_all()

    def end(self) -> None:
        """Note that all groups are updated. Only results that something waits for are in memory: [Note: a step goes on]"""
        self._results.send_rest()
        if self._results.awaited:
            self.settle()
            self._results.awaited.clear()
        self._results.check()
        if not self._results.in_flight:
            self._free_slots()
        self._has_updated = False
        self._ahead.begin_step()
        for _, gradient in self._read:
            if gradient is not None:
                fix([gradient], partial(self._wait_for_updates, weakref.ref(gradient)))
        super().end()

    def abandon(self) -> None:
        super().abandon()
        self.rejoin()
        with contextlib.suppress(DeviceError):  # a failed device keeps the memory until the process ends
            self._results.finish()
            self._free_slots()
            with self.on_device.apart():
                self._ahead.free()
        self._results.forget()

    # ------------------------------------------------------------------------------------------------------------------

    def _free_slots(self) -> None:
        with self.on_device.apart():
            self._ring.free()
            self._coded_there.free()
        self._has_updated = False

    def _free_ahead(self) -> int:
        self.settle()
        with self.on_device.apart():
            return self._ahead.free()

    def _update_on_device(
        self, update: GroupUpdate, part: Slice, access: Access, slot: UpdateSlot, is_there: bool
    ) -> Callable[[], None]:
        """Queue the update of a slice in a slot; `is_there`: the slot has its state. Return what sends its results."""
        storage = slot.storage
        if storage is None:
            raise InvariantError("a slice was to be updated in a slot without memory")
        self._pager.lease(access)
        self._results.release_arrived()
        self._pager.wait(access)
        started = time.monotonic()
        try:
            parts = parts_of(update, part, self.gradient_of, self._is_in_place, is_there)
            up = list(self._on_host(p for p in parts if p.copied_up))
            if up or not is_there:
                self.on_device.bring_up(storage, up, slot.last_use)
            self._coded_there.begin_slice(coded_in(update.trainable, part))
            self._views = {(p.place, p.begin): p.view(storage) for p in parts}
            run: list[Update] = []
            for piece in part.pieces:
                by_kernel = self._is_by_kernel(update.trainable, piece.parameter)
                run.append(self._prepare(update, piece.parameter, piece.begin, piece.end, by_kernel))
                self._place_others(run[-1])
            for proxy, works in self._proxies.each_with(self._update_by_kernels(run)):
                proxy.update(works)
            for one in run:
                self._store(one)
            self._results.send_unheld(update.trainable.group, self._coded_there.counts())
            found = self._on_host(p for p in parts if p.copied_down)
            down = [(memory, storage.read(at, memory.numel())) for at, memory in found]
            if self._is_in_place and access.pages:
                down += self._parameters(update.trainable, part)
            counts, self._counts = self._counts, []
        except BaseException:
            self._counts.clear()
            self._views.clear()
            self.on_device.finish()  # some of its copies may be in flight
            self._pager.release(access)
            raise
        self._views.clear()
        self._counters.updated(started, access.key)
        is_awaited = bool(access.pages) or not self._is_in_place
        return partial(self._results.send, update, access, slot, [*down, *counts], is_awaited)

    def _parameters(self, trainable: Trainable, part: Slice) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield a slice's parameters in host memory and in the image. [Note: what stays is updated there]"""
        for piece in part.pieces:
            place = trainable.places[piece.parameter].param
            if place.section.resident:
                continue
            here = self.on_device.parameter(place.section, place.slot)[piece.begin : piece.end].view(torch.uint8)
            for at, memory in self._on_host([SlicePart(place, piece.begin, piece.end, 0, False, True)]):
                yield memory, here[at : at + memory.numel()]

    def _access(self, trainable: Trainable, part: Slice) -> Access:
        """Return the access of a slice: its pages are used in their frames, but for those with state of other shapes."""
        access = self._accesses.get(part.access)
        if access is None:
            others = [place for piece in part.pieces for place in trainable.places[piece.parameter].others.values()]
            addressed = {page for place in others for page in place.pages(0, place.slot.spec.numel)}
            access = replace(part.access, in_frames=frozenset(part.access.pages) - addressed)
            self._accesses[part.access] = access
        return access

    def _is_by_kernel(self, trainable: Trainable, number: int) -> bool:
        places, settings = trainable.places[number], trainable.settings[number]
        if self._kernel is not None or not places.coded:
            return self._kernel is not None
        return is_fused(self._proxies.kind(settings), self._proxies.settings(settings)) and is_rounded(places)

    def _widen(self, gradient: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return gradient.to(dtype)

    def _tensors_of(self, places: ParameterLocations, begin: int, end: int) -> PieceTensors:
        shape = (-1,) if places.may_cut else places.param.slot.spec.shape
        state = {key: self._there(place, begin, end).view(shape) for key, place in places.state.items()}
        return self._there(places.param, begin, end).view(shape), state, self._others(places)

    def _update_by_kernels(self, run: list[Update]) -> list[Work]:
        """Queue the updates by swapper's AdamW. Return the others. [Note: fused AdamW], one_pass.py"""
        if self._kernel is not None:
            self._kernel.update(run, self._proxies.settings)
            return []
        for one in run:
            if one.by_kernel:
                update_by_kernel(one, self._proxies.settings(one.work.settings))
        return [one.work for one in run if not one.by_kernel]

    def _counts_there(self, settings: int, by_kernel: bool) -> bool:
        """Return True if counters of a group are counted on the device."""
        return not by_kernel and self._proxies.counts_on_device(settings)

    def _place_others(self, update: Update) -> None:
        """Replace state of other shapes by copies on the device. A counter is copied only if a kernel counts it: no wait."""
        device, state = self.on_device.device.device, update.work.state
        for key in update.places.others:
            value = state.get(key)
            if isinstance(value, torch.Tensor) and value.dim():
                state[key] = value.to(device)
            elif isinstance(value, torch.Tensor) and self._counts_there(update.work.settings, update.by_kernel):
                state[key] = torch.full((), value.item(), dtype=value.dtype, device=device)

    def _is_unchanged(self, stored: torch.Tensor, value: torch.Tensor) -> bool:
        return False  # comparing would wait for the kernels

    def _keep(self, update: Update, key: str, value: torch.Tensor) -> None:
        stored = update.state_tensors[key]
        is_counter = key in update.places.others and not stored.dim()  # that of a parameter of one number is as small
        if not is_counter or not self._counts_there(update.work.settings, update.by_kernel):
            super()._keep(update, key, value)
        else:  # it comes with the slice: reading it now would wait for the kernels
            self._counts.append((stored.view(1).view(torch.uint8), value.view(1).view(torch.uint8)))

    def _there(self, place: TensorLocation, begin: int, end: int) -> torch.Tensor:
        """Return elements [begin, end) of a tensor of the slice, flat: in the slot, or in the state that stays on the device."""
        view = self._views.get((place, begin))
        if view is None and self._is_in_place and place.section.plan.family == "param":
            return self.on_device.parameter(place.section, place.slot)[begin:end]
        return self.kept.view(place.section.plan.group, place)[begin:end] if view is None else view

    def _others(self, places: ParameterLocations) -> dict[str, torch.Tensor]:
        if not places.state_stays:
            return super()._others(places)
        return self.kept.others(places.param.section.plan.group, places)

    def _on_host(self, parts: Iterable[SlicePart]) -> Iterator[tuple[int, torch.Tensor]]:
        return pieces_on_host(parts, self.on_device.host)

    def refresh_masters(self, trainable: Trainable, before: Mapping[str, torch.Tensor]) -> None:
        self._ahead.invalidate()
        self._results.wait_for(trainable.group)
        if trainable.group not in self.kept:
            super().refresh_masters(trainable, before)
            return
        self.kept.ready([trainable.group])
        for part in trainable.all_slices(self._page_bytes):
            changed = tuple(page for page in part.access.pages if page in part.access.writes)  # without gradients
            with self._pager.leased(Access(None, changed)):
                try:
                    self._refresh_kept(trainable, part, before)
                finally:
                    self._views.clear()
                    self._coded_there.free()
                    self.on_device.finish()

    @torch.no_grad()
    def _refresh_kept(self, trainable: Trainable, part: Slice, before: Mapping[str, torch.Tensor]) -> None:
        self._coded_there.begin_slice(coded_in(trainable, part))
        slot = self.on_device.new_storage(device_slice_bytes(trainable, part))
        try:
            for piece in part.pieces:
                places, begin, end = trainable.places[piece.parameter], piece.begin, piece.end
                if not places.has_master:
                    continue
                param = SlicePart(places.param, begin, end, 0, True, False)
                self.on_device.bring_up(slot, list(self._on_host([param])))
                new = self._views[places.param, begin] = param.view(slot)
                if places.has_coded_master:
                    self._coded_there.refresh_master(places, begin, end, before[places.name], end - begin)
                else:
                    master = self._there(places.state["master"], begin, end)
                    master.copy_(torch.where(master.to(new.dtype) == new, master, new.to(master.dtype)))
        finally:
            slot.free()
        if (found := self._coded_there.counts()) is not None and (error := found[1](found[0].cpu())) is not None:
            raise error

    def _gradient_part(self, update: GroupUpdate, number: int, begin: int, end: int) -> torch.Tensor:
        """Return elements of a gradient, clipped: in the slot, or in the gradient that stays on the device."""
        here = update.gradients[number]
        if here is not None and type(here) is not ColdGradient:
            return here.detach().reshape(-1)[begin:end]
        grad, content = self.gradient_of(update.trainable.parameters[number])
        return content.of(self._views[grad, begin])
