"""Describes a gradient whose data is not with its parameter: the location of its pages, and its metadata."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

import torch
from torch import nn

from swapper.errors import StateError
from swapper.paging.planning.schedule import Access
from swapper.paging.section import Page
from swapper.train.gradients.cold_grad import Change, ColdGradient
from swapper.train.layout.slices import TensorLocation


@dataclass(slots=True)
class GradientMeta:
    """A gradient's metadata, in addition to the content of its pages.

    Attributes:
        zero: it is zeros, whatever the pages hold.
        changes: of each element, in this order, when the gradient is used: clipping, unscaling.
        norms: known ones, changes included, by their order.
        finite: whether all elements are finite; None if unknown.
        failure: the reason why the pages are incomplete, until it is zeroed; text, since an exception would keep
            objects alive.
    """

    zero: bool = False
    changes: tuple[Change, ...] = ()
    norms: dict[float, torch.Tensor] = field(default_factory=dict)
    finite: bool | None = None
    failure: str = ""

    def fail(self, error: BaseException) -> None:
        """Note that the gradient does not reach its pages whole, because of `error`; the first one counts."""
        self.failure = self.failure or str(error) or type(error).__name__

    def of(self, part: torch.Tensor) -> torch.Tensor:
        """Return elements of the gradient, given those in the pages. Do not change the result."""
        part = torch.zeros_like(part) if self.zero else part
        for change in self.changes:
            part = change(part)
        return part


class Accumulation:
    """Tells whether autograd made a parameter's gradient, or added to one that the user had assigned.

    An assigned gradient is the user's: it may be a part of a larger tensor, or another parameter's too, and stays in
    place.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._before: weakref.ref[torch.Tensor] | None = None

    def begins(self, parameter: torch.Tensor) -> None:
        """Note that autograd is about to add to the gradient, or to make one.

        Raises:
            StateError: the assigned one has no data to add to.
        """
        gradient = parameter.grad
        if type(gradient) is ColdGradient:
            raise without_data(self._name, gradient)
        self._before = None if gradient is None else weakref.ref(gradient)

    def was_there(self, gradient: torch.Tensor) -> bool:
        """Return True if `gradient`, the parameter's present one, is the one that it had when accumulation began."""
        return self._before is not None and self._before() is gradient


def is_part(gradient: torch.Tensor) -> bool:
    """Return True if it has only a part of its memory: before `offload` only a user makes such gradients."""
    return gradient.untyped_storage().nbytes() > gradient.nbytes


def without_data(name: str, gradient: ColdGradient) -> StateError:
    """Return the error for a cold `gradient` assigned to a parameter that is not its own, or not its newest."""
    whose = "of an earlier backward" if gradient.swapper_name == name else f"that of {gradient.swapper_name}"
    return StateError(
        f"the gradient of {name} was set to one {whose}, which is {gradient.swapper_where} and has no data to assign: keep "
        "gradients in memory with manager.offload(..., gradients='host'), or on an accelerator with gradients='device'; or release "
        "it with zero_grad"
    )


@dataclass(slots=True)
class GradientSlot:
    """One parameter's gradient.

    Attributes:
        name, parameter, place: its parameter and location.
        here: the parameter's ColdGradient, if it has one.
        stash: the same, while autograd makes a gradient to be added to it.
        accumulation: recognizes the user's gradients.
        content: its metadata.
    """

    name: str
    parameter: nn.Parameter
    place: TensorLocation
    here: weakref.ref[torch.Tensor] | None = None
    stash: torch.Tensor | None = None
    content: GradientMeta = field(default_factory=GradientMeta)
    accumulation: Accumulation = field(init=False)

    def __post_init__(self) -> None:
        self.accumulation = Accumulation(self.name)

    def stands_for(self, gradient: torch.Tensor | None) -> bool:
        """Return True if `gradient` is the ColdGradient of these pages."""
        return self.here is not None and gradient is not None and self.here() is gradient

    def check_whole(self) -> None:
        """Raise StateError unless all of the gradient has reached its pages."""
        if self.content.failure:
            raise StateError(
                f"the gradient of {self.name} did not reach its pages whole ({self.content.failure}): call zero_grad and run the "
                "backward again"
            )


@dataclass(frozen=True, slots=True)
class GradientPart:
    """Elements [begin, end) of a gradient, at their location.

    Attributes:
        view: of them, flat.
        at: their offset in bytes, in the page, or in the section if that stays in memory.
        page: that contains them; the whole section if that stays in memory.
        access: the page's, to be leased; None if it stays in memory.
    """

    view: torch.Tensor
    begin: int
    end: int
    at: int
    page: Page
    access: Access | None
