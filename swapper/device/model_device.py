"""A model's part of an accelerator: how its budget is divided; images of its groups, its buffers, and the copies that fill them.

On a cycle a fixed set is best ([Note: what stays], paging/prefetcher.py); here it consists of whole groups, because a group's
storage is there or not. They are taken evenly from the cycle, so that a resident group computes between two that must be copied.
Streaming needs memory for the largest unit's groups, and for the next ones.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from swapper.device.copies import PageCopy, Uploads
from swapper.device.device import Device, open_device
from swapper.device.device_memory import DeviceStorage, HostSide, Span, merge_spans, place_in_storage, spans_of_page
from swapper.device.tier import DeviceCopy, DeviceTier
from swapper.errors import BudgetError, ConfigError, DeviceError, InvariantError
from swapper.paging.pager import Pager
from swapper.paging.schedule import Access
from swapper.paging.section import Section
from swapper.runtime.counters import Counters
from swapper.runtime.sizes import format_bytes, parse_bytes

AHEAD_BYTES = 64 << 20
"""Memory for groups that are copied while one computes: at most an AHEAD_SHARE-th of the budget, but room for the largest."""
AHEAD_SHARE = 8
STEPS = 64
"""The share that stays is searched in steps of 1/64."""
EARLIER_SHARE = 4
"""An earlier gradient, to which one is added, is on the device in pieces of this part of the bytes for downloads."""
MAX_EARLIER_BYTES = 64 << 20
"""At most: a choice."""
PAGES_ON_THEIR_WAY = 2
"""Frames leased for gradients at once that a pool always has: one is copied while the next is queued."""
RING = 3
"""Slices on the device at once if they are updated there: one is copied up, one is updated, one is copied down."""


@dataclass(frozen=True, slots=True)
class DeviceBudget:
    """An accelerator, and how many bytes of its memory may be used. `is_auto`: the user left that to swapper."""

    device: Device
    nbytes: int
    is_auto: bool = False

    @classmethod
    def parse(cls, device: str | torch.device | Device, device_memory: int | str) -> DeviceBudget | None:
        """Return what the user asked for; None for the CPU, whose memory is host memory. "auto" is half of what is free.

        Raises:
            ConfigError: an option is not known, or they do not go together.
            DeviceError: there is no such device.
        """
        opened = open_device(device)
        if opened is not None:
            auto = device_memory == "auto"
            nbytes = opened.free_bytes() // 2 if auto else parse_bytes(device_memory, "device_memory")
            if opened.is_there and nbytes > (total_bytes := opened.total_bytes()):
                raise ConfigError(
                    f"device_memory={device_memory!r} is more than {opened} has, {format_bytes(total_bytes)}: leave it out, and "
                    "swapper takes what forward and backward leave"
                )
            return cls(opened, nbytes, auto)
        if device_memory != "auto":
            raise ConfigError(f"device_memory={device_memory!r} goes with a device; on the CPU say host_memory")
        return None


@dataclass(frozen=True, slots=True)
class DevicePlacement:
    """How a budget is divided.

    Attributes:
        image_bytes: for all groups that are on the device at once.
        resident_set: groups that stay once they were copied.
        down_bytes: for gradients in flight to host memory, if any.
        sum_bytes: for gradients that are added up there, and go to host memory in a step's last backward.
        gradients: groups whose gradients stay until they are used.
        state: groups whose optimizer state stays.
        ahead_bytes: for optimizer state that is copied up before its gradients are there.
        max_sum_bytes, max_ahead_bytes: that there are such gradients and such state.
    """

    image_bytes: int
    resident_set: frozenset[int]
    down_bytes: int = 0
    sum_bytes: int = 0
    gradients: frozenset[int] = frozenset()
    state: frozenset[int] = frozenset()
    ahead_bytes: int = 0
    max_sum_bytes: int = 0
    max_ahead_bytes: int = 0


def place_on_device(
    device_bytes: int,
    fixed_bytes: int,
    images: Mapping[int, int],
    units: Sequence[Sequence[int]],
    where: Sequence[str],
    device: object,
    fixed: str = "small tensors, buffers and conversions",
) -> DevicePlacement:
    """Return the placement that copies the fewest bytes a pass.

    Args:
        device_bytes: the budget.
        fixed_bytes: for everything else on the device, which `fixed` names.
        images: by group, in the order of a pass, the size of its storage.
        units: for each unit, the groups that are in use while it runs.
        where: the units' names.
        device, fixed: for the message.

    Raises:
        BudgetError: with the smallest budget that works.
    """
    left = device_bytes - fixed_bytes
    ahead_bytes = min(AHEAD_BYTES, max(left, 0) // AHEAD_SHARE)
    for step in range(STEPS, -1, -1):
        resident_set = _even(images, step)
        if _needed(images, units, resident_set, ahead_bytes) <= left:
            return DevicePlacement(left, resident_set)
    working = _needed(images, units, frozenset(), None)
    if working <= left:
        return DevicePlacement(left, frozenset())
    largest = max(range(len(units)), key=lambda unit: sum(images.get(group, 0) for group in units[unit]), default=0)
    raise BudgetError(
        f"device_memory={format_bytes(device_bytes)} is too small: on {device} this model needs at least "
        f"{format_bytes(fixed_bytes + working)} ({fixed_bytes + working} bytes), of which {format_bytes(fixed_bytes)} are "
        f"{fixed}, and {format_bytes(working)} what is used at once in "
        f"{where[largest]!r}; raise device_memory",
        option="device_memory",
        smallest_bytes=fixed_bytes + working,
    )


def _even(images: Mapping[int, int], step: int) -> frozenset[int]:
    """Return groups that are about step / STEPS of all bytes, evenly spread."""
    resident_set, all_bytes, staying_bytes = [], 0, 0
    for group, nbytes in images.items():
        all_bytes += nbytes
        if (staying_bytes + nbytes) * STEPS <= all_bytes * step:
            resident_set.append(group)
            staying_bytes += nbytes
    return frozenset(resident_set)


def _needed(
    images: Mapping[int, int], units: Iterable[Sequence[int]], resident_set: frozenset[int], ahead_bytes: int | None
) -> int:
    """Return the peak of all images' bytes, with room for the next ones unless `ahead_bytes` is None."""
    streamed = {group: nbytes for group, nbytes in images.items() if group not in resident_set}
    kept_bytes = sum(images.values()) - sum(streamed.values())
    if not streamed:
        return kept_bytes
    working_sets = {tuple(sorted(streamed[group] for group in unit if group in streamed)) for unit in units}
    working = max((sum(sizes) for sizes in working_sets), default=0)
    ahead = 0 if ahead_bytes is None else min(max(ahead_bytes, max(streamed.values())), sum(streamed.values()))
    return kept_bytes + working + ahead


class ModelDevice:
    """Owns the device's part of one model.

    Args:
        host: memory of the frames and of resident sections.
        is_cyclic: the expected order of images repeats.

    Attributes:
        tier: has the images.
    """

    def __init__(
        self,
        device: Device,
        placement: DevicePlacement,
        host: HostSide,
        pager: Pager,
        counters: Counters,
        is_cyclic: bool,
    ) -> None:
        self.device = device
        self.host = host
        self._resident_set = placement.resident_set
        self._uploads = Uploads(device, pager, host.of, counters)
        self.tier = DeviceTier(device, self._uploads, placement.image_bytes, counters, is_cyclic)
        self._buffers: list[tuple[nn.Module, str]] = []  # that were moved
        self._parameters: list[nn.Parameter] = []  # that were moved

    def reserve(self, sizes: Iterable[int]) -> tuple[DeviceStorage, list[int]]:
        """Return a storage for tensors of `sizes` bytes, and the offset of each. `free` it once it has views."""
        offsets, nbytes = place_in_storage(sizes)
        return DeviceStorage(self.device, nbytes), offsets

    def add_image(
        self,
        group: int,
        name: str,
        storage: DeviceStorage,
        spans: Mapping[Section, Sequence[Span]],
        kept: Collection[int] = (),
    ) -> DeviceCopy:
        """Return the image of a group.

        Args:
            group, name: its index, and its name in messages.
            storage: its memory, which is freed.
            spans: the parts of each section, and their offsets in the storage.
            kept: pages that stay in host memory once they were read.
        """
        storage.free()
        access = partial(page_access, group)
        copies = [copy for section, of in spans.items() for copy in page_copies(section, of, access, kept)]
        image = DeviceCopy(name, storage, copies, group in self._resident_set)
        self.tier.add(image)
        return image

    def lease(self, image: DeviceCopy) -> None:
        """Have an image there for kernels of a pass. Raises as `DeviceTier.lease`."""
        self.tier.lease(image)

    def copy_back(self, image: DeviceCopy) -> None:
        """Copy changes of an image to host memory."""
        raise InvariantError(f"{image.name} is only read")

    def move(self, model: nn.Module, parameters: Iterable[nn.Parameter] = ()) -> None:
        """Move the model's buffers to the device, and `parameters`, which are in no image."""
        for parameter in parameters:
            if parameter.device != self.device.device:
                parameter.data = parameter.data.to(self.device.device)
                self._parameters.append(parameter)
        done: dict[int, torch.Tensor] = {}
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.device != self.device.device:
                    module._buffers[name] = done.setdefault(id(buffer), buffer.to(self.device.device))
                    self._buffers.append((module, name))

    def move_back(self) -> None:
        """Move everything back to the CPU, unless the device failed."""
        with contextlib.suppress(DeviceError), self.device.named("moving buffers back"):
            for parameter in self._parameters:
                parameter.data = parameter.data.cpu()
            there = [(module, name, module._buffers.get(name)) for module, name in self._buffers]
            back: dict[int, torch.Tensor] = {}  # by id: a shared one stays shared
            for module, name, buffer in there:
                if buffer is not None and buffer.device == self.device.device:
                    module._buffers[name] = back.setdefault(id(buffer), buffer.cpu())
        self._buffers, self._parameters = [], []

    def close(self) -> None:
        """Wait for all copies, move back what was moved, and close the tier. No image is used any more."""
        self.tier.finish()
        self.move_back()
        self.tier.close()
        self._uploads.close()


def page_copies(
    section: Section, spans: Sequence[Span], access: Callable[[int], Access], kept: Collection[int] = ()
) -> list[PageCopy]:
    """Return how a section is copied to the device: page by page, or as a whole if it is resident.

    Args:
        spans: the parts of the section that are copied.
        access: returns the access to a page.
        kept: pages that stay in host memory once they were read.
    """
    if section.resident:
        whole = Access(None, ())
        return [PageCopy(section.piece, whole, merge_spans(spans), stays=True, is_held=True)]
    return [
        PageCopy(page, access(page.index), spans_of_page(spans, page.offset, page.nbytes), page.index in kept)
        for page in section.pages
    ]


def page_access(group: int, page: int) -> Access:
    """Return the access to one page of a group's parameters that is copied to the device."""
    return Access(("param", group, page), (page,), in_frames=frozenset({page}))
