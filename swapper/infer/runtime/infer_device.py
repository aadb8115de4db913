"""What a loaded model has on an accelerator: images of its groups, and what stays there by itself.

Weights go from the frames of host memory to the device page by page; what the device's budget can hold stays there, then what host
memory can hold, and the rest is read in each pass. Small weights, buffers and what the checkpoint does not have are moved once.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from swapper.device.copies import COPIES_IN_FLIGHT
from swapper.device.device import Device
from swapper.device.device_placement import DevicePlacement
from swapper.device.device_storage import Span
from swapper.device.tier import DeviceCopy
from swapper.infer.mapping.adoption import view_of
from swapper.infer.planning.streaming_plan import StreamedGroup
from swapper.infer.runtime.streaming import Streaming
from swapper.modules.model_device import ModelDevice
from swapper.paging.section import Section
from swapper.runtime.counters import Counters


class InferenceDevice(ModelDevice):
    """Owns the device's part of one model.

    Args:
        device: where kernels run.
        streaming: the frames that it is fed from.
        placement: of the device's budget.
        counters: to keep.
    """

    def __init__(self, device: Device, streaming: Streaming, placement: DevicePlacement, counters: Counters) -> None:
        assert streaming.host_side is not None
        super().__init__(device, placement, streaming.host_side, streaming.pager, counters, is_cyclic=True)
        self._image_bytes = placement.image_bytes
        self._passing_frames = streaming.pool.frame_count

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
        storage, offsets = self.reserve(part.nbytes for part in parts)
        spans = {
            section: [Span(begin, parts[number].nbytes, offsets[number]) for number, begin in run.places]
            for run, section in zip(group.runs, sections, strict=True)
        }
        views = iter([view_of(storage.memory, offset, part) for offset, part in zip(offsets, parts, strict=True)])
        located = [[next(views) for _ in weight.recipe.parts] for weight in group.weights]
        name = group.weights[0].name.rpartition(".")[0] if group.weights else ""
        image = self.add_image(group.index, name, storage, spans, kept)
        self._passing_frames -= sum(copy.stays for copy in image.copies)
        self._uploads.most_in_flight = max(COPIES_IN_FLIGHT, self._passing_frames // 2)
        return image, located

    def has_room_for(self, group: StreamedGroup) -> bool:
        """Whether all of it can be on the device. What is read by rows or parts may be larger."""
        return group.image_bytes <= self._image_bytes

    def stays(self, group: int) -> bool:
        return group in self._resident_set

    def moved(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [tensor.to(self.device.device) for tensor in tensors]
