"""What a model has on an accelerator: images of its groups, its buffers, and the copies of what fills them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial

import torch
from torch import nn

from swapper.device.copies import PageCopy, Uploads
from swapper.device.device import Device
from swapper.device.device_placement import DevicePlacement
from swapper.device.device_storage import DeviceStorage, Span, place_in_storage, spans_of_page
from swapper.device.registered_memory import HostSide
from swapper.device.tier import DeviceCopy, DeviceTier
from swapper.errors import DeviceError
from swapper.paging.pager import Pager
from swapper.paging.planning.schedule import Access
from swapper.paging.section import Section
from swapper.runtime.counters import Counters


class ModelDevice:
    """Owns the device's part of one model.

    Args:
        device: where kernels run.
        placement: of its memory.
        host: the frames' memory, and that of what stays.
        pager: of the frames.
        counters: to keep.
        is_cyclic: what comes after the last image that is expected: the first; else nothing.

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
        """Return a storage for tensors of `sizes` bytes, and where in it each begins. `free` it once it has views."""
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
            group, name: its index, and what people know it by.
            storage: has its memory, and is freed.
            spans: what of each section goes where in it.
            kept: pages that stay in host memory once they were read.
        """
        storage.free()
        access = partial(page_access, group)
        copies = [copy for section, of in spans.items() for copy in page_copies(section, of, access, kept)]
        image = DeviceCopy(name, storage, copies, group in self._resident_set)
        self.tier.add(image)
        return image

    def move(self, model: nn.Module, parameters: Iterable[nn.Parameter] = ()) -> None:
        """Have the model's buffers on the device, and `parameters`, which are in no image."""
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
        """What was moved is on the CPU again, unless the device failed."""
        with contextlib.suppress(DeviceError), self.device.named("moving buffers back"):
            for parameter in self._parameters:
                parameter.data = parameter.data.cpu()
            for module, name in self._buffers:
                buffer = module._buffers.get(name)
                if buffer is not None and buffer.device == self.device.device:
                    module._buffers[name] = buffer.cpu()
        self._buffers, self._parameters = [], []

    def close(self) -> None:
        """Nobody uses an image any more. Waits for all copies; what was moved is on the CPU again."""
        self.tier.finish()
        self.move_back()
        self.tier.close()


def page_copies(
    section: Section, spans: Sequence[Span], access: Callable[[int], Access], kept: Collection[int] = ()
) -> list[PageCopy]:
    """Return how a section comes to the device: page by page, or where it stays in memory, at one time.

    Args:
        spans: of the section, which go to the device.
        access: makes the use of a page.
        kept: pages that stay in host memory once they were read.
    """
    if section.resident:
        whole = Access(None, ())
        return [PageCopy(section.piece, whole, tuple(spans), stays=True, is_held=True)]
    return [
        PageCopy(page, access(page.index), spans_of_page(spans, page.offset, page.nbytes), page.index in kept)
        for page in section.pages
    ]


def page_access(group: int, page: int) -> Access:
    """Return the use of one page of a group's parameters, which goes on to the device."""
    return Access(("param", group, page), (page,))
