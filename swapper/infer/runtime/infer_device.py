"""What a loaded model has on an accelerator: images of its groups, and what stays there by itself.

Weights go from the frames of host memory to the device page by page; what the device's budget can hold stays there, then what host
memory can hold, and the rest is read in each pass. Small weights, buffers and what the checkpoint does not have are moved once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence

import torch
from torch import nn

from swapper.device.device import Device
from swapper.device.device_placement import DevicePlacement
from swapper.device.device_storage import DeviceStorage
from swapper.device.image_layout import Span, place_in_storage, spans_of_page
from swapper.device.tier import DeviceCopy, DeviceTier
from swapper.device.uploads import COPIES_IN_FLIGHT, PageCopy, Uploads
from swapper.errors import DeviceError
from swapper.infer.mapping.adoption import view_of
from swapper.infer.planning.streaming_plan import StreamedGroup
from swapper.infer.runtime.streaming import Streaming, page_access
from swapper.paging.section import Section
from swapper.runtime.counters import Counters


class InferenceDevice:
    """Owns the device's part of one model.

    Args:
        device: where kernels run.
        streaming: the frames that it is fed from.
        placement: of the device's budget.
        counters: to keep.

    Attributes:
        tier: has the images.
    """

    def __init__(self, device: Device, streaming: Streaming, placement: DevicePlacement, counters: Counters) -> None:
        self.device = device
        self._placement = placement
        self._uploads = Uploads(device, streaming.pager, streaming.frame_of, counters)
        self.tier = DeviceTier(device, self._uploads, placement.image_bytes, counters)
        self._passing_frames = streaming.frame_count
        self._moved: list[nn.Parameter] = []
        self._buffers: list[tuple[nn.Module, str]] = []

    def image(
        self, group: StreamedGroup, sections: Sequence[Section], kept: Collection[int]
    ) -> tuple[DeviceCopy, list[list[torch.Tensor]]]:
        """Return a group's image, and the parts of each of its weights as views of it.

        Args:
            group: what it holds.
            sections: of its runs.
            kept: pages that stay in host memory.
        """
        parts = [part for weight in group.weights for part in weight.recipe.parts]
        offsets, nbytes = place_in_storage(part.nbytes for part in parts)
        storage = DeviceStorage(self.device, nbytes)
        copies = []
        for run, section in zip(group.runs, sections, strict=True):
            spans = [Span(begin, parts[number].nbytes, offsets[number]) for number, begin in run.places]
            for page in section.pages:
                wanted = spans_of_page(spans, page.offset, page.nbytes)
                copies.append(PageCopy(page, page_access(group.index, page.index), wanted, page.index in kept))
        self._passing_frames -= sum(copy.stays for copy in copies)
        self._uploads.most_in_flight = max(COPIES_IN_FLIGHT, self._passing_frames // 2)
        views = iter([view_of(storage.memory, offset, part) for offset, part in zip(offsets, parts, strict=True)])
        located = [[next(views) for _ in weight.recipe.parts] for weight in group.weights]
        storage.free()
        name = group.weights[0].name.rpartition(".")[0] if group.weights else ""
        image = DeviceCopy(name, storage, copies, group.index in self._placement.resident_set)
        self.tier.add(image)
        return image, located

    def has_room_for(self, group: StreamedGroup) -> bool:
        """Whether all of it can be on the device. What is read by rows or parts may be larger."""
        return group.image_bytes <= self._placement.image_bytes

    def stays(self, group: int) -> bool:
        return group in self._placement.resident_set

    def moved(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [tensor.to(self.device.device) for tensor in tensors]

    def move_the_rest(self, model: nn.Module, there: Collection[int]) -> None:
        """Move buffers, and parameters that nobody loads; `there` are ids of the loaded ones."""
        done: dict[int, torch.Tensor] = {}
        for module in model.modules():
            for parameter in module._parameters.values():
                if parameter is not None and id(parameter) not in there and parameter.device != self.device.device:
                    parameter.data = parameter.data.to(self.device.device)
                    self._moved.append(parameter)
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.device != self.device.device:
                    module._buffers[name] = done.setdefault(id(buffer), buffer.to(self.device.device))
                    self._buffers.append((module, name))

    def move_back(self) -> None:
        """What was moved is the model's own: it has it on the CPU again, unless the device failed."""
        with contextlib.suppress(DeviceError), self.device.named("moving buffers back"):
            for parameter in self._moved:
                parameter.data = parameter.data.cpu()
            for module, name in self._buffers:
                buffer = module._buffers.get(name)
                if buffer is not None and buffer.device == self.device.device:
                    module._buffers[name] = buffer.cpu()
        self._moved, self._buffers = [], []

    def close(self) -> None:
        self.tier.close()
