"""Keeps gradients: in host memory, or on NVMe (paged_grads.py); of an accelerator in both (device_grads.py).

Gradients of parameters that are always in memory, and those that are updated on an accelerator, stay autograd's own
(autograd_grads.py). If parameters are on NVMe and their gradients in host memory, each gradient has a slot in a
resident section: after autograd has accumulated one, it is copied there and autograd's tensor is released;
`parameter.grad` is a tensor in the slot. A later backward accumulates into it. So `grad` is an ordinary tensor for
clipping, scalers and hooks. While anything refers to the slot's memory (the tensor, a view, `.data`, an array), also
beyond `zero_grad`, it keeps its values: the next gradient stays autograd's own then. While nothing does, the pager
caches pages there.

A gradient that has a graph (`backward(create_graph=True)`) stays autograd's own: a penalty must reach the parameters.

[Note: victim cache] Gradients in memory have permanent slots, but content only from backward to the optimizer's update. In a
forward that memory is idle, if they were zeroed (to None). Pages that are evicted there and needed again in backward are
parameters, whose sections have the layout of their gradients'. Such a page is copied to the gradients' slots and, for backward,
back, instead of being read from the drive again. An arriving gradient drops the page in its slot. See
docs/decisions/victim-cache.md.
"""

from __future__ import annotations

import ctypes
import tempfile
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from swapper.errors import IoError, UnsupportedError
from swapper.io import beneath
from swapper.paging.pager import Pager
from swapper.paging.section import Page, Section
from swapper.runtime.free_memory import note_freed
from swapper.tensors.torch_private import count_uses, without_torch_functions
from swapper.train.gradients.autograd_grads import (
    AccumulationHooks,
    AutogradGradients,
    GradientsOnDevice,
    check_dense,
)
from swapper.train.gradients.cold_grad import Accumulation, ColdGradient, GradientMeta, is_part
from swapper.train.gradients.device_grads import DeviceGradients
from swapper.train.gradients.paged_grads import PagedGradients
from swapper.train.groups.processor import Processor
from swapper.train.groups.train_device import TrainingDevice
from swapper.train.layout.slices import GroupUpdate, TensorLocation, Trainable


@dataclass(frozen=True, slots=True)
class VictimRegion:
    """The cache location of a page: bytes [offset, offset + page.nbytes) of its parameters' gradients."""

    section: Section
    offset: int
    owners: tuple[str, ...]


def find_regions(sections: Iterable[Section], grad_sections: Iterable[Section]) -> dict[int, VictimRegion]:
    """Return, by index of each page of parameters whose gradients are in memory, its cache location."""
    gradients = {_layout(section): section for section in grad_sections if section.resident}
    regions = {}
    for section in sections:
        gradient = gradients.get(_layout(section))
        if gradient is None or section.plan.family != "param":
            continue
        for page in section.pages:
            end = page.offset + page.nbytes
            owners = [slot.spec.owner for slot in section.plan.slots if slot.offset < end and slot.end > page.offset]
            regions[page.index] = VictimRegion(gradient, page.offset, tuple(owners))
    return regions


def _layout(section: Section) -> tuple[int, tuple[tuple[str, int, int], ...], int]:
    slots = tuple((slot.spec.owner, slot.offset, slot.end) for slot in section.plan.slots)
    return section.plan.group, slots, section.plan.nbytes


class GradientVictimCache:
    """The pager's victim cache (paging/frames.py): slots of gradients that nobody holds.

    Args:
        regions: by index of page; the sections have memory.
        is_idle: by parameter's name, True if its gradient's slot is unused.
    """

    def __init__(self, regions: Mapping[int, VictimRegion], is_idle: Mapping[str, Callable[[], bool]]) -> None:
        self._regions = regions
        self._is_idle = is_idle

    def keep(self, page: Page, address: int) -> bool:
        region = self._regions.get(page.index)
        if region is None or not all(self._is_idle[owner]() for owner in region.owners):
            return False
        ctypes.memmove(region.section.memory.data_ptr() + region.offset, address, page.nbytes)
        return True

    def load(self, page: Page, address: int) -> None:
        region = self._regions[page.index]
        ctypes.memmove(address, region.section.memory.data_ptr() + region.offset, page.nbytes)

    def place_of(self, page: Page) -> tuple[Any, int]:
        region = self._regions[page.index]
        return region.section.view, region.offset


class Gradients:
    """All gradients of a model, wherever they live: the interface for the optimizer's sweep and a relayout.

    Args:
        parameters: all, with their qualified names.
        sections: with memory; those that are not resident are on NVMe.
        pager: makes the leases.
        regions: by index of a page of parameters, its cache region in `sections`.
        finish_step: makes an open step use its gradients.
        processor: makes the gradients; an accelerator copies them to the host.
        kept: names of parameters whose gradients stay autograd's own, on the device or in host memory.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        sections: Iterable[Section],
        pager: Pager,
        regions: Mapping[int, VictimRegion],
        finish_step: Callable[[], None],
        processor: Processor,
        kept: Collection[str] = (),
    ) -> None:
        parameters = list(parameters)
        places = {slot.spec.owner: TensorLocation(section, slot) for section in sections for slot in section.plan.slots}
        trained = [(name, parameter, places[name]) for name, parameter in parameters if name in places]
        stay = [(name, parameter) for name, parameter in parameters if name in kept]
        self._kept: AutogradGradients
        self.paged: PagedGradients
        self._processor = processor
        self._on_device: GradientsOnDevice | None = None
        if isinstance(processor, TrainingDevice):
            self._kept = self._on_device = GradientsOnDevice(stay, processor)
            self.paged = DeviceGradients(trained, pager, finish_step, processor)
            paged, at_hand = trained, []
        else:
            self._kept = AutogradGradients(stay)
            paged = [entry for entry in trained if not entry[2].section.resident]
            self.paged = PagedGradients(paged, pager, finish_step)
            at_hand = [entry for entry in trained if entry[2].section.resident]
        self._in_pages = {id(parameter) for _, parameter, _ in paged}
        self._host = HostGradients(
            [(name, p, place.section.tensor(place.slot)) for name, p, place in at_hand], regions, pager
        )

    def remove(self) -> None:
        self.paged.remove()
        self._host.remove()
        self._kept.remove()

    # --- for relayout: gradients on NVMe or on a device ---------------------------------------------------------------

    def present(self) -> list[str]:
        """Return the names of the parameters that have a gradient there.

        Raises:
            StateError: one has another's, or an earlier one.
        """
        return [*self.paged.present(), *(self._on_device.present() if self._on_device is not None else ())]

    def owner(self, name: str) -> GradientsOnDevice | PagedGradients:
        """Return what has the gradient of a parameter."""
        return self._on_device if self._on_device is not None and name in self._on_device else self.paged

    # ------------------------------------------------------------------------------------------------------------------

    def entered(self) -> None:
        """Note that a forward begins, or anything else outside of a backward."""
        self.paged.restore()
        if torch.is_grad_enabled():  # else a thread may evaluate while the training one is in zero_grad
            self.paged.forget_released()

    def part(self, parameter: nn.Parameter, gradient: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        """See GradientSource (slice_updates.py)."""
        if id(parameter) in self._in_pages:
            return self.paged.part(parameter, begin, end)
        return gradient.detach().reshape(-1)[begin:end]

    def check(self, trainables: Iterable[Trainable], groups: range) -> None:
        """Check gradients of parameters in these groups of the optimizers, which the user may have assigned, before a step begins.

        Raises:
            StateError: one has no data, and is not the parameter's own.
            UnsupportedError: one is sparse.
        """
        with without_torch_functions():  # many are cold, and only their attributes are read
            for trainable in trainables:
                for parameter, places, number in trainable.members:
                    gradient = parameter.grad
                    if number not in groups or gradient is None:
                        continue
                    if type(gradient) is ColdGradient:
                        self.paged.check(parameter, places.name, gradient)
                    elif gradient.layout is not torch.strided:
                        raise UnsupportedError(
                            f"parameter {places.name} has a sparse gradient: assign it dense, grad.to_dense()"
                        )

    def make_ready(self, update: GroupUpdate) -> None:
        """Move a group's gradients to where its update reads them, and have its image on the device filled again after it."""
        parameters = update.trainable.parameters
        self.paged.store_assigned(parameters, update.gradients)
        self.paged.fill_zeroed(parameters)
        self.paged.settle(parameters)
        self._processor.before_update(update.trainable.group)


def is_gradient_aliased(gradient: torch.Tensor) -> bool:
    """Return True if something else refers to the memory of a parameter's gradient."""
    return type(gradient) is not ColdGradient and gradient.numel() > 0 and count_uses(gradient) > 1


class HostGradients:
    """Owns the gradients' slots.

    Args:
        places: for each trainable parameter its qualified name and the tensor for its gradient.
        regions: by index of a page of parameters, its cache region while those gradients are unused.
        pager: of those pages.
    """

    def __init__(
        self, places: list[tuple[str, nn.Parameter, torch.Tensor]], regions: Mapping[int, VictimRegion], pager: Pager
    ) -> None:
        self._hooks = AccumulationHooks()
        cached: dict[str, list[int]] = {}  # by parameter: pages
        for index, region in regions.items():
            for owner in region.owners:
                cached.setdefault(owner, []).append(index)
        slots = {name: _HostSlot(name, p, place, pager, tuple(cached.get(name, ()))) for name, p, place in places}
        self._slots = list(slots.values())
        for name, parameter, _ in places:
            slot = slots[name]
            if parameter.grad is not None and not is_part(parameter.grad):
                slot.take(parameter)
            self._hooks.add(parameter, slot.accumulation.begin, slot.take)
        if regions:
            pager.use_victim_cache(GradientVictimCache(regions, {name: slot.is_idle for name, slot in slots.items()}))

    def remove(self) -> None:
        self._hooks.remove()
        for slot in self._slots:
            slot.release()


class _HostSlot:
    """One parameter's slot. `cached_pages` may be cached there while it is idle."""

    def __init__(
        self, name: str, parameter: nn.Parameter, place: torch.Tensor, pager: Pager, cached_pages: tuple[int, ...]
    ) -> None:
        self._name = name
        self._place = place
        self._pager = weakref.ref(pager)  # the garbage collector does not traverse hooks
        self._cached_pages = cached_pages
        self._memory: weakref.ref[object] | None = None  # alive as long as any tensor, view or alias of it
        self._is_filling = False
        self.accumulation = Accumulation(name, parameter)

    def is_idle(self) -> bool:
        """Return True if nobody holds the gradient in the slot."""
        return not self._is_filling and (self._memory is None or self._memory() is None)

    def release(self) -> None:
        """Release all memory except that of a gradient that is still held; no gradient will follow."""
        self._place = torch.empty(0, device="cpu")

    def take(self, parameter: torch.Tensor) -> None:
        """Copy the parameter's gradient to the slot, unless that is in use, or the gradient is the user's or has a graph."""
        gradient = parameter.grad
        if gradient is None or gradient.requires_grad or self.accumulation.was_there(gradient):
            return
        check_dense(self._name, gradient)
        if (
            not self.is_idle()
        ):  # by this gradient, or by an earlier one, of which somebody keeps a tensor, view or array
            return
        note_freed(gradient.nbytes)
        self._is_filling = True
        try:
            pager = self._pager()
            if self._cached_pages and pager is not None:
                pager.drop_cached(self._cached_pages)
            self._place.copy_(gradient)
            parameter.grad = self._make()
        finally:
            self._is_filling = False

    def _make(self) -> torch.Tensor:
        """Return a tensor in the slot, with a storage and a version counter that only its own views share."""
        if not self._place.numel():
            return self._place.data
        memory = (ctypes.c_uint8 * self._place.nbytes).from_address(self._place.data_ptr())
        memory.owner = self._place  # type: ignore[attr-defined]  # keeps its memory alive
        self._memory = weakref.ref(memory)
        return torch.frombuffer(memory, dtype=self._place.dtype).view(self._place.shape).data  # without a base


class GradientStash:
    """Owns an unnamed file of gradients on NVMe, or on an accelerator, during a relayout (session/replacement.py).

    Pages belong to the session that closes, and their scratch file is deleted with it; gradients on an accelerator may
    move to pages then. The stash is filled from the old session's gradients and emptied into new ones, again and again.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._file = tempfile.TemporaryFile(dir=beneath.where(directory))  # noqa: SIM115
        self._places: dict[str, tuple[int, GradientMeta]] = {}
        self._end = 0

    def fill(self, gradients: Gradients) -> None:
        """Copy the gradients into the file. Raises IoError: they cannot be read, or the drive is full."""
        for name in gradients.present():
            owner = gradients.owner(name)
            self._places[name] = self._end, owner.content(name)
            for part in owner.parts(name):
                with self._explaining("write", self._end, part):
                    self._file.seek(self._end)
                    self._file.write(_bytes_of(part))
                    self._file.flush()
                self._end += part.nbytes

    def empty_into(self, gradients: Gradients) -> None:
        """Copy the file to `gradients`, which has space for all of these parameters.

        Raises:
            IoError: a transfer failed.
        """
        for name, (at, content) in self._places.items():
            owner = gradients.owner(name)
            for part in owner.parts(name):
                with self._explaining("read", at, part):
                    self._file.seek(at)
                    done = self._file.readinto(_bytes_of(part))
                if done < part.nbytes:
                    truncated = "the file of stashed gradients is truncated"
                    raise IoError("read", str(self._directory), at + done, part.nbytes - done, 0, truncated)
                at += part.nbytes
            owner.present_again(name, content)

    def close(self) -> None:
        self._file.close()

    @contextmanager
    def _explaining(self, operation: str, at: int, part: torch.Tensor) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            where = str(self._directory)
            raise IoError(operation, where, at, part.nbytes, error.errno or 0, "stashing gradients") from error


def _bytes_of(part: torch.Tensor) -> memoryview:
    return memoryview(part.detach().view(torch.uint8).numpy())  # type: ignore[arg-type]
