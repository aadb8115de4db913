"""Makes the groups of a loaded model: streamed, on a device, larger than that, or read on demand (experts).

On a device a group's parameters are views of its image (its storage there). Weights are copied page by page from the
frames of host memory; those that fit the device's budget stay there, then those that fit host memory, and the rest is
read in each pass. Small weights, buffers and tensors that the checkpoint does not have are moved once.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import nn

from swapper.device.copies import COPIES_IN_FLIGHT, NewCopies
from swapper.device.device import Device
from swapper.device.device_placement import DevicePlacement
from swapper.device.device_storage import Span
from swapper.device.tier import DeviceCopy, DeviceTier
from swapper.errors import BudgetError
from swapper.infer.mapping.adoption import Places, adopt, locate, view_of
from swapper.infer.mapping.matching import Recipe, Weight
from swapper.infer.operators.device_experts import DeviceExperts
from swapper.infer.operators.experts import Experts, ExpertWeights, Key, OnDemandGroup, numbered
from swapper.infer.planning.infer_placement import Fit
from swapper.infer.planning.streaming_plan import StreamedGroup
from swapper.infer.runtime.streaming import Streaming
from swapper.infer.runtime.weights import GroupWeights, MadeMemory, PagedWeight
from swapper.modules.guarded import FaultHandler
from swapper.modules.model_device import ModelDevice
from swapper.paging.pager import Pager
from swapper.paging.planning.schedule import Access
from swapper.paging.section import Section
from swapper.runtime.counters import Counters

Adopted = TypeVar("Adopted", Weight, ExpertWeights)


class DeviceGroup(GroupWeights):
    """A group whose image is leased; its pages are in host memory only while they are copied.

    Args:
        index, weights, pager, fault_handler: see GroupWeights; the parts of the weights are views of the image's storage.
        image: the group's.
        tier: has the image.
    """

    def __init__(
        self,
        index: int,
        weights: Sequence[PagedWeight],
        image: DeviceCopy,
        tier: DeviceTier,
        pager: Pager,
        fault_handler: FaultHandler,
    ) -> None:
        super().__init__(index, weights, (), (), pager, fault_handler, image)
        self.image: DeviceCopy = image
        self._tier = tier
        self._stays_materialized = False  # it is on the device for good
        image.before_eviction = self._before_eviction

    @property
    def settled(self) -> bool:
        return not self.paged or self._stays_materialized

    @property
    def streamed_pages(self) -> list[int]:
        return [] if self.image.stays else [copy.page.index for copy in self.image.copies if not copy.stays]

    @property
    def accesses(self) -> list[Access]:
        if self.image.stays and self.image.is_filled:
            return []
        return [copy.access for copy in self.image.copies if not copy.stays]

    @property
    def kept_accesses(self) -> list[Access]:
        return [copy.access for copy in self.image.copies if copy.is_held]

    def _fault_in(self) -> bool:
        if self.paged:
            self._tier.lease(self.image)
        return not self.settled

    def _give_back(self, changed: bool) -> None:
        if not self.settled:
            self._dematerialize()
        if self.paged:
            self._tier.release(self.image)

    def forget_leases(self) -> None:
        super().forget_leases()
        self._tier.forget(self.image)

    def abandon(self, keep_cold: bool = True) -> None:
        is_settled = self.settled
        super().abandon(keep_cold)
        self.image.before_eviction = lambda: None  # else the two would keep each other, and the memory
        if not is_settled:
            self._tier.drop(self.image)

    def _materialize(self) -> None:
        super()._materialize()
        self._stays_materialized = self.image.stays and not self._makes

    def _forget_change(self) -> None:
        self._tier.invalidate(self.image)

    def _before_eviction(self) -> None:
        """Dematerialize: the image was to stay and is evicted."""
        self._stays_materialized = False
        self._dematerialize()


class LargerThanDevice(GroupWeights):
    """A group that is read by rows or parts and is too large for the device as a whole; or one without weights."""

    def _fault_in(self) -> bool:
        if self.weights:
            raise BudgetError(
                f"parameter {self.names[0]} is used as a whole, and is larger than what device_memory leaves for weights; "
                "only its rows or parts can be used. Raise device_memory",
                option="device_memory",
            )
        return False


class InferenceDevice(ModelDevice):
    """Owns the device's part of one model.

    Args:
        device: runs the kernels.
        streaming: has the frames that are copied from.
        placement: of the device's budget.
        counters: to update.

    Attributes:
        copies: of experts, of parts of matrices, and of rows of embeddings.
    """

    def __init__(self, device: Device, streaming: Streaming, placement: DevicePlacement, counters: Counters) -> None:
        assert streaming.host_side is not None
        super().__init__(device, placement, streaming.host_side, streaming.pager, counters, is_cyclic=True)
        self._image_bytes = placement.image_bytes
        self.copies = NewCopies(device, counters, self._allocate)
        self._passing_frames = streaming.pool.frame_count

    def image(
        self, group: StreamedGroup, sections: Sequence[Section], kept: Collection[int]
    ) -> tuple[DeviceCopy, list[list[torch.Tensor]]]:
        """Return a group's image, and the parts of each of its weights as views of it.

        Args:
            group: the content of the image.
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
        self._uploads.max_in_flight = max(COPIES_IN_FLIGHT, self._passing_frames // 2)
        return image, located

    def experts(self, host_bytes: int, min_bytes: int) -> DeviceExperts[Key]:
        """Return memory for experts: `host_bytes` in host memory, and here at least this much, and what images leave."""
        tier = self.tier
        made: DeviceExperts[Key] = DeviceExperts(
            self.copies, host_bytes, lambda nbytes: min_bytes + tier.spare_bytes(nbytes)
        )
        tier.shrink_others = made.shrink
        return made

    def has_room_for(self, group: StreamedGroup) -> bool:
        """Return True if all of it fits the device's budget. A group that is read by rows or parts may be larger."""
        return group.image_bytes <= self._image_bytes

    def _allocate(self, nbytes: int) -> torch.Tensor:
        """Return memory for a copy; if that is short, idle images are dropped for it."""
        return self.tier.evicting(lambda: self.device.empty(nbytes), nbytes, "rows of a weight")

    def close(self) -> None:
        self.copies.finish()
        super().close()

    def stays(self, group: int) -> bool:
        return group in self._resident_set


@dataclass
class GroupMaking:
    """Gives every loaded parameter its memory, group by group. Parameters of the model may be replaced by new objects.

    Attributes:
        fitting: the groups, and the pages of them that stay.
        streaming: has the memory that they are read into.
        on_device: the same on an accelerator, if kernels run there.
        where: kernels run.
        fault_handler: called on access to a cold parameter.
        made: memory for weights that are computed while they are used.
        names, recipes: of the groups' parameters, by id.
    """

    model: nn.Module
    fitting: Fit
    streaming: Streaming
    on_device: InferenceDevice | None
    where: torch.device
    fault_handler: FaultHandler
    experts: Experts
    made: MadeMemory
    groups: list[GroupWeights] = field(default_factory=list)
    small: list[nn.Parameter] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)
    recipes: dict[int, Recipe] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._plan = self.fitting.plan
        self._places = Places(self.model)
        self._used = self._plan.used_groups
        self._apart = {group: expert for expert in self._plan.demanded for group in expert}
        self._adopted: dict[int, nn.Parameter] = {}  # by id of the parameter that the model had

    def make_all(self) -> None:
        """Fill `small` and `groups`."""
        located = locate(self._plan.small_runs, self.streaming.small, self._plan.small)
        for weight, parts in zip(self._plan.small, located, strict=True):
            moved = [part.to(self.where) for part in parts]
            self.small.append(adopt(self._places, weight, weight.recipe.from_parts(moved)))
        for group, sections in zip(self._plan.groups, self.streaming.sections, strict=True):
            self.groups.append(self._make(group, sections))
        for layer in self._plan.experts:
            self.experts.add_layer([self.adopted(weights) for weights in layer])

    def adopted(self, weight: Adopted) -> Adopted:
        """Return a weight of the plan with the parameter that the model has now."""
        return replace(weight, parameter=self._adopted[id(weight.parameter)])

    def _make(self, group: StreamedGroup, sections: Sequence[Section]) -> GroupWeights:
        pager, fault_handler = self.streaming.pager, self.fault_handler
        pages = [page.index for section in sections for page in section.pages]
        kept = pages[: max(len(pages) - self.fitting.placement.streamed, 0)] if self._stays_in_host(group.index) else []
        image: DeviceCopy | None = None
        if self.on_device is None:
            located = locate(group.runs, sections, group.weights)
        elif group.index in self._apart or not group.weights or not self.on_device.has_room_for(group):
            located = [[] for _ in group.weights]
        else:
            image, located = self.on_device.image(group, sections, kept)
        weights = self._adopt(group, located)
        if group.index in self._apart:
            return OnDemandGroup(group.index, weights, pager, fault_handler, self._with_it(group.index), self.experts)
        if image is not None and self.on_device is not None:
            return DeviceGroup(group.index, weights, image, self.on_device.tier, pager, fault_handler)
        if self.on_device is not None:
            return LargerThanDevice(group.index, weights, (), (), pager, fault_handler)
        return GroupWeights(group.index, weights, pages, kept, pager, fault_handler)

    def _adopt(self, group: StreamedGroup, located: Sequence[list[torch.Tensor]]) -> list[PagedWeight]:
        weights = []
        for weight, parts in zip(group.weights, located, strict=True):
            paged = PagedWeight(weight.name, weight.parameter, parts, weight.recipe, self.where, self.made.empty)
            paged = replace(paged, parameter=adopt(self._places, weight, paged.data()))
            self._adopted[id(weight.parameter)] = paged.parameter
            self.names[id(paged.parameter)] = weight.name
            self.recipes[id(paged.parameter)] = weight.recipe
            weights.append(paged)
        return weights

    def _stays_in_host(self, group: int) -> bool:
        """Return True if pages of the group may stay in host memory: it is used as a whole, and not resident on a device."""
        return group in self._used and (self.on_device is None or not self.on_device.stays(group))

    def _with_it(self, index: int) -> list[tuple[Key, Recipe]]:
        """Return the weights of the other groups of an expert."""
        others = [(group, self._plan.groups[group].weights) for group in self._apart[index] if group != index]
        return [item for group, some in others for item in numbered(group, [weight.recipe for weight in some])]
