"""Copies gradients from an accelerator to host memory or NVMe, as autograd accumulates them.

`parameter.grad` is a ColdGradient (cold_grad.py) in both cases, because torch allows a gradient on the parameter's device
only. A gradient that is added to an earlier one is copied in pieces to separate memory, and added on the CPU. A location
is read only after all copies to it have arrived.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn

from swapper.device.registered_memory import STAGING_BYTES
from swapper.paging.pager import Pager
from swapper.train.device.train_device import PAGES_ON_THEIR_WAY, TrainingDevice
from swapper.train.gradients.cold_grad import GradientMeta, GradientPart, GradientSlot
from swapper.train.gradients.paged_grads import PagedGradients
from swapper.train.layout.slices import TensorLocation

PIECE_BYTES = STAGING_BYTES // 4
"""Bytes. Gradients that are added are copied in pieces of this size."""


class DeviceGradients(PagedGradients):
    """Owns the gradients' pages and slots, in memory and on NVMe.

    Args:
        places: for each trainable parameter its qualified name and its gradient's location.
    """

    def __init__(
        self, places: list[tuple[str, nn.Parameter, TensorLocation]], pager: Pager, on_device: TrainingDevice
    ) -> None:
        self._host = on_device.host
        self._device = on_device.device.device
        self._gradient_came = on_device.gradient_came
        self._downloads = on_device.downloads
        self._free = list(on_device.host.new_staging().view(-1, PIECE_BYTES))
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
        here = torch.empty((), dtype=spec.dtype, device=self._device).expand(spec.shape)
        here.swapper_where = "off the device"  # type: ignore[attr-defined]
        return here

    @torch.no_grad()
    def _move(self, slot: GradientSlot, gradient: torch.Tensor, adding: bool) -> None:
        self._gradient_came(id(slot.parameter))
        before, slot.content = slot.content, GradientMeta()
        if not adding:
            slot.content.norms = {kind: torch.linalg.vector_norm(gradient, kind) for kind in self._norm_types}
        flat = gradient.view(-1)
        elements = PIECE_BYTES // flat.element_size()
        for part in self._parts(slot):
            self._lease(slot, part)
            self._in_flight[id(slot.parameter)] += 1
            landing = _Landing(slot, partial(self._landed, slot, part))
            try:
                if adding:
                    for begin in range(part.begin, part.end, elements):
                        end = min(begin + elements, part.end)
                        there = part.view[begin - part.begin : end - part.begin]
                        self._add(there, flat[begin:end], before, landing)
                elif part.end > part.begin:
                    self._put(part, flat[part.begin : part.end], landing)
            finally:
                landing.ended()

    def _put(self, part: GradientPart, source: torch.Tensor, landing: _Landing) -> None:
        memory = self._host.of(part.page)[part.at : part.at + source.nbytes]
        landing.began()
        self._downloads.send([(memory, source.view(torch.uint8))], landing.ended, landing.failed)

    def _add(self, there: torch.Tensor, source: torch.Tensor, before: GradientMeta, landing: _Landing) -> None:
        """Add `source` to `there` when it has arrived; `before` is the metadata of the content there."""
        while not self._free:
            self._downloads.wait_for_oldest()
        piece = self._free.pop()
        memory = piece[: source.nbytes]

        def arrived() -> None:
            with torch.inference_mode(False), torch.no_grad():
                there.copy_(memory.view(there.dtype).add_(before.of(there)))
            self._free.append(piece)
            landing.ended()

        def lost(error: BaseException) -> None:
            self._free.append(piece)
            landing.failed(error)

        landing.began()
        self._downloads.send([(memory, source.view(torch.uint8))], arrived, lost)

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
