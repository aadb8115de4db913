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
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from swapper.errors import UnsupportedError
from swapper.modules.own_hook import hookable
from swapper.paging.pager import Pager
from swapper.paging.planning.schedule import Access
from swapper.runtime.free_memory import note_freed
from swapper.runtime.interrupts import defer_sigint
from swapper.train.gradients.cold_grad import Change, ColdGradient
from swapper.train.gradients.gradient_slot import GradientMeta, GradientPart, GradientSlot, is_part, without_data
from swapper.train.layout.slices import TensorLocation

USUAL_NORM = 2.0  # the default of clip_grad_norm_


class PagedGradients:
    """Owns the gradients' pages: their content, and whether it is needed.

    Args:
        places: for each trainable parameter its qualified name and its gradient's location.
        pager: makes the leases.
    """

    def __init__(self, places: list[tuple[str, nn.Parameter, TensorLocation]], pager: Pager) -> None:
        self._pager = pager
        self._homes = {id(parameter): GradientSlot(name, parameter, place) for name, parameter, place in places}
        self._by_name = {home.name: home for home in self._homes.values()}
        self._stashed: list[GradientSlot] = []  # whose ColdGradient was removed in this backward
        self._let_go: list[GradientSlot] = []  # by zero_grad; recorded anywhere, processed when a gradient arrives
        self._users: dict[int, set[int]] = {}  # by index of a page: ids of the parameters whose gradients it has
        self._norm_types: dict[float, None] = {USUAL_NORM: None}  # computed for each as it is written
        self.finish_update: Callable[[], None] = lambda: None  # makes an open step use its gradients
        self._handles: list[Any] = []
        for home in self._homes.values():
            if home.parameter.grad is not None and not is_part(home.parameter.grad):
                self._take(home)
            before, after = self._hook(home, PagedGradients._stash), self._hook(home, PagedGradients._take)
            with hookable(home.parameter):
                self._handles.append(home.parameter.register_hook(before))  # type: ignore[no-untyped-call]
                self._handles.append(home.parameter.register_post_accumulate_grad_hook(after))  # type: ignore[no-untyped-call]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for home in self._homes.values():
            if type(home.parameter.grad) is ColdGradient:
                home.parameter.grad = None

    def __contains__(self, parameter: nn.Parameter) -> bool:
        return id(parameter) in self._homes

    def check(self, parameter: nn.Parameter, name: str, gradient: ColdGradient) -> None:
        """Raise StateError unless the pages hold `gradient`, the parameter's own."""
        home = self._homes.get(id(parameter))
        if home is None or not home.stands_for(gradient):
            raise without_data(name, gradient)

    # --- for the sweep and clipping
    # ------------------------------------------------------------------------------------

    def part(self, parameter: nn.Parameter, begin: int, end: int) -> torch.Tensor:
        """Return elements [begin, end) of a gradient whose pages are leased, clipped; do not change them."""
        home = self._homes[id(parameter)]
        home.check_whole()
        return home.content.of(home.place.section.tensor(home.place.slot).view(-1)[begin:end])

    def where(self, parameter: nn.Parameter) -> tuple[TensorLocation, GradientMeta]:
        """Return the location of a gradient, and its metadata."""
        home = self._homes[id(parameter)]
        home.check_whole()
        return home.place, home.content

    @torch.no_grad()
    def norm(self, home: GradientSlot, norm_type: float) -> torch.Tensor:
        """Return a gradient's norm, computed as the gradient was written, or now by reading it.

        From then on it is computed for all as they are written.
        """
        home.check_whole()
        self._norm_types[norm_type] = None
        if norm_type not in home.content.norms:
            home.content.norms[norm_type] = torch.linalg.vector_norm(self._whole(home), norm_type)
        return home.content.norms[norm_type]

    @torch.no_grad()
    def is_finite(self, home: GradientSlot) -> bool:
        home.check_whole()
        known = home.content.norms.get(USUAL_NORM)
        if home.content.finite is None and known is not None and bool(known.isfinite()):
            home.content.finite = True
        if home.content.finite is None:
            home.content.finite = bool(torch.isfinite(self._whole(home)).all())
        return home.content.finite

    def change(self, home: GradientSlot, change: Change) -> None:
        """Record a change of each element, for when the gradient is used."""
        self._finish_update()
        home.check_whole()
        home.content = GradientMeta(home.content.zero, (*home.content.changes, change))

    def zero(self, home: GradientSlot) -> None:
        """Set the gradient to zero. The content of its pages is no longer needed."""
        self._finish_update()
        home.content = GradientMeta(zero=True)
        self._forget([home])

    def _finish_update(self) -> None:
        """Finish an open step before a gradient changes that it may use."""
        if (
            torch._C._current_graph_task_id() == -1
        ):  # else a hook changes its own, or autograd makes more: neither is open then
            self.finish_update()

    def _whole(self, home: GradientSlot) -> torch.Tensor:
        """Return a gradient in memory, unchanged."""
        slot = home.place.slot
        whole = torch.empty(slot.spec.shape, dtype=slot.spec.dtype)
        flat = whole.view(-1)
        for view, begin, end in self._pages(home):
            flat[begin:end] = home.content.of(view)
        return whole

    def settle(self, parameters: Sequence[nn.Parameter] | None = None) -> None:
        """Wait for gradients in flight, these or all, before their locations are read."""

    def have_arrived(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Return True if `settle` would not wait for these gradients."""
        return True

    def bring(self, parameter: nn.Parameter, gradient: torch.Tensor | None) -> None:
        """Copy `gradient` to its location before an update, if the user has assigned it."""
        home = self._homes.get(id(parameter))
        if home is None or gradient is None or type(gradient) is ColdGradient:
            return
        with defer_sigint:
            self.forget_what_was_let_go()
            home.here, home.content = None, GradientMeta()
            self._move(home, gradient.detach().contiguous(), adding=False)

    def before_step(self) -> None:
        """Fill every gradient's pages that the sweep leases, even of one that was zeroed and did not arrive again."""
        for home in self._homes.values():
            if home.content.zero and type(home.parameter.grad) is ColdGradient:
                for view, _, _ in self._pages(home):
                    view.zero_()
                home.content.zero = False

    # --- for relayout
    # --------------------------------------------------------------------------------------------------

    def present(self) -> list[str]:
        """Return the names of the parameters that have a gradient here.

        Raises:
            StateError: one has another's, or an earlier one.
        """
        self.restore()
        homes = [home for home in self._homes.values() if type(home.parameter.grad) is ColdGradient]
        for home in homes:
            self.check(home.parameter, home.name, home.parameter.grad)  # type: ignore[arg-type]
        return [home.name for home in homes]

    def content(self, name: str) -> GradientMeta:
        return self._by_name[name].content

    def parts(self, name: str) -> Iterator[torch.Tensor]:
        """Yield the parts of a gradient's pages in order, flat: to be read, or to be filled."""
        for view, _, _ in self._pages(self._by_name[name]):
            yield view

    def present_again(self, name: str, content: GradientMeta) -> None:
        """Restore the parameter's gradient from its `parts` and `content`."""
        home = self._by_name[name]
        home.content = content
        home.parameter.grad = self._make_cold(home)

    # --- as autograd accumulates
    # ---------------------------------------------------------------------------------------

    def restore(self) -> None:
        """Restore the earlier gradient of parameters for which a backward brought none."""
        while self._stashed:
            home = self._stashed.pop()
            if home.stash is not None and home.parameter.grad is None:
                home.parameter.grad = home.stash
            home.stash = None

    def _hook(
        self, home: GradientSlot, act: Callable[[PagedGradients, GradientSlot], None]
    ) -> Callable[[torch.Tensor], None]:
        """Make a hook of the parameter. It must not refer to self or the parameter: the collector does not traverse
        hooks."""
        owner, key = weakref.ref(self), id(home.parameter)

        def hook(_: torch.Tensor) -> None:
            gradients = owner()
            if gradients is not None:
                act(gradients, gradients._homes[key])

        return hook

    def _stash(self, home: GradientSlot) -> None:
        """Move the earlier gradient out of autograd's way, before one is accumulated."""
        if not home.stands_for(home.parameter.grad):
            home.accumulation.begins(home.parameter)
            return
        if not self._stashed:
            torch.autograd.Variable._execution_engine.queue_callback(self.restore)
        self._stashed.append(home)
        home.stash, home.parameter.grad = home.parameter.grad, None

    def _take(self, home: GradientSlot) -> None:
        """Move the parameter's gradient to its pages, added to the earlier one; not the user's own.

        Raises:
            IoError: a page cannot be leased. The gradient counts as present, and raises until it is zeroed.
        """
        gradient = home.parameter.grad
        if gradient is None or type(gradient) is ColdGradient or home.accumulation.was_there(gradient):
            return
        with defer_sigint:
            self._take_held(home, gradient)

    def _take_held(self, home: GradientSlot, gradient: torch.Tensor) -> None:
        if gradient.layout is not torch.strided:
            raise UnsupportedError(
                f"parameter {home.name} got a sparse gradient, which swapper cannot page: build the embedding with sparse=False"
            )
        self.forget_what_was_let_go()
        note_freed(gradient.nbytes)
        before = home.stash
        if before is None:
            home.content = GradientMeta()
        try:
            home.check_whole()
            self._move(home, gradient.detach().contiguous(), adding=before is not None)
        except BaseException as error:
            home.content.fail(error)
            raise
        finally:
            home.parameter.grad, home.stash = before if before is not None else self._make_cold(home), None

    @torch.no_grad()
    def _move(self, home: GradientSlot, gradient: torch.Tensor, adding: bool) -> None:
        flat = gradient.view(-1)
        for view, begin, end in self._pages(home):
            part = flat[begin:end]
            if adding:
                part.add_(home.content.of(view))
            view.copy_(part)
        norms = {norm_type: torch.linalg.vector_norm(gradient, norm_type) for norm_type in self._norm_types}
        is_finite = bool(norms[USUAL_NORM].isfinite()) or bool(torch.isfinite(gradient).all())  # squares may overflow
        home.content = GradientMeta(norms=norms, finite=is_finite)

    def _make_cold(self, home: GradientSlot) -> torch.Tensor:
        here = self._stand_in(home)
        here.__class__ = ColdGradient
        here.swapper_name = home.name  # type: ignore[attr-defined]
        home.here = weakref.ref(here, lambda _: self._let_go.append(home))
        here.swapper_gradient = _finder(weakref.ref(self), id(home.parameter), home.here)  # type: ignore[attr-defined]
        return here

    def _stand_in(self, home: GradientSlot) -> torch.Tensor:
        """Return a tensor like the gradient, without its data."""
        return home.place.section.tensor(home.place.slot)

    def _pages(self, home: GradientSlot) -> Iterator[tuple[torch.Tensor, int, int]]:
        """Yield (flat view, begin, end) of the gradient page by page, each leased meanwhile."""
        self.settle()
        for part in self._parts(home):
            self._lease(home, part)
            try:
                yield part.view, part.begin, part.end
            finally:
                self._release(part)

    def _parts(self, home: GradientSlot) -> Iterator[GradientPart]:
        """Yield the gradient page by page, or at once if it stays in memory. Lease each before the next."""
        section, slot = home.place.section, home.place.slot
        itemsize = slot.spec.dtype.itemsize
        flat = section.tensor(slot).view(-1)
        if section.resident:
            yield GradientPart(flat, 0, slot.spec.numel, slot.offset, section.piece, None)
        for number, page in enumerate(section.pages_of(slot.offset, slot.end)):
            only = frozenset({page.index})
            fresh = frozenset() if self._users.get(page.index) else only
            access = Access(("grad", home.name, number), (page.index,), fresh=fresh, writes=only)
            begin = max(page.offset - slot.offset, 0) // itemsize
            end = (min(slot.end, page.offset + page.nbytes) - slot.offset) // itemsize
            at = slot.offset + begin * itemsize - page.offset
            yield GradientPart(flat[begin:end], begin, end, at, page, access)

    def _lease(self, home: GradientSlot, part: GradientPart) -> None:
        if part.access is not None:
            self._pager.acquire(part.access)
            self._users.setdefault(part.page.index, set()).add(id(home.parameter))

    def _release(self, part: GradientPart) -> None:
        if part.access is not None:
            self._pager.release(part.access, part.access.writes)

    def forget_what_was_let_go(self) -> None:
        """Process `zero_grad`. A ColdGradient may die anywhere, even within the pager; here it is safe."""
        homes, self._let_go[:] = list(self._let_go), []
        self._forget(h for h in homes if h.stash is None and type(h.parameter.grad) is not ColdGradient)

    def _forget(self, homes: Iterable[GradientSlot]) -> None:
        """Discard the pages of these gradients."""
        empty = []
        for home in homes:
            slot = home.place.slot
            for page in home.place.section.pages_of(slot.offset, slot.end):
                users = self._users.get(page.index, set())
                users.discard(id(home.parameter))
                if not users:
                    empty.append(page.index)
        if empty:
            self._pager.forget(empty)


@dataclass(frozen=True, slots=True)
class _PagedGradient:
    """The gradient behind a ColdGradient."""

    owner: PagedGradients
    home: GradientSlot

    def norm(self, norm_type: float) -> torch.Tensor:
        return self.owner.norm(self.home, norm_type)

    def is_finite(self) -> bool:
        return self.owner.is_finite(self.home)

    def change(self, change: Change) -> None:
        self.owner.change(self.home, change)

    def zero(self) -> None:
        self.owner.zero(self.home)


def _finder(
    owner: weakref.ref[PagedGradients], key: int, here: weakref.ref[torch.Tensor]
) -> Callable[[], _PagedGradient | None]:
    """Return a finder of a ColdGradient's gradient; it returns None if the parameter has another one, or none."""

    def find() -> _PagedGradient | None:
        gradients, tensor = owner(), here()
        home = None if gradients is None else gradients._homes[key]
        is_its = (
            home is not None and home.stands_for(tensor) and (home.parameter.grad is tensor or home.stash is tensor)
        )
        return _PagedGradient(gradients, home) if gradients is not None and home is not None and is_its else None

    return find
