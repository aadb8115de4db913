"""Gradients on NVMe: as autograd accumulates one, it leaves for its pages.

A parameter's `grad` is then a `ColdGradient`: it says that there is a gradient, of what shape and dtype; what needs its
data raises an error that names the way. Before autograd accumulates into it again, `grad` is taken away, so that autograd makes a
tensor of its own; what the pages have is added to that, whose norm is then the whole gradient's, and all of it goes to the pages.

The optimizer's sweep leases the pages with the state and multiplies them by the factor that clipping left. When `zero_grad` lets
the ColdGradient go, its pages are forgotten: what has not been written by then never is.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from swapper.core.memory import note_freed
from swapper.core.pager import Pager
from swapper.core.schedule import Access
from swapper.errors import ColdParameterError, InvariantError, StateError, UnsupportedError
from swapper.interrupts import held_back
from swapper.modules.cold import METADATA
from swapper.modules.own_hook import hookable
from swapper.train.slices import Place

ADVICE = (
    "clip with manager.clip_grad_norm_ or manager.clip_grad_value_, let go of it with zero_grad(set_to_none=True), or keep "
    "gradients in memory: manager.offload(..., gradients='host')"
)


class ColdGradient(torch.Tensor):
    """A gradient that lies on NVMe. Never made by anyone: a tensor's class is set to it."""

    swapper_name = ""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func not in METADATA:
            name = next((a.swapper_name for a in args if type(a) is ColdGradient), "")
            raise ColdParameterError(
                f"the gradient of {name or 'a parameter'} is on NVMe and {getattr(func, '__name__', func)} needs its data: {ADVICE}"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        with torch._C.DisableTorchFunctionSubclass():
            return f"ColdGradient(on NVMe, shape={tuple(self.shape)}, dtype={self.dtype})"


@dataclass(frozen=True, slots=True)
class GradientNotes:
    """What is known of a gradient besides its data.

    Attributes:
        norm: 2-norm of the gradient, in its dtype, as torch.linalg.vector_norm gives it.
        factor: what the sweep multiplies it by, as clipping would have done in place; None for nothing.
        limit: what the sweep clamps it to, after the factor.
        failure: why the pages have only a part of it, until it is zeroed.
    """

    norm: torch.Tensor | None = None
    factor: torch.Tensor | None = None
    limit: float | None = None
    failure: BaseException | None = None


@dataclass(slots=True)
class _Home:
    """One parameter's gradient.

    Attributes:
        name, parameter, place: whose, and where.
        here: the ColdGradient that the parameter has, if it has one.
        stash: the same, while autograd makes a gradient to be added to it.
        norm, factor, limit, failure: see GradientNotes.
    """

    name: str
    parameter: nn.Parameter
    place: Place
    here: weakref.ref[torch.Tensor] | None = None
    stash: torch.Tensor | None = None
    norm: torch.Tensor | None = None
    factor: torch.Tensor | None = None
    limit: float | None = None
    failure: BaseException | None = None


class PagedGradients:
    """Owns the gradients' pages: what they hold, and whether anyone wants it.

    Args:
        places: for each trainable parameter its qualified name and the place of its gradient.
        pager: what leases go to.
    """

    def __init__(self, places: list[tuple[str, nn.Parameter, Place]], pager: Pager) -> None:
        self._pager = pager
        self._homes = {id(parameter): _Home(name, parameter, place) for name, parameter, place in places}
        self._by_name = {home.name: home for home in self._homes.values()}
        self._stashed: list[_Home] = []  # whose ColdGradient was taken away in this backward
        self._let_go: list[_Home] = []  # by zero_grad; noted anywhere, acted upon when a gradient comes
        self._users: dict[int, set[int]] = {}  # by index of a page: ids of the parameters whose gradients it has
        self._handles: list[Any] = []
        for home in self._homes.values():
            if home.parameter.grad is not None:
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

    # --- what the sweep and clipping need -------------------------------------------------------------------------

    def part(self, parameter: nn.Parameter, begin: int, end: int) -> torch.Tensor:
        """Return elements [begin, end) of a gradient whose pages are leased, clipped as was asked; not to be changed."""
        home = self._homes[id(parameter)]
        _check_whole(home)
        return _clipped(home, home.place.section.tensor(home.place.slot).view(-1)[begin:end])

    def norm(self, parameter: nn.Parameter, norm_type: float) -> torch.Tensor:
        """Return a gradient's norm, as torch.linalg.vector_norm gives it; it was taken as the gradient left.

        Raises:
            UnsupportedError: another norm than the 2-norm, or the gradient was clipped since.
        """
        home = self._homes[id(parameter)]
        if norm_type != 2.0:
            raise UnsupportedError(
                f"a gradient on NVMe has its 2-norm taken in passing, not norm_type={norm_type}: {ADVICE}"
            )
        _check_whole(home)
        self._check_not_clipped(home)
        if home.norm is None:
            raise InvariantError(f"{home.name} has a gradient on NVMe without a norm")
        return home.norm

    def multiply(self, parameter: nn.Parameter, factor: torch.Tensor) -> None:
        """Have the gradient multiplied by `factor` (0-dim) when it is used."""
        self._check_not_clipped(self._homes[id(parameter)])
        self._homes[id(parameter)].factor = factor

    def clamp(self, parameter: nn.Parameter, limit: float) -> None:
        """Have the gradient clamped to [-limit, limit] when it is used."""
        self._check_not_clipped(self._homes[id(parameter)])
        self._homes[id(parameter)].limit = limit

    def _check_not_clipped(self, home: _Home) -> None:
        if home.factor is not None or home.limit is not None:
            raise UnsupportedError(
                f"the gradient of {home.name} is on NVMe and was clipped in this step already: clip once a step, or keep "
                "gradients in memory: manager.offload(..., gradients='host')"
            )

    # --- when the layout changes ----------------------------------------------------------------------------------

    def present(self) -> list[str]:
        """Return the names of the parameters that have a gradient here."""
        self.restore()
        return [home.name for home in self._homes.values() if type(home.parameter.grad) is ColdGradient]

    def notes(self, name: str) -> GradientNotes:
        home = self._home_of(name)
        return GradientNotes(home.norm, home.factor, home.limit, home.failure)

    def parts(self, name: str) -> Iterator[torch.Tensor]:
        """Yield a gradient in order, flat, piece by piece: to be read, or to be made anew."""
        for view, _, _ in self._pages(self._home_of(name)):
            yield view

    def present_again(self, name: str, notes: GradientNotes) -> None:
        """What was put into the gradient's `parts` is the parameter's gradient."""
        home = self._home_of(name)
        home.norm, home.factor, home.limit, home.failure = notes.norm, notes.factor, notes.limit, notes.failure
        home.parameter.grad = self._make_cold(home)

    def _home_of(self, name: str) -> _Home:
        return self._by_name[name]

    # --- as autograd accumulates ----------------------------------------------------------------------------------

    def restore(self) -> None:
        """Where a backward brought no gradient after all, what was accumulated before is the gradient still."""
        while self._stashed:
            home = self._stashed.pop()
            if home.stash is not None and home.parameter.grad is None:
                home.parameter.grad = home.stash
            home.stash = None

    def _hook(self, home: _Home, act: Callable[[PagedGradients, _Home], None]) -> Callable[[torch.Tensor], None]:
        """Make a hook of the parameter. Hooks are not looked through for cycles: it keeps neither us nor the parameter alive."""
        owner, key = weakref.ref(self), id(home.parameter)

        def hook(_: torch.Tensor) -> None:
            gradients = owner()
            if gradients is not None:
                act(gradients, gradients._homes[key])

        return hook

    def _stash(self, home: _Home) -> None:
        """A gradient is about to be accumulated: what was before is out of autograd's way."""
        if type(home.parameter.grad) is ColdGradient:
            if not self._stashed:
                torch.autograd.Variable._execution_engine.queue_callback(self.restore)
            self._stashed.append(home)
            home.stash, home.parameter.grad = home.parameter.grad, None

    def _take(self, home: _Home) -> None:
        """Move the gradient that the parameter has to its pages, on top of what was accumulated before.

        Raises:
            IoError: a page cannot be had. The gradient counts as there, and refuses to be used until it is zeroed.
        """
        gradient = home.parameter.grad
        if gradient is None or type(gradient) is ColdGradient:
            return
        with held_back:
            self._take_held(home, gradient)

    def _take_held(self, home: _Home, gradient: torch.Tensor) -> None:
        if gradient.layout is not torch.strided:
            raise UnsupportedError(
                f"parameter {home.name} got a sparse gradient, which swapper cannot page: build the embedding with sparse=False"
            )
        self.forget_what_was_let_go()
        note_freed(gradient.nbytes)
        before = home.stash
        if before is None:
            home.failure = None
        try:
            _check_whole(home)
            self._move(home, gradient.detach().contiguous(), adding=before is not None)
        except BaseException as error:
            home.failure = home.failure or error
            raise
        finally:
            home.parameter.grad, home.stash = before if before is not None else self._make_cold(home), None

    @torch.no_grad()
    def _move(self, home: _Home, gradient: torch.Tensor, adding: bool) -> None:
        flat = gradient.view(-1)
        for view, begin, end in self._pages(home):
            part = flat[begin:end]
            if adding:
                part.add_(_clipped(home, view))
            view.copy_(part)
        home.norm = torch.linalg.vector_norm(gradient, 2.0)
        home.factor = home.limit = None

    def _make_cold(self, home: _Home) -> torch.Tensor:
        here = home.place.section.tensor(home.place.slot)
        here.__class__ = ColdGradient
        here.swapper_name = home.name  # type: ignore[attr-defined]
        home.here = weakref.ref(here, lambda _: self._let_go.append(home))
        return here

    def _pages(self, home: _Home) -> Iterator[tuple[torch.Tensor, int, int]]:
        """Yield (flat view, begin, end) of the gradient page by page, each leased meanwhile."""
        section, slot = home.place.section, home.place.slot
        itemsize = slot.spec.dtype.itemsize
        flat = section.tensor(slot).view(-1)
        for number, page in enumerate(section.pages_of(slot.offset, slot.end)):
            users = self._users.setdefault(page.index, set())
            only = frozenset({page.index})
            fresh = frozenset() if users else only
            access = Access(("grad", home.name, number), (page.index,), fresh=fresh, writes=only)
            self._pager.acquire(access)
            users.add(id(home.parameter))
            try:
                begin = max(page.offset - slot.offset, 0) // itemsize
                end = (min(slot.end, page.offset + page.nbytes) - slot.offset) // itemsize
                yield flat[begin:end], begin, end
            finally:
                self._pager.release(access, access.writes)

    def forget_what_was_let_go(self) -> None:
        """Act upon `zero_grad`. A ColdGradient may die anywhere, at a collection within the pager even: here it is safe to act."""
        empty = []
        while self._let_go:
            home = self._let_go.pop()
            if home.stash is not None or type(home.parameter.grad) is ColdGradient:
                continue  # there is another one meanwhile
            slot = home.place.slot
            for page in home.place.section.pages_of(slot.offset, slot.end):
                users = self._users.get(page.index, set())
                users.discard(id(home.parameter))
                if not users:
                    empty.append(page.index)
        if empty:
            self._pager.forget(empty)


def _clipped(home: _Home, part: torch.Tensor) -> torch.Tensor:
    """Return what clipping was to make of a part of the gradient."""
    if home.factor is not None:
        part = part.mul(home.factor)
    return part if home.limit is None else part.clamp(-home.limit, home.limit)


def _check_whole(home: _Home) -> None:
    if home.failure is not None:
        raise StateError(
            f"the gradient of {home.name} did not reach its pages whole ({home.failure}): call zero_grad and run the backward again"
        ) from home.failure
