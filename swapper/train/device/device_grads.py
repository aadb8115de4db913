"""Gradients of a model that runs on an accelerator: as autograd accumulates one there, it goes down to its place.

That is in host memory, or on NVMe page by page; `parameter.grad` is a ColdGradient (cold_grad.py) in both cases, because torch has
a parameter's gradient on the parameter's device only. What comes on top of an earlier one is added on the CPU once the copy has
arrived, in pieces, through memory of its own. Nothing looks at a place before what is on its way to it has arrived.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn

from swapper.device.registered_frames import STAGING_BYTES
from swapper.paging.pager import Pager
from swapper.train.device.train_device import PAGES_ON_THEIR_WAY, TrainingDevice
from swapper.train.gradients.cold_grad import GradientMeta, GradientPart, GradientSlot
from swapper.train.gradients.paged_grads import PagedGradients
from swapper.train.layout.slices import TensorLocation

PIECE_BYTES = STAGING_BYTES // 4
"""What is to be added comes down through pieces of this size."""


class DeviceGradients(PagedGradients):
    """Owns the gradients' places, in memory and on NVMe.

    Args:
        places: for each trainable parameter its qualified name and the place of its gradient.
        pager: what leases go to.
        on_device: brings gradients down.
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
        self._on_their_way: Counter[int] = Counter()  # by id of the parameter: parts of its gradient
        super().__init__(places, pager)

    def settle(self, parameters: Sequence[nn.Parameter] | None = None) -> None:
        if parameters is None:
            self._downloads.finish()
            return
        while any(self._on_their_way[id(parameter)] for parameter in parameters):
            self._downloads.wait_for_oldest()

    def have_arrived(self, parameters: Sequence[nn.Parameter]) -> bool:
        self._downloads.collect()
        return not any(self._on_their_way[id(parameter)] for parameter in parameters)

    def _stand_in(self, home: GradientSlot) -> torch.Tensor:
        spec = home.place.slot.spec
        here = torch.empty((), dtype=spec.dtype, device=self._device).expand(spec.shape)
        here.swapper_where = "off the device"  # type: ignore[attr-defined]
        return here

    @torch.no_grad()
    def _move(self, home: GradientSlot, gradient: torch.Tensor, adding: bool) -> None:
        self._gradient_came(id(home.parameter))
        before, home.content = home.content, GradientMeta()
        if not adding:
            home.content.norms = {kind: torch.linalg.vector_norm(gradient, kind) for kind in self._norm_types}
        flat = gradient.view(-1)
        elements = PIECE_BYTES // flat.element_size()
        for part in self._parts(home):
            self._lease(home, part)
            self._on_their_way[id(home.parameter)] += 1
            landing = _Landing(home, partial(self._landed, home, part))
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
        """Have `source` added to what will be `there` by then; `before` says how that is to be read."""
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

    def _landed(self, home: GradientSlot, part: GradientPart) -> None:
        self._on_their_way[id(home.parameter)] -= 1
        self._release(part)

    def _lease(self, home: GradientSlot, part: GradientPart) -> None:
        while self._pages_leased >= PAGES_ON_THEIR_WAY:
            self._downloads.wait_for_oldest()
        super()._lease(home, part)
        self._pages_leased += part.access is not None

    def _release(self, part: GradientPart) -> None:
        self._pages_leased -= part.access is not None
        super()._release(part)


class _Landing:
    """What waits until all copies of a part of a gradient are over: the lease of its page.

    Args:
        home: whose gradient it is.
        over: to be called then.
    """

    def __init__(self, home: GradientSlot, over: Callable[[], None]) -> None:
        self._home = home
        self._over = over
        self._open = 1  # more of them may come

    def began(self) -> None:
        self._open += 1

    def ended(self) -> None:
        """A copy is over; or no more of them come."""
        self._open -= 1
        if self._open == 0:
            self._over()

    def failed(self, error: BaseException) -> None:
        self._home.content.fail(error)
        self.ended()
