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
from swapper.errors import UnsupportedError
from swapper.modules.groups import Group
from swapper.modules.guarded import FaultHandler
from swapper.modules.leased_group import storage_of
from swapper.paging.pager import Pager
from swapper.paging.planning.layout import Slot
from swapper.paging.planning.schedule import Access
from swapper.paging.section import Page, Section
from swapper.train.device.train_device import TrainingDevice
from swapper.train.parameters.parameter_group import GroupParameters


class DeviceGroupParameters(GroupParameters):
    """As any group; what is leased is its image, and pages in host memory only for as long as they are copied.

    Args:
        group, places, pager, fault_handler, expire: as for any group.
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
    def storages(self) -> set[int]:
        return {self.image.storage.identity}

    def _tensors_at_places(self) -> list[torch.Tensor]:
        return self._views

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

    def _bring_in(self) -> bool:
        if self.catch_up is not None:
            self.catch_up(None)
        self._on_device.lease(self)
        return True

    def _give_back(self, changed: bool) -> None:
        try:
            if changed:
                self._expire("a forward or backward that changed the parameter")
                self._copy_back()
        finally:
            self._dematerialize()
            self._on_device.tier.release(self.image)

    def written(self) -> list[str]:
        """Nobody sees what is written past torch's version counter on a device."""
        return []

    def _take_hold(self, access: Access) -> None:
        self._on_device.tier.lease(self.image)

    def _external_pages(self) -> dict[Page, int]:
        """They are not in memory: `copy_back` sees whether they change."""
        return {}

    def _copy_back(self) -> None:
        self._on_device.copy_back(self.image)

    def _drop_hold(self, access: Access, changed: Collection[int]) -> None:
        self.holds.remove(access)
        self._dematerialize()
        self._on_device.tier.release(self.image)

    def forget_leases(self) -> None:
        super().forget_leases()
        self._on_device.tier.forget(self.image, len(self.holds))

    def abandon(self, keep_cold: bool = True) -> None:
        """Parameters whose place is in host memory are usable there; the others stay cold for good if `keep_cold`."""
        super().abandon(keep_cold and not self._is_in_memory)
        if keep_cold and self._is_in_memory:
            for parameter, (section, slot) in zip(self.parameters, self.places, strict=True):
                parameter.data = section.tensor(slot)
        self._on_device.tier.drop(self.image)

    def _is_at_place(self, number: int, parameter: nn.Parameter) -> bool:
        is_of_image = storage_of(parameter) == self.image.storage.identity
        return is_of_image and parameter.storage_offset() == self._views[number].storage_offset()
