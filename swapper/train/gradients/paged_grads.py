"""Keeps gradients on NVMe: each is written to its pages as autograd accumulates it.

A parameter's `grad` is then a `ColdGradient` (cold_grad.py). Before autograd accumulates into it again, `grad` is
removed, so that autograd makes a tensor of its own. The content of the pages is added to that, so its norm is the whole
gradient's, and the sum goes to the pages.

The optimizer's sweep leases the pages with the state, and applies clipping and unscaling. When `zero_grad` releases the
ColdGradient, its pages are discarded, and unwritten ones are never written.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import nn

from swapper.paging.pager import Pager
from swapper.paging.schedule import Access
from swapper.runtime.free_memory import note_freed
from swapper.runtime.interrupts import defer_signals
from swapper.tensors.torch_private import after_backward, backward_task
from swapper.train.gradients.autograd_grads import AccumulationHooks, Hook, check_dense
from swapper.train.gradients.cold_grad import (
    Change,
    ColdGradient,
    GradientMeta,
    GradientPart,
    GradientSlot,
    behind,
    is_part,
    without_data,
)
from swapper.train.layout.slices import TensorLocation

USUAL_NORM = 2.0  # the default of clip_grad_norm_


class PagedGradients:
    """Owns the gradients' pages: their content, and whether it is needed.

    Args:
        places: for each trainable parameter its qualified name and its gradient's location.
        pager: makes the leases.
        finish_step: makes an open step use its gradients.
    """

    def __init__(
        self, places: list[tuple[str, nn.Parameter, TensorLocation]], pager: Pager, finish_step: Callable[[], None]
    ) -> None:
        self._pager = pager
        self._finish_step = finish_step
        self._slots = {id(parameter): GradientSlot(name, parameter, place) for name, parameter, place in places}
        self._by_name = {slot.name: slot for slot in self._slots.values()}
        self._stashed: list[GradientSlot] = []  # whose ColdGradient was removed in this backward
        # ColdGradients that died, as by zero_grad, by slot; recorded anywhere, processed when a gradient arrives.
        self._released: list[tuple[GradientSlot, weakref.ref[torch.Tensor]]] = []
        self._users: dict[int, set[int]] = {}  # by index of a page: ids of the parameters whose gradients it has
        self._norm_types: dict[float, None] = {USUAL_NORM: None}  # computed for each as it is written
        self._hooks = AccumulationHooks()
        for slot in self._slots.values():
            if slot.parameter.grad is not None and not is_part(slot.parameter.grad):
                self._take(slot)
            before, after = self._hook(slot, PagedGradients._stash), self._hook(slot, PagedGradients._take)
            self._hooks.add(slot.parameter, before, after)

    def remove(self) -> None:
        self._hooks.remove()
        for slot in self._slots.values():
            if type(slot.parameter.grad) is ColdGradient:
                slot.parameter.grad = None

    def check(self, parameter: nn.Parameter, name: str, gradient: ColdGradient) -> None:
        """Raise StateError unless the pages hold `gradient`, the parameter's own."""
        slot = self._slots.get(id(parameter))
        if slot is None or not slot.stands_for(gradient):
            raise without_data(name, gradient)

    # --- for the sweep and clipping -----------------------------------------------------------------------------------

    def part(self, parameter: nn.Parameter, begin: int, end: int) -> torch.Tensor:
        """Return elements [begin, end) of a gradient whose pages are leased, clipped; do not change them."""
        slot = self._slots[id(parameter)]
        slot.check_whole()
        return slot.content.of(slot.place.section.tensor(slot.place.slot).view(-1)[begin:end])

    def where(self, parameter: nn.Parameter) -> tuple[TensorLocation, GradientMeta]:
        """Return the location of a gradient, and its metadata."""
        slot = self._slots[id(parameter)]
        slot.check_whole()
        return slot.place, slot.content

    @torch.no_grad()
    def norm(self, slot: GradientSlot, norm_type: float) -> torch.Tensor:
        """Return a gradient's norm, computed as the gradient was written, or now by reading it.

        From then on it is computed for all as they are written.
        """
        slot.check_whole()
        self._norm_types[norm_type] = None
        if norm_type not in slot.content.norms:
            slot.content.norms[norm_type] = torch.linalg.vector_norm(self._whole(slot), norm_type)
        return slot.content.norms[norm_type]

    @torch.no_grad()
    def find_finite(self, slots: Sequence[GradientSlot]) -> None:
        """Find out at once which of these gradients' norms are finite: one wait for a device, not one for each."""
        asked = [slot for slot in slots if slot.content.finite is None and USUAL_NORM in slot.content.norms]
        if asked:
            norms = torch.stack([slot.content.norms[USUAL_NORM].isfinite() for slot in asked])
            for slot, is_finite in zip(asked, norms.tolist(), strict=True):
                slot.content.finite = True if is_finite else None  # squares may overflow

    @torch.no_grad()
    def is_finite(self, slot: GradientSlot) -> bool:
        """Return True if all of its elements are finite."""
        slot.check_whole()
        known = slot.content.norms.get(USUAL_NORM)
        if slot.content.finite is None and known is not None and bool(known.isfinite()):
            slot.content.finite = True
        if slot.content.finite is None:
            slot.content.finite = bool(torch.isfinite(self._whole(slot)).all())
        return slot.content.finite

    def change(self, slot: GradientSlot, change: Change) -> None:
        """Record a change of its elements, for when it is used."""
        self._finish_update()
        slot.check_whole()
        slot.content = GradientMeta(slot.content.zero, (*slot.content.changes, change))

    def zero(self, slot: GradientSlot) -> None:
        self._finish_update()
        slot.content = GradientMeta(zero=True)
        self._forget([slot])

    def _finish_update(self) -> None:
        """Finish an open step before a gradient changes that it may use."""
        if backward_task() == -1:  # in a backward no step is open that uses the gradient
            self._finish_step()

    def _whole(self, slot: GradientSlot) -> torch.Tensor:
        """Return a gradient in memory, unchanged."""
        at = slot.place.slot
        whole = torch.empty(at.spec.shape, dtype=at.spec.dtype, device="cpu")
        flat = whole.view(-1)
        for view, begin, end in self._pages(slot):
            flat[begin:end] = slot.content.of(view)
        return whole

    def settle(self, parameters: Sequence[nn.Parameter] | None = None) -> None:
        """Wait for gradients in flight, these or all, before their locations are read."""

    def have_arrived(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Return True if `settle` would not wait for these gradients."""
        return True

    def store_assigned(self, parameters: Sequence[nn.Parameter], gradients: Sequence[torch.Tensor | None]) -> None:
        """Copy gradients of these parameters that the user has assigned to their locations, before an update."""
        for parameter, gradient in zip(parameters, gradients, strict=True):
            slot = self._slots.get(id(parameter))
            if slot is None or gradient is None or type(gradient) is ColdGradient:
                continue
            with defer_signals:
                self.forget_released()
                slot.here, slot.content = None, GradientMeta()
                self._move(slot, gradient.detach().contiguous(), adding=False)

    def before_step(self) -> None:
        """Fill every gradient's pages that the sweep leases."""
        self.fill_zeroed(slot.parameter for slot in self._slots.values())

    def fill_zeroed(self, parameters: Iterable[nn.Parameter]) -> None:
        """Fill the pages of gradients that were zeroed and did not arrive again, before an update reads them."""
        for parameter in parameters:
            slot = self._slots.get(id(parameter))
            if slot is not None and slot.content.zero and type(slot.parameter.grad) is ColdGradient:
                for view, _, _ in self._pages(slot):
                    view.zero_()
                slot.content.zero = False

    # --- for relayout -------------------------------------------------------------------------------------------------

    def present(self) -> list[str]:
        self.restore()
        found = []
        for slot in self._slots.values():
            gradient = slot.parameter.grad
            if type(gradient) is ColdGradient:
                self.check(slot.parameter, slot.name, gradient)
                found.append(slot.name)
        return found

    def content(self, name: str) -> GradientMeta:
        """Return a gradient's metadata."""
        return self._by_name[name].content

    def parts(self, name: str) -> Iterator[torch.Tensor]:
        """Yield the parts of a gradient in order, flat, in host memory: to be read, or to be filled if there is none."""
        for view, _, _ in self._pages(self._by_name[name]):
            yield view

    def present_again(self, name: str, content: GradientMeta) -> None:
        """Restore the parameter's gradient from its `parts` and `content`."""
        slot = self._by_name[name]
        slot.content = content
        slot.parameter.grad = self._make_cold(slot)

    # --- as autograd accumulates --------------------------------------------------------------------------------------

    def restore(self) -> None:
        """Restore the earlier gradient of parameters that got none in a backward."""
        while self._stashed:
            slot = self._stashed.pop()
            if slot.stash is not None and slot.parameter.grad is None:
                slot.parameter.grad = slot.stash
            slot.stash = None

    def _hook(self, slot: GradientSlot, act: Callable[[PagedGradients, GradientSlot], None]) -> Hook:
        owner, key = weakref.ref(self), id(slot.parameter)

        def hook(_: torch.Tensor) -> None:
            gradients = owner()
            if gradients is not None:
                act(gradients, gradients._slots[key])

        return hook

    def _stash(self, slot: GradientSlot) -> None:
        """Move the earlier gradient out of autograd's way, before one is accumulated."""
        if not slot.stands_for(slot.parameter.grad):
            slot.accumulation.begin()
            return
        if not self._stashed:
            after_backward(self.restore)
        self._stashed.append(slot)
        slot.stash, slot.parameter.grad = slot.parameter.grad, None

    def _take(self, slot: GradientSlot) -> None:
        """Move the parameter's gradient to its pages, added to the earlier one; not the user's own, nor one that has a graph.

        Raises:
            IoError: a page cannot be leased. The gradient counts as present, and raises until it is zeroed.
        """
        gradient = slot.parameter.grad
        if gradient is None or type(gradient) is ColdGradient or slot.accumulation.was_there(gradient):
            return
        if gradient.requires_grad:
            self._leave_with_graph(slot, gradient)
            return
        with defer_signals:
            self._take_held(slot, behind(gradient))

    @torch.enable_grad()
    def _leave_with_graph(self, slot: GradientSlot, gradient: torch.Tensor) -> None:
        """Leave `gradient` autograd's own, added to the earlier one: a penalty on it must reach the parameters."""
        if slot.stash is not None:
            slot.check_whole()
            slot.parameter.grad = self._whole(slot).to(gradient.device) + gradient
            slot.stash = None

    def _take_held(self, slot: GradientSlot, gradient: torch.Tensor) -> None:
        check_dense(slot.name, gradient)
        self.forget_released()
        note_freed(gradient.nbytes)
        before = slot.stash
        if before is None:
            slot.here, slot.content = None, GradientMeta()
        try:
            slot.check_whole()
            self._move(slot, gradient.detach().contiguous(), adding=before is not None)
        except BaseException as error:
            slot.content.fail(error)
            raise
        finally:
            slot.parameter.grad, slot.stash = before if before is not None else self._make_cold(slot), None

    @torch.no_grad()
    def _move(self, slot: GradientSlot, gradient: torch.Tensor, adding: bool) -> None:
        flat = gradient.view(-1)
        for view, begin, end in self._pages(slot):
            part = flat[begin:end]
            if adding:
                part.add_(slot.content.of(view))
            view.copy_(part)
        norms = {norm_type: torch.linalg.vector_norm(gradient, norm_type) for norm_type in self._norm_types}
        is_finite = bool(norms[USUAL_NORM].isfinite()) or bool(torch.isfinite(gradient).all())  # squares may overflow
        slot.content = GradientMeta(norms=norms, finite=is_finite)

    def _make_cold(self, slot: GradientSlot) -> torch.Tensor:
        here = self._stand_in(slot)
        here.__class__ = ColdGradient
        here.swapper_name = slot.name  # type: ignore[attr-defined]
        slot.here = weakref.ref(here, lambda died: self._released.append((slot, died)))
        here.swapper_gradient = _finder(weakref.ref(self), id(slot.parameter), slot.here)  # type: ignore[attr-defined]
        return here

    def _stand_in(self, slot: GradientSlot) -> torch.Tensor:
        """Return a tensor like the gradient, without its data."""
        return slot.place.section.tensor(slot.place.slot)

    def _pages(self, slot: GradientSlot) -> Iterator[tuple[torch.Tensor, int, int]]:
        """Yield (flat view, begin, end) of the gradient page by page, each leased meanwhile."""
        self.settle()
        for part in self._parts(slot):
            self._lease(slot, part)
            try:
                yield part.view, part.begin, part.end
            finally:
                self._release(part)

    def _parts(self, slot: GradientSlot) -> Iterator[GradientPart]:
        """Yield the gradient page by page, or at once if it stays in memory. Lease each before the next."""
        section, at = slot.place.section, slot.place.slot
        itemsize = at.spec.dtype.itemsize
        flat = section.tensor(at).view(-1)
        if section.resident:
            yield GradientPart(flat, 0, at.spec.numel, at.offset, section.piece, None)
        for number, page in enumerate(section.pages_of(at.offset, at.end)):
            only = frozenset({page.index})
            fresh = frozenset() if self._users.get(page.index) else only
            access = Access(("grad", slot.name, number), (page.index,), fresh=fresh, writes=only)
            begin = max(page.offset - at.offset, 0) // itemsize
            end = (min(at.end, page.offset + page.nbytes) - at.offset) // itemsize
            offset = at.offset + begin * itemsize - page.offset
            yield GradientPart(flat[begin:end], begin, end, offset, page, access)

    def _lease(self, slot: GradientSlot, part: GradientPart) -> None:
        if part.access is not None:
            self._pager.acquire(part.access)
            self._users.setdefault(part.page.index, set()).add(id(slot.parameter))

    def _release(self, part: GradientPart) -> None:
        if part.access is not None:
            self._pager.release(part.access, part.access.writes)

    def forget_released(self) -> None:
        """Process `zero_grad`. A ColdGradient may die anywhere, even within the pager; here it is safe.

        An earlier one, which the program or an exception's traceback has kept, may die at any time: the pages have a newer
        gradient then, which an open step may be still to use.
        """
        if self._released:
            released, self._released = self._released, []
            self._forget(slot for slot, died in released if slot.here is died)

    def _forget(self, slots: Iterable[GradientSlot]) -> None:
        empty = []
        for slot in slots:
            at = slot.place.slot
            for page in slot.place.section.pages_of(at.offset, at.end):
                users = self._users.get(page.index, set())
                users.discard(id(slot.parameter))
                if not users:
                    empty.append(page.index)
        if empty:
            self._pager.forget(empty)


def _finder(
    owner: weakref.ref[PagedGradients], key: int, here: weakref.ref[torch.Tensor]
) -> Callable[[], tuple[PagedGradients, GradientSlot] | None]:
    """Return a finder of a ColdGradient's gradient; it returns None if the parameter has another one, or none."""

    def find() -> tuple[PagedGradients, GradientSlot] | None:
        gradients, tensor = owner(), here()
        if gradients is None:
            return None
        slot = gradients._slots[key]
        is_its = slot.stands_for(tensor) and (slot.parameter.grad is tensor or slot.stash is tensor)
        return (gradients, slot) if is_its else None

    return find
