"""What an offloaded model has on an accelerator: images of its groups, its buffers, and the copies both ways.

Forwards and backwards run there. Parameters come page by page from host memory or NVMe, where their place is, before their
kernels; gradients go down as they come (device_grads.py); the update is made on the CPU, where the state is, or slice by slice here
(device_sweep.py), and puts the images of all that is trained out of date. What the device's budget can hold stays from one use to
the next within a step.

[Note: streams of a backward] Autograd runs each node on the stream on which its operation was in the forward, and hooks on the
stream of their node. A parameter's gradient is written, and the hook after it runs, on the stream that was current when the forward
first used the parameter; it is good on that stream only, until the backward is over: then torch has the stream of whoever called it
wait for all of those. So who uses gradients before (`update="backward"`), on the stream of whatever hook comes next, has that
stream wait for the parameters' streams; and what it queues there is waited for by the caller's stream when the backward is over.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from swapper.device.copies import Downloads, PageCopy
from swapper.device.device import OUT_OF_MEMORY, Device
from swapper.device.device_placement import DeviceBudget, DevicePlacement
from swapper.device.device_storage import DeviceStorage, Span
from swapper.device.registered_memory import HostSide
from swapper.device.tier import DeviceCopy
from swapper.errors import BudgetError, ConfigError, DeviceError
from swapper.modules.groups import Group
from swapper.modules.model_device import ModelDevice
from swapper.modules.torch_functions import tensors_among
from swapper.paging.pager import Pager
from swapper.paging.planning.layout import Slot
from swapper.paging.planning.schedule import Access
from swapper.paging.section import Section
from swapper.paging.store.page_files import checksum_of
from swapper.runtime.counters import Counters
from swapper.runtime.sizes import format_bytes

PAGES_ON_THEIR_WAY = 2
"""Frames that may be leased for gradients at one time."""
RING = 3
"""Slices that are on the device at one time where they are updated there: one comes, one is updated, one goes."""
USES_REMEMBERED = 64
"""Of each group in a step, on average: what comes beyond that is not expected again."""


_open: weakref.WeakSet[TrainingDevice] = weakref.WeakSet()


class Leased(Protocol):
    """A group, as far as it matters here."""

    image: DeviceCopy


class Kernel(Protocol):
    """What updates in place of the user's optimizer."""

    def update(self, updates: Iterable[Any], settings: Callable[[int], Mapping[str, Any]]) -> None:
        """See AdamWKernel."""
        ...


class TrainingDevice(ModelDevice):
    """Owns the device's part of one run.

    Args:
        budget: where kernels run, and how much of its memory may be used.
        placement: of that.
        host: the frames' memory, and that of what stays.
        pager: of the frames.
        counters: to keep.
        updates: whether the optimizer's update is made there too.
        kernel: makes it in place of the optimizer.

    Attributes:
        downloads: bring gradients down, and what was changed on the device.
        order: of the streams that gradients come on, and those that use them.

    Raises:
        BudgetError: with what other runs have of the device it is more than there is.
    """

    def __init__(
        self,
        budget: DeviceBudget,
        placement: DevicePlacement,
        host: HostSide,
        pager: Pager,
        counters: Counters,
        updates: bool,
        kernel: Kernel | None = None,
    ) -> None:
        _check_others(budget)
        super().__init__(budget.device, placement, host, pager, counters, is_cyclic=False)
        device = budget.device
        self.updates = updates
        self.kernel = kernel
        self._budget = budget
        self._pager = pager
        self.downloads = Downloads(device, counters, placement.down_bytes)
        self.order = StreamOrder(device)
        self._images: list[DeviceCopy] = []
        self._image_of: dict[int, DeviceCopy] = {}  # by id of a parameter
        self._used: list[DeviceCopy] = []  # in this step, in order
        _open.add(self)

    def image(self, group: Group, places: Sequence[tuple[Section, Slot]]) -> tuple[DeviceCopy, list[torch.Tensor]]:
        """Return the image of a group whose parameters have their place there, and each as a view of it."""
        storage, views, spans = self.lay_out(places)
        image = self.add_image(group.index, group.name, storage, spans)
        self._images.append(image)
        self._image_of.update((id(parameter), image) for _, parameter in group.parameters)
        return image, views

    def lay_out(
        self, places: Sequence[tuple[Section, Slot]]
    ) -> tuple[DeviceStorage, list[torch.Tensor], dict[Section, list[Span]]]:
        """Return a storage without memory for what has its place there, each as a view of it, and what fills it, by section."""
        storage, offsets = self.reserve(slot.spec.nbytes for _, slot in places)
        views = [
            storage.memory[offset : offset + slot.spec.nbytes].view(slot.spec.dtype).view(slot.spec.shape)
            for offset, (_, slot) in zip(offsets, places, strict=True)
        ]
        spans: dict[Section, list[Span]] = {}
        for offset, (section, slot) in zip(offsets, places, strict=True):
            spans.setdefault(section, []).append(Span(slot.offset, slot.spec.nbytes, offset))
        storage.free()
        return storage, views, spans

    def start(self) -> None:
        """All images are made: expect a forward and a backward."""
        self.tier.expect([*self._images, *reversed(self._images)])

    # --- what passes tell -------------------------------------------------------------------------------------------

    def pass_begins(self) -> None:
        self.tier.keep_free_memory()

    def check_inputs(self, module: nn.Module, inputs: object) -> None:
        """Raise ConfigError where a forward is given tensors, and all of them are somewhere else."""
        where = {tensor.device for tensor in tensors_among(inputs)}
        if where and self.device.device not in where:
            found = ", ".join(sorted(map(str, where)))
            raise ConfigError(
                f"{type(module).__name__} runs on {self.device} and was given tensors on {found} only: move them, "
                f"`tensor.to({str(self.device)!r})`"
            )

    def lease(self, group: Leased) -> None:
        """See DeviceTier.lease."""
        self.tier.lease(group.image)
        if len(self._used) < USES_REMEMBERED * len(self._images):
            self._used.append(group.image)

    def gradient_came(self, parameter: int) -> None:
        """Autograd has written the gradient of a parameter, given its id, on the current stream. [Note: streams of a backward]"""
        self.order.note()
        self._image_of[parameter].storage.note_use()  # by what made the gradient

    def copy_back(self, image: DeviceCopy) -> None:
        """What is on the device is what counts: have its place in memory or on NVMe the same, and wait for that.

        Raises:
            IoError: a page could not be read.
            DeviceError: the device failed.
        """
        image.storage.wait_for_users()
        for copy in image.copies:
            only = frozenset() if copy.page.section.resident else frozenset({copy.page.index})
            access = Access(None, tuple(only), writes=only)
            self._pager.acquire(access)
            try:
                memory = self.host.of(copy.page)
                external = checksum_of(copy.page, memory.data_ptr())
                self.downloads.send(
                    [(memory[s.begin : s.begin + s.nbytes], image.storage.read(s.target, s.nbytes)) for s in copy.spans]
                )
                self.downloads.finish()
                if external is not None and external == checksum_of(copy.page, memory.data_ptr()):
                    only = frozenset()  # it stays where it was lent
            finally:
                self._pager.release(access, only)

    def new_storage(self, nbytes: int) -> DeviceStorage:
        """Return memory on the device; where it is short, what stays there is given up for it.

        Raises:
            BudgetError: there is none.
        """
        try:
            storage = DeviceStorage(self.device, nbytes)
        except OUT_OF_MEMORY:
            self.tier.evict_idle()
            try:
                storage = DeviceStorage(self.device, nbytes)
            except OUT_OF_MEMORY as error:
                raise BudgetError(
                    f"{self.device} has no {format_bytes(nbytes)} left for the update of a slice, after everything that is not in "
                    f"use was given up: lower device_memory, or say update_on='cpu' ({error})"
                ) from error
        storage.free()
        storage.allocate()
        return storage

    def fill_anew(self, storage: DeviceStorage, copies: Sequence[PageCopy]) -> None:
        """Fill a storage, which has memory or is given some. `finish` waits for that, and gives back the frames it comes from.

        Raises:
            BudgetError: there is no memory for it.
            IoError: a page could not be read.
        """
        if storage.is_allocated:
            storage.invalidate()
        else:
            self._allocate(storage)
        for copy in copies:
            self._uploads.send(copy, storage)
        storage.all_is_queued()

    def _allocate(self, storage: DeviceStorage) -> None:
        try:
            storage.allocate()
        except OUT_OF_MEMORY:
            self.tier.evict_idle()
            try:
                storage.allocate()
            except OUT_OF_MEMORY as error:
                raise BudgetError(
                    f"{self.device} has no {format_bytes(storage.nbytes)} left for the optimizer state that stays there, after "
                    f"everything that is not in use was given up: lower device_memory, or what else is on the device ({error})"
                ) from error

    def bring_up(self, storage: DeviceStorage, pieces: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Fill a storage anew, in the order of kernels that have used it, and have those that are queued next wait for that."""
        storage.invalidate()
        self._uploads.fill(storage, pieces)
        storage.wait_on_current_stream()

    def finish(self) -> None:
        """Wait for all copies, also of passes that failed. What was on its way from a device that failed is lost."""
        with contextlib.suppress(DeviceError):
            self.downloads.finish()
        self.tier.finish()

    def forget_uses(self) -> None:
        """A pass was abandoned: nothing is learned from it."""
        self._used.clear()

    # --- an update --------------------------------------------------------------------------------------------------

    def before_update(self, group: int) -> None:
        """The places of a group's parameters are about to be changed."""
        self.tier.invalidate(self._images[group])

    def after_update(self) -> None:
        """Parameters are what the next step's forward is to use. What this one did is expected of it."""
        if self._used:
            self.tier.expect(self._used)
        self._used.clear()
        self.tier.prepare_next()

    # ----------------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        _open.discard(self)
        self.finish()
        super().close()
        self._images, self._used, self._image_of = [], [], {}


def _check_others(budget: DeviceBudget) -> None:
    others = [other._budget.nbytes for other in _open if other.device.identity == budget.device.identity]
    total_bytes = budget.device.total_bytes() if others else 0
    if others and budget.nbytes + sum(others) > total_bytes:
        raise BudgetError(
            f"{budget.device} has {format_bytes(total_bytes)}, of which {len(others)} other manager{'s' * (len(others) > 1)} "
            f"may use {format_bytes(sum(others))}: device_memory={format_bytes(budget.nbytes)} is more than the rest. Lower one of "
            "them, or close the other manager"
        )


class StreamOrder:
    """Knows the streams on which there is something that the next user has to wait for. With one stream it records nothing.

    Args:
        device: whose streams.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._noted: set[Any] = set()

    def note(self) -> None:
        """What is queued on the current stream will be used, perhaps on another one."""
        self._noted.add(self._device.current_stream())

    def follow(self) -> None:
        """Have the current stream wait for all that was noted, and what is queued on it from now on is noted."""
        current = self._device.current_stream()
        for stream in self._noted - {current}:
            self._device.let_wait(current, self._device.record(stream))
        self._noted = {current}
