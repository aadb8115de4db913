"""A group's parameters where kernels run on an accelerator: views of its image there, warm while leased, cold otherwise.

Their content has its place in host memory or on NVMe, as without a device: there the optimizer updates it and from there the image
is filled. What is changed on the device itself (by a forward that writes to its own weights, or inside `manager.gather`) is copied
back to that place before the image may go.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import nn

from swapper.device.tier import DeviceCopy
from swapper.errors import StateError, UnsupportedError
from swapper.modules.cold import FaultHandler, guard, leave_cold, unguard
from swapper.modules.groups import Group
from swapper.paging.pager import Pager
from swapper.paging.planning.layout import Slot
from swapper.paging.planning.schedule import Access
from swapper.paging.section import Page, Section
from swapper.train.device.train_device import TrainingDevice
from swapper.train.layout.content import SectionSource
from swapper.train.parameters.parameter_group import GroupParameters, storage_of


class DeviceGroupParameters(GroupParameters):
    """As any group; what is leased is its image, and pages in host memory only for as long as they are copied.

    Args:
        group, places, pager, keeper, expire: as for any group.
        on_device: has the images.
    """

    def __init__(
        self,
        group: Group,
        places: Sequence[tuple[Section, Slot]],
        pager: Pager,
        fault_handler: FaultHandler,
        expire: Callable[[str], None],
        on_device: TrainingDevice,
    ) -> None:
        super().__init__(group, places, pager, fault_handler, expire)
        self._on_device = on_device
        self.image: DeviceCopy
        self.image, self._views = on_device.image(group, places)
        self._is_in_memory = not self.paged
        self.paged = True  # it goes away between its uses, wherever its place is
        self._read_access = Access(None, ())  # what is held is the image; these only say what for
        self._write_access = Access(None, (), writes=frozenset({-1}))

    @property
    def homes(self) -> set[int]:
        return {self.image.storage.identity}

    def adopt(self, content: SectionSource | None) -> None:
        if content is not None:
            self._fill(content)
        for (_, parameter), view in zip(self.group.parameters, self._views, strict=True):
            if parameter.is_meta:
                home = nn.Parameter(view, requires_grad=parameter.requires_grad)
                torch.utils.swap_tensors(parameter, home)  # type: ignore[no-untyped-call]
            else:
                parameter.data = view
            guard(parameter, self._fault_handler)
        self._dematerialize()

    def check_graph_of_backward(self) -> None:
        """A device answers no reads of memory that is away.

        Raises:
            UnsupportedError: nobody holds the group.
        """
        if not self.holds:
            raise UnsupportedError(
                f"a backward with create_graph=True uses {self.group.name or 'the model'}, and the backward of that would "
                f"find its parameters away from {self._on_device.device}: run forward and backwards inside "
                "`with manager.gather(model):`"
            )

    def expected_before(self) -> list[int]:
        """Copies come before their turn: what the schedule expects before them says nothing of what is passed over."""
        return []

    def defer_update(self, catch_up: Callable[[Access | None], None]) -> None:
        super().defer_update(catch_up)
        self.image.waits = True

    def clear_deferred(self) -> None:
        super().clear_deferred()
        self.image.waits = False

    def _bring_in(self) -> None:
        if self.catch_up is not None:
            self.catch_up(None)
        self._on_device.lease(self)

    def lease(self) -> None:
        if self._leases:
            self.wait_on_current_stream()
        super().lease()

    def wait_on_current_stream(self) -> None:
        self.image.storage.let_compute_use()

    def release(self) -> None:
        self.image.storage.note_use()
        self._leases -= 1
        if self._leases:
            return
        changed = self._changed()
        try:
            if changed:
                self._expire("a forward or backward that changed the parameter")
                self._fault_in_deferred()
        finally:
            self._dematerialize()
            self._on_device.tier.release(self.image)
        if changed:
            self._fault_handler.note_change(self, changed)

    def written(self) -> list[str]:
        """Nobody sees what is written past torch's version counter on a device."""
        return []

    def _take_hold(self, access: Access) -> None:
        self._on_device.tier.lease(self.image)

    def _external_pages(self) -> dict[Page, int]:
        """They are not in memory: `copy_back` sees whether they change."""
        return {}

    def _fault_in_deferred(self) -> None:
        self._on_device.copy_back(self.image)

    def _drop_hold(self, access: Access, changed: Collection[int]) -> None:
        self.holds.remove(access)
        self._dematerialize()
        self._on_device.tier.release(self.image)

    def forget_leases(self) -> None:
        self._leases = 0
        self._dematerialize()
        self._on_device.tier.forget(self.image, len(self.holds))

    def abandon(self, keep_cold: bool) -> None:
        """Parameters whose place is in host memory are usable there; the others stay cold for good if `keep_cold`."""
        for parameter, (section, slot) in zip(self.parameters, self.places, strict=True):
            if keep_cold and not self._is_in_memory:
                leave_cold(parameter)
                continue
            unguard(parameter)
            if keep_cold:
                parameter.data = section.tensor(slot)
        self._on_device.tier.drop(self.image)

    def _check_places(self) -> None:
        identity = self.image.storage.identity
        for (name, parameter), view in zip(self.group.parameters, self._views, strict=True):
            same = storage_of(parameter) == identity or not view.numel()
            if (
                not same
                or parameter.storage_offset() != view.storage_offset()
                or parameter.shape != view.shape
                or parameter.dtype != view.dtype
            ):
                raise StateError(
                    f"parameter {name} was replaced or resized behind the manager's back: expected {view.dtype} "
                    f"{list(view.shape)} at its place on {view.device}, found {parameter.dtype} {list(parameter.shape)} on "
                    f"{parameter.device}. Change values inside `with manager.gather(..., write=True)`; change shapes, dtypes or "
                    "devices before manager.offload"
                )
