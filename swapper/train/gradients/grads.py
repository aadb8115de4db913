"""Keeps gradients: in host memory, inside the budget, or on NVMe (paged_grads.py); on an accelerator in both
(device_grads.py).

Gradients of parameters that are always in memory, and those that are updated on an accelerator, stay autograd's own
(autograd_grads.py). If parameters are on NVMe and their gradients in host memory, each gradient has a slot in a
resident section: after autograd has accumulated one, it is copied there and autograd's tensor is released;
`parameter.grad` is a tensor in the slot. A later backward accumulates into it. So `grad` is an ordinary tensor for
clipping, scalers and hooks. A reference that is kept beyond `zero_grad` keeps its values: before the slot is reused,
that tensor gets memory of its own. While no tensor is in the slot, the pager uses it as a victim cache
(victim_cache.py).

A gradient that has a graph (`backward(create_graph=True)`) stays autograd's own: a penalty on it must reach the
parameters.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from swapper.errors import UnsupportedError
from swapper.modules.own_hook import hookable
from swapper.paging.pager import Pager
from swapper.paging.section import Section
from swapper.runtime.free_memory import note_freed
from swapper.train.device.device_grads import DeviceGradients
from swapper.train.device.train_device import TrainingDevice
from swapper.train.gradients.autograd_grads import AutogradGradients, GradientsOnDevice
from swapper.train.gradients.cold_grad import ColdGradient
from swapper.train.gradients.gradient_slot import Accumulation, GradientMeta, is_part
from swapper.train.gradients.paged_grads import PagedGradients
from swapper.train.gradients.victim_cache import GradientVictimCache, VictimRegion
from swapper.train.layout.slices import TensorLocation


class Gradients:
    """All gradients of a model, wherever they live: the interface for clipping and the optimizer's sweep.

    Args:
        parameters: all, with their qualified names.
        sections: with memory; those that are not resident are on NVMe.
        pager: makes the leases.
        rooms: by index of a page of parameters, its cache region in `sections`.
        on_device: the accelerator of the parameters, if any; copies gradients to the host.
        kept: names of parameters whose gradients stay autograd's own, on the device or in host memory.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        sections: Iterable[Section],
        pager: Pager,
        rooms: Mapping[int, VictimRegion],
        on_device: TrainingDevice | None = None,
        kept: Collection[str] = (),
    ) -> None:
        parameters = list(parameters)
        places = {slot.spec.owner: TensorLocation(section, slot) for section in sections for slot in section.plan.slots}
        trained = [(name, parameter, places[name]) for name, parameter in parameters if name in places]
        stay = [(name, parameter) for name, parameter in parameters if name in kept]
        self._kept: AutogradGradients
        self.paged: PagedGradients
        self._there: GradientsOnDevice | None = None
        if on_device is not None:
            self._kept = self._there = GradientsOnDevice(stay, on_device)
            self.paged = DeviceGradients(trained, pager, on_device)
            at_hand = []
        else:
            self._kept = AutogradGradients(stay)
            self.paged = PagedGradients([entry for entry in trained if not entry[2].section.resident], pager)
            at_hand = [entry for entry in trained if entry[2].section.resident]
        self._host = HostGradients(
            [(name, p, place.section.tensor(place.slot)) for name, p, place in at_hand], rooms, pager
        )

    def remove(self) -> None:
        self.paged.remove()
        self._host.remove()
        self._kept.remove()

    # --- for relayout: gradients on NVMe or on a device
    # ------------------------------------------------------------------

    def present(self) -> list[str]:
        """Return the names of the parameters that have a gradient there."""
        return [*self.paged.present(), *(self._there.present() if self._there is not None else ())]

    def content(self, name: str) -> GradientMeta:
        return GradientMeta() if self._there is not None and name in self._there else self.paged.content(name)

    def parts(self, name: str) -> Iterator[torch.Tensor]:
        """Yield the parts of a gradient in order, flat: to be read, or to be filled."""
        return self._there.parts(name) if self._there is not None and name in self._there else self.paged.parts(name)

    def present_again(self, name: str, content: GradientMeta) -> None:
        """Restore the parameter's gradient from its `parts` and `content`."""
        if self._there is not None and name in self._there:
            self._there.present_again(name, content)
        else:
            self.paged.present_again(name, content)

    # ------------------------------------------------------------------------------------------------------------------

    def entered(self) -> None:
        """Note that a forward begins, or anything else outside of a backward."""
        self.paged.restore()
        if torch.is_grad_enabled():  # else a thread may evaluate while the training one is in zero_grad
            self.paged.forget_what_was_let_go()

    def part(self, parameter: nn.Parameter, gradient: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        """Return elements [begin, end) of `gradient`, which `parameter` has or had, flat and clipped; do not change
        them.

        Requires leases of its pages, if any.
        """
        if parameter in self.paged:
            return self.paged.part(parameter, begin, end)
        return gradient.detach().reshape(-1)[begin:end]

    def check(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Check the gradients of `parameters`, which the user may have assigned, before a step begins.

        Raises:
            StateError: one has no data, and is not the parameter's own.
            UnsupportedError: one is sparse.
        """
        with torch._C.DisableTorchFunctionSubclass():  # many are cold, and only their attributes are read
            for name, parameter in parameters:
                gradient = parameter.grad
                if type(gradient) is ColdGradient:
                    self.paged.check(parameter, name, gradient)
                elif gradient is not None and gradient.layout is not torch.strided:
                    raise UnsupportedError(
                        f"parameter {name} has a sparse gradient, which swapper cannot page: assign it dense, grad.to_dense()"
                    )

    def make_ready(self, parameters: Sequence[nn.Parameter], gradients: Sequence[torch.Tensor | None]) -> None:
        """Move `gradients`, one for each parameter, to where an update reads them."""
        for parameter, gradient in zip(parameters, gradients, strict=True):
            self.paged.bring(parameter, gradient)
        self.paged.settle(parameters)

    def before_step(self) -> None:
        """Prepare the gradients for a step."""
        self.paged.before_step()

    def clip_norm(self, parameters: Iterable[nn.Parameter], max_norm: float, norm_type: float) -> torch.Tensor:
        """Clip as torch.nn.utils.clip_grad_norm_ does, and return the norm before it."""
        return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)

    def clip_value(self, parameters: Iterable[nn.Parameter], clip_value: float) -> None:
        """Clip as torch.nn.utils.clip_grad_value_ does."""
        nn.utils.clip_grad_value_(parameters, clip_value)


class HostGradients:
    """Owns the gradients' slots.

    Args:
        places: for each trainable parameter its qualified name and the tensor for its gradient.
        rooms: by index of a page of parameters, its cache region while those gradients are unused.
        pager: of those pages.
    """

    def __init__(
        self, places: list[tuple[str, nn.Parameter, torch.Tensor]], rooms: Mapping[int, VictimRegion], pager: Pager
    ) -> None:
        self._handles: list[Any] = []
        guests: dict[str, list[int]] = {}
        for index, room in rooms.items():
            for owner in room.owners:
                guests.setdefault(owner, []).append(index)
        homes = {name: _Home(name, place, pager, tuple(guests.get(name, ()))) for name, _, place in places}
        self._homes = list(homes.values())
        for name, parameter, _ in places:
            if parameter.grad is not None and not is_part(parameter.grad):
                homes[name].take(parameter)
            with hookable(parameter):
                self._handles.append(parameter.register_hook(homes[name].hook_before(parameter)))  # type: ignore[no-untyped-call]
                handle = parameter.register_post_accumulate_grad_hook(homes[name].take)  # type: ignore[no-untyped-call]
            self._handles.append(handle)
        if rooms:
            pager.use_victim_cache(GradientVictimCache(rooms, {name: home.is_idle for name, home in homes.items()}))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for home in self._homes:
            home.let_go()


class _Home:
    """One parameter's slot, and the tensor there that was its last gradient.

    `guests` are the pages that may be cached there while it is idle.
    """

    def __init__(self, name: str, place: torch.Tensor, pager: Pager, guests: tuple[int, ...]) -> None:
        self._name = name
        self._place = place
        self._pager = weakref.ref(pager)  # the garbage collector does not traverse hooks
        self._guests = guests
        self._last: weakref.ref[torch.Tensor] | None = None
        self._memory: weakref.ref[Any] | None = None  # alive as long as any tensor, view or alias of it
        self._taking = False
        self._accumulation = Accumulation(name)

    def hook_before(self, parameter: nn.Parameter) -> Callable[[torch.Tensor], None]:
        """Return the hook that runs before autograd accumulates; it must not refer to the parameter's owner."""
        of, accumulation = weakref.ref(parameter), self._accumulation

        def begin(_: torch.Tensor) -> None:
            if (parameter := of()) is not None:
                accumulation.begins(parameter)

        return begin

    def is_idle(self) -> bool:
        """Return True if nobody holds the gradient in the slot."""
        return not self._taking and (self._memory is None or self._memory() is None)

    def let_go(self) -> None:
        """Release all memory except that of a gradient that is still held; no gradient will follow."""
        self._place = torch.empty(0)

    def take(self, parameter: torch.Tensor) -> None:
        """Copy the parameter's gradient to the slot, unless it is there, is the user's, or a graph needs it where it
        is."""
        gradient = parameter.grad
        last = self._last() if self._last is not None else None
        if gradient is None or gradient is last or gradient.requires_grad or self._accumulation.was_there(gradient):
            return
        if gradient.layout is not torch.strided:
            raise UnsupportedError(
                f"parameter {self._name} got a sparse gradient, which swapper cannot page: "
                "build the embedding with sparse=False"
            )
        note_freed(gradient.nbytes)
        if last is not None:
            last.data = last.clone()  # somebody keeps it
        self._taking = True
        try:
            pager = self._pager()
            if self._guests and pager is not None:
                pager.drop_cached(self._guests)
            self._place.copy_(gradient)
            parameter.grad = here = self._make()
            self._last = weakref.ref(here)
        finally:
            self._taking = False

    def _make(self) -> torch.Tensor:
        """Return a tensor in the slot, with a storage and a version counter that only its own views share."""
        if not self._place.numel():
            return self._place.data
        memory = (ctypes.c_uint8 * self._place.nbytes).from_address(self._place.data_ptr())
        memory.owner = self._place  # type: ignore[attr-defined]  # keeps what is there alive
        self._memory = weakref.ref(memory)
        return torch.frombuffer(memory, dtype=self._place.dtype).view(self._place.shape)
