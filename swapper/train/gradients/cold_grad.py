"""Defines a gradient whose data is not with its parameter: the tensor that `parameter.grad` is, slot and metadata.

The tensor, while the gradient lies on NVMe or off the device, is a ColdGradient. It has the gradient's shape and dtype.
Changes of every element alone, such as clipping and unscaling, are recorded and applied when the gradient is used:
element by element that gives the same bits. Its norms, and whether it is finite, are known from when it was written, or
found by reading it. Every other operation on its data raises an error that names the remedy.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NoReturn, Protocol

import torch
from torch import nn

from swapper.errors import ColdParameterError, StateError
from swapper.paging.schedule import Access
from swapper.paging.section import Page
from swapper.tensors import torch_private
from swapper.tensors.guarded_tensor import SET_DATA, Function, GuardedTensor, tensors_among
from swapper.train.layout.slices import TensorLocation

ADVICE = "clip with clip_grad_norm_ or clip_grad_value_, or release it with zero_grad"
KEEP = {
    "on NVMe": "; with manager.offload(..., gradients='host') it stays in memory",
    "off the device": "; with manager.offload(..., gradients='device') it stays there, but for shards of FSDP2",
}

Change = Callable[[torch.Tensor], torch.Tensor]
"""A pending change of a gradient's elements; returns new ones. It must not depend on an element's position."""


class GradientOwner(Protocol):
    """Has the content of cold gradients. See PagedGradients."""

    def change(self, slot: GradientSlot, change: Change) -> None: ...

    def norm(self, slot: GradientSlot, norm_type: float) -> torch.Tensor: ...

    def zero(self, slot: GradientSlot) -> None: ...

    def find_finite(self, slots: Sequence[GradientSlot]) -> None: ...

    def is_finite(self, slot: GradientSlot) -> bool: ...


class ColdGradient(GuardedTensor):
    """A gradient that lies on NVMe. Never constructed: a tensor's class is set to it.

    Attributes:
        swapper_name: the parameter's.
        swapper_where: its location, in words.
        swapper_gradient: returns the gradient behind it, by its owner and slot; None if that is gone.
    """

    swapper_name = ""
    swapper_where = "on NVMe"
    swapper_gradient: Callable[[], tuple[GradientOwner, GradientSlot] | None]

    @staticmethod
    def _operate(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        action = _ACTIONS.get(func)
        done = NotImplemented if action is None else action(*args, **kwargs)
        if done is NotImplemented:
            refuse(next(one for one in tensors_among((args, kwargs)) if type(one) is ColdGradient), func)
        return done

    def _text(self) -> str:
        return f"ColdGradient({self.swapper_where}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def _instead(self, operation: str) -> NoReturn:
        refuse(self, operation)


def refuse(one: ColdGradient, func: object) -> NoReturn:
    """Raise ColdParameterError: `func` needs the data of a gradient."""
    raise ColdParameterError(
        f"the gradient of {one.swapper_name} is {one.swapper_where} and {getattr(func, '__name__', func)} needs its data: "
        f"{ADVICE}{KEEP[one.swapper_where]}"
    )


def _of(tensor: object) -> tuple[GradientOwner, GradientSlot] | None:
    if type(tensor) is not ColdGradient:
        return None
    found = tensor.swapper_gradient()
    if found is None:
        raise ColdParameterError(f"this was the gradient of {tensor.swapper_name}, not any more: use parameter.grad")
    return found


def _change(tensor: torch.Tensor, found: tuple[GradientOwner, GradientSlot], change: Change) -> torch.Tensor:
    owner, slot = found
    owner.change(slot, change)
    torch.autograd.graph.increment_version([tensor])
    return tensor


def _vector_norm(tensor: Any, ord: Any = 2, *others: Any, **named: Any) -> Any:  # as torch has it
    found = _of(tensor)
    if found is None or others or named or isinstance(ord, torch.Tensor):
        return NotImplemented
    owner, slot = found
    return owner.norm(slot, float(ord))


class _Factor:
    """The value that a factor, of shape (), has now. If it is on a device it is copied when it is used, with all others."""

    _elsewhere: ClassVar[weakref.WeakSet[_Factor]] = weakref.WeakSet()  # those not in host memory

    def __init__(self, factor: torch.Tensor) -> None:
        self.value = factor.detach().clone()
        if self.value.device.type != "cpu":
            self._elsewhere.add(self)

    def on_device_of(self, part: torch.Tensor) -> torch.Tensor:
        """Return it where `part` is, or in host memory, where any kernel takes it from."""
        if self.value.device not in (part.device, torch.device("cpu")):
            _copy_to_host(self._elsewhere)
        return self.value


def _copy_to_host(factors: weakref.WeakSet[_Factor]) -> None:
    """Copy these factors to host memory: one wait for all of a device and dtype."""
    alike: dict[tuple[torch.device, torch.dtype], list[_Factor]] = {}
    for factor in list(factors):
        alike.setdefault((factor.value.device, factor.value.dtype), []).append(factor)
    factors.clear()
    for some in alike.values():
        for factor, value in zip(some, torch.stack([factor.value for factor in some]).cpu().unbind(), strict=True):
            factor.value = value


def _mul(tensor: Any, other: Any) -> Any:
    found = _of(tensor)
    if found is None or type(other) is ColdGradient or (isinstance(other, torch.Tensor) and other.dim()):
        return NotImplemented
    if not isinstance(other, torch.Tensor):
        return _change(tensor, found, lambda part: part.mul(other))
    factor = _Factor(other)
    if tensor.dim():
        return _change(tensor, found, lambda part: part.mul(factor.on_device_of(part)))

    def multiply(part: torch.Tensor) -> torch.Tensor:  # two numbers: torch computes in the wider dtype of both
        return part.clone().view(()).mul_(factor.on_device_of(part)).view(part.shape)

    return _change(tensor, found, multiply)


def _clamp(tensor: Any, min: Any = None, max: Any = None) -> Any:
    found = _of(tensor)
    if found is None or isinstance(min, torch.Tensor) or isinstance(max, torch.Tensor):
        return NotImplemented
    return _change(tensor, found, lambda part: part.clamp(min, max))


def _zero(tensor: Any) -> Any:
    found = _of(tensor)
    if found is None:
        return NotImplemented
    owner, slot = found
    owner.zero(slot)
    torch.autograd.graph.increment_version([tensor])
    return tensor


def _zero_all(tensors: Sequence[torch.Tensor]) -> None:
    for tensor in tensors:
        tensor.zero_()


def _unscale_all(tensors: Sequence[torch.Tensor], found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
    """Unscale for torch.amp.GradScaler: set `found_inf` if anything is not finite, multiply all by `inv_scale`."""
    plain = [tensor for tensor in tensors if type(tensor) is not ColdGradient]
    if plain:
        torch_private.foreach_unscale(plain, found_inf, inv_scale)
    factor = inv_scale.detach().cpu().clone()  # it is used there
    cold = [found for tensor in tensors if (found := _of(tensor)) is not None]
    for owner in dict.fromkeys(owner for owner, _ in cold):
        owner.find_finite([slot for its, slot in cold if its is owner])

    def unscale(part: torch.Tensor) -> torch.Tensor:
        changed = part.clone()
        unused = torch.zeros_like(found_inf, device=part.device)
        torch_private.foreach_unscale([changed], unused, factor.to(part.device))
        return changed

    for tensor in tensors:
        found = _of(tensor)
        if found is not None:
            owner, slot = found
            if not owner.is_finite(slot):
                found_inf.fill_(1.0)
            if factor.item() != 1:  # a scaler that only checks passes one
                _change(tensor, found, unscale)


def _norm_all(tensors: Sequence[torch.Tensor], ord: object = 2, dtype: object = None) -> list[torch.Tensor]:
    named = {} if dtype is None else {"dtype": dtype}
    return [torch.linalg.vector_norm(tensor, ord, **named) for tensor in tensors]


def _mul_all(tensors: Sequence[torch.Tensor], other: object) -> None:
    others = other if isinstance(other, list | tuple) else [other] * len(tensors)
    for tensor, factor in zip(tensors, others, strict=True):
        tensor.mul_(factor)


def _clamp_all(which: str) -> Function:
    def clamp(tensors: Sequence[torch.Tensor], limit: Any) -> Any:
        if not isinstance(limit, int | float):
            return NotImplemented
        for tensor in tensors:
            tensor.clamp_(**{which: limit})
        return None

    return clamp


def _conversion(convert: Function) -> Function:
    """Return what a conversion does that leaves tensors of this dtype and device as they are; others need data."""

    def stay(tensor: Any, *given: Any, **named: Any) -> Any:
        like = torch.empty((2,) * tensor.dim(), dtype=tensor.dtype, device=tensor.device)
        is_same = type(tensor) is ColdGradient and convert(like, *given, **named) is like
        return tensor if is_same else NotImplemented

    return stay


def _assign_itself(tensor: Any, other: Any) -> Any:
    """As `Module.cpu()` does, which changes nothing then."""
    return None if other is tensor else NotImplemented


_ACTIONS: dict[Function, Function] = {
    SET_DATA: _assign_itself,
    **{convert: _conversion(convert) for convert in (torch.Tensor.to, torch.Tensor.cpu, torch.Tensor.type)},
    **{convert: _conversion(convert) for convert in (torch.Tensor.float, torch.Tensor.bfloat16, torch.Tensor.double)},
    torch.linalg.vector_norm: _vector_norm,
    torch.Tensor.mul_: _mul,
    torch.Tensor.clamp_: _clamp,
    torch.Tensor.zero_: _zero,
    torch_private.foreach_zero: _zero_all,
    torch_private.foreach_norm: _norm_all,
    torch_private.foreach_mul: _mul_all,
    torch_private.foreach_clamp_min: _clamp_all("min"),
    torch_private.foreach_clamp_max: _clamp_all("max"),
    torch_private.foreach_unscale: _unscale_all,
}


# --- the slot of a gradient -------------------------------------------------------------------------------------------


@dataclass(slots=True)
class GradientMeta:
    """A gradient's metadata, in addition to the content of its pages.

    Attributes:
        zero: it is zeros, whatever the pages hold.
        changes: of each element, in this order, when the gradient is used: clipping, unscaling.
        norms: known ones, changes included, by their order.
        finite: whether all elements are finite; None if unknown.
        failure: why the pages are incomplete, until it is zeroed; text, as an exception would keep objects alive.
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

    An assigned gradient is the user's, perhaps a part of a larger tensor, or another parameter's too: it stays there.
    """

    def __init__(self, name: str, parameter: nn.Parameter) -> None:
        self._name = name
        self._parameter = weakref.ref(parameter)  # the garbage collector does not traverse hooks
        self._before: weakref.ref[torch.Tensor] | None = None

    def begin(self, _: torch.Tensor | None = None) -> None:
        """Note that autograd is about to add to the gradient, or to make one: a hook of the parameter.

        Raises:
            StateError: the assigned one has no data to add to.
        """
        parameter = self._parameter()
        gradient = None if parameter is None else parameter.grad
        if type(gradient) is ColdGradient:
            raise without_data(self._name, gradient)
        self._before = None if gradient is None else weakref.ref(gradient)

    def was_there(self, gradient: torch.Tensor) -> bool:
        """Return True if `gradient`, the parameter's present one, is the one that it had when accumulation began."""
        return self._before is not None and self._before() is gradient


def is_part(gradient: torch.Tensor) -> bool:
    """Return True if it has only a part of its memory: before `offload` only a user makes such gradients."""
    return gradient.untyped_storage().nbytes() > gradient.nbytes


def stand_for(gradient: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Return a tensor without data on `device` that stands for a gradient on another: torch allows a parameter no such `grad`."""
    here = torch.empty((), dtype=gradient.dtype, device=device).expand(gradient.shape)
    here.swapper_gradient_there = gradient  # type: ignore[attr-defined]
    return here


def behind(gradient: torch.Tensor) -> torch.Tensor:
    """Return the gradient that a tensor stands for: by `stand_for`, or itself."""
    return getattr(gradient, "swapper_gradient_there", gradient)


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
        here: the parameter's ColdGradient, if it has one.
        stash: the same, while autograd makes a gradient to be added to it.
        accumulation: recognizes the user's gradients.
    """

    name: str
    parameter: nn.Parameter
    place: TensorLocation
    here: weakref.ref[torch.Tensor] | None = None
    stash: torch.Tensor | None = None
    content: GradientMeta = field(default_factory=GradientMeta)
    accumulation: Accumulation = field(init=False)

    def __post_init__(self) -> None:
        self.accumulation = Accumulation(self.name, self.parameter)

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
        page: the page that has them; the whole section if that stays in memory.
        access: the page's, to be leased; None if it stays in memory.
    """

    view: torch.Tensor
    begin: int
    end: int
    at: int
    page: Page
    access: Access | None
