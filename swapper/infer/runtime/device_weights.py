"""A group's parameters where kernels run on an accelerator: views of its storage there, warm while leased, cold otherwise."""

from __future__ import annotations

from collections.abc import Sequence

from swapper.device.tier import DeviceCopy, DeviceTier
from swapper.errors import BudgetError
from swapper.infer.runtime.weights import GroupWeights, PagedWeight
from swapper.modules.cold import FaultHandler
from swapper.paging.pager import Pager
from swapper.paging.planning.schedule import Access


class DeviceGroup(GroupWeights):
    """As any group; what it leases is its image, and pages in host memory only for as long as they are copied.

    Args:
        index, weights, pager, keeper: as for any group; the parts of the weights are views of the image's storage.
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
        super().__init__(index, weights, (), (), pager, fault_handler)
        self.image = image
        self._tier = tier
        self._stays_warm = False
        image.let_go = self._let_go

    @property
    def settled(self) -> bool:
        """Everything is on the device for good."""
        return not self.paged or (self.image.stays and self.image.is_filled and not self._makes)

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

    def lease(self) -> bool:
        was_brought = False
        if self._leases and self.paged:
            self.image.storage.let_compute_use()  # the stream may be another one
        if self._leases == 0 and self.paged:
            was_brought = self._tier.lease(self.image)
            try:
                if not self._stays_warm:
                    self._materialize()
            except BaseException:
                self._dematerialize()
                self._tier.release(self.image)
                raise
        self._leases += 1
        return was_brought

    def release(self) -> None:
        self.image.storage.note_use()
        self._leases -= 1
        if self._leases or not self.paged:
            return
        self._stays_warm = self.settled
        changed = None
        if not self._stays_warm:
            changed = self._changed()
            self._dematerialize()
        self._tier.release(self.image)
        self.refuse_change(changed)

    def forget_leases(self) -> None:
        if self._leases and self.paged:
            self._leases = 0
            if not self._stays_warm:
                self._dematerialize()
            self._tier.forget(self.image)

    def abandon(self) -> None:
        is_settled = self.settled
        super().abandon()
        self.image.let_go = _nothing  # or the two would keep each other, and the memory
        if not is_settled:
            self._tier.drop(self.image)

    def _forget_change(self) -> None:
        self._tier.invalidate(self.image)

    def _let_go(self) -> None:
        """The image was to stay and must go."""
        self._stays_warm = False
        self._dematerialize()


class LargerThanDevice(GroupWeights):
    """A group of which rows or parts are read, and that the device has no room for as a whole; or one without weights."""

    def lease(self) -> bool:
        if self.paged:
            raise BudgetError(
                f"parameter {self.weights[0].name} is used as a whole, and is larger than what device_memory leaves for weights; "
                "only its rows or parts can be used. Raise device_memory"
            )
        return super().lease()


def _nothing() -> None: ...
