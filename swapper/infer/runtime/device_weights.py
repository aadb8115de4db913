"""A group's parameters where kernels run on an accelerator: views of its storage there, warm while leased, cold otherwise."""

from __future__ import annotations

from collections.abc import Sequence

from swapper.device.tier import DeviceCopy, DeviceTier
from swapper.errors import BudgetError
from swapper.infer.runtime.weights import GroupWeights, PagedWeight
from swapper.modules.guarded import FaultHandler
from swapper.paging.pager import Pager
from swapper.paging.planning.schedule import Access


class DeviceGroup(GroupWeights):
    """As any group; what it leases is its image, and pages in host memory only for as long as they are copied.

    Args:
        index, weights, pager, fault_handler: as for any group; the parts of the weights are views of the image's storage.
        image: the group's.
        tier: which has it.
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
        self._stays_warm = False  # it is on the device for good, and shown
        image.before_eviction = self._let_go

    @property
    def settled(self) -> bool:
        return not self.paged or self._stays_warm

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

    def _bring_in(self) -> bool:
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
        self.image.before_eviction = _nothing  # or the two would keep each other, and the memory
        if not is_settled:
            self._tier.drop(self.image)

    def _materialize(self) -> None:
        super()._materialize()
        self._stays_warm = self.image.stays and not self._makes

    def _forget_change(self) -> None:
        self._tier.invalidate(self.image)

    def _let_go(self) -> None:
        """The image was to stay and must go."""
        self._stays_warm = False
        self._dematerialize()


class LargerThanDevice(GroupWeights):
    """A group of which rows or parts are read, and that the device has no room for as a whole; or one without weights."""

    def _bring_in(self) -> bool:
        if self.paged:
            raise BudgetError(
                f"parameter {self.names[0]} is used as a whole, and is larger than what device_memory leaves for weights; "
                "only its rows or parts can be used. Raise device_memory"
            )
        return False


def _nothing() -> None: ...
