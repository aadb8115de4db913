"""Copies gradients from an accelerator to host memory or NVMe, as autograd accumulates them.

`parameter.grad` is a ColdGradient (cold_grad.py) in both cases, because torch allows a gradient on the parameter's device
only. For a gradient that is added to an earlier one, that one is copied up in pieces, and added there: Python waits for no
kernel. A location is read only after all copies to it have arrived.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn

from swapper.device.device_storage import DEVICE_ALIGNMENT_BYTES
from swapper.paging.pager import Pager
from swapper.train.device.train_device import EARLIER_SHARE, PAGES_ON_THEIR_WAY, TrainingDevice
from swapper.train.gradients.cold_grad import GradientMeta, GradientPart, GradientSlot
from swapper.train.gradients.paged_grads import PagedGradients
from swapper.train.layout.slices import TensorLocation

MAX_PIECE_BYTES = 64 << 20
"""Of an earlier gradient that is on the device at once, to be added: a choice."""


class DeviceGradients(PagedGradients):
    """Owns the gradients' pages and slots, in memory and on NVMe.

    Args:
        places: for each trainable parameter its qualified name and its gradient's location.
    """

    def __init__(
        self, places: list[tuple[str, nn.Parameter, TensorLocation]], pager: Pager, on_device: TrainingDevice
    ) -> None:
        self._on_device = on_device
        self._downloads = on_device.downloads
        self._pages_leased = 0
        self._in_flight: Counter[int] = Counter()  # by id of the parameter: parts of its gradient
        super().__init__(places, pager)

    def settle(self, parameters: Sequence[nn.Parameter] | None = None) -> None:
        if parameters is None:
            self._downloads.finish()
            return
        while any(self._in_flight[id(parameter)] for parameter in parameters):
            self._downloads.wait_for_oldest()

    def have_arrived(self, parameters: Sequence[nn.Parameter]) -> bool:
        self._downloads.collect()
        return not any(self._in_flight[id(parameter)] for parameter in parameters)

    def _stand_in(self, slot: GradientSlot) -> torch.Tensor:
        spec = slot.place.slot.spec
        here = torch.empty((), dtype=spec.dtype, device=self._on_device.device.device).expand(spec.shape)
        here.swapper_where = "off the device"  # type: ignore[attr-defined]
        return here

    @torch.no_grad()
    def _move(self, slot: GradientSlot, gradient: torch.Tensor, adding: bool) -> None:
        self._on_device.gradient_came(id(slot.parameter))
        if adding:
            self.settle([slot.parameter])  # copies of an earlier backward
        before, slot.content = slot.content, GradientMeta()
        flat = gradient.view(-1)
        for part in self._parts(slot):
            self._lease(slot, part)
            self._in_flight[id(slot.parameter)] += 1
            landing = _Landing(slot, partial(self._landed, slot, part))
            try:
                if part.end > part.begin:
                    source = flat[part.begin : part.end]
                    memory = self._on_device.host.of(part.page)[part.at : part.at + source.nbytes]
                    if adding and not before.zero:
                        self._add(source, memory, before)
                    landing.began()
                    self._downloads.send([(memory, source.view(torch.uint8))], landing.ended, landing.failed)
            finally:
                landing.ended()
        slot.content.norms = {kind: torch.linalg.vector_norm(gradient, kind) for kind in self._norm_types}

    def _add(self, gradient: torch.Tensor, memory: torch.Tensor, before: GradientMeta) -> None:
        """Add an earlier gradient, in `memory` on the host, to `gradient` on the device; `before` is its metadata."""
        nbytes = min(
            max(self._downloads.most_bytes // EARLIER_SHARE, DEVICE_ALIGNMENT_BYTES), MAX_PIECE_BYTES, memory.numel()
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
        while self._pages_leased >= PAGES_ON_THEIR_WAY:
            self._downloads.wait_for_oldest()
        super()._lease(slot, part)
        self._pages_leased += part.access is not None

    def _release(self, part: GradientPart) -> None:
        self._pages_leased -= part.access is not None
        super()._release(part)


class _Landing:
    """Calls `over` when all copies of a part of a gradient are over: its page is leased until then.

    Args:
        slot: of the gradient.
        over: the function to call.
    """

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
