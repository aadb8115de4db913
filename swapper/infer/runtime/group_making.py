"""The groups of a loaded model, each made as it is used: streamed, on a device, larger than that, or asked for by experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import nn

from swapper.device.tier import DeviceCopy
from swapper.infer.mapping.adoption import Places, adopt, locate
from swapper.infer.mapping.matching import Recipe
from swapper.infer.operators.experts import Experts, OnDemandGroup, numbered
from swapper.infer.planning.infer_placement import Placement
from swapper.infer.planning.streaming_plan import StreamedGroup, StreamingPlan
from swapper.infer.runtime.device_weights import DeviceGroup, LargerThanDevice
from swapper.infer.runtime.infer_device import InferenceDevice
from swapper.infer.runtime.streaming import Streaming
from swapper.infer.runtime.weights import GroupWeights, PagedWeight
from swapper.modules.guarded import FaultHandler
from swapper.paging.section import Section


class GroupMaking:
    """Gives every loaded parameter its place, group by group. The model's own parameters may be others afterwards.

    Args:
        model: has the parameters.
        blueprint, placement: what its groups are, and what of them stays.
        streaming: has the memory that they are read into.
        on_device: the same where kernels run on an accelerator.
        where: kernels run.
        keeper: who is asked when a cold parameter is touched.
        experts: gives the experts' cache, when it is needed.

    Attributes:
        groups: those that are made, by index.
        small: parameters that stay.
        names, recipes: of the parameters of groups, by id: what each is called, and what it is made of.
    """

    def __init__(
        self,
        model: nn.Module,
        blueprint: StreamingPlan,
        placement: Placement,
        streaming: Streaming,
        on_device: InferenceDevice | None,
        where: torch.device,
        fault_handler: FaultHandler,
        experts: Callable[[], Experts],
    ) -> None:
        self._places = Places(model)
        self._blueprint = blueprint
        self._placement = placement
        self._streaming = streaming
        self._on_device = on_device
        self._where = where
        self._fault_handler = fault_handler
        self._experts = experts
        self._used = blueprint.used_groups
        self._apart = {group: expert for expert in blueprint.demanded for group in expert}
        self.groups: list[GroupWeights] = []
        self.small: list[nn.Parameter] = []
        self.names: dict[int, str] = {}
        self.recipes: dict[int, Recipe] = {}

    def make_all(self) -> None:
        """Make `small` and `groups`."""
        blueprint = self._blueprint
        located = locate(blueprint.small_runs, self._streaming.small, blueprint.small)
        for weight, parts in zip(blueprint.small, located, strict=True):
            moved = parts if self._on_device is None else self._on_device.moved(parts)
            self.small.append(adopt(self._places, weight, weight.recipe.from_parts(moved)))
        for group, sections in zip(blueprint.groups, self._streaming.sections, strict=True):
            self.groups.append(self._make(group, sections))

    def _make(self, group: StreamedGroup, sections: Sequence[Section]) -> GroupWeights:
        pager, fault_handler = self._streaming.pager, self._fault_handler
        pages = [page.index for section in sections for page in section.pages]
        kept = pages[: max(len(pages) - self._placement.streamed, 0)] if self._stays_in_host(group.index) else []
        image: DeviceCopy | None = None
        if self._on_device is None:
            located = locate(group.runs, sections, group.weights)
        elif group.index in self._apart or not group.weights or not self._on_device.has_room_for(group):
            located = [[] for _ in group.weights]
        else:
            image, located = self._on_device.image(group, sections, kept)
        weights = self._adopt(group, located)
        if group.index in self._apart:
            return OnDemandGroup(group.index, weights, pager, fault_handler, self._with_it(group.index), self._experts)
        if image is not None and self._on_device is not None:
            return DeviceGroup(group.index, weights, image, self._on_device.tier, pager, fault_handler)
        if self._on_device is not None:
            return LargerThanDevice(group.index, weights, (), (), pager, fault_handler)
        return GroupWeights(group.index, weights, pages, kept, pager, fault_handler)

    def _adopt(self, group: StreamedGroup, located: Sequence[list[torch.Tensor]]) -> list[PagedWeight]:
        weights = []
        for weight, parts in zip(group.weights, located, strict=True):
            paged = PagedWeight(weight.name, weight.parameter, parts, weight.recipe, self._where)
            paged = replace(paged, parameter=adopt(self._places, weight, paged.data()))
            self.names[id(paged.parameter)] = weight.name
            self.recipes[id(paged.parameter)] = weight.recipe
            weights.append(paged)
        return weights

    def _stays_in_host(self, group: int) -> bool:
        """Whether some of the group may be kept in host memory: it is used as a whole, and does not stay on a device."""
        return group in self._used and (self._on_device is None or not self._on_device.stays(group))

    def _with_it(self, index: int) -> list[tuple[int, Recipe]]:
        """Return the weights of the other groups of an expert."""
        others = [(group, self._blueprint.groups[group].weights) for group in self._apart[index] if group != index]
        return [item for group, some in others for item in numbered(group, [weight.recipe for weight in some])]
