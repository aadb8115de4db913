"""Copies gradients from an accelerator to host memory or NVMe, as autograd accumulates them.

`parameter.grad` is a ColdGradient (cold_grad.py) in both cases, because torch allows a gradient on the parameter's device
only. A location is read only after all copies to it have arrived.

[Note: sums] If a step has several backwards, a gradient stays on the device, as far as there is memory, and the next ones
are added to it there: it is copied once, in the step's last backward. Nothing tells which one that is: it is the one of
the same number as in the step before. If a step ends earlier, its sums are copied then. If it goes on, or without
memory, the earlier gradient is copied up in pieces and added there. Python waits for no kernel in any case.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from swapper.device.device_memory import DEVICE_ALIGNMENT_BYTES
from swapper.device.model_device import EARLIER_SHARE, MAX_EARLIER_BYTES
from swapper.paging.pager import Pager
from swapper.runtime.interrupts import defer_signals
from swapper.train.gradients.autograd_grads import Hook
from swapper.train.gradients.cold_grad import GradientMeta, GradientPart, GradientSlot, is_part
from swapper.train.gradients.paged_grads import PagedGradients
from swapper.train.groups.train_device import StreamOrder, TrainingDevice
from swapper.train.layout.slices import TensorLocation


class DeviceGradients(PagedGradients):
    """Owns the gradients' pages and slots, in memory and on NVMe.

    Args:
        places: for each trainable parameter its qualified name and its gradient's location.
    """

    def __init__(
        self,
        places: list[tuple[str, nn.Parameter, TensorLocation]],
        pager: Pager,
        finish_step: Callable[[], None],
        on_device: TrainingDevice,
    ) -> None:
        self._on_device = on_device
        self._downloads = on_device.downloads
        self._pages_leased = 0
        # By id of the parameter:
        self._in_flight: Counter[int] = Counter()  # parts of its gradient
        self._sums: dict[int, torch.Tensor] = {}  # its gradient, which stays for now
        self._sum_bytes = 0
        self._order = StreamOrder(on_device.device)  # of the streams that add them up
        self._came: Counter[int] = Counter()  # backwards of this step that had a gradient of it
        self._usual: Counter[int] = Counter()  # backwards of the last step
        super().__init__(places, pager, finish_step)

    def _hook(self, slot: GradientSlot, act: Callable[[PagedGradients, GradientSlot], None]) -> Hook:
        hook, alone = super()._hook(slot, act), self._on_device.alone

        def hook_alone(gradient: torch.Tensor) -> None:
            with alone:
                hook(gradient)

        return hook_alone

    def remove(self) -> None:
        super().remove()
        self._sums.clear()
        self._sum_bytes = 0

    def settle(self, parameters: Sequence[nn.Parameter] | None = None) -> None:
        self._copy_sums(self._sums if parameters is None else map(id, parameters))
        if parameters is None:
            self._downloads.finish()
            return
        while any(self._in_flight[id(parameter)] for parameter in parameters):
            self._downloads.wait_for_oldest()

    def have_arrived(self, parameters: Sequence[nn.Parameter]) -> bool:
        self._copy_sums(map(id, parameters))
        self._downloads.collect()
        return not any(self._in_flight[id(parameter)] for parameter in parameters)

    def before_step(self) -> None:
        self._copy_sums(self._sums)
        super().before_step()

    def _stand_in(self, slot: GradientSlot) -> torch.Tensor:
        spec = slot.place.slot.spec
        here = torch.empty((), dtype=spec.dtype, device=self._on_device.shown_on).expand(spec.shape)
        here.swapper_where = "off the device"  # type: ignore[attr-defined]
        return here

    @torch.no_grad()
    def _move(self, slot: GradientSlot, gradient: torch.Tensor, adding: bool) -> None:
        key = id(slot.parameter)
        self._on_device.gradient_came(key)
        gradient = gradient.to(self._on_device.device.device)  # one that the user has assigned to a shard
        if adding and slot.content.zero:  # zeros all the same: torch makes 0 of 0 and -0
            gradient, adding = slot.content.of(gradient).add_(gradient), False
        earlier, here = self._take_sum(key), slot.content if adding else None
        slot.content = GradientMeta()
        if here is None:
            self._usual[key], self._came[key] = self._came[key], 0
        elif earlier is not None:
            gradient, here = here.of(earlier).add_(gradient), None
        self._came[key] += 1
        has_room = self._sum_bytes + gradient.nbytes <= self._on_device.memory.sum_bytes
        if here is None and has_room and self._came[key] < self._usual[key]:
            self._sums[key] = gradient.clone() if is_part(gradient) else gradient
            self._sum_bytes += gradient.nbytes
            self._order.note()
        else:
            self._copy(slot, gradient, here, is_summed=earlier is not None)

    # --- gradients that are added up on the device: [Note: sums] ------------------------------------------------------

    def _take_sum(self, key: int) -> torch.Tensor | None:
        """Return the sum of a parameter, by its id, which is not one any more."""
        found = self._sums.pop(key, None)
        self._sum_bytes -= 0 if found is None else found.nbytes
        return found

    def _copy_sums(self, keys: Iterable[int]) -> None:
        """Copy the sums of these parameters, by id, to their locations."""
        for key in [key for key in keys if key in self._sums]:
            slot, changes = self._slots[key], self._slots[key].content.changes
            self._order.follow()
            with defer_signals, torch.no_grad():
                found = self._take_sum(key)
                if found is None:
                    continue
                try:
                    self._copy(slot, found, None, is_summed=True)
                except BaseException as error:
                    slot.content.fail(error)
                    raise
                slot.content = replace(slot.content, changes=changes, norms={} if changes else slot.content.norms)

    def _whole(self, slot: GradientSlot) -> torch.Tensor:
        here = self._sums.get(id(slot.parameter))
        return super()._whole(slot) if here is None else slot.content.of(here)

    def _forget(self, slots: Iterable[GradientSlot]) -> None:
        slots = list(slots)
        for slot in slots:
            self._take_sum(id(slot.parameter))
        super()._forget(slots)

    # ------------------------------------------------------------------------------------------------------------------

    def _copy(self, slot: GradientSlot, gradient: torch.Tensor, before: GradientMeta | None, is_summed: bool) -> None:
        """Copy a gradient to its location, added to the one that is there, if `before` is that one's metadata.

        `is_summed`: memory for it is reserved apart from that of copies.
        """
        if before is not None:
            self.settle([slot.parameter])  # copies of an earlier backward
        flat = gradient.view(-1)
        for part in map(_in_frame, self._parts(slot)):
            self._lease(slot, part)
            self._in_flight[id(slot.parameter)] += 1
            landing = _Landing(slot, partial(self._landed, slot, part))
            try:
                if part.end > part.begin:
                    source = flat[part.begin : part.end]
                    memory = self._on_device.host.of(part.page)[part.at : part.at + source.nbytes]
                    if before is not None:
                        self._add(source, memory, before)
                    landing.began()
                    pieces = [(memory, source.view(torch.uint8))]
                    self._downloads.send(pieces, landing.ended, landing.failed, is_held=not is_summed)
            finally:
                landing.ended()
        slot.content.norms = {kind: torch.linalg.vector_norm(gradient, kind) for kind in self._norm_types}

    def _add(self, gradient: torch.Tensor, memory: torch.Tensor, before: GradientMeta) -> None:
        """Add an earlier gradient, in `memory` on the host, to `gradient` on the device; `before` is its metadata."""
        nbytes = min(
            max(self._downloads.max_bytes // EARLIER_SHARE, DEVICE_ALIGNMENT_BYTES), MAX_EARLIER_BYTES, memory.numel()
        )
        nbytes -= nbytes % gradient.element_size()
        storage = self._on_device.new_storage(
            nbytes, "an earlier gradient", "say gradients='device', or add fewer of them"
        )
        try:
            for begin in range(0, memory.numel(), nbytes):
                piece = memory[begin : begin + nbytes]
                self._on_device.bring_up(storage, [(0, piece)])
                earlier = storage.read(0, piece.numel()).view(gradient.dtype)
                first = begin // gradient.element_size()
                gradient[first : first + earlier.numel()].add_(before.of(earlier))
        finally:
            storage.free()

    def _landed(self, slot: GradientSlot, part: GradientPart) -> None:
        self._in_flight[id(slot.parameter)] -= 1
        self._release(part)

    def _lease(self, slot: GradientSlot, part: GradientPart) -> None:
        while self._pages_leased >= self._on_device.max_pages:
            self._downloads.wait_for_oldest()
        super()._lease(slot, part)
        self._pages_leased += part.access is not None

    def _release(self, part: GradientPart) -> None:
        self._pages_leased -= part.access is not None
        super()._release(part)


def _in_frame(part: GradientPart) -> GradientPart:
    """Return the part with an access to its frame alone."""
    return part if part.access is None else replace(part, access=replace(part.access, in_frames=part.access.writes))


class _Landing:
    """Calls `over` when all copies of a part of a gradient are over: its page is leased until then."""

    def __init__(self, slot: GradientSlot, over: Callable[[], None]) -> None:
        self._slot = slot
        self._over = over
        self._open = 1  # until all copies have been queued

    def began(self) -> None:
        self._open += 1

    def ended(self) -> None:
        """End a copy, or the queueing of copies."""
        self._open -= 1
        if self._open == 0:
            self._over()

    def failed(self, error: BaseException) -> None:
        self._slot.content.fail(error)
        self.ended()
