"""A group of parameters that come and go together: here while somebody has a lease, cold otherwise."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from swapper.device.tier import DeviceCopy
from swapper.modules.cold import leave_cold, materialize, set_cold, unguard
from swapper.paging.planning.schedule import Access


class LeasedGroup(ABC):
    """Counts the leases of one group. A subclass knows where its parameters come from.

    Args:
        index: the group's.
        parameters: qualified name and parameter of each.
        image: the group where kernels run on an accelerator; None: on the CPU.

    Attributes:
        paged: some of it goes away between its uses.
    """

    image: DeviceCopy | None
    paged: bool

    def __init__(
        self, index: int, parameters: Iterable[tuple[str, nn.Parameter]], image: DeviceCopy | None = None
    ) -> None:
        named = list(parameters)
        self.index = index
        self.image = image
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        self._leases = 0  # of passes; they share one lease of the pager's
        self._versions: list[int] = []  # of the parameters when they were leased

    @property
    def is_leased(self) -> bool:
        """Whether a pass leases it."""
        return self._leases > 0

    @property
    def settled(self) -> bool:
        """Everything is here for good: a lease costs nothing."""
        return not self.paged

    @property
    @abstractmethod
    def storages(self) -> set[int]:
        """Storages that parameters go away with, as `storage_of` gives them."""

    @property
    @abstractmethod
    def kept_accesses(self) -> Sequence[Access]:
        """What is leased of the pager whether a pass leases the group or not."""

    def lease(self) -> bool:
        """Bring the parameters in, if they are not, and keep them until `release`. Returns whether they were asked for."""
        if self._leases:
            self.wait_on_current_stream()
            self._leases += 1
            return False
        is_asked = self._bring_in()
        self._leases = 1
        if is_asked:
            try:
                self._materialize()
            except BaseException:
                self.release()
                raise
            self._versions = [parameter._version for parameter in self.parameters]
        return is_asked

    def wait_on_current_stream(self) -> None:
        """It is leased, and kernels on the current stream use it too, which need not be the one that it was leased on."""
        if self.image is not None:
            self.image.storage.wait_on_current_stream()

    def release(self) -> None:
        """Give a lease back; the last one lets the parameters go."""
        if self.image is not None:
            self.image.storage.note_use()
        self._leases -= 1
        if self._leases:
            return
        changed = self._changed()
        try:
            self._give_back(bool(changed))
        finally:
            if changed:
                self._note_change(changed)

    def forget_leases(self) -> None:
        """The passes that held leases are gone. The pager drops its own count by itself."""
        self._leases = 0
        self._versions = []
        if not self.settled:
            self._dematerialize()

    def abandon(self, keep_cold: bool = True) -> None:
        """Nobody will lease it any more. What is here for good stays usable; the rest stays cold for good if `keep_cold`."""
        for parameter in self.parameters:
            if keep_cold and not self.settled:
                leave_cold(parameter)
            else:
                unguard(parameter)

    # --- what differs -----------------------------------------------------------------------------------------------

    @abstractmethod
    def _bring_in(self) -> bool:
        """Have the parameters' data where they show it. Returns False where they need not be shown: they are already."""

    @abstractmethod
    def _give_back(self, changed: bool) -> None:
        """Nobody leases the group: have the parameters cold, and their memory given back."""

    @abstractmethod
    def _note_change(self, names: list[str]) -> None:
        """These parameters were changed while they were leased, and are given back."""

    def _changed(self) -> list[str]:
        """Names of the parameters that were changed in place since they were leased, as nn.Embedding(max_norm=...) does."""
        versions, self._versions = self._versions, []
        now = zip(self.names, self.parameters, versions, strict=False)  # none, where they could not be shown
        return [name for name, parameter, version in now if parameter._version != version]

    def _materialize(self) -> None:
        for parameter in self.parameters:
            materialize(parameter)

    def _dematerialize(self) -> None:
        for parameter in self.parameters:
            set_cold(parameter)


def storage_of(tensor: torch.Tensor) -> int | None:
    """Return what all tensors on one storage have in common, wherever it is; None for a tensor that has none."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except NotImplementedError:  # sparse and opaque tensors, and those that functorch has wrapped
        return None
