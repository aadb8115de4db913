"""A model's part of an accelerator: images of its groups, its buffers, and the copies that fill them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial

import torch
from torch import nn

from swapper.device.copies import PageCopy, Uploads
from swapper.device.device import Device
from swapper.device.device_placement import DevicePlacement
from swapper.device.device_storage import DeviceStorage, Span, merge_spans, place_in_storage, spans_of_page
from swapper.device.registered_memory import HostSide
from swapper.device.tier import DeviceCopy, DeviceTier
from swapper.errors import DeviceError, InvariantError
from swapper.paging.pager import Pager
from swapper.paging.schedule import Access
from swapper.paging.section import Section
from swapper.runtime.counters import Counters


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
