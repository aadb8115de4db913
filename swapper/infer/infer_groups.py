"""Makes the groups of a loaded model, each with its home: host memory, a device, none (larger than that), or experts on demand.

On a device a group's parameters are views of its image (its storage there). Weights are copied page by page from the
frames of host memory; those that fit the device's budget stay there, then those that fit host memory, and the rest is
read in each pass. Small weights, buffers and tensors that the checkpoint does not have are moved once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import nn

from swapper.device.copies import COPIES_IN_FLIGHT, NewCopies
from swapper.device.device import Device
from swapper.device.device_memory import Span
from swapper.device.model_device import DevicePlacement, ModelDevice
from swapper.errors import BudgetError
from swapper.infer.adoption import Places, adopt, locate, view_of
from swapper.infer.experts import DeviceExperts, Experts, ExpertWeights, Key, OnDemandHome
from swapper.infer.matching import Recipe, Weight
from swapper.infer.planning.infer_placement import Fit
from swapper.infer.planning.streaming_plan import StreamedGroup
from swapper.infer.streaming import Streaming
from swapper.infer.weights import GroupWeights, MadeMemory, PagedWeight
from swapper.modules.guarded import FaultHandler
from swapper.modules.home import DeviceHome, GroupHome, HostHome, Update
from swapper.paging.section import Section
from swapper.runtime.counters import Counters

Adopted = TypeVar("Adopted", Weight, ExpertWeights)


class RowsHome(GroupHome):
    """None: a group on a device that is read by rows or parts and is too large for it as a whole; or one without weights.

    Args:
        names: of the weights.
    """

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__()
        self._names = list(names)

    def fetch(self, update: Update | None) -> bool:
        if self._names:
            raise BudgetError(
                f"parameter {self._names[0]} is used as a whole, and is larger than what device_memory leaves for weights; "
                "only its rows or parts can be used. Raise device_memory",
                option="device_memory",
            )
        return super().fetch(update)

    def unmanage(self, number: int) -> None:
        del self._names[number]


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

    def home(
        self, group: StreamedGroup, sections: Sequence[Section], kept: Collection[int]
    ) -> tuple[GroupHome, list[list[torch.Tensor]]]:
        """Return a group's home here, and the parts of each of its weights as views of it.

        Args:
            sections: of its runs.
            kept: pages that stay in host memory, unless the image stays here.
        """
        if not group.weights or group.image_bytes > self._image_bytes:
            return RowsHome(weight.name for weight in group.weights), [[] for _ in group.weights]
        parts = [part for weight in group.weights for part in weight.recipe.parts]
        storage, offsets = self.reserve(part.nbytes for part in parts)
        spans = {
            section: [Span(begin, parts[number].nbytes, offsets[number]) for number, begin in run.places]
            for run, section in zip(group.runs, sections, strict=True)
        }
        views = iter([view_of(storage.memory, offset, part) for offset, part in zip(offsets, parts, strict=True)])
        located = [[next(views) for _ in weight.recipe.parts] for weight in group.weights]
        name = group.weights[0].name.rpartition(".")[0]
        image = self.add_image(group.index, name, storage, spans, () if group.index in self._resident_set else kept)
        self._passing_frames -= sum(copy.stays for copy in image.copies)
        self._uploads.max_in_flight = max(COPIES_IN_FLIGHT, self._passing_frames // 2)
        return DeviceHome(self, image), located

    def experts(self, host_bytes: int, min_bytes: int) -> DeviceExperts:
        """Return memory for experts: `host_bytes` in host memory, and here at least this much, and what images leave."""
        tier = self.tier
        made = DeviceExperts(self.copies, host_bytes, lambda nbytes: min_bytes + tier.spare_bytes(nbytes))
        tier.shrink_others = made.shrink
        return made

    def _allocate(self, nbytes: int) -> torch.Tensor:
        """Return memory for a copy; if that is short, idle images are dropped for it."""
        return self.tier.evicting(lambda: self.device.empty(nbytes), nbytes, "rows of a weight")

    def close(self) -> None:
        self.copies.finish()
        super().close()


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
        home, located = self._home(group, sections)
        return GroupWeights(group.index, self._adopt(group, located), home, self.fault_handler)

    def _home(
        self, group: StreamedGroup, sections: Sequence[Section]
    ) -> tuple[GroupHome, Sequence[list[torch.Tensor]]]:
        """Return a group's home, and the parts of each of its weights there."""
        if group.index in self._apart:
            expert = OnDemandHome(self.experts, self._numbered(group.index), self._with_it(group.index))
            return expert, [[] for _ in group.weights]
        pages = [page for section in sections for page in section.pages]
        kept = max(len(pages) - self.fitting.placement.streamed, 0) if group.index in self._used else 0
        if self.on_device is not None:
            return self.on_device.home(group, sections, [page.index for page in pages[:kept]])
        home = HostHome(self.streaming.pager, group.index, pages, kept)
        return home, locate(group.runs, sections, group.weights)

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

    def _with_it(self, index: int) -> list[tuple[Key, Recipe]]:
        """Return the weights of the other groups of an expert."""
        return [item for group in self._apart[index] if group != index for item in self._numbered(group)]

    def _numbered(self, group: int) -> list[tuple[Key, Recipe]]:
        """Return the recipe of each weight of a group, with its key in the experts' cache."""
        return [
            (("group", group, number), weight.recipe) for number, weight in enumerate(self._plan.groups[group].weights)
        ]
