"""Owns an offloaded model's part of an accelerator: images of its groups, its buffers, and copies in both directions.

Forwards and backwards run there. Parameters are copied page by page from host memory or NVMe before their kernels;
gradients are copied down as they come (device_grads.py). The update runs on the CPU, where the state is, or slice by
slice on the device (device_sweep.py), and invalidates the images of all trained groups. Images that fit the device's
budget stay from one use to the next within a step.

[Note: streams of a backward] Autograd runs each node on the stream of its operation in the forward, and hooks on the
stream of their node. A parameter's gradient is written, and the hook after it runs, on the stream that was current when
the forward first used the parameter. The gradient is valid on that stream only until the backward is over: then torch
makes the backward's caller's stream wait for all of those. So `update="backward"` waits for the parameters' streams.

[Note: threads of a backward] Autograd runs a backward's nodes of the accelerator in a thread of its own, and those of the CPU
in the thread that called it: hooks of both may be due at once (a module that returns a tensor of the CPU). They are not
made to be interleaved, and every call of the device lets the other thread go on. So each takes `alone` after its turn.

[Note: stream of updates] Updates on the device have a stream of their own, so that the kernels of a forward or backward
wait neither for them nor for the copies of their slices. It waits for what was queued when a step's first update begins
(scalars of the optimizer's on the device), and for gradients that stay. The caller's stream waits for it when the backward
is over. All other results go by host memory, or are waited for by who uses them (resident state).

[Note: what stays is updated there] The parameters of an image that stays are updated in it, and not copied to the device again.
Pages that are on NVMe are written with the slice that updates them, as each commit needs them. Of what is in host memory no byte
is copied in a step: it has an earlier content (`DeviceCopy.is_dirty`) until something reads it: a commit, a snapshot, a change
from outside, an eviction, closing.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn

from swapper.device.copies import CopyTimes, Downloads, PageCopy
from swapper.device.device import OUT_OF_MEMORY, Device
from swapper.device.device_memory import DeviceStorage, HostSide, Span
from swapper.device.model_device import PAGES_ON_THEIR_WAY, DeviceBudget, DevicePlacement, ModelDevice
from swapper.device.tier import DeviceCopy
from swapper.errors import BudgetError, DeviceError
from swapper.modules.groups import Group
from swapper.modules.home import DeviceHome, GroupHome
from swapper.paging.layout import Slot
from swapper.paging.pager import Pager
from swapper.paging.schedule import Access
from swapper.paging.section import Section
from swapper.paging.store.page_files import checksum_of
from swapper.runtime.counters import Counters
from swapper.runtime.sizes import format_bytes
from swapper.tensors.guarded_tensor import tensors_among
from swapper.train.groups.memory_use import MemoryUse
from swapper.train.groups.processor import Processor

MORE_PAGES_ON_THEIR_WAY = 14
"""Maximum of those from spare frames, of which at most every second one is taken: a choice. With few, Python waits for kernels
that make gradients, and queues no others."""
USES_REMEMBERED = 64
"""Maximum uses of a group in a step, on average, that are predicted for the next step: a choice."""

_open: weakref.WeakSet[TrainingDevice] = weakref.WeakSet()


class TrainingDevice(ModelDevice, Processor):
    """Owns the device's part of one session.

    Args:
        budget: the device, and how much of its memory may be used.
        placement: the division of that.
        host: memory of frames and resident sections.
        updates: the optimizer's updates run there too.
        spare_frames: of the pool, beyond what a step needs at once.

    Attributes:
        max_pages: maximum of frames leased for gradients at once.
        downloads: copies gradients, and changes made on the device, to the host.
        memory: limits of what is there.
        staying_gradients: groups whose gradients stay there.
        order: of the streams that write gradients which stay, and the one that uses them.
        shown_on: the device of the parameters, and of the gradients that stand for those that leave.
        updating: the stream of updates.
        alone: see [Note: threads of a backward].

    Raises:
        BudgetError: the budgets of this and other sessions exceed the device's memory.
    """

    is_device = True

    def __init__(
        self,
        budget: DeviceBudget,
        placement: DevicePlacement,
        host: HostSide,
        pager: Pager,
        counters: Counters,
        updates: bool,
        spare_frames: int = 0,
    ) -> None:
        _check_others(budget)
        super().__init__(budget.device, placement, host, pager, counters, is_cyclic=False)
        device = budget.device
        self.alone = threading.RLock()
        self.updates = updates
        self.shown_on = device.device
        self.max_pages = PAGES_ON_THEIR_WAY + min(max(spare_frames, 0) // 2, MORE_PAGES_ON_THEIR_WAY)
        self._budget = budget
        self._pager = pager
        self.downloads = Downloads(device, counters, placement.down_bytes)
        self.staying_gradients = placement.gradients
        self.memory = MemoryUse(budget, placement, self.tier, counters)
        self.order = StreamOrder(device)
        self._counters = counters
        self._slices = device.new_stream()  # slices that are updated do not wait behind images
        self._slice_times = CopyTimes(device, counters, "upload_s")
        self.updating = device.new_stream()
        self._images: list[DeviceCopy] = []
        self._copy_of: dict[int, DeviceCopy] = {}  # by id of a parameter
        self._at: dict[tuple[Section, Slot], tuple[DeviceStorage, torch.Tensor]] = {}  # parameters in their images
        self._used: list[DeviceCopy] = []  # in this step, in order
        _open.add(self)

    def home(self, group: Group, places: Sequence[tuple[Section, Slot]]) -> tuple[GroupHome, list[torch.Tensor]]:
        storage, views, spans = self.lay_out(places)
        image = self.add_image(group.index, group.name, storage, spans)
        self._images.append(image)
        image.before_eviction = partial(self._before_eviction, image)
        self._at.update({place: (storage, view) for place, view in zip(places, views, strict=True)})
        self._copy_of.update((id(parameter), image) for _, parameter in group.parameters)
        return DeviceHome(self, image), views

    def lay_out(
        self, places: Sequence[tuple[Section, Slot]]
    ) -> tuple[DeviceStorage, list[torch.Tensor], dict[Section, list[Span]]]:
        """Return a storage without memory for tensors at `places`, a view of it for each, and its spans by section."""
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
        self.tier.expect([*self._images, *reversed(self._images)])

    # --- passes -------------------------------------------------------------------------------------------------------

    def pass_begins(self) -> None:
        self.memory.pass_begins()

    def check_inputs(self, module: nn.Module, inputs: object) -> None:
        where = {tensor.device for tensor in tensors_among(inputs)}
        if where and self.device.device not in where:
            found = ", ".join(sorted(map(str, where)))
            raise DeviceError(
                f"{type(module).__name__} runs on {self.device} and was given tensors on {found} only: move them, "
                f"`tensor.to({str(self.device)!r})`"
            )

    def lease(self, image: DeviceCopy) -> None:
        super().lease(image)
        if len(self._used) < USES_REMEMBERED * len(self._images):
            self._used.append(image)

    def gradient_came(self, parameter: int) -> None:
        """Note that autograd has written the gradient of the parameter with this id on the current stream."""
        self._copy_of[parameter].storage.note_use()  # by the kernels that made the gradient

    def write_back(self, image: DeviceCopy) -> None:
        """Copy an image to host memory if it was updated on the device since. Raises as `copy_back`."""
        if image.is_dirty:
            self.copy_back(image)

    def _before_eviction(self, image: DeviceCopy) -> None:
        self.downloads.finish()  # they may read it
        self.write_back(image)

    def sync_to_host(self) -> None:
        for image in self._images:
            self.write_back(image)

    def discard_changes(self, groups: Collection[int] | None = None) -> None:
        for index, image in enumerate(self._images):
            if image.is_filled and (groups is None or index in groups):
                self.tier.invalidate(image)

    def copy_back(self, image: DeviceCopy) -> None:
        """Copy the device's content to the locations of the image's tensors, and wait for the copies.

        Raises:
            IoError: a page could not be read.
            DeviceError: the device failed.
        """
        image.storage.wait_for_users()
        for copy in image.copies:
            only = frozenset() if copy.page.section.resident else frozenset({copy.page.index})
            access = Access(None, tuple(only), writes=only, in_frames=only)
            self._pager.acquire(access)
            try:
                memory = self.host.of(copy.page)
                external = checksum_of(copy.page, memory.data_ptr())
                self.downloads.send(
                    [(memory[s.begin : s.begin + s.nbytes], image.storage.read(s.target, s.nbytes)) for s in copy.spans]
                )
                self.downloads.finish()
                if external is not None and external == checksum_of(copy.page, memory.data_ptr()):
                    only = frozenset()  # unchanged: it stays external
            finally:
                self._pager.release(access, only)
        image.is_dirty = False

    def new_storage(
        self, nbytes: int, purpose: str = "the update of a slice", remedy: str = "say update_on='cpu'"
    ) -> DeviceStorage:
        """Return memory on the device; if that is short, idle images are dropped for it.

        Raises:
            BudgetError: there is too little for `purpose`; `remedy` helps.
        """
        return self.tier.evicting(lambda: self._allocate(nbytes), nbytes, purpose, remedy)

    def spare_storage(self, nbytes: int) -> DeviceStorage | None:
        """Return memory on the device; None if that is short: nothing is dropped for it."""
        try:
            return self._allocate(nbytes)
        except OUT_OF_MEMORY:
            return None

    def _allocate(self, nbytes: int) -> DeviceStorage:
        """Return memory that copies may fill at once, without waiting for kernels. Raises OUT_OF_MEMORY."""
        storage = DeviceStorage(self.device, nbytes)
        storage.free()
        storage.allocate()
        return storage

    def fill(self, storage: DeviceStorage, copies: Sequence[PageCopy]) -> None:
        """Fill a storage, allocating its memory if needed. `finish` waits for the copies, and releases their frames.

        Raises:
            BudgetError: there is too little memory.
            IoError: a page could not be read.
        """
        if storage.is_allocated:
            storage.invalidate()
        else:
            self.tier.evicting(storage.allocate, storage.nbytes, "the optimizer state that stays there")
        for copy in copies:
            self._uploads.send(copy, storage)
        storage.all_is_queued()

    def bring_up(
        self,
        storage: DeviceStorage,
        pieces: Sequence[tuple[int, torch.Tensor]],
        last_use: torch.Event | None = None,
        after: torch.Event | None = None,
    ) -> None:
        """Refill a storage, on a stream of its own; kernels that are queued next wait for the copies.

        Args:
            pieces: (offset in bytes, host memory), which the caller leaves unchanged until the copies are over.
            last_use: of what the storage has: see `DeviceStorage.invalidate`.
            after: an event after which the host memory has what is to be copied.
        """
        if after is not None:
            self.device.let_wait(self._slices, after)
        if storage.filled_at is not None:
            storage.invalidate(last_use)
        with self.device.range("upload of a slice", storage.nbytes):
            queued = storage.fill(pieces, self._slices)
            storage.all_is_queued()
        self._counters.uploaded_bytes += sum(source.numel() for _, source in pieces)
        self._slice_times.add(queued)
        storage.wait_on_current_stream()

    def finish(self) -> None:
        with contextlib.suppress(DeviceError):
            self.downloads.finish()
        with contextlib.suppress(DeviceError):
            self.device.wait_for(self.device.record(self._slices))
        self._slice_times.collect()
        self.tier.finish()

    def forget_uses(self) -> None:
        self._used.clear()

    # --- an update ----------------------------------------------------------------------------------------------------

    def before_update(self, group: int) -> None:
        """Invalidate a group's image before its parameters are updated, unless they are updated there."""
        if not self.updates_in_place(group):
            self.tier.invalidate(self._images[group])

    def updates_in_place(self, group: int) -> bool:
        """Return True if the group's parameters are updated in their image. [Note: what stays is updated there]"""
        image = self._images[group]
        return self.updates and image.stays and image.is_filled

    def changing(self, group: int) -> AbstractContextManager[object]:
        """Return a context that queues the update of a group's image."""
        image = self._images[group]
        image.is_dirty = any(copy.page.section.resident for copy in image.copies)
        return self.tier.changing(image)

    def parameter(self, section: Section, slot: Slot) -> torch.Tensor:
        """Return the memory of a parameter in its image, flat. A write there grows no version of the parameter."""
        storage, view = self._at[section, slot]
        return storage.read(int(view.storage_offset()) * view.element_size(), view.nbytes).view(view.dtype)

    def apart(self) -> AbstractContextManager[None]:
        """Return a context whose kernels are queued on the stream of updates."""
        return self.device.on(self.updating)

    def after_update(self) -> None:
        """Upload updated parameters for the next step, which is expected to use them in the order of this one."""
        if self._used:
            self.tier.expect(self._used)
        self._used.clear()
        self.memory.step_taken()
        self.tier.prepare_next()

    # ------------------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        _open.discard(self)
        self.memory.close()
        self.finish()
        super().close()
        self._images, self._used, self._copy_of, self._at = [], [], {}, {}


class ShardDevice(TrainingDevice):
    """Of a sharded model: FSDP2 gathers its parameters from host memory. Here are updates, and copies of gradients."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.shown_on = torch.device("cpu")

    def home(self, group: Group, places: Sequence[tuple[Section, Slot]]) -> tuple[GroupHome, list[torch.Tensor]]:
        return Processor.home(self, group, places)

    def gradient_came(self, parameter: int) -> None:
        """No image is used by the kernels that made the gradient."""

    def before_update(self, group: int) -> None:
        """No image is outdated."""

    def updates_in_place(self, group: int) -> bool:
        return False


def _check_others(budget: DeviceBudget) -> None:
    others = [other._budget.nbytes for other in _open if other.device.identity == budget.device.identity]
    total_bytes = budget.device.total_bytes() if others else 0
    if others and budget.nbytes + sum(others) > total_bytes:
        raise BudgetError(
            f"{budget.device} has {format_bytes(total_bytes)}, of which {len(others)} other manager{'s' * (len(others) > 1)} "
            f"may use {format_bytes(sum(others))}: device_memory={format_bytes(budget.nbytes)} is more than the rest. Lower one of "
            "them, or close the other manager",
            option="device_memory",
        )


class StreamOrder:
    """Records the streams with work that the next user must wait for; with a single stream no event is needed."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._noted: set[torch.Stream] = set()

    def note(self) -> None:
        """Note that work on the current stream will be used, perhaps on another one."""
        self._noted.add(self._device.current_stream())

    def follow(self) -> None:
        """Make the current stream wait for all noted ones. From now on it alone is noted."""
        current = self._device.current_stream()
        for stream in self._noted - {current}:
            self._device.let_wait(current, self._device.record(stream))
        self._noted = {current}
